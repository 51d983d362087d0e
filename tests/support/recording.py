"""Frames of `make run`, a kill, Ctrl-C and resume as a person sees them.

On a terminal of 80x24 and on one of 50x20, each in a checkout of its own. A frame of text is kept when the phase or the
notice has changed, and every few seconds. A frame is at fault if it has lines of an older one, or numbers that
contradict each other.
"""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tandem.rundir.durable import read_json_or_none
from tandem.rundir.ownership import LOCK
from tandem_launcher.local.guardian import marked
from tests.support import ROOT
from tests.support.processes import TANDEM
from tests.support.terminal import CTRL_C, Terminal
from tests.support.waiting import SECONDS

SIZES = ((80, 24), (50, 20))
EVERY_SECONDS = 3.0
TITLE = re.compile(r"^  digits  (\S.*?)  +\S")
STEP = re.compile(r"^  step ([\d,]+)")
SAVED = re.compile(r"^  (?:checkpoint|saved) +step ([\d,]+)")
PICTURE = re.compile(r"━|^  (loss|workers|trainers|train) {2,}|saves and leaves$")
ROW = re.compile(r"^  ([a-z]+) {2,}\S")


@dataclass
class Recording:
    """The frames of one terminal."""

    columns: int
    lines: int
    frames: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _last: tuple[str, ...] = ()
    _kept_at: float = 0.0

    def look(self, terminal: Terminal, what: str, *, always: bool = False) -> list[str]:
        """Look at the terminal; keep what it shows if that is news."""
        shown = terminal.look()
        while shown and not shown[-1]:
            shown.pop()
        now = time.monotonic()
        notable = tuple(line for line in shown if TITLE.match(line) or "Ctrl-C" in line or "was stopped" in line)
        key = tuple(re.sub(r"\d.*", "", line) for line in notable)
        if always or key != self._last or now - self._kept_at > EVERY_SECONDS:
            self._last, self._kept_at = key, now
            self._keep(shown, what, now)
        return shown

    def _keep(self, shown: list[str], what: str, now: float) -> None:
        rule = "─" * self.columns
        body = "\n".join(f"│{line:<{self.columns}}│" for line in shown)
        self.frames.append(f"{now - self._began:6.1f} s  {what}\n┌{rule}┐\n{body}\n└{rule}┘\n")
        self.faults += [f"frame {len(self.frames)}, {what}: {wrong}" for wrong in frame_faults(shown, self.columns)]


def frame_faults(shown: list[str], columns: int) -> list[str]:
    found = []
    titles = [line for line in shown if TITLE.match(line)]
    if len(titles) > 1:
        found.append(f"{len(titles)} titles: lines of an older picture")
    if not titles and any(PICTURE.search(line) for line in shown):
        found.append("parts of a picture without its title")
    labels = [match[1] for line in shown if titles and (match := ROW.match(line)) and match[1] != "digits"]
    if len(labels) != len(set(labels)):
        found.append("a row twice")
    if any(len(line) > columns for line in shown):
        found.append("a line is wider than the terminal")
    step = next((_number(match) for line in shown if (match := STEP.match(line))), None)
    saved = next((_number(match) for line in shown if (match := SAVED.match(line))), None)
    if step is not None and saved is not None and saved > step and "training" in "".join(titles):
        found.append(f"step {step} is behind checkpoint {saved}")
    cut = [line for line in shown if titles and line.endswith("…") and ROW.match(line)]
    return found + [f"a value is cut: {line}" for line in cut]


def record(columns: int, lines: int, folder: Path) -> Recording:
    """`make run`, a rank that is killed, Ctrl-C, and the same run to its end, in a checkout at `folder`."""
    for name in ("Makefile", "README.md", "constraints.txt", "examples", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(Path(sys.prefix))
    run = folder / "runs" / "digits"
    kept, terminal = Recording(columns, lines), Terminal(columns, lines)
    try:
        command = terminal.start(["make", "run"], folder)
        _until(kept, terminal, command, "make run", lambda shown: _step(shown) >= 300)
        _rank(run, "worker-1").kill()
        _until(kept, terminal, command, "a rank was killed", lambda shown: _has("(generation|gen) 2", shown))
        _until(kept, terminal, command, "a rank was killed", lambda shown: _has("^  digits  training", shown))
        terminal.press(CTRL_C)
        _until(kept, terminal, command, "Ctrl-C", lambda shown: False)
        kept.look(terminal, "after Ctrl-C", always=True)
        command = terminal.start([TANDEM, "run", "examples/digits.yaml"], folder)
        _until(kept, terminal, command, "resumed", lambda shown: False)
        shown = kept.look(terminal, "complete", always=True)
        if not any("is complete" in line for line in shown):
            kept.faults.append("the resumed run is not complete")
        kept.faults += [f"left on the terminal: {line}" for line in terminal.all_lines() if PICTURE.search(line)]
        if not terminal.is_as_before:
            kept.faults.append("the terminal is not as it was before")
    finally:
        terminal.close()
    return kept


def _until(
    kept: Recording,
    terminal: Terminal,
    command: "subprocess.Popen[bytes]",
    what: str,
    there: Callable[[list[str]], bool],
) -> None:
    """Look until something is there, or the command has ended."""
    deadline = time.monotonic() + 4 * SECONDS
    while not there(kept.look(terminal, what)) and command.poll() is None:
        if time.monotonic() > deadline:
            command.kill()
            raise TimeoutError(f"{what}: {terminal.look()}")
        time.sleep(0.02)


def _has(pattern: str, shown: list[str]) -> bool:
    return any(re.search(pattern, line) for line in shown)


def _step(shown: list[str]) -> int:
    return next((_number(match) for line in shown if (match := STEP.match(line))), 0)


def _number(match: "re.Match[str]") -> int:
    return int(match[1].replace(",", ""))


def _rank(run: Path, worker: str) -> psutil.Process:
    mark = str((read_json_or_none(run / LOCK) or {}).get("mark"))
    for process in marked(mark):
        if process.name() == "tandem-rank" and process.environ().get("TANDEM_REPLICA") == worker:
            return process
    raise LookupError(f"{worker} has no rank")
