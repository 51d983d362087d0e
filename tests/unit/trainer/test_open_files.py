"""Files that a script left open, among them those of modules that were imported before the fork."""

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import gc, os, shelve, sys
from tandem_trainer.open_files import close_files, freeze
early = open("early.txt", "w")
shelf = shelve.open("shelf")
freeze()
early.write("early")
shelf["key"] = "value"
late = open("late.txt", "w")
late.write("late")
{more}
close_files()
os._exit(0)
"""


@pytest.mark.parametrize("more", ["", "gc.freeze()", "gc.freeze(); gc.unfreeze()", "freeze()", "del early"])
def test_files_of_before_and_after_a_freeze_are_closed(tmp_path: Path, more: str) -> None:
    subprocess.run([sys.executable, "-c", CODE.format(more=more)], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "early.txt").read_text() == "early"
    assert (tmp_path / "late.txt").read_text() == "late"
    subprocess.run(
        [sys.executable, "-c", "import shelve; assert dict(shelve.open('shelf')) == {'key': 'value'}"],
        cwd=tmp_path,
        check=True,
        timeout=60,
    )
