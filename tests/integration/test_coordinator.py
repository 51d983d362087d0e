"""The coordinator as a process, spoken to over HTTP by agents that this test plays."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem import launch
from tandem.coordinator_client import CoordinatorClient, Refused, Unreachable
from tandem.durable import Lines, read_lines
from tandem.exitcode import ExitCode
from tandem.job import DistributedTrainingJob
from tandem.lineage import GenerationRecord
from tandem.messages import Answer, Membership, RankReport, Sync
from tandem.rundir import RunDir
from tandem.snapshot import Snapshot
from tandem.status import CheckpointRef
from tests.integration.elastic import TOKEN, until


class Coordinator:
    """A coordinator process and its run directory."""

    def __init__(self, path: Path, **spec: Any) -> None:
        self.path, self.rundir, self.port = path, RunDir(path / "run"), 0
        workers = {"replicas": 2, "maxReplicas": 4}
        elasticity = {"heartbeatSeconds": 0.5, "lostAfterSeconds": 2.0, "growCooldownSeconds": 0.2, "maxRestarts": 1}
        elasticity |= spec.pop("elasticity", {})
        body = {
            "apiVersion": "tandem.dev/v1alpha1",
            "kind": "DistributedTrainingJob",
            "metadata": {"name": "digits", "namespace": "lab"},
            "spec": {
                "trainer": {"task": "image-classification"},
                "workers": workers,
                "elasticity": elasticity,
                **spec,
            },
        }
        self.rundir.create()
        self.rundir.write_job(DistributedTrainingJob.parse(body))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Coordinator":
        port_file = self.path / "port"
        port_file.unlink(missing_ok=True)
        self.process = spawn(self.rundir, launch.coordinator_command("127.0.0.1", self.port, port_file))
        self.port = int(until(lambda: port_file.exists() and port_file.read_text(), what="the coordinator's start"))
        return self

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.communicate(timeout=20)
        return self.process.returncode

    def client(self, token: str = TOKEN) -> CoordinatorClient:
        return CoordinatorClient(f"127.0.0.1:{self.port}", token)

    def snapshot(self) -> Snapshot:
        with self.client() as client:
            return client.status()

    def raw(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request(method, path, body, {"Authorization": f"Bearer {TOKEN}"} | headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, json.loads(content) if content.startswith(b"{") else {"text": content.decode()}


def spawn(rundir: RunDir, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
    variables = os.environ | {"TANDEM_RUN_DIR": str(rundir.path), "TANDEM_TOKEN": TOKEN} | environment
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


class Agent(threading.Thread):
    """An agent that does what it is told, and would train if it had something to train."""

    def __init__(self, coordinator: Coordinator, replica: str, port: int = 4000) -> None:
        super().__init__(daemon=True)
        self.replica, self.port, self.coordinator = replica, port, coordinator
        self.generation: int | None = None
        self.membership: Membership | None = None
        self.ranks: list[RankReport] = []
        self.told: list[Answer] = []
        self.reason = ""
        self.must_go = False
        self.silent = threading.Event()
        self.start()

    def run(self) -> None:
        state, client = "joining", self.coordinator.client()
        while not self.silent.is_set():
            sync = self.sync(state, None if client.connected else self.membership)
            try:
                answer = client.sync(sync)
            except Unreachable:
                time.sleep(0.05)
                continue
            self.told.append(answer)
            if sync.reason == "WorkerFailed":
                self.reason = ""
            if answer.order == "run" and answer.membership is not None:
                state, self.generation, self.membership = "running", answer.membership.generation, answer.membership
            elif answer.order == "save" and self.must_go:
                client.sync(self.sync("leaving"))
                break
            elif answer.order in ("save", "rejoin"):
                state = "joining"
            elif answer.order == "end":
                break
        client.close()

    def sync(self, state: str, membership: Membership | None = None) -> Sync:
        return Sync(
            replica=self.replica,
            incarnation=f"{self.replica}-{id(self)}",
            address="127.0.0.1",
            port=self.port,
            processes=1,
            state=state,  # type: ignore[arg-type]
            reason=self.reason if state == "running" else "",  # type: ignore[arg-type]
            generation=self.generation,
            membership=membership if state == "running" else None,
            leaving=self.must_go and state == "running",
            ranks=self.ranks if state == "running" else [],
        )

    def vanish(self) -> None:
        self.silent.set()
        self.join(10)


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator without agents, for requests that change nothing."""
    made = Coordinator(tmp_path_factory.mktemp("idle")).start()
    yield made
    made.kill()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    made = Coordinator(tmp_path).start()
    yield made
    assert made.process is not None
    if made.process.poll() is None:
        made.kill()


