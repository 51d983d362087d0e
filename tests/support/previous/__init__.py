"""The version that landed before this one, to be run beside it.

Its sources lie here as an archive, and not only in the history: a clone that is shallow tests the same.
After a version has landed: `python -m tests.support.previous COMMIT`, with its whole hash, and the hash below.
"""

import lzma
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.support import ROOT

COMMIT = "9bd022c7fcb75767a336c2a7a4be81fab7e1fa7d"
"""The commit that the archive holds."""
ARCHIVE = Path(__file__).with_name("sources.tar.xz")
PACKAGES = ("core", "coordinator", "trainer", "evaluator", "operator")
CONTENT = (*PACKAGES, "charts/tandem", "images", ".dockerignore", "README.md", "constraints.txt", "pyproject.toml")
"""What of it is kept: all that runs, and what images and releases are made of."""


class Previous:
    """Its sources, unpacked into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(folder, filter="data")

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which Python imports it in the place of the present sources."""
        return {**os.environ, "PYTHONPATH": os.pathsep.join(str(self.folder / name) for name in PACKAGES)}

    def tandem(self, *words: str | Path) -> "subprocess.CompletedProcess[str]":
        """One call of its command line, to its end."""
        program = [sys.executable, "-c", "from tandem.cli import main; main()"]
        return subprocess.run(
            [*program, *words], cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=120
        )


def packed(commit: str) -> bytes:
    """The archive of a commit, the same bytes each time; git writes the commit's name into it."""
    tree = subprocess.run(
        ["git", "archive", commit, *CONTENT], cwd=ROOT, capture_output=True, check=True, timeout=60
    ).stdout
    return lzma.compress(tree, preset=9 | lzma.PRESET_EXTREME)
