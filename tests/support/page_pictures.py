"""The pictures of the live page in docs/live-page.md, from a real run in which a worker is killed, and others of both
pages to be looked at: part of `make picture`. It needs Chromium."""

import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.support import ROOT
from tests.support.cluster.browser import Browser
from tests.support.local_run import LocalRun
from tests.support.processes import TANDEM

IMAGES, PICTURES = ROOT / "docs/images", ROOT / "runs/pictures"
KILLED_AFTER, TAKEN_AFTER = 22.0, 45.0
"""Seconds from the first step on."""


class Screen(NamedTuple):
    """What a reader has in front."""

    width: int
    height: int
    is_dark: bool = False


DOCUMENTED = {"live": Screen(1160, 1500), "live-phone": Screen(390, 900, is_dark=True)}
"""Pictures of the live page in docs/images: what such a screen shows."""
LOOKED_AT = {"1280": Screen(1280, 900), "390": Screen(390, 900)}
"""Pictures of whole pages in runs/pictures."""


def main() -> None:
    """Run, kill, look, end the run."""
    with (
        tempfile.TemporaryDirectory(prefix="tandem-page-") as folder,
        LocalRun(Path(folder), "--set", "trainer.loop.epochs=800") as run,
    ):
        run.reaches(1)
        began = time.monotonic()
        time.sleep(KILLED_AFTER)
        rank = run.rank_of("worker-0")
        rank.kill()
        time.sleep(began + TAKEN_AFTER - time.monotonic())
        take(run.path)


def take(run: Path) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    with Browser() as browser:
        browser.go(told("open", str(run), "--print").split()[-1])
        for name, screen in DOCUMENTED.items():
            photograph(browser, screen, IMAGES / f"{name}.png", whole=False)
        for name, screen in LOOKED_AT.items():
            photograph(browser, screen, PICTURES / f"live-{name}.png")
        told("report", str(run))
        browser.go((run / "report.html").as_uri())
        for name, screen in LOOKED_AT.items():
            photograph(browser, screen, PICTURES / f"report-{name}.png")


def told(*words: str) -> str:
    """What a command says."""
    return subprocess.run([TANDEM, *words], capture_output=True, text=True, check=True).stdout


def photograph(browser: Browser, screen: Screen, path: Path, whole: bool = True) -> None:
    """Take one picture, of the whole page or of what the screen shows."""
    browser.screen(*screen)
    browser.until(lambda: is_whole(browser), "the page with all that was logged")
    time.sleep(3)
    browser.picture(path, whole=whole)
    print(f"wrote {path.relative_to(ROOT)}")


def is_whole(browser: Browser) -> bool:
    """Whether the page shows the run from its beginning on."""
    words = browser.value("(document.body || {}).innerText || ''")
    return "step" in words and "Reading what was logged" not in words


if __name__ == "__main__":
    main()