@pytest.fixture
def agents(coordinator: Coordinator) -> Iterator[tuple[Agent, Agent]]:
    pair = Agent(coordinator, "worker-0"), Agent(coordinator, "worker-1")
    until(lambda: all(agent.generation == 1 for agent in pair), what="the first generation")
    yield pair
    for agent in pair:
        agent.vanish()


def test_the_number_of_a_generation_is_on_the_disk_before_an_agent_learns_of_it(
    coordinator: Coordinator, agents: tuple[Agent, Agent]
) -> None:
    page = json.loads(coordinator.rundir.coordinator_file.read_text())
    assert page["generation"] == 1
    assert [member["replica"] for member in page["membership"]["members"]] == ["worker-0", "worker-1"]


def test_a_failure_reaches_all_agents_at_once_and_they_meet_again(
    coordinator: Coordinator, agents: tuple[Agent, Agent]
) -> None:
    began = time.monotonic()
    agents[0].reason = "WorkerFailed"
    until(lambda: all(agent.generation == 2 for agent in agents))
    # The heartbeat that carries the news may have to wait for the one before it; everything else is a round trip.
    assert time.monotonic() - began < 0.5 + 1.0
    status = coordinator.snapshot()
    assert [view.reason for view in status.generations] == ["Started", "WorkerFailed"]
    assert status.generations[0].closed_at is not None
    assert status.status.restarts == 1


def test_an_agent_that_vanishes_is_lost_and_the_other_goes_on_alone(
    coordinator: Coordinator, agents: tuple[Agent, Agent]
) -> None:
    agents[1].vanish()
    until(lambda: agents[0].generation == 2)
    assert agents[0].membership is not None
    assert [member.replica for member in agents[0].membership.members] == ["worker-0"]
    assert agents[0].membership.reason == "MemberLost"


def test_an_agent_that_hangs_up_after_it_was_told_that_the_generation_is_closed_is_not_waited_for(
    tmp_path: Path,
) -> None:
    patient = Coordinator(tmp_path, elasticity={"heartbeatSeconds": 10.0, "lostAfterSeconds": 60.0}).start()
    rest, killed = Agent(patient, "worker-0"), Agent(patient, "worker-1")
    until(lambda: rest.generation == 1 and killed.generation == 1)
    killed.silent.set()
    began = time.monotonic()
    with patient.client() as client:
        assert client.sync(rest.sync("running").model_copy(update={"reason": "WorkerFailed"})).order == "rejoin"
    until(lambda: rest.generation == 2)
    assert rest.membership is not None
    assert [member.replica for member in rest.membership.members] == ["worker-0"]
    assert time.monotonic() - began < 6.0, "it would be waited for 10 s if it were taken for alive"
    assert killed.told[-1].order == "rejoin"
    patient.kill()
    for agent in (rest, killed):
        agent.vanish()


def test_a_coordinator_that_is_killed_and_started_again_adopts_what_runs(
    coordinator: Coordinator, agents: tuple[Agent, Agent]
) -> None:
    coordinator.kill()
    coordinator.start()
    snapshot = until(lambda: (s := coordinator.snapshot()).status.world_size and s)
    assert snapshot.status.generation == 1
    assert snapshot.status.world_size == 2
    assert all({answer.order for answer in agent.told} <= {"wait", "run"} for agent in agents)
    assert [view.reason for view in snapshot.generations] == ["Started"], "reasons survive"


