"""Whoever reads a command's output may stop reading, as `head -1` does: that is no mistake of ours, and no damage."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem_cli.main import BROKEN_PIPE
from tests.support import ROOT
from tests.support.local_run import DIGITS
from tests.support.processes import TANDEM
from tests.support.worlds.small_run import SmallRun, messy

FULL = pytest.mark.full("cli")


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    return messy(tmp_path / "run")


def unread(*words: str | Path, both: bool = False) -> tuple[int, str]:
    """A call whose standard output nobody reads, nor, with `both`, what it says of errors: exit code and errors."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return _called(words, stdout=writing, stderr=writing if both else subprocess.PIPE)
    finally:
        os.close(writing)


def without_output(*words: str | Path) -> tuple[int, str]:
    """A call without a standard output, as by `>&-`: exit code and errors."""
    return _called(words, stderr=subprocess.PIPE, preexec_fn=lambda: os.close(1))


def _called(
    words: tuple[str | Path, ...],
    stdout: int | None = None,
    stderr: int | None = None,
    preexec_fn: Callable[[], None] | None = None,
) -> tuple[int, str]:
    # Buffered, as it is for most: what was not written is tried again at the end of the interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [TANDEM, *words],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        preexec_fn=preexec_fn,
        timeout=60,
        check=False,
    )
    return done.returncode, (done.stderr or b"").decode()


def test_the_code_is_that_of_a_tool_that_sigpipe_has_killed() -> None:
    assert BROKEN_PIPE == 141


@pytest.mark.parametrize(
    "words",
    [
        ["ls"],
        ["verify"],
        *(
            pytest.param(one, marks=FULL)
            for one in (["ls", "-o", "json"], ["show", "latest"], ["verify", "-o", "json"])
        ),
    ],
)
def test_what_is_told_of_checkpoints_ends_quietly(run: SmallRun, words: list[str]) -> None:
    assert unread("checkpoints", words[0], run.rundir.path, *words[1:]) == (BROKEN_PIPE, "")


@pytest.mark.parametrize(
    "words",
    [
        ["validate", DIGITS],
        ["--help"],
        *(pytest.param(one, marks=FULL) for one in (["validate", "--output", "json", DIGITS], ["--version"])),
    ],
)
def test_so_does_what_is_said_without_a_run(words: list[str]) -> None:
    assert unread(*words) == (BROKEN_PIPE, "")


@pytest.mark.parametrize("words", [["validate", "nothing.yaml"], ["no-such-command"]])
def test_so_does_a_mistake_whose_message_nobody_reads(words: list[str]) -> None:
    assert unread(*words, both=True) == (BROKEN_PIPE, "")


def test_nothing_is_deleted_of_what_nobody_was_told(run: SmallRun) -> None:
    before = run.names()
    assert unread("checkpoints", "prune", run.rundir.path, "--all", "--yes") == (BROKEN_PIPE, "")
    assert run.names() == before


def test_a_command_that_has_no_output_at_all_still_says_what_is_wrong(run: SmallRun) -> None:
    assert without_output("checkpoints", "ls", run.rundir.path) == (0, "")
    assert without_output("validate", "nothing.yaml") == (2, "error: nothing.yaml does not exist\n")
