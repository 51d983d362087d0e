"""The run directory before anything is started."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tandem.errors import UserError
from tandem.formatting import parse_rfc3339
from tandem.job.resource import DistributedTrainingJob
from tandem.processes.launch import SUBMITTED_ANNOTATION
from tandem.rundir.layout import RunDir
from tandem.rundir.ownership import LOCK, differences
from tandem_cli.commands.run import Command, describe_next_steps
from tandem_launcher.local import prepare
from tandem_launcher.local.prepare import HeldFolder, claim
from tandem_launcher.local.processes import parent_process
from tests.support import manifests
from tests.support.manifests import images

AGAIN = "tandem run digits.yaml --fresh"


def job(name: str = "digits", workers: int = 2, **trainer: Any) -> DistributedTrainingJob:
    return manifests.job(name, trainer=trainer or {"task": "image-classification"}, workers={"replicas": workers})


def prepared(path: Path, given: DistributedTrainingJob | None = None, fresh: bool = False) -> HeldFolder:
    return claim(path, given or job(), fresh, AGAIN)


def recorded(path: Path) -> DistributedTrainingJob:
    """The job in a run directory, without the time of its submission."""
    found = RunDir(path).read_job()
    submitted_at = parse_rfc3339(found.metadata.annotations[SUBMITTED_ANNOTATION])
    assert submitted_at is not None
    assert abs(time.time() - submitted_at) < 3600
    return found.model_copy(update={"metadata": found.metadata.model_copy(update={"annotations": {}})})


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A run directory that an earlier run left."""
    path = tmp_path / "runs" / "digits"
    prepared(path).release()
    return path


def test_a_new_directory_is_made_with_its_parents_and_the_job_in_it(tmp_path: Path) -> None:
    mine = prepared(tmp_path / "a" / "b")
    assert recorded(mine.run_dir.path) == job()
    assert mine.run_dir.checkpoints.is_dir()
    assert mine.notes == ()
    mine.release()