def test_a_coordinator_never_gives_a_number_twice_even_without_its_file(
    coordinator: Coordinator, agents: tuple[Agent, Agent]
) -> None:
    for agent in agents:
        agent.vanish()
    coordinator.kill()
    coordinator.rundir.coordinator_file.unlink()
    record = GenerationRecord(generation=7, world_size=2, started_at=time.time())
    coordinator.rundir.record_generation(record)
    coordinator.start()
    again = Agent(coordinator, "worker-0"), Agent(coordinator, "worker-1")
    until(lambda: all(agent.generation == 8 for agent in again))
    for agent in again:
        agent.vanish()


def test_of_two_coordinators_of_one_job_the_older_ends(coordinator: Coordinator) -> None:
    command = launch.coordinator_command("127.0.0.1", 0, coordinator.path / "other-port")
    other = spawn(coordinator.rundir, command)
    try:
        until((coordinator.path / "other-port").exists)
        pair = Agent(coordinator, "worker-0"), Agent(coordinator, "worker-1")
        assert coordinator.process is not None
        output, _ = coordinator.process.communicate(timeout=20)
        assert coordinator.process.returncode == ExitCode.SUPERSEDED
        assert b"has taken over" in output
        for agent in pair:
            agent.vanish()
            assert agent.generation is None, "what the older one decided was never handed out"
    finally:
        other.kill()
        other.communicate()


def test_the_budget_of_restarts_ends_the_job(coordinator: Coordinator, agents: tuple[Agent, Agent]) -> None:
    agents[0].reason = "WorkerFailed"
    until(lambda: all(agent.generation == 2 for agent in agents))
    agents[0].reason = "WorkerFailed"
    until(lambda: all(agent.told[-1].order == "end" for agent in agents))
    failed = until(coordinator.rundir.failed)
    assert failed["reason"] == "RestartsExhausted"
    assert "maxRestarts is 1" in failed["message"]
    until(lambda: coordinator.snapshot().status.phase == "Failed")


def test_a_new_target_is_honoured_and_a_senseless_one_refused(
    coordinator: Coordinator, agents: tuple[Agent, Agent]
) -> None:
    with coordinator.client() as client:
        client.set_target(1)
        until(lambda: client.status().status.world_size == 1)
        assert client.status().generations[-1].reason == "TargetChanged"
        with pytest.raises(Refused, match="from 1 to 4, not 9"):
            client.set_target(9)
    coordinator.kill()
    coordinator.start()
    workers = coordinator.snapshot().status.workers
    assert workers is not None
    assert workers.desired == 1, "a target survives the coordinator"


def test_who_must_go_leaves_after_the_group_has_saved(coordinator: Coordinator, agents: tuple[Agent, Agent]) -> None:
    for index, agent in enumerate(agents):
        agent.ranks = [RankReport(rank=index, step=50)]
    until(lambda: coordinator.snapshot().status.phase == "Running")
    agents[1].must_go = True
    until(lambda: agents[0].generation == 2)
    orders = [answer.order for answer in agents[0].told]
    assert "rejoin" not in orders, "that would have aborted its ranks"
    assert orders.count("save") == 1
    snapshot = coordinator.snapshot()
    assert snapshot.generations[-1].reason == "Preempted"
    assert snapshot.generations[-1].detail == "worker-1 has to leave"
    assert snapshot.generations[-1].members == ["worker-0"]
    told = [(event.kind, event.text) for event in snapshot.events]
    assert ("info", "worker-1 has to leave; the group saves first") in told
    assert ("info", "generation 1 is over: worker-1 has to leave") in told


def test_a_newcomer_joins_after_the_group_has_saved(coordinator: Coordinator) -> None:
    first = Agent(coordinator, "worker-0")
    until(lambda: first.generation == 1)
    first.ranks = [RankReport(rank=0, step=50)]
    until(lambda: coordinator.snapshot().status.phase == "Running")
    second = Agent(coordinator, "worker-1")
    until(lambda: second.generation == 2)
    assert "rejoin" not in [answer.order for answer in first.told]
    assert coordinator.snapshot().generations[-1].reason == "MemberJoined"
    for agent in (first, second):
        agent.vanish()


