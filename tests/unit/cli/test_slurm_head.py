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
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from tandem import launch
from tandem.exitcode import ExitCode
from tandem.rundir.layout import RunDir
from tandem.rundir.ownership import ENDPOINT
from tandem_cli.local import prepare
from tandem_cli.slurm import head as head_module
from tandem_cli.slurm import jobs, scheduler
from tandem_cli.slurm.head import AGAIN_SECONDS, NODES_SECONDS, Crew, Head
from tandem_cli.slurm.jobs import Submission
from tandem_cli.slurm.scheduler import NodeState, QueuedJob
from tests.support import manifests
from tests.support.waiting import until

SLEEP = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
parent = os.getppid()
while os.getppid() == parent:
    time.sleep(0.05)
"""
SLEEPS = [sys.executable, "-c", SLEEP]
STARTS = ["sh", "-c", 'shift 3; exec "$@"', "srun", "--nodes=1"]
"""srun as far as this machine needs it: it starts what follows the options."""


class Cluster:
    """What SLURM says of one job."""

    def __init__(self) -> None:
        self.nodes = ["n0", "n1"]
        self.state = "RUNNING"
        self.requeued: list[str] = []

    def ask(self, *words: str) -> str:
        assert words[:2] == ("scontrol", "requeue")
        self.requeued.append(words[2])
        return ""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    played = Cluster()
    monkeypatch.setattr(scheduler, "nodes", lambda job: list(played.nodes))
    monkeypatch.setattr(scheduler, "node", lambda name: NodeState("127.0.0.1", True))
    monkeypatch.setattr(scheduler, "queue", lambda ids: [QueuedJob(ids[0], played.state, "None", "gpu", "n[0-1]", "")])
    monkeypatch.setattr(scheduler, "ask", played.ask)
    monkeypatch.setattr(launch, "agent_command", lambda *_, **__: SLEEPS)
    return played


@pytest.fixture
def head(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    """A head whose coordinator has taken a port at once."""
    found = made(tmp_path)
    waits = [sys.executable, "-c", f"open({str(found.crew.port_file)!r}, 'w').write('1\\n2\\n')\n{SLEEP}"]
    monkeypatch.setattr(launch, "coordinator_command", lambda *_, **__: waits)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield found
    found.close()
    for number, handler in before.items():
        signal.signal(number, handler)


def made(folder: Path) -> Head:
    (folder / "targets").mkdir()
    run_dir = manifests.run_directory(folder / "run", manifests.job(workers={"replicas": 2}))
    run_dir.create()
    return Head(
        Crew(run_dir.read_job(), run_dir, [*STARTS], (), "token-of-this-test", folder),
        "7",
        None,
        False,
        folder / "targets",
    )


def running(head: Head) -> dict[str, str]:
    """The agents that run, and their nodes."""
    agents = [child for child in head.children.values() if child.role == "agent" and child.running]
    return {child.name: head.steps[child.name].node for child in agents}


def turns(head: Head, at: float, wanted: dict[str, str]) -> None:
    """Turn at that moment until these agents run."""

    def look() -> bool:
        head.turn(at)
        return running(head) == wanted

    until(look, f"{wanted}", seconds=30, otherwise=lambda: f"{running(head)}")


def test_a_node_that_is_gone_takes_its_agent_with_it_and_a_new_one_gets_its_name(head: Head, cluster: Cluster) -> None:
    now = time.monotonic()
    turns(head, now, {"worker-0": "n0", "worker-1": "n1"})
    cluster.nodes = ["n1"]
    head.ask_nodes.hurry()
    turns(head, now + 1, {"worker-1": "n1"})
    cluster.nodes = ["n1", "n5"]
    head.ask_nodes.hurry()
    turns(head, now + 2 + NODES_SECONDS, {"worker-0": "n5", "worker-1": "n1"})


def test_prometheus_has_a_target_without_a_secret_while_the_job_runs(tmp_path: Path, head: Head) -> None:
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
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    with monkeypatch.context() as disk:
        disk.setattr("tandem_cli.slurm.head.publish", full)
        disk.setattr("tandem_cli.slurm.head.replace_json", full)
        turns(head, now, {"worker-0": "n0", "worker-1": "n1"})
    endpoint = head.crew.run_dir.path / ENDPOINT
    head.turn(now + 0.9 * AGAIN_SECONDS)
    assert not endpoint.exists()
    head.turn(now + AGAIN_SECONDS)
    assert endpoint.exists()


def test_a_failure_that_the_disk_does_not_take_is_the_exit_code_all_the_same(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [sys.executable, "-c", f"raise SystemExit({int(ExitCode.CONFIGURATION)})"]
    monkeypatch.setattr(launch, "coordinator_command", lambda *_, **__: wrong)
    monkeypatch.setattr(RunDir, "mark_failed", full)
    assert head.run() == ExitCode.FAILED


def test_a_job_that_starts_on_a_full_disk_says_so_and_so_does_its_status(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = made(tmp_path).crew.run_dir
    jobs.record(run_dir.path, Submission("7"))
    monkeypatch.setattr(prepare, "LEAST_FREE_BYTES", 2**70)
    monkeypatch.setattr(sys, "argv", ["head", "train", "--run-dir", str(run_dir.path)])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    said = io.StringIO()
    with redirect_stderr(said):
        assert head_module.main() == ExitCode.USAGE
    assert said.getvalue().startswith("tandem: no space: ")
    monkeypatch.setattr(scheduler, "queue", lambda ids: [])
    monkeypatch.setattr(scheduler, "ended", lambda job: "FAILED")
    phase, words = jobs.state_words(run_dir.path)
    assert phase == "Ended"
    assert words.startswith("job 7 ended (FAILED); no space: ")


def test_a_step_that_srun_does_not_start_is_no_failure_and_is_tried_again_later(
    tmp_path: Path, head: Head, cluster: Cluster
) -> None:
    tries = tmp_path / "tries"
    head.crew.srun[:] = ["sh", "-c", f"echo >>{tries}", "srun"]  # type: ignore[index]
    now = time.monotonic()

    def tried(at: float, count: int) -> None:
        def look() -> bool:
            head.turn(at)
            return tries.exists() and len(tries.read_text()) == count and not running(head)

        until(look, f"{count} tries")

    tried(now, 2)
    tried(now + 0.9 * AGAIN_SECONDS, 2)
    for life in range(2, 8):
        tried(now + life * 2 * AGAIN_SECONDS, 2 * life)
    assert head.crew.run_dir.failed() is None


@pytest.mark.parametrize(
    ("number", "state", "requeued", "code"),
    [
        (signal.SIGTERM, "RUNNING", ["7"], ExitCode.PREEMPTED),
        (signal.SIGTERM, "COMPLETING", [], ExitCode.PREEMPTED),
        (signal.SIGINT, "RUNNING", [], ExitCode.INTERRUPTED),
    ],
)
def test_a_warning_requeues_the_job_unless_slurm_is_ending_it_and_a_stop_ends_it(
    head: Head, cluster: Cluster, number: int, state: str, requeued: list[str], code: ExitCode
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