def test_a_request_to_stop_goes_to_whoever_holds_the_directory_now(there: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        # It has ended, and nobody has reaped it.
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        (there / LOCK).write_text(json.dumps({"pid": ended.pid, "mark": "earlier"}))
        assert parent_process(there) is None
        mine = prepared(there)
        assert json.loads((there / LOCK).read_text()) == {"pid": os.getpid(), "mark": ""}
        mine.sign("mine")
        assert json.loads((there / LOCK).read_text()) == {"pid": os.getpid(), "mark": "mine"}
        mine.release()


def test_the_same_job_goes_on(there: Path) -> None:
    prepared(there).release()


def test_what_is_not_trained_may_change(there: Path) -> None:
    prepared(there, job(workers=3)).release()
    assert RunDir(there).read_job().spec.workers.replicas == 3


def test_a_default_that_is_written_out_is_no_difference(there: Path) -> None:
    prepared(there, job(task="image-classification", config={"epochs": 5})).release()


def test_an_image_matters_only_on_a_cluster() -> None:
    assert differences(job(), job(task="image-classification", image="registry/trainer:1")) == []


def test_what_cannot_be_gone_on_with_is_refused_with_what_differs_and_the_very_command(there: Path) -> None:
    (there / "checkpoints" / "step-000000500").mkdir()
    other = job("digits", task="image-classification", config={"seed": 7, "model": "baby-cnn"})
    with pytest.raises(UserError) as refusal:
        prepared(there, other)
    message = str(refusal.value)
    assert "holds step-000000500, which this job cannot continue" in message
    assert "spec.trainer.loop.seed: there 0, now 7" in message
    assert 'spec.trainer.parameters.model: there "cnn", now "baby-cnn"' in message
    assert AGAIN in message
    assert recorded(there) == job()


def test_where_nothing_was_saved_another_job_begins(there: Path) -> None:
    other = job("digits", task="image-classification", config={"model": "baby-cnn"})
    prepared(there, other).release()
    assert recorded(there) == other
    assert recorded(there / "attempt") == job()


def test_a_field_says_what_happens_to_an_earlier_run(there: Path) -> None:
    (there / "checkpoints" / "step-000000500").mkdir()
    with pytest.raises(UserError, match=r"onExisting is Refuse.*onExisting=Resume.*--fresh"):
        prepared(there, manifests.job("digits", checkpoint={"onExisting": "Refuse"}))
    mine = prepared(there, manifests.job("digits", checkpoint={"onExisting": "Fresh"}))
    mine.release()
    assert RunDir(there / "previous").checkpoint_names() == ["step-000000500"]
    assert str(there / "previous") in mine.notes[0]


def test_another_name_is_another_job() -> None:
    assert differences(job("one"), job("two")) == ["metadata.name: there one, now two"]


def test_a_command_is_not_a_task() -> None:
    found = differences(job(), job(command=["python", "train.py"]))
    assert found == ['spec.trainer.task: there "image-classification", now not set']


def test_a_damaged_job_file_is_refused(there: Path) -> None:
    (there / "job.json").write_text("{")
    (there / "checkpoints" / "step-000000500").mkdir()
    with pytest.raises(UserError, match=r"damaged.*--fresh"):
        prepared(there)


def test_fresh_keeps_the_last_run_that_saved_something(there: Path) -> None:
    (there / "checkpoints" / "step-000000500").mkdir()
    mine = prepared(there, job("other"), fresh=True)
    mine.release()
    assert RunDir(there / "previous").checkpoint_names() == ["step-000000500"]
    assert str(there / "previous") in mine.notes[0]
    prepared(there, fresh=True).release()
    assert RunDir(there / "previous").checkpoint_names() == ["step-000000500"]
    assert RunDir(there / "attempt").read_job().metadata.name == "other"
    assert [path.name for path in there.parent.iterdir()] == ["digits"]


def test_fresh_without_an_earlier_run_is_nothing_special(tmp_path: Path) -> None:
    mine = prepared(tmp_path / "digits", fresh=True)
    assert mine.notes == ()
    mine.release()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_with_other_things_is_never_touched(tmp_path: Path, fresh: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"not a run directory and not empty \(it holds thesis.tex\)"):
        prepared(tmp_path, fresh=fresh)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_directory_whose_making_was_cut_short_is_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    prepared(tmp_path).release()


def test_a_failed_run_is_tried_again_and_its_failure_kept(there: Path) -> None:
    RunDir(there).mark_failed("Diverged", "the loss is NaN", 65)
    (there / "checkpoints" / "step-000000500").mkdir()
    mine = prepared(there)
    mine.release()
    assert mine.run_dir.failed() is None
    assert json.loads((there / "log" / "failed-1.json").read_text())["reason"] == "Diverged"
    assert "Diverged" in mine.notes[0]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file is a file"):
        prepared(tmp_path / "file")
    with pytest.raises(UserError, match=r"file.* is a file"):
        prepared(tmp_path / "file" / "digits")


def test_a_directory_that_cannot_be_made_is_named() -> None:
    with pytest.raises(UserError, match=r"cannot write to /proc/digits"):
        prepared(Path("/proc/digits"))


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_too_little_space_is_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(2**30, 2**30 - 2**20, 2**20))
    with pytest.raises(UserError, match=r"1\.0 MB are free at .* at least 16\.0 MB"):
        prepared(tmp_path / "digits")