def test_an_agent_that_waits_for_its_ranks_to_save_is_not_told_so_all_the_time(
    coordinator: Coordinator, agents: tuple[Agent, Agent]
) -> None:
    for index, agent in enumerate(agents):
        agent.ranks = [RankReport(rank=index, step=50)]
    until(lambda: coordinator.snapshot().status.phase == "Running")
    agents[0].vanish()
    agents[1].vanish()
    with coordinator.client() as client:
        waits = agents[1].sync("running", agents[1].membership)
        going = agents[0].sync("running").model_copy(update={"leaving": True})
        assert client.sync(going).order == "save"
        assert client.sync(waits).order == "save"
        began = time.monotonic()
        assert client.sync(waits).order == "save"
        assert time.monotonic() - began > 0.3


def test_a_group_that_hangs_is_told_to_write_its_stacks_and_starts_again(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, elasticity={"hangSeconds": 1.5}).start()
    pair = Agent(coordinator, "worker-0"), Agent(coordinator, "worker-1")
    try:
        until(lambda: all(agent.generation == 1 for agent in pair), what="the first generation")
        for step in range(1, 6):
            for index, agent in enumerate(pair):
                agent.ranks = [RankReport(rank=index, step=step)]
            told = [len(agent.told) for agent in pair]
            until(lambda told=told: all(len(agent.told) > n + 1 for agent, n in zip(pair, told, strict=True)))
        pair[1].ranks = [RankReport(rank=1, step=5, phase="stopped")]
        until(lambda: all(agent.generation == 2 for agent in pair), what="the restart")
        for agent in pair:
            assert [answer.stacks for answer in agent.told if answer.order == "rejoin"] == [True]
        snapshot = coordinator.snapshot()
        assert snapshot.generations[-1].reason == "Hung"
        (over,) = [event for event in snapshot.events if "generation 1 is over" in event.text]
        assert over.kind == "warning"
        assert "rank 1 (worker-1) is stopped at step 5" in over.text
        assert "stacks/g000001" in over.text
        assert any("failure 1 of 1" in event.text for event in snapshot.events)
    finally:
        for agent in pair:
            agent.vanish()
        coordinator.kill()


def test_the_stacks_of_the_last_hang_are_written_before_the_job_ends(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, elasticity={"hangSeconds": 1.0, "maxRestarts": 0}).start()
    agent, other = Agent(coordinator, "worker-0"), Agent(coordinator, "worker-1")
    try:
        until(lambda: agent.generation == 1, what="the first generation")
        for step in (1, 2):
            agent.ranks = [RankReport(rank=0, step=step)]
            told = len(agent.told)
            until(lambda told=told: len(agent.told) > told + 1)
        until(lambda: any(answer.stacks for answer in agent.told), what="the order to write stacks")
        began = time.monotonic()
        until(coordinator.rundir.failed, what="the job's end")
        assert time.monotonic() - began > 1.0
        until(lambda: agent.told[-1].order == "end")
    finally:
        agent.vanish()
        other.vanish()
        coordinator.kill()


def test_a_straggler_is_named_in_the_status_the_events_and_the_metrics(
    coordinator: Coordinator, agents: tuple[Agent, Agent]
) -> None:
    for index, agent in enumerate(agents):
        agent.ranks = [RankReport(rank=index, step=50, busy_seconds=0.1 + 0.2 * index)]
    snapshot = until(lambda: (s := coordinator.snapshot()).status.stragglers and s, what="naming the straggler")
    assert [straggler.dump() for straggler in snapshot.status.stragglers] == [
        {"rank": 1, "replica": "worker-1", "ratio": 3.0}
    ]
    assert snapshot.members[1].ranks[0].busy_seconds == pytest.approx(0.3)
    assert [event.text for event in snapshot.events if "slow" in event.text] == [
        "rank 1 (worker-1) is slow: its work takes 3.0 times the median"
    ]
    _, body = coordinator.raw("GET", "/metrics")
    assert 'tandem_straggler_ratio{job="digits",namespace="lab",rank="1",replica="worker-1"} 3.0' in body["text"]
    assert 'tandem_rank_busy_seconds{job="digits",namespace="lab",rank="0"} 0.1' in body["text"]


