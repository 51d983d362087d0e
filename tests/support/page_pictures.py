"""The pictures of the live page in docs/live-page.md, from a real run in which a worker is killed:
part of `make picture`. It needs Chromium."""

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from tests.support import ROOT
from tests.support.cluster.browser import Browser
from tests.support.picture import MANIFEST
from tests.support.processes import TANDEM
from tests.support.waiting import until

IMAGES = ROOT / "docs/images"
KILLED_AFTER, TAKEN_AFTER = 22.0, 45.0
"""Seconds from the first look at a rank on."""
SCREENS = {"live": (1160, 1500, False), "live-phone": (390, 900, True)}
"""Width, height, and whether it is dark."""


def main() -> None:
    """Run, kill, look, end the run."""
    with tempfile.TemporaryDirectory(prefix="tandem-page-") as folder:
        run = Path(folder) / "digits"
        words = [TANDEM, "run", MANIFEST, "--run-dir", run, "--set", "spec.trainer.config.epochs=800"]
        process = subprocess.Popen(words, cwd=ROOT)
        try:
            take(run, process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def take(run: Path, pid: int) -> None:
    """Kill a rank of it after a while, and take the pictures a while later."""
    ranks = until(lambda: [one for one in psutil.Process(pid).children(True) if one.name() == "tandem-rank"], "a rank")
    began = time.monotonic()
    time.sleep(KILLED_AFTER)
    os.kill(ranks[-1].pid, signal.SIGKILL)
    time.sleep(began + TAKEN_AFTER - time.monotonic())
    printed = subprocess.run([TANDEM, "open", run, "--print"], capture_output=True, text=True, check=True)
    with Browser() as browser:
        browser.go(printed.stdout.split()[-1])
        for name, (width, height, dark) in SCREENS.items():
            browser.screen(width, height, dark)
            browser.until(lambda: is_whole(browser), "the page with all that was logged")
            time.sleep(3)
            browser.picture(IMAGES / f"{name}.png", whole=False)
            print(f"wrote docs/images/{name}.png")


def is_whole(browser: Browser) -> bool:
    """Whether the page shows the run from its beginning on."""
    words = browser.value("(document.body || {}).innerText || ''")
    return "step" in words and "Reading what was logged" not in words


if __name__ == "__main__":
    main()
