"""The version that landed before this one, to be run beside it.

Its sources lie here as an archive, and not only in the history: a clone that is shallow tests the same.
After a version has landed: `python -m tests.support.previous COMMIT`, with its whole hash, and the hash below.
"""

import lzma
import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

from tandem.processes import distribution
from tests.support import ROOT

COMMIT = "eee36797a1f0e2b3ebc442f66eb2aff0ad92875e"
"""The commit that the archive holds."""
ARCHIVE = Path(__file__).with_name("sources.tar.xz")
REST = ("charts/tandem", "images", ".dockerignore", "README.md", "constraints.txt", "pyproject.toml")
"""What of it is kept besides its code: all that runs, and what images and releases are made of."""


class Previous:
    """Its sources, unpacked into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        self.rooms = rooms(project)
        self._script = project["project"]["scripts"]["tandem"]
        self._describe(project["project"])

    def _describe(self, project: dict[str, Any]) -> None:
        """Write its metadata where Python finds it before that of the installed one: torchrun finds the rendezvous and
        the output of ranks by entry points, and those that are installed name modules of the present."""
        groups = project["entry-points"].items()
        points = [
            f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in entries.items())
            for group, entries in groups
        ]
        for name in {project["name"], distribution.NAME}:
            folder = self.folder / self.rooms[0] / f"{name.replace('-', '_')}-{project['version']}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Name: {name}\nVersion: {project['version']}\n")
            # Each stands once, though the distribution may have had another name.
            (folder / "entry_points.txt").write_text("\n".join(points if name == project["name"] else []))

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which Python imports it in the place of the present sources."""
        return {**os.environ, "PYTHONPATH": os.pathsep.join(str(self.folder / name) for name in self.rooms)}

    def tandem(self, *words: str | Path) -> "subprocess.CompletedProcess[str]":
        """One call of its command line, to its end."""
        module, _, function = self._script.partition(":")
        program = [sys.executable, "-c", f"from {module} import {function}; {function}()"]
        return subprocess.run(
            [*program, *words], cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=120
        )


def rooms(project: dict[str, Any]) -> tuple[str, ...]:
    """The folders with a version's code, from its pyproject.toml."""
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return tuple(Path(package).parts[0] for package in packages)


def tree(commit: str) -> bytes:
    """What is kept of a commit, as a tar file; git writes the commit's name into it."""
    project = tomllib.loads(_git("show", f"{commit}:pyproject.toml").decode())
    return _git("archive", commit, *rooms(project), *REST)


def packed(commit: str) -> bytes:
    """The archive of a commit, the same bytes each time."""
    return lzma.compress(tree(commit), preset=9 | lzma.PRESET_EXTREME)


def _git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
