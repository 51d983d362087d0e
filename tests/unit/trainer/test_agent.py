"""Which commands are Python's own, and start warm."""

import sys

import pytest

from tandem_trainer.agent.torchrun import under_this_python

PYTHON = sys.executable


@pytest.mark.parametrize(
    ("command", "rest"),
    [
        (["train.py", "--lr", "1"], ["train.py", "--lr", "1"]),
        (["-m", "train"], ["-m", "train"]),
        ([PYTHON, "-c", "pass", "--lr"], ["-c", "pass", "--lr"]),
        ([PYTHON, "-u", "-c", "pass"], ["-c", "pass"]),
        ([PYTHON, "-u", "train.py"], ["train.py"]),
        ([PYTHON, "train.py", "-u"], ["train.py", "-u"]),
        ([PYTHON, "-P", "-m", "train"], ["-P", "-m", "train"]),
        ([PYTHON, "-P"], []),
        ([PYTHON, "-O", "-c", "pass"], []),
        ([PYTHON, "-c"], []),
        ([PYTHON], []),
        (["sh", "-c", "python train.py"], []),
        (["nowhere/python", "-c", "pass"], []),
    ],
)
def test_what_stands_after_this_python(command: list[str], rest: list[str]) -> None:
    assert under_this_python(command) == rest
