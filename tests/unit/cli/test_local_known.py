"""Which runs of this machine are known, and which one a name means."""

import fcntl
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.errors import UserError
from tandem.rundir.layout import RunDir
from tandem_cli.kubernetes.kubectl import ClusterError
from tandem_cli.local.known import find_runs, is_alive, list_runs, remember, state_folder
from tandem_cli.local.platform import OnThisMachine, saved_in
from tandem_cli.local.run_output import Logs
from tandem_cli.local.run_view import job_view
from tandem_cli.main import application
from tandem_cli.platforms import Run
from tandem_cli.runs import find_run, open_run
from tests.support import manifests
from tests.support.fake_kubectl import FakeKubectl


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def run(path: Path, job: str = "digits") -> Path:
    path.mkdir(parents=True)
    (path / "job.json").write_text(json.dumps({"metadata": {"name": job}}))
    (path / "local.lock").touch()
    return path


def test_runs_in_this_folder_and_runs_begun_elsewhere_are_known(tmp_path: Path) -> None:
    run(Path("runs/digits"))
    far = run(tmp_path / "far away" / "mine")
    remember(far)
    assert set(list_runs()) == {Path("runs/digits"), far}


def test_runs_of_this_folder_come_first_and_the_newest_of_each_before_the_others(tmp_path: Path) -> None:
    """Those of other folders, mixed in by their time, would hide what one has just started."""
    for started, path in enumerate(("runs/old", "/far", "runs/new", "/farther", "deep/below/runs/mine")):
        place = tmp_path / "elsewhere" / path[1:] if path.startswith("/") else Path(path)
        remember(run(place))
        os.utime(place / "local.lock", (1e9 + started, 1e9 + started))
    assert list_runs() == [
        *(Path("deep/below/runs/mine"), Path("runs/new"), Path("runs/old")),
        *(tmp_path / "elsewhere" / name for name in ("farther", "far")),
    ]


def test_a_run_that_was_deleted_is_forgotten(tmp_path: Path) -> None:
    far = run(tmp_path / "far")
    remember(far)
    (far / "job.json").unlink()
    (far / "local.lock").unlink()
    far.rmdir()
    assert list_runs() == []
    assert not list((state_folder() / "runs").iterdir())


def test_a_state_folder_that_cannot_be_written_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", os.devnull)
    remember(run(tmp_path / "far"))
    assert list_runs() == []


def test_a_name_means_the_run_here_before_any_other(tmp_path: Path) -> None:
    remember(run(tmp_path / "far" / "digits"))
    assert find_runs("digits") == [tmp_path / "far" / "digits"]
    run(Path("runs/digits"))
    assert find_runs("digits") == [Path("runs/digits")]


def test_a_name_is_that_of_the_folder_or_of_the_job(tmp_path: Path) -> None:
    far = run(tmp_path / "far" / "tuesday")
    remember(far)
    assert find_runs("tuesday") == find_runs("digits") == [far]


