"""Writes a report: the page, and each picture as PNG."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandem.processes.distribution import version
from tandem_cli.report import clock, raster
from tandem_cli.report.figures import Picture, pictures
from tandem_cli.report.page import DrawnPicture, page
from tandem_cli.report.reading import read
from tandem_cli.report.run import RunData
from tandem_cli.report.summary import Summary, summarize
from tandem_coordinator.charts import gallery
from tandem_coordinator.charts.chart import NARROW, WIDE

FILE = "report.html"


@dataclass(frozen=True)
class Report:
    """Files of a report."""

    page: Path
    """The HTML file."""
    pictures: tuple[Path, ...]
    """The PNG files."""
    run: RunData
    """The run."""
    summary: Summary
    """Its key figures."""


def write(run_dir: Path, output: Path | None = None, png: bool = True) -> Report:
    """Write the report of a run.

    Args:
        output: HTML file if it ends in .html or .htm, else the folder for `report.html`; None for the run directory.
        png: also write the pictures as PNG files, into a folder beside the page and named after it.

    Raises:
        NoRun: `run_dir` is not a run directory.
        OSError: the report cannot be written.
    """
    run = read(run_dir)
    ticks = clock.make_clock(run.marks)
    summary = summarize(run, ticks)
    target = _target(run_dir, output)
    target.parent.mkdir(parents=True, exist_ok=True)
    page_pictures, written = [], []
    for picture in pictures(run, ticks, summary):
        wide, narrow = picture.draw("wide", WIDE), picture.draw("narrow", NARROW)
        if wide is None or narrow is None:
            continue
        page_pictures.append(DrawnPicture(picture.title, picture.finding, wide, narrow))
        if png:
            written.append(_png(picture, wide, target.with_suffix("")))
    if run.wrong:
        page_pictures.append(_gallery(run))
    with replacing(target) as temporary:
        temporary.write_text(page(run, summary, ticks, page_pictures, str(run_dir), version()), "utf-8")
    return Report(target, tuple(written), run, summary)


def _target(run_dir: Path, output: Path | None) -> Path:
    if output is None:
        return run_dir / FILE
    return output if output.suffix.lower() in (".html", ".htm") and not output.is_dir() else output / FILE


def _gallery(run: RunData) -> DrawnPicture:
    title = "What the best checkpoint takes for something else"
    finding = "The wrong samples of which it is most sure: what each is → what it was taken for, and how sure it was."
    wide, narrow = (
        gallery.draw(f"wrong-{name}", title, run.wrong, style) for name, style in (("wide", WIDE), ("narrow", NARROW))
    )
    return DrawnPicture(title, finding, wide, narrow)


def _png(picture: Picture, svg: str, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{picture.name}.png"
    with replacing(path) as temporary:
        temporary.write_bytes(raster.png(svg, picture.title))
    return path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` in one step: a page that a browser reloads is never incomplete."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
