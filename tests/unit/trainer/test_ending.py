"""Which exit code an error means, and what is said of it."""

import errno
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tandem.processes.exitcode import ExitCode
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import GenerationRecord
from tandem_trainer.ending import code_of
from tandem_trainer.failure import UnusableInput
from tandem_trainer.initial_weights import load_initial
from tandem_trainer.process_group import Group
from tests.support.disks import unreadable
from tests.support.ports import reserved_port

ALONE = Group(0, 1, 0, torch.device("cpu"))
GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:441. "
    "This is typically caused by a remote worker crashing.",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation",
    "Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
)
"""As torch 2.15 and older ones said it."""


def code(error: Exception, folder: Path, has_peers: bool = True) -> ExitCode:
    return code_of(error, RunDir(folder), has_peers)


def raised_by_torch(what: str) -> Exception:
    """A real error of torch's store."""
    try:
        if what == "nobody listens":
            dist.TCPStore("127.0.0.1", reserved_port(), is_master=False, timeout=timedelta(seconds=0.1))
        else:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            store.set_timeout(timedelta(seconds=0.1))
            store.get("what nobody has set")
    except Exception as error:
        return error
    raise AssertionError("torch raised nothing")


@pytest.mark.parametrize("said", GLOO)
def test_what_gloo_says_when_a_peer_has_gone_counts_against_nothing(tmp_path: Path, said: str) -> None:
    assert code(RuntimeError(said), tmp_path) == ExitCode.PEER_LOST
    assert code(RuntimeError(said), tmp_path, has_peers=False) == ExitCode.FAILED


@pytest.mark.parametrize("what", ["nobody listens", "a key that does not come"])
def test_what_torchs_store_raises_is_known_by_its_type(tmp_path: Path, what: str) -> None:
    assert code(raised_by_torch(what), tmp_path) == ExitCode.PEER_LOST


def test_what_a_script_makes_of_a_lost_peer_is_one() -> None:
    error = ValueError("the epoch cannot be ended")
    error.__cause__ = RuntimeError(GLOO[0])
    assert code(error, Path()) == ExitCode.PEER_LOST


@pytest.mark.parametrize(
    "said",
    [
        "could not restore the tokenizer",
        "the feature store answered: Connection refused",
        "Broken pipe while the data set was read",
        "NCCL_DEBUG must be INFO",
        "Socket Timeout of the object storage",
    ],
)
def test_an_error_of_the_scripts_own_is_a_failure_whatever_words_it_uses(
    tmp_path: Path, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert code(RuntimeError(said), tmp_path) == ExitCode.FAILED
    assert said in capfd.readouterr().err


def test_where_a_lost_peer_was_missed_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def step_in_the_script() -> None:
        raise RuntimeError(GLOO[0])

    with pytest.raises(RuntimeError) as caught:
        step_in_the_script()
    assert code(caught.value, tmp_path) == ExitCode.PEER_LOST
    told = capfd.readouterr().err
    assert "in step_in_the_script" in told
    assert "Connection closed by peer" in told


def test_what_no_rank_finds_at_first_ends_the_job_at_once(tmp_path: Path) -> None:
    assert code(UnusableInput("data.path: /data is not a folder"), tmp_path) == ExitCode.CONFIGURATION
    assert RunDir(tmp_path).failed()["message"] == "data.path: /data is not a folder"


def test_what_an_earlier_generation_had_counts_against_the_one_that_lacks_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rundir = RunDir(tmp_path)
    rundir.create()
    rundir.record_generation(GenerationRecord(generation=1, world_size=2, members=["one", "other"], started_at=1.0))
    assert code(UnusableInput("data.path: /data is not a folder"), tmp_path) == ExitCode.FAILED
    assert rundir.failed() is None
    assert "data.path: /data is not a folder; earlier generations had it" in caplog.text


def test_who_cannot_read_the_run_directory_ends_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(_: RunDir) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(RunDir, "newest_generation", stale)
    assert code(UnusableInput("data.path: /data is not a folder"), tmp_path) == ExitCode.FAILED
    assert RunDir(tmp_path).failed() is None


def test_weights_on_a_disk_that_fails_end_no_job(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Input/output error") as caught:
        load_initial(nn.Linear(1, 1), unreadable(tmp_path / "weights.safetensors"), ALONE)
    assert code(caught.value, tmp_path) == ExitCode.FAILED
    assert RunDir(tmp_path).failed() is None
    with pytest.raises(UnusableInput, match="No such file"):
        load_initial(nn.Linear(1, 1), tmp_path / "nowhere.safetensors", ALONE)