def test_the_last_events_of_a_job_are_about_its_end(coordinator: Coordinator, agents: tuple[Agent, Agent]) -> None:
    coordinator.rundir.mark_done(CheckpointRef(name="step-000000200", step=200, generation=1))
    until(lambda: all(agent.told[-1].order == "end" for agent in agents))
    with coordinator.client() as client:
        for agent in agents:
            client.sync(agent.sync("leaving"))
    snapshot = coordinator.snapshot()
    assert (snapshot.events[-1].kind, snapshot.events[-1].text) == ("info", "training is complete")
    assert snapshot.generations[-1].closed_at is not None
    assert snapshot.members == []


def test_the_end_is_read_from_the_run_directory(coordinator: Coordinator, agents: tuple[Agent, Agent]) -> None:
    coordinator.rundir.mark_failed("ConfigurationError", "there is no such folder", 78)
    until(lambda: all(agent.told[-1].order == "end" for agent in agents))
    assert agents[0].told[-1].why == "there is no such folder"
    status = coordinator.snapshot().status
    assert (status.phase, status.message) == ("Failed", "there is no such folder")


def test_what_ranks_and_evaluators_report_is_shown_and_disappears_with_them(
    coordinator: Coordinator, agents: tuple[Agent, Agent]
) -> None:
    for index, agent in enumerate(agents):
        agent.ranks = [RankReport(rank=index, step=50, total_steps=200, loss=0.5, throughput=640.0, cpu=0.75, gpu=0.5)]
    lines = Lines(coordinator.rundir.log / "evaluator-evaluator-0-0.jsonl")
    now = time.time()
    lines.append(
        {"kind": "usage", "time": now - 1, "cpuSeconds": 1.0, "state": "idle", "checkpoint": None},
        {"kind": "usage", "time": now, "cpuSeconds": 1.5, "state": "evaluating", "checkpoint": "step-000000050"},
    )
    lines.close()
    snapshot = until(
        lambda: (s := coordinator.snapshot()).evaluators and s.status.progress and len(s.members[1].ranks) and s
    )
    assert snapshot.status.phase == "Running"
    assert snapshot.status.progress.step == 50
    assert snapshot.status.progress.percent == 25.0
    assert (snapshot.status.loss, snapshot.status.throughput) == (0.5, 640.0)
    assert snapshot.status.utilization.trainer_cpu == 1.5
    assert snapshot.evaluators[0].cpu == pytest.approx(0.5)
    assert snapshot.evaluators[0].state == "step-000000050"

    def series(name: str) -> dict[str, float]:
        _, body = coordinator.raw("GET", "/metrics")
        return {
            sample.labels.get("rank", ""): sample.value
            for family in text_string_to_metric_families(body["text"])
            for sample in family.samples
            if sample.name == name and sample.labels["job"] == "digits" and sample.labels["namespace"] == "lab"
        }

    assert series("tandem_rank_cpu_cores") == {"0": 0.75, "1": 0.75}
    assert series("tandem_loss") == {"": 0.5}
    agents[1].vanish()
    until(lambda: series("tandem_rank_cpu_cores").keys() == {"0"}, what="the lost rank's series' end")
    # A thread of its own writes the journal.
    records = until(
        lambda: (
            (found := read_lines(coordinator.rundir.log / "coordinator.jsonl")[0])
            and {"generation", "sample", "closed", "event"} <= {record["kind"] for record in found}
            and found
        )
    )
    assert any(record.get("trainerCpu") == {"0": 0.75, "1": 0.75} for record in records)


GARBAGE = [
    (b"", "the body is not JSON"),
    (b"{", "the body is not JSON"),
    (b"[" * 10_000, "the body is not JSON"),
    (b"[]", "the body"),
    (b"{}", "replica"),
    (b"\xff\xfe", "the body is not JSON"),
    (json.dumps({"replica": "../../etc"}).encode(), "replica"),
    (json.dumps({"replica": "a" * 300}).encode(), "replica"),
]