def test_a_full_disk_is_told_in_words(tmp_path: Path) -> None:
    """On a real full disk: a file system of 64 KiB in a mount namespace of its own."""
    code = (
        "import sys; from pathlib import Path; import tests.unit.launcher.test_local_prepare as t\n"
        "t.tell(Path(sys.argv[1]) / 'digits')"
    )
    script = 'mount -t tmpfs -o size=64k none "$0" && head -c 70000 /dev/zero > "$0/big"; exec "$1" -c "$2" "$0"'
    command = ["unshare", "-m", "sh", "-c", script, str(tmp_path), sys.executable, code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in result.stderr or "mount:" in result.stderr:
        pytest.skip(f"no mount namespaces here: {result.stderr.strip()}")
    assert result.stdout.startswith("UserError: no space"), result


def tell(path: Path) -> None:
    """Prepare, and print what became of it."""
    try:
        prepared(path)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")


class TestTwoRunsInOneDirectory:
    @pytest.fixture
    def other(self, there: Path) -> Iterator[subprocess.Popen[str]]:
        """Another process that holds the directory."""
        code = (
            "import sys; from pathlib import Path; import tests.unit.launcher.test_local_prepare as t\n"
            "mine = t.prepared(Path(sys.argv[1])); mine.sign('0123'); print('held', flush=True); sys.stdin.read()"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(there)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()
        process.communicate()

    @pytest.mark.parametrize("fresh", [False, True])
    def test_the_second_is_refused_and_told_who_is_there(
        self, there: Path, other: subprocess.Popen[str], fresh: bool
    ) -> None:
        with pytest.raises(UserError, match=rf"another tandem run \(process {other.pid}\) uses"):
            prepared(there, fresh=fresh)
        assert not (there.parent / "digits.1").exists()

    def test_the_lock_is_free_when_its_holder_was_killed(self, there: Path, other: subprocess.Popen[str]) -> None:
        other.kill()
        other.wait()
        prepared(there).release()

    def test_the_next_waits_for_the_guardian_of_a_killed_one(self, there: Path) -> None:
        mine = prepared(there)
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        os.pwrite(mine.lock, json.dumps({"pid": gone.pid, "mark": "0123"}).encode(), 0)
        guardian = subprocess.Popen(["sleep", "0.6"], pass_fds=(mine.lock,))
        mine.release()
        prepared(there).release()
        assert guardian.poll() == 0

    def test_it_does_not_wait_for_ever(self, there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prepare, "CLEANING_SECONDS", 0.2)
        mine = prepared(there)
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        os.pwrite(mine.lock, json.dumps({"pid": gone.pid}).encode(), 0)
        with pytest.raises(UserError, match="another tandem run"):
            prepared(there)
        mine.release()


def test_the_endpoint_file_is_for_the_user_alone(tmp_path: Path) -> None:
    mine = prepared(tmp_path / "digits")
    mine.publish("http://127.0.0.1:1", "secret")
    mine.publish("http://127.0.0.1:2", "secret")
    mine.release()
    assert json.loads(mine.endpoint_file.read_text()) == {"url": "http://127.0.0.1:2", "token": "secret"}
    assert mine.endpoint_file.stat().st_mode & 0o777 == 0o600


def test_a_script_that_failed_may_have_saved_something_itself(tmp_path: Path) -> None:
    script = manifests.job("mine", trainer={"command": ["python", "mine.py"]})
    path = tmp_path / "mine"
    prepared(path, script).release()
    RunDir(path).mark_failed("RepeatedFailure", "rank 0 failed", 1)
    mine = prepared(path, script)
    mine.release()
    assert mine.notes == (
        "the last attempt failed (RepeatedFailure); the script starts again, the checkpoints that it saved itself "
        f"stay, and the logs of that attempt are in {path / 'attempt'}",
    )


def test_a_run_that_stays_complete_keeps_the_training_that_made_it(tmp_path: Path) -> None:
    path = tmp_path / "digits"
    prepared(path, job(task="image-classification", config={"epochs": 100})).release()
    RunDir(path).mark_done(None)
    less = job(workers=3, task="image-classification", config={"epochs": 4})
    prepared(path, less).release()
    recorded = RunDir(path).read_job().spec
    assert (recorded.trainer.settings_of_loop.epochs, recorded.workers.replicas) == (100, 3)
    assert RunDir(path).done() is not None
    again = manifests.job("digits", trainer=images({"epochs": 8}))
    prepared(path, again).release()
    assert RunDir(path).done() is not None, "8 epochs are fewer than the 100 that were made"
    prepared(path, job(task="image-classification", config={"epochs": 101})).release()
    assert RunDir(path).done() is None
    assert RunDir(path).read_job().spec.trainer.settings_of_loop.epochs == 101


@pytest.mark.parametrize(
    ("asked", "made", "told"),
    [
        (
            {"epochs": 4},
            {"epochs": 100},
            "100 epochs are trained, and this job requests no more; to train further: tandem run ",
        ),
        ({"epochs": 100}, {"epochs": 100}, "to train further: tandem run "),
        (
            {"maxSteps": 5},
            {"maxSteps": 7},
            "7 steps are trained, and this job requests no more; to train further: tandem run ",
        ),
    ],
)
def test_the_way_on_starts_from_what_was_made(asked: dict[str, int], made: dict[str, int], told: str) -> None:
    ((field, length),) = made.items()
    command = Command("digits.yaml", (f"spec.trainer.loop.{field}=4", "workers.replicas=3"), None, 0, None, False)
    was, now = (job(task="image-classification", config=config) for config in (made, asked))
    words = describe_next_steps(command, now, was)
    assert words.startswith(told)
    assert f"--set workers.replicas=3 --set trainer.loop.{field}={2 * length};" in words


def test_a_disk_without_hard_links_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: object, **more: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(UserError, match="does not support hard links, which checkpoints need; use a local disk"):
        prepared(tmp_path / "run")
    assert not (tmp_path / "run" / "job.json").exists()
