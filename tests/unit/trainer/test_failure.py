"""What a rank leaves of the error that it failed by, and what its agent makes of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn
from torch.distributed import DistBackendError

from tandem.processes.exitcode import ExitCode
from tandem.rundir.store import StoreUnavailableError
from tandem.wire.protocol import MAX_ERROR_LENGTH, MAX_TRACEBACK_LENGTH
from tandem_trainer.agent import local_ranks
from tandem_trainer.agent.local_ranks import LocalRanks
from tandem_trainer.checkpoint.restoring import UnreadableCheckpoint
from tandem_trainer.checkpoint.saving import SaveFailed
from tandem_trainer.checkpoint.state import CheckpointMismatch
from tandem_trainer.failure import ConfigurationError, read, record
from tests.support.waiting import until

ROOM = 3000


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_the_error_its_place_and_its_traceback_arrive() -> None:
    error = raised(KeyError("image"))
    at, failure = read(record(error, error.__traceback__, ROOM), rank=3, code=1, ended_at=float("inf"))
    assert at < float("inf")
    assert (failure.rank, failure.code, failure.error) == (3, 1, "KeyError: 'image'")
    assert failure.where.startswith(__file__[-250:])
    assert failure.where.endswith("in raised")
    assert failure.traceback.startswith("Traceback (most recent call last):")
    assert failure.traceback.rstrip().endswith("KeyError: 'image'")
    assert not failure.consequence
    assert not failure.passing


def test_the_place_is_in_the_code_of_the_user() -> None:
    """Not where a library, Python or Tandem has noticed the mistake."""
    net = nn.parallel.DataParallel(nn.Linear(1, 1))

    def of_libraries() -> object:
        return net.nothing

    for mistake in (of_libraries, lambda: json.loads("{"), lambda: read(None, "a", 0, 0.0)):  # type: ignore[arg-type]
        with pytest.raises((AttributeError, ValueError)) as raised:
            mistake()
        _, failure = read(record(raised.value, raised.value.__traceback__, ROOM), 0, 1, 0.0)
        assert failure.where.partition(":")[0] == __file__, failure.where
        assert failure.traceback.count("Traceback") == 1
        assert failure.traceback.count("File ") > 2, "the whole way is shown"


@pytest.mark.parametrize(
    "name",
    [
        "<string>",
        "<eval_with_key>.3",
        "<attrs generated init model.Config>",
        "pandas/_libs/index.pyx",
        "/build/pandas/_libs/index.pxi",
        "/build/a.pxd",
        "train.py",
        "/tmp/torchinductor_user/ab/cab.py",
    ],
)
def test_the_place_is_not_in_code_that_a_library_has_generated(name: str) -> None:
    assert place(name).partition(":")[0] == __file__


@pytest.mark.parametrize("name", ["/tmp/ipykernel_17/2604.py", "<ipython-input-3-0a1b>", "<stdin>", "/srv/me/train.py"])
def test_the_place_may_be_in_a_notebook(name: str) -> None:
    assert place(name).partition(":")[0] == name


def place(name: str) -> str:
    """The place of an error in code of a file of that name, which this one calls."""
    code = compile("1 / 0", name, "exec")
    with pytest.raises(ZeroDivisionError) as raised:
        exec(code, {})
    return read(record(raised.value, raised.value.__traceback__, ROOM), 0, 1, 0.0)[1].where


@pytest.mark.parametrize("letter", ["a", "ä", "𝄞"])
def test_what_is_long_is_cut_and_keeps_its_end(letter: str) -> None:
    error = raised(ValueError(letter * 10_000 + "\nand the end"))
    content = record(error, error.__traceback__, ROOM)
    assert len(content) <= ROOM
    _, failure = read(content, 0, 1, 0.0)
    assert failure.error.startswith(f"ValueError: {letter}")


def of(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "consequence", "passing"),
    [
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"), True, False),
        (DistBackendError("NCCL error"), True, True),
        (FileNotFoundError(2, "No such file"), False, False),
        (FileNotFoundError("no such split"), False, False),
        (ConnectionResetError(104, "reset"), False, True),
        (OSError(28, "No space left on device"), False, True),
        (OSError("image file is truncated"), False, False),
        (of(OSError("the hub cannot be reached"), ConnectionResetError(104, "reset")), False, True),
        (RuntimeError("CUDA error: an illegal memory access"), False, True),
        (RuntimeError("shapes do not fit"), False, False),
        (ConfigurationError("the data has no such slice"), False, False),
        (CheckpointMismatch("another model"), False, False),
        (SaveFailed("the disk is full"), False, True),
        (StoreUnavailableError("the server does not answer"), False, True),
        (UnreadableCheckpoint("step-000000010 cannot be read: the server does not answer"), False, True),
    ],
)
def test_what_is_of_peers_and_what_may_pass(error: Exception, consequence: bool, passing: bool) -> None:
    _, failure = read(record(raised(error), None, ROOM), 0, 1, 0.0)
    assert (failure.consequence, failure.passing) == (consequence, passing)


def test_a_sentence_of_ours_stands_alone() -> None:
    error = raised(ConfigurationError("the data has no such slice"))
    _, failure = read(record(error, error.__traceback__, ROOM), 0, ExitCode.CONFIGURATION, 0.0)
    assert (failure.error, failure.where, failure.traceback) == ("the data has no such slice", "", "")


def test_what_a_rank_says_at_length_is_cut() -> None:
    said = json.dumps({"error": "e" * 9_000, "where": 3, "traceback": "t" * 9_000, "at": 1.0}).encode()
    _, failure = read(said, 0, 1, 7.0)
    assert (len(failure.error), failure.where, len(failure.traceback)) == (MAX_ERROR_LENGTH, "3", MAX_TRACEBACK_LENGTH)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"at": "x"}'])
def test_without_a_sound_record_the_exit_code_remains(content: bytes | None) -> None:
    at, failure = read(content, 0, -9, 7.0)
    assert (at, failure.code, failure.error) == (7.0, -9, "")


RANK = """
import sys
from tandem_trainer.pulse import Pulse
Pulse.open_for_rank(phase="script")
try:
    raise KeyError(sys.argv[1])
except KeyError as error:
    Pulse.record_failure(error)
sys.exit(int(sys.argv[2]))
"""


def test_an_agent_tells_the_first_failure_of_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "_memory_folder", lambda: str(tmp_path))
    ranks = LocalRanks(1, 2)
    assert ranks.failure() is None

    def starts(local_rank: int, error: str, code: int) -> None:
        own = {"TANDEM_PULSE": str(ranks.folder), "LOCAL_RANK": str(local_rank), "RANK": str(4 + local_rank)}
        rank = subprocess.Popen([sys.executable, "-c", RANK, error, str(code)], env={**os.environ, **own})

        def has_ended() -> bool:
            ranks.watch()
            return local_rank in ranks._codes

        until(has_ended, "its end")
        assert rank.wait() == code

    starts(1, "first", 3)
    starts(0, "second", 1)
    failed = ranks.failure()
    assert (failed[1].rank, failed[1].code, failed[1].error) == (5, 3, "KeyError: 'first'")
    assert ranks.verdict() == "WorkerFailed"
    ranks.close()


def test_how_a_rank_was_killed_that_nobody_saw_is_what_torchrun_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_ranks, "_memory_folder", lambda: str(tmp_path))
    ranks = LocalRanks(1, 1, first_rank=3)
    ranks.record_exit_codes({0: -11})
    failed = ranks.failure()
    assert (failed[1].rank, failed[1].code) == (3, -11)
    ranks.close()
