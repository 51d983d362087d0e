"""The archive of the previous version is what its commit holds, and nobody's handiwork."""

import io
import lzma
import re
import subprocess
import sys
import tarfile
from importlib import import_module
from pathlib import Path

from tests.support import ROOT
from tests.support.previous import ARCHIVE, COMMIT, Previous, tree


def test_it_says_which_commit_it_is() -> None:
    with tarfile.open(ARCHIVE) as archive:
        assert archive.pax_headers["comment"] == COMMIT


def test_it_holds_what_the_commit_holds() -> None:
    """As far as this clone knows the commit; one that is shallow has the word of those that do."""
    known = subprocess.run(["git", "cat-file", "-e", f"{COMMIT}^{{commit}}"], cwd=ROOT, capture_output=True)
    if known.returncode == 0:
        assert files(lzma.decompress(ARCHIVE.read_bytes())) == files(tree(COMMIT))


def test_python_takes_its_modules_in_the_place_of_ours(tmp_path: Path) -> None:
    previous = Previous(tmp_path)
    code = "import tandem, tandem_coordinator, tandem_trainer as last; print(tandem.__file__, last.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code], env=previous.environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    assert all(Path(file).is_relative_to(tmp_path) for file in found)


def test_modules_that_its_sbatch_scripts_and_heads_start_are_still_programs(tmp_path: Path) -> None:
    """A job may wait in the queue, or run, while Tandem is upgraded where it is installed."""
    sources = [path.read_text() for path in Previous(tmp_path).folder.glob("*/*/slurm/*.py")]
    modules = set(re.findall(r'"(tandem_\w+\.slurm\.\w+)"', "".join(sources)))
    assert len(modules) == 4
    assert all(callable(import_module(module).main) for module in modules)


def files(tar: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        found = {one.name: archive.extractfile(one) for one in archive if one.isfile()}
        return {name: file.read() for name, file in found.items() if file is not None}
