"""The head of a job on SLURM, with real processes; the cluster, and what torch would do, are played."""

import errno
import io
import json
import os
import pwd
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tandem.processes import launch
from tandem.processes.exitcode import ExitCode
from tandem.processes.supervision import MAX_FAILURES
from tandem.rundir.layout import RunDir
from tandem.rundir.ownership import ENDPOINT
from tandem_launcher.local import prepare
from tandem_launcher.slurm import extension, jobs, scheduler
from tandem_launcher.slurm import head as head_module
from tandem_launcher.slurm.head import NODES_SECONDS, RETRY_SECONDS, SlurmRunner, own_job_id
from tandem_launcher.slurm.jobs import Submission
from tandem_launcher.slurm.process_factory import SlurmProcessFactory
from tandem_launcher.slurm.refusals import MAX_REFUSALS
from tandem_launcher.slurm.scheduler import NodeState, QueuedJob, SlurmError
from tandem_launcher.terminal.display import Watch
from tests.support import manifests
from tests.support.waiting import until

SLEEP = f"""
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
parent = os.getppid()
while os.getppid() == parent:
    os.kill({os.getpid()}, 0)
    time.sleep(0.05)
"""
"""It ends with its parent. A child whose parent was killed before it asked for the parent ends with this process."""
SLEEPS = [sys.executable, "-c", SLEEP]
SRUN = 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"'
STARTS = ["sh", "-c", SRUN, "srun", "--nodes=1"]
"""srun as far as this machine needs it: it starts what follows the options."""


