"""The pictures of the live page in docs/live-page.md, from a real run in which a worker is killed:
part of `make picture`. It needs Chromium."""

import subprocess
import tempfile
import time
from pathlib import Path

from tests.support import ROOT
from tests.support.cluster.browser import Browser
from tests.support.local_run import LocalRun
from tests.support.processes import TANDEM

IMAGES = ROOT / "docs/images"
KILLED_AFTER, TAKEN_AFTER = 22.0, 45.0
"""Seconds from the first step on."""
SCREENS = {"live": (1160, 1500, False), "live-phone": (390, 900, True)}
"""Width, height, and whether it is dark."""


def main() -> None:
    """Run, kill, look, end the run."""
    with (
        tempfile.TemporaryDirectory(prefix="tandem-page-") as folder,
        LocalRun(Path(folder), "--set", "trainer.config.epochs=800") as run,
    ):
        run.reaches(1)
        began = time.monotonic()
        time.sleep(KILLED_AFTER)
        rank = run.rank_of("worker-0")
        assert rank is not None
        rank.kill()
        time.sleep(began + TAKEN_AFTER - time.monotonic())
        take(run.path)


def take(run: Path) -> None:
    """Take the pictures of its page."""
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