@pytest.mark.parametrize(("body", "complaint"), GARBAGE)
def test_garbage_is_answered_with_a_sentence(idle: Coordinator, body: bytes, complaint: str) -> None:
    status, answer = idle.raw("POST", "/v1/sync", body)
    assert status == 400
    assert complaint in answer["error"]


def test_impossible_agents_are_refused(idle: Coordinator) -> None:
    sound = {
        "replica": "worker-0",
        "incarnation": "a",
        "address": "10.0.0.1",
        "port": 4000,
        "processes": 1,
        "state": "running",
        "generation": 1,
    }
    for wrong, complaint in [
        ({"processes": 2}, "every replica of this job has 1 processes"),
        ({"generation": None}, "must say which generation"),
        ({"generation": 2**50}, "was ever given out"),
        ({"port": 0}, "port"),
        ({"address": "evil host"}, "address"),
        ({"surprise": 1}, "surprise"),
        ({"ranks": [{"rank": 0, "step": 1}] * 65}, "ranks"),
        ({"ranks": [{"rank": 0, "step": 1, "loss": "NaN"}]}, "ranks.0.loss"),
    ]:
        status, answer = idle.raw("POST", "/v1/sync", json.dumps(sound | wrong).encode())
        assert status == 400, wrong
        assert complaint in answer["error"]
    assert idle.snapshot().members == []


def test_a_large_request_is_refused(idle: Coordinator) -> None:
    status, answer = idle.raw("POST", "/v1/sync", b" " * 70_000)
    assert status == 413
    assert "65536 bytes" in answer["error"]


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xe9"])
@pytest.mark.parametrize("path", ["/status", "/metrics", "/v1/sync", "/v1/target", "/nowhere"])
def test_without_the_token_nothing_is_answered(idle: Coordinator, path: str, header: str) -> None:
    status, answer = idle.raw("GET" if "v1" not in path else "POST", path, Authorization=header)
    assert status == 401
    assert "token" in answer["error"]
    assert TOKEN not in answer["error"]


def test_liveness_needs_no_token_and_other_paths_do_not_exist(idle: Coordinator) -> None:
    assert idle.raw("GET", "/healthz", Authorization="")[0] == 200
    assert idle.raw("GET", "/nowhere")[0] == 404
    with idle.client("wrong") as client, pytest.raises(Refused, match="token"):
        client.status()


def test_a_heartbeat_that_says_nothing_new_is_held_for_the_heartbeat_time(
    coordinator: Coordinator, agents: tuple[Agent, Agent]
) -> None:
    before = len(agents[0].told)
    time.sleep(2.0)
    assert 2 <= len(agents[0].told) - before <= 6


def test_told_to_stop_it_stops_at_once(coordinator: Coordinator, agents: tuple[Agent, Agent]) -> None:
    began = time.monotonic()
    assert coordinator.kill(signal.SIGTERM) == 0
    assert time.monotonic() - began < 5


def refusal(rundir: RunDir, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-m", "tandem_coordinator", "--host", "127.0.0.1", "--port", "0", *arguments]
    process = spawn(rundir, command, **environment)
    _, complaint = process.communicate(timeout=30)
    assert process.returncode == ExitCode.USAGE
    assert b"Traceback" not in complaint
    assert complaint.count(b"\n") == 1
    return complaint.decode()


def test_what_keeps_it_from_starting_is_one_sentence(tmp_path: Path) -> None:
    rundir = Coordinator(tmp_path).rundir
    assert "set TANDEM_TOKEN" in refusal(rundir, TANDEM_TOKEN="")
    assert "set TANDEM_RUN_DIR" in refusal(rundir, TANDEM_RUN_DIR="")
    assert "70000 is not a port" in refusal(rundir, "--port", "70000")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use" in refusal(rundir, "--port", str(port))
    rundir.job_file.write_text("{}")
    assert "job.json is not a job" in refusal(rundir)
    rundir.job_file.unlink()
    assert "job.json is missing" in refusal(rundir)