class Cluster:
    """What SLURM says of one job."""

    def __init__(self) -> None:
        self.nodes = ["n0", "n1"]
        self.state = "RUNNING"
        self.requeued: list[str] = []
        self.failed: set[str] = set()
        self.extensions: dict[str, str] = {}
        """The node of each job that came later, by its number; empty while it waits."""
        self.refuses = ""
        self.ending: set[str] = set()
        """Jobs that came later and that SLURM is ending."""

    def queue(self, ids: Sequence[str]) -> list[QueuedJob]:
        """What squeue says of these jobs."""
        found = [QueuedJob("7", self.state, "None", "gpu", "n[0-1]", "")] if "7" in ids else []
        for job, node in self.extensions.items():
            if job in ids:
                state = "COMPLETING" if job in self.ending else "RUNNING" if node else "PENDING"
                found.append(QueuedJob(job, state, "Resources", "gpu", node, "N/A"))
        return found

    def submit(self, script: Path, options: Sequence[str], environment: Mapping[str, str]) -> str:
        """sbatch."""
        assert script.read_text() == "of one node"
        assert "SLURM_JOB_ID" not in environment
        if self.refuses:
            raise SlurmError(self.refuses)
        job = str(10 + len(self.extensions))
        self.extensions[job] = ""
        return job

    def ask(self, *words: str) -> str:
        assert words[:2] == ("scontrol", "requeue")
        self.requeued.append(words[2])
        return ""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    played = Cluster()
    monkeypatch.setattr(scheduler, "nodes", lambda job: list(played.nodes))
    monkeypatch.setattr(scheduler, "node", lambda name: NodeState("127.0.0.1", name not in played.failed))
    monkeypatch.setattr(scheduler, "queue", played.queue)
    monkeypatch.setattr(scheduler, "submit", played.submit)
    monkeypatch.setattr(scheduler, "cancel", lambda job: played.extensions.pop(job, None))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(scheduler, "run", played.ask)
    monkeypatch.setattr(launch, "agent_command", lambda *_, **__: SLEEPS)
    # Steps that outlive a killed test ask this scontrol about their job, and leave: it has ended.
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text("#!/bin/sh\necho JobState=COMPLETED\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    return played


@pytest.fixture
def head(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmRunner]:
    """A head whose coordinator has taken a port at once."""
    found = made(tmp_path)
    waits = [sys.executable, "-c", f"open({str(found.processes.port_file)!r}, 'w').write('1\\n2\\n')\n{SLEEP}"]
    monkeypatch.setattr(launch, "coordinator_command", lambda *_, **__: waits)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield found
    found.close()
    for number, handler in before.items():
        signal.signal(number, handler)


def made(folder: Path) -> SlurmRunner:
    (folder / "targets").mkdir()
    run_dir = manifests.run_directory(folder / "run", manifests.job(workers={"replicas": 2}))
    run_dir.create()
    (run_dir.path / "slurm").mkdir()
    (run_dir.path / "slurm" / "extend.sh").write_text("of one node")
    return SlurmRunner(
        SlurmProcessFactory(run_dir.read_job(), run_dir, [*STARTS], (), "token-of-this-test", folder, "7"),
        None,
        False,
        folder / "targets",
        replace_nodes=True,
    )


def running(head: SlurmRunner) -> dict[str, str]:
    """The agents that run, and their nodes."""
    agents = [child for child in head.children.values() if child.role == "agent" and child.running]
    return {child.name: head.steps[child.name].node for child in agents}


def turns(head: SlurmRunner, at: float, wanted: dict[str, str]) -> None:
    """Turn at that moment until these agents run."""

    def look() -> bool:
        head.turn(at)
        return running(head) == wanted

    until(look, f"{wanted}", seconds=30, otherwise=lambda: f"{running(head)}")


def test_a_node_that_is_gone_takes_its_agent_with_it_and_a_new_one_gets_its_name(
    head: SlurmRunner, cluster: Cluster
) -> None:
    now = time.monotonic()
    turns(head, now, {"worker-0": "n0", "worker-1": "n1"})
    cluster.nodes = ["n1"]
    head.poll_nodes.hurry()
    turns(head, now + 1, {"worker-1": "n1"})
    cluster.nodes = ["n1", "n5"]
    head.poll_nodes.hurry()
    turns(head, now + 2 + NODES_SECONDS, {"worker-0": "n5", "worker-1": "n1"})


def wishes(head: SlurmRunner, replicas: int) -> None:
    """Have the coordinator say so."""
    members = SimpleNamespace(desired=replicas)
    seen = SimpleNamespace(status=SimpleNamespace(workers=members), members=[], finished=None)
    watches(head, SimpleNamespace(newest=seen, calm=lambda _: None, close=lambda: None))


def watches(head: SlurmRunner, coordinator: SimpleNamespace) -> None:
    if head._watch is not None:
        head._watch.close()
    head._watch = cast("Watch", coordinator)


def looks(head: SlurmRunner, at: float) -> None:
    """Have it ask SLURM."""
    head.poll_nodes.hurry()
    head.turn(at)


@pytest.fixture
def trains(head: SlurmRunner) -> float:
    """It trains on its two nodes; the moment."""
    now = time.monotonic()
    turns(head, now, {"worker-0": "n0", "worker-1": "n1"})
    wishes(head, 2)
    return now


def test_the_coordinator_is_asked_less_often_while_all_run_and_nobody_leaves(head: SlurmRunner, trains: float) -> None:
    calm: list[bool] = []
    watches(head, SimpleNamespace(newest=None, calm=calm.append, close=lambda: None))
    head.turn(trains + 1)
    assert calm == [True]
    head.steps["worker-1"].kill()

    def asked_again() -> bool:
        head.turn(trains + 1)
        return not calm[-1]

    until(asked_again, "the end of an agent")
    # It is tried again later: what has ended so was never started.
    turns(head, trains + 2 + RETRY_SECONDS, {"worker-0": "n0", "worker-1": "n1"})
    assert calm[-1]
    head.leaving = "stop"
    head.turn(trains + 3 + RETRY_SECONDS)
    assert not calm[-1]


def test_a_node_that_failed_is_replaced_by_one_of_another_job(
    head: SlurmRunner, cluster: Cluster, trains: float
) -> None:
    cluster.failed, cluster.nodes = {"n1"}, ["n0"]
    looks(head, trains + 1)
    assert cluster.extensions == {"10": ""}
    looks(head, trains + 2)
    assert cluster.extensions == {"10": ""}, "one that waits is enough"
    cluster.extensions["10"] = "n5"
    head.poll_nodes.hurry()
    turns(head, trains + 3, {"worker-0": "n0", "worker-1": "n5"})
    assert "--jobid=10" in head.steps["worker-1"].command
    assert "SLURM_JOB_ID" not in head.steps["worker-1"].environment
    assert "--jobid=10" not in head.steps["worker-0"].command
    head.close()
    assert not cluster.extensions
    assert not jobs.extensions(head.processes.run_dir.path)


def test_a_node_that_the_user_took_from_the_job_is_not_replaced(
    head: SlurmRunner, cluster: Cluster, trains: float
) -> None:
    cluster.nodes = ["n0"]
    looks(head, trains + 1)
    looks(head, trains + 2)
    assert not cluster.extensions
    wishes(head, 3)
    looks(head, trains + 3)
    assert set(cluster.extensions) == {"10", "11"}, "what the user says later counts whole"


def test_more_workers_get_nodes_and_fewer_give_them_back_once_their_agents_have_left(
    head: SlurmRunner, cluster: Cluster, trains: float
) -> None:
    wishes(head, 4)
    looks(head, trains + 1)
    assert set(cluster.extensions) == {"10", "11"}
    cluster.extensions["10"] = "n5"
    head.poll_nodes.hurry()
    turns(head, trains + 2, {"worker-0": "n0", "worker-1": "n1", "worker-2": "n5"})
    until(lambda: head.steps["worker-2"].log.read_bytes().startswith(b"--- "), "the start of the step")
    wishes(head, 2)
    looks(head, trains + 3)
    assert set(cluster.extensions) == {"10"}, "the one that waits goes at once"
    assert "worker-2" in running(head) or head.children["worker-2"].code == 75

    def left() -> bool:
        looks(head, trains + 4)
        return "worker-2" not in head.children

    until(left, "the agent's end", otherwise=lambda: f"{cluster.extensions}")
    assert not cluster.extensions


def test_an_agent_saves_while_slurm_ends_its_job_and_another_node_is_asked_for(
    head: SlurmRunner, cluster: Cluster, trains: float
) -> None:
    wishes(head, 3)
    looks(head, trains + 1)
    cluster.extensions["10"] = "n5"
    head.poll_nodes.hurry()
    turns(head, trains + 2, {"worker-0": "n0", "worker-1": "n1", "worker-2": "n5"})
    cluster.ending.add("10")
    looks(head, trains + 3)
    assert running(head)["worker-2"] == "n5"
    assert set(cluster.extensions) == {"10", "11"}
    del cluster.extensions["10"]
    looks(head, trains + 4)
    assert "worker-2" not in head.children


def test_a_refusal_is_in_the_status_and_asked_again_later(
    head: SlurmRunner, cluster: Cluster, trains: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = head.processes.run_dir.path
    jobs.record_submission(path, Submission("7"))
    cluster.refuses = "you may not submit here"
    wishes(head, 3)
    looks(head, trains + 1)
    words = jobs.describe_state(path)[1]
    assert words.endswith("; no further node can be requested: you may not submit here")
    cluster.refuses = ""
    looks(head, trains + 2)
    assert not cluster.extensions, "not asked again so soon"
    # Somebody has submitted it from a login node.
    cluster.extensions["12"] = "n7"
    extension.register(path, "12")
    head.poll_nodes.hurry()
    turns(head, trains + 3, {"worker-0": "n0", "worker-1": "n1", "worker-2": "n7"})


def test_prometheus_has_a_target_without_a_secret_while_the_job_runs(tmp_path: Path, head: SlurmRunner) -> None:
    turns(head, time.monotonic(), {"worker-0": "n0", "worker-1": "n1"})
    (file,) = (tmp_path / "targets").iterdir()
    assert file.name == "tandem-7.json"
    (target,) = json.loads(file.read_text())
    assert target["targets"] == ["127.0.0.1:2"]
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert target["labels"] == {"job": "digits", "run": str(tmp_path / "run"), "user": user, "slurm_job_id": "7"}
    head.close()
    assert not list((tmp_path / "targets").iterdir())


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_does_not_end_the_head_and_what_it_publishes_comes_when_there_is_room(
    head: SlurmRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    with monkeypatch.context() as disk:
        disk.setattr("tandem_launcher.slurm.head.publish", full)
        disk.setattr("tandem_launcher.slurm.head.replace_json", full)
        turns(head, now, {"worker-0": "n0", "worker-1": "n1"})
    endpoint = head.processes.run_dir.path / ENDPOINT
    head.turn(now + 0.9 * RETRY_SECONDS)
    assert not endpoint.exists()
    head.turn(now + RETRY_SECONDS)
    assert endpoint.exists()


def test_a_disk_that_does_not_answer_for_a_while_changes_nothing(
    head: SlurmRunner, trains: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = head.processes.run_dir.done_file
    done.touch()
    head.turn(trains + 1)

    def stale(path: Path, **_: object) -> bool:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as disk:
        disk.setattr(Path, "exists", stale)
        head.turn(trains + 2)
        assert head._facts(trains + 2).done
        assert not head._facts(trains + 2).failed
        disk.setattr(Path, "unlink", stale)
        head.close()


def test_a_head_whose_own_node_slurm_has_given_up_goes_back_into_the_queue(
    head: SlurmRunner, cluster: Cluster, trains: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n0")
    looks(head, trains + 1)
    assert not head.leaving
    cluster.nodes = ["n1"]
    looks(head, trains + 2)
    assert head.leaving == "requeue"


def test_a_controller_that_does_not_answer_is_asked_again_to_requeue(
    head: SlurmRunner, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_module, "REQUEUE_PAUSE", 0.0)
    answers = [
        scheduler.SlurmUnavailableError("socket timed out"),
        scheduler.SlurmUnavailableError("socket timed out"),
        None,
    ]

    def busy(*words: str) -> str:
        if (answer := answers.pop(0)) is not None:
            raise answer
        return cluster.ask(*words)

    monkeypatch.setattr(scheduler, "run", busy)
    head._requeue()
    assert cluster.requeued == ["7"]
    assert not answers
    answers += [SlurmError("this cluster does not requeue jobs"), None]
    head._requeue()
    assert len(answers) == 1, "who refuses is not asked again"


@pytest.mark.parametrize("lost", [1, MAX_FAILURES])
def test_an_evaluator_that_was_lost_is_waited_for_where_the_rest_is_done_but_not_for_ever(
    head: SlurmRunner, trains: float, lost: int
) -> None:
    head._add("evaluator-0", "evaluator")
    head.children["evaluator-0"] = replace(head.children["evaluator-0"], ended_at=trains, failures=lost)
    head._not_before["evaluator-0"] = trains + RETRY_SECONDS
    head.processes.run_dir.done_file.touch()
    for name in ("worker-0", "worker-1"):
        head.steps[name].close()
    until(lambda: head.turn(trains + 1) or not running(head), "the end of the agents")
    head.turn(trains + 1)
    assert (head.children["coordinator"].asked_at is None) == (lost < MAX_FAILURES)


def test_a_failure_that_the_disk_does_not_take_is_the_exit_code_all_the_same(
    head: SlurmRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [sys.executable, "-c", f"raise SystemExit({int(ExitCode.CONFIGURATION)})"]
    monkeypatch.setattr(launch, "coordinator_command", lambda *_, **__: wrong)
    monkeypatch.setattr(RunDir, "mark_failed", full)
    assert head.run() == ExitCode.FAILED


def test_an_element_of_an_array_asks_by_its_place_and_a_training_by_its_number() -> None:
    """The last element has the number of the array."""
    variables = {"SLURM_JOB_ID": "40", "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "2"}
    assert own_job_id(False, variables) == "40_2"
    assert own_job_id(True, variables) == "40"
    assert own_job_id(False, {"SLURM_JOB_ID": "7"}) == "7"
    assert own_job_id(True, {}) == ""


def test_a_job_that_starts_on_a_full_disk_says_so_and_so_does_its_status(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = made(tmp_path).processes.run_dir
    jobs.record_submission(run_dir.path, Submission("7"))
    monkeypatch.setattr(prepare, "MIN_FREE_BYTES", 2**70)
    monkeypatch.setattr(sys, "argv", ["head", "train", "--run-dir", str(run_dir.path)])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    said = io.StringIO()
    with redirect_stderr(said):
        assert head_module.main() == ExitCode.USAGE
    assert said.getvalue().startswith("tandem: no space: ")
    monkeypatch.setattr(scheduler, "queue", lambda ids: [])
    monkeypatch.setattr(scheduler, "final_state", lambda job: "FAILED")
    phase, words = jobs.describe_state(run_dir.path)
    assert phase == "Ended"
    assert words.startswith("job 7 ended (FAILED); no space: ")


class Refusing:
    """An srun that starts nothing for a while.

    Args:
        file: gets a line for each try.
        said: what it says.
    """

    def __init__(self, head: SlurmRunner, file: Path, said: str) -> None:
        self._head, self._file, self._now, self._tries = head, file, time.monotonic(), 0
        self._words = ["sh", "-c", f"echo >>{file}; echo '{said}'; exit 1", "srun"]
        self._refuse()

    def _refuse(self) -> None:
        self._head.processes.srun[:] = self._words  # type: ignore[index]

    def tries(self, count: int) -> None:
        """Turn until each of two agents was tried so often."""
        for _ in range(count):
            self._tries += 1
            self._now += 2 * RETRY_SECONDS
            self.tried(0.0)

    def tried(self, later: float) -> None:
        """Turn, and see that there was no further try."""

        def look() -> bool:
            self._head.turn(self._now + later)
            found = len(self._file.read_text()) if self._file.exists() else 0
            return found == 2 * self._tries and not running(self._head)

        until(look, f"{self._tries} tries", seconds=30)

    def starts(self) -> None:
        """Turn until it has started all, and each has begun."""
        self._head.processes.srun[:] = STARTS  # type: ignore[index]
        self._now += 2 * RETRY_SECONDS
        turns(self._head, self._now, {"worker-0": "n0", "worker-1": "n1"})

        def have_begun() -> bool:
            self._head.turn(self._now)
            return all(self._head.steps[name].preamble() is None for name in running(self._head))

        until(have_begun, "the first line of each", seconds=30)
        self._head.turn(self._now)

    def ends(self) -> None:
        """Lose all that it has started, and start nothing again.

        A step's `kill` asks it to leave first; a step that then reports its end before SIGKILL is not lost.
        """
        for name in running(self._head):
            process = self._head.steps[name]._process
            process.kill()
        self._refuse()
        until(lambda: self._head.turn(self._now) or not running(self._head), "the end of both", seconds=30)


AWAY, UNKNOWN = "srun: error: Unable to contact slurm controller", "srun: unrecognized option"


def test_a_step_that_srun_does_not_start_is_no_failure_and_is_tried_again_later(
    tmp_path: Path, head: SlurmRunner
) -> None:
    srun = Refusing(head, tmp_path / "tries", AWAY)
    srun.tries(1)
    srun.tried(0.9 * RETRY_SECONDS)
    srun.tries(MAX_REFUSALS + 1)
    assert head.processes.run_dir.failed() is None
    assert not jobs.shortages(head.processes.run_dir.path)


def test_the_status_says_what_srun_refuses_until_it_does_not(tmp_path: Path, head: SlurmRunner) -> None:
    path = head.processes.run_dir.path
    jobs.record_submission(path, Submission("7"))
    srun = Refusing(head, tmp_path / "tries", UNKNOWN)
    srun.tries(MAX_REFUSALS - 1)
    assert jobs.shortages(path) in [
        f"worker-{i} cannot be started on n{i}: srun: unrecognized option; retried every few seconds" for i in range(2)
    ]
    srun.starts()
    assert not jobs.shortages(path)
    srun.ends()
    srun.tries(MAX_REFUSALS + 1)
    assert head.processes.run_dir.failed() is None, "of a job that srun has started once nothing is given up"


def test_a_job_of_which_srun_starts_no_agent_is_given_up(tmp_path: Path, head: SlurmRunner) -> None:
    Refusing(head, tmp_path / "tries", UNKNOWN).tries(MAX_REFUSALS)
    failed = head.processes.run_dir.failed()
    assert failed["reason"] == "StepsRefused"
    assert str(failed["message"]).startswith("srun starts no agent of this job: worker-")
    assert head.run() == ExitCode.FAILED


@pytest.mark.parametrize(
    ("number", "state", "requeued", "code"),
    [
        (signal.SIGTERM, "RUNNING", ["7"], ExitCode.PREEMPTED),
        (signal.SIGTERM, "COMPLETING", [], ExitCode.PREEMPTED),
        (signal.SIGINT, "RUNNING", [], ExitCode.INTERRUPTED),
    ],
)
def test_a_warning_requeues_the_job_unless_slurm_is_ending_it_and_a_stop_ends_it(
    head: SlurmRunner, cluster: Cluster, number: int, state: str, requeued: list[str], code: ExitCode
) -> None:
    cluster.state = state
    turns(head, time.monotonic(), {"worker-0": "n0", "worker-1": "n1"})
    for name in ("worker-0", "worker-1"):
        until(lambda name=name: head.steps[name].log.read_bytes().startswith(b"--- "), "the start of a step")
    timer = threading.Timer(0.5, lambda: signal.raise_signal(number))
    timer.start()
    assert head.run() == code
    timer.join()
    assert cluster.requeued == requeued
    assert {step.outcome() for name, step in head.steps.items() if name != "coordinator"} <= {75, -15}