def test_a_name_of_several_runs_is_refused_with_their_folders(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        remember(run(tmp_path / folder / "digits"))
    with pytest.raises(UserError, match=r"digits is the name of several runs: .*one/digits.*|.*two/digits"):
        find_run("digits")


def folder_of(one: Run) -> Path | None:
    """The run directory; None for a job on a cluster."""
    return one.path if isinstance(one, OnThisMachine) else None


class TestWhatAWordMeans:
    def test_a_namespace_or_a_context_is_of_a_cluster(self) -> None:
        run(Path("runs/digits"))
        assert folder_of(find_run("digits", namespace="team")) is None
        assert folder_of(find_run("digits", context="there")) is None

    def test_a_folder_is_a_run(self) -> None:
        run(Path("runs/digits"))
        assert folder_of(find_run("runs/digits")) == Path("runs/digits")

    def test_a_name_of_a_run_is_that_run(self) -> None:
        run(Path("runs/digits"))
        assert folder_of(find_run("digits")) == Path("runs/digits")
        assert open_run(Path("digits")).path == Path("runs/digits")

    def test_any_other_name_is_a_job_where_kubectl_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tool = tmp_path / "bin" / "kubectl"
        tool.parent.mkdir()
        tool.touch(mode=0o755)
        monkeypatch.setenv("PATH", str(tool.parent))
        Path("digits").mkdir()
        assert folder_of(find_run("digits")) is None, "a folder that is no run hides no job"

    def test_any_other_name_is_refused_where_it_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run(Path("runs/digits"))
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(UserError, match=r"no run of this machine is called digitz, .* Runs here: runs/digits"):
            find_run("digitz")

    def test_a_path_that_is_no_run_is_refused(self) -> None:
        run(Path("runs/digits"))
        with pytest.raises(UserError, match=r"runs/digitz does not exist\. Runs here: runs/digits"):
            find_run("runs/digitz")


def test_without_a_cluster_a_name_that_no_run_has_is_answered_with_the_runs_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(Path("runs/digits"))
    fake = FakeKubectl(tmp_path)
    monkeypatch.setenv("PATH", fake.path)
    fake.answers(complains="The connection to the server localhost:8080 was refused - did you specify the right host?")
    with pytest.raises(ClusterError) as caught:
        find_run("nosuch").view()
    assert str(caught.value) == (
        "no run of this machine is called nosuch, and kubectl has no cluster configured for a job. "
        "Runs here: runs/digits"
    )
    with pytest.raises(ClusterError, match="set KUBECONFIG"):
        find_run("nosuch", "team").view()


def test_a_run_is_alive_while_somebody_holds_its_lock(tmp_path: Path) -> None:
    path = run(tmp_path / "far")
    assert not is_alive(path)
    lock = os.open(path / "local.lock", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert is_alive(path)
    finally:
        os.close(lock)
    assert not is_alive(path)


class TestARunThatIsOver:
    def test_was_stopped_if_nothing_says_how_it_ended(self, tmp_path: Path) -> None:
        seen = job_view(run(tmp_path / "far"))
        assert seen.job.status.phase == "Suspended"
        assert seen.job.status.message == "not running; the same `tandem run` starts over: nothing was saved"

    def test_of_a_script_nobody_knows_here_what_it_has_saved(self, tmp_path: Path) -> None:
        path = run(tmp_path / "far")
        RunDir(path).write_job(manifests.job("mine", trainer={"command": ["python", "mine.py"]}))
        told = job_view(path).job.status.message
        assert told.endswith("starts the script again, which finds the checkpoints that it saved itself")
        assert saved_in(RunDir(path)) == "what it has saved itself stays as it is"

    def test_has_failed_with_its_message(self, tmp_path: Path) -> None:
        path = run(tmp_path / "far")
        RunDir(path).mark_failed("Diverged", "the loss became NaN", 65)
        seen = job_view(path)
        assert (seen.job.status.phase, seen.job.status.message) == ("Failed", "the loss became NaN")

    def test_tells_what_happened_and_what_follows_on_itself_once(self, tmp_path: Path) -> None:
        path = run(tmp_path / "far")
        (path / "log").mkdir()
        texts = [("info", "generation 1"), ("warning", "slow"), ("warning", "slow")]
        lines = [{"kind": "event", "time": 10.0 + i, "level": one[0], "text": one[1]} for i, one in enumerate(texts)]
        text = "".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "ev'
        (path / "log" / "coordinator.jsonl").write_text(text)
        seen = job_view(path)
        assert [(one.text, one.count, one.warning) for one in seen.job_events] == [
            ("generation 1", 1, False),
            ("slow", 2, True),
        ]


class TestLogs:
    @pytest.fixture
    def logs(self, tmp_path: Path) -> Path:
        folder = tmp_path / "far" / "log"
        folder.mkdir(parents=True)
        (folder / "worker-0.txt").write_text(
            "--- 2026-11-23 08:00:01 worker-0, start 1\nepoch 1\n2026-11-23 08:00:05,100 level=INFO step\nepoch 2\n"
        )
        (folder / "coordinator.txt").write_text("2026-11-23 08:00:03,000 level=INFO listening\n")
        (folder / "guardian.txt").write_text("nothing\n")
        return folder.parent

    def test_are_in_the_order_of_time_and_what_has_none_counts_as_the_line_before(self, logs: Path) -> None:
        lines = [(line.process, line.text.split(" ")[-1]) for line in Logs(logs, (), "", None).lines()]
        assert lines == [
            ("worker-0", "1"),
            ("worker-0", "1"),
            ("coordinator", "listening"),
            ("worker-0", "step"),
            ("worker-0", "2"),
        ]

    def test_tell_each_line_once_and_never_half_of_one(self, logs: Path) -> None:
        found = Logs(logs, ("worker-0",), "", 1)
        assert [line.text for line in found.lines()] == ["epoch 2"]
        with (logs / "log" / "worker-0.txt").open("a") as file:
            file.write("epoch")
            file.flush()
            assert list(found.lines()) == []
            file.write(" 3\n")
        assert [line.text for line in found.lines()] == ["epoch 3"]

    def test_of_what_is_not_there_say_what_is(self, logs: Path) -> None:
        with pytest.raises(UserError, match="no log of worker-7; it has logs of: coordinator, worker-0"):
            list(Logs(logs, ("worker-7",), "", None).lines())


def called(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(application(words), words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_a_run_is_renamed_and_found_by_its_new_name(tmp_path: Path) -> None:
    run(Path("runs/digits"))
    assert called("mv", "digits", "first") == (
        0,
        "runs/digits is now runs/first; to resume it: tandem run FILE --run-dir runs/first\n",
    )
    assert (find_runs("first"), list_runs()) == ([Path("runs/first")], [Path("runs/first")])
    called("mv", "first", str(tmp_path / "elsewhere"))
    assert list_runs() == [tmp_path / "elsewhere"]
    run(Path("runs/digits"))
    with pytest.raises(UserError, match="elsewhere already exists; choose another name"):
        called("mv", "digits", str(tmp_path / "elsewhere"))


def test_a_run_is_deleted_with_all_that_is_in_it_and_only_when_that_is_said(tmp_path: Path) -> None:
    path = run(Path("runs/digits"))
    (path / "model.pt").write_bytes(bytes(1000))
    assert called("rm", "digits")[1].startswith("nothing was deleted; --yes deletes runs/digits")
    assert path.exists()
    assert called("rm", "--yes", "digits")[0] == 0
    assert list(Path("runs").iterdir()) == []
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match="is not a run directory"):
        called("rm", "--yes", str(tmp_path))
    assert (tmp_path / "notes.txt").exists()


@pytest.mark.parametrize("words", [("rm", "--yes", "digits"), ("mv", "digits", "first")])
def test_a_run_that_goes_on_stays_where_it_is(words: tuple[str, ...]) -> None:
    path = run(Path("runs/digits"))
    with (path / "local.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, output = 0, ""
        try:
            code, output = called(*words)
        except UserError as error:
            code, output = 2, str(error)
    assert (code, path.exists()) == (2, True)
    assert "runs/digits is running; stop it first: tandem stop runs/digits" in output


def test_status_lists_the_runs_of_a_machine_without_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run(Path("runs/digits"))
    (path / "job.json").write_text(json.dumps(manifests.manifest()))
    monkeypatch.setenv("PATH", "")
    code, listed = called("status")
    assert (code, "runs/digits" in listed) == (0, True)
    fake = FakeKubectl(tmp_path)
    monkeypatch.setenv("PATH", fake.path)
    refused = "The connection to the server localhost:8080 was refused - did you specify the right host or port?"
    fake.answers("get", complains=refused)
    assert called("status") == (0, listed)
    with pytest.raises(ClusterError, match="kubectl has no cluster configured"):
        called("status", "-A")


def test_status_of_a_run_names_the_way_to_a_job_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run(Path("runs/digits"))
    (path / "job.json").write_text(json.dumps(manifests.manifest()))
    monkeypatch.setenv("PATH", FakeKubectl(tmp_path).path)
    assert "a job on a cluster: tandem status digits -n NAMESPACE" in called("status", "digits")[1]
    monkeypatch.setenv("PATH", "")
    assert "-n NAMESPACE" not in called("status", "digits")[1]
