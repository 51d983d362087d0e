"""The coordinator as a process: generations, changes, ends, as the agents of a test meet them."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.processes import launch
from tandem.processes.exitcode import ExitCode
from tandem.rundir.lineage import GenerationRecord
from tandem.wire.protocol import RankReport
from tandem.wire.status import CheckpointRef
from tandem_coordinator.forming import STACKS_SECONDS
from tests.support.coordinator_process import Agent, Coordinator, CoordinatorProcess
from tests.support.lines import Lines, read_lines
from tests.support.waiting import until

HELD_SECONDS = 60.0
BEFORE_IT_IS_ANSWERED = 0.75 * HELD_SECONDS
"""The coordinator holds a heartbeat for four fifths of the heartbeat time at least: so long anything else may take."""


def test_the_number_of_a_generation_is_on_the_disk_before_an_agent_learns_of_it(
    coordinator: Coordinator, agents: tuple[Agent, Agent]
) -> None:
    page = json.loads(coordinator.rundir.coordinator_file.read_text())
    assert page["generation"] == 1
    assert [member["replica"] for member in page["membership"]["members"]] == ["worker-0", "worker-1"]


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[tuple[Coordinator, Agent, Agent]]:
    """A coordinator that holds heartbeats for most of a minute, and two agents whose heartbeats it holds."""
    made = Coordinator(tmp_path, elasticity={"heartbeatSeconds": HELD_SECONDS, "lostAfterSeconds": 600.0}).start()
    agents = Agent(made, "worker-0"), Agent(made, "worker-1")
    until(lambda: all(agent.generation == 1 for agent in agents), "the first generation")
    yield made, *agents
    made.kill()
    for agent in agents:
        agent.vanish()


def test_a_failure_reaches_all_agents_at_once_and_they_meet_again(patient: tuple[Coordinator, Agent, Agent]) -> None:
    coordinator, *agents = patient
    with coordinator.client() as client:
        failed = agents[0].sync("running").model_copy(update={"reason": "WorkerFailed"})
        assert client.sync(failed).order == "rejoin"
    until(lambda: all(agent.generation == 2 for agent in agents), "generation 2", BEFORE_IT_IS_ANSWERED)
    assert all([answer.order for answer in agent.told][-2:] == ["rejoin", "run"] for agent in agents)
    status = coordinator.snapshot()
    assert [view.reason for view in status.generations] == ["Started", "WorkerFailed"]
    assert status.generations[0].closed_at is not None
    assert status.status.restarts == 1


def test_an_agent_that_vanishes_is_lost_and_the_other_goes_on_alone(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, elasticity={"lostAfterSeconds": 2.0}).start()
    rest, gone = Agent(coordinator, "worker-0"), Agent(coordinator, "worker-1")
    until(lambda: rest.generation is not None and gone.generation is not None, "a generation of both")
    gone.vanish()
    until(
        lambda: (now := rest.membership) and [member.replica for member in now.members] == ["worker-0"],
        "a generation without it",
    )
    assert rest.membership.reason == "MemberLost"
    coordinator.kill()
    rest.vanish()


def test_an_agent_that_hangs_up_after_it_was_told_that_the_generation_is_closed_is_not_waited_for(
    patient: tuple[Coordinator, Agent, Agent],
) -> None:
    coordinator, rest, killed = patient
    killed.silent.set()
    with coordinator.client() as client:
        assert client.sync(rest.sync("running").model_copy(update={"reason": "WorkerFailed"})).order == "rejoin"
    until(lambda: rest.generation == 2, "a generation without one that is not taken for alive", BEFORE_IT_IS_ANSWERED)
    assert [member.replica for member in rest.membership.members] == ["worker-0"]
    assert killed.told[-1].order == "rejoin"


def test_a_coordinator_that_is_killed_and_started_again_adopts_what_runs(
    coordinator: Coordinator, agents: tuple[Agent, Agent]
) -> None:
    coordinator.kill()
    coordinator.start()
    snapshot = until(lambda: (s := coordinator.snapshot()).status.world_size and s, "a group that is whole")
    assert snapshot.status.generation == 1
    assert snapshot.status.world_size == 2
    assert all({answer.order for answer in agent.told} <= {"wait", "run"} for agent in agents)
    assert [view.reason for view in snapshot.generations] == ["Started"], "reasons survive"


def finishes(agent: Agent) -> None:
    agent.vanish()
    with agent.coordinator.client() as client:
        client.status()  # so it knows what the coordinator reads
        client.sync(agent.sync("leaving").model_copy(update={"finished": True}))


def test_a_script_of_which_one_member_still_works_goes_on_over_the_death_of_the_coordinator(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, trainer={"command": ["python", "train.py"]}).start()
    done, rest = Agent(coordinator, "worker-0"), Agent(coordinator, "worker-1")
    until(lambda: done.generation == rest.generation == 1, "a generation of both")
    finishes(done)
    assert json.loads(coordinator.rundir.beside_coordinator_file.read_text())["finished"] == ["worker-0"]
    coordinator.kill()
    coordinator.start()
    snapshot = until(lambda: (s := coordinator.snapshot()).status.world_size and s, "the group that goes on")
    assert (snapshot.status.generation, snapshot.finished) == (1, 1)
    finishes(rest)
    until(coordinator.rundir.done_file.exists, "its end")
    assert {answer.order for answer in rest.told} <= {"wait", "run"}, "it did not begin anew"
    coordinator.kill()


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
    until(lambda: all(agent.generation == 8 for agent in again), "generation 8")
    for agent in again:
        agent.vanish()


def test_of_two_coordinators_of_one_job_the_older_ends(coordinator: Coordinator) -> None:
    command = launch.coordinator_command("127.0.0.1", 0, coordinator.path / "other-port")
    other = CoordinatorProcess(coordinator.rundir, command)
    try:
        until((coordinator.path / "other-port").exists, "the port of the other")
        pair = Agent(coordinator, "worker-0"), Agent(coordinator, "worker-1")
        output, _ = coordinator.process.communicate()
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
    until(lambda: all(agent.generation == 2 for agent in agents), "generation 2")
    agents[0].reason = "WorkerFailed"
    until(lambda: all(agent.told[-1].order == "end" for agent in agents), "the order to end")
    failed = until(coordinator.rundir.failed, "FAILED.json")
    assert failed["reason"] == "RestartsExhausted"
    assert "maxRestarts is 1" in failed["message"]
    until(lambda: coordinator.snapshot().status.phase == "Failed", "phase Failed")


def test_a_new_target_is_honoured_and_a_senseless_one_refused(
    coordinator: Coordinator, agents: tuple[Agent, Agent]
) -> None:
    with coordinator.client() as client:
        assert coordinator.raw("POST", "/v1/target", b'{"replicas": 1}')[0] == 200
        until(lambda: client.status().status.world_size == 1, "a group that is whole")
        assert client.status().generations[-1].reason == "TargetChanged"
        code, refusal = coordinator.raw("POST", "/v1/target", b'{"replicas": 9}')
        assert code == 400
        assert "from 1 to 4, not 9" in refusal["error"]
        waits = b'{"name": "gpus", "integration": "Workload", "admitted": 0, "position": 2, "newer": 1}'
        assert coordinator.raw("POST", "/v1/queue", waits)[0] == 200
        assert coordinator.raw("POST", "/v1/queue", b'{"name": "other", "integration": 3}')[0] == 400
        queue = client.status().status.queue
        assert queue is not None
        assert (queue.name, queue.position) == ("gpus", 2)
    coordinator.kill()
    coordinator.start()
    assert coordinator.snapshot().status.workers.desired == 1, "a target survives the coordinator"


def test_who_must_go_leaves_after_the_group_has_saved(coordinator: Coordinator, agents: tuple[Agent, Agent]) -> None:
    for index, agent in enumerate(agents):
        agent.ranks = [RankReport(rank=index, step=50)]
    until(lambda: coordinator.snapshot().status.phase == "Running", "phase Running")
    agents[1].must_go = True
    until(lambda: agents[0].generation == 2, "generation 2")
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
    until(lambda: first.generation == 1, "generation 1")
    first.ranks = [RankReport(rank=0, step=50)]
    until(lambda: coordinator.snapshot().status.phase == "Running", "phase Running")
    second = Agent(coordinator, "worker-1")
    until(lambda: second.generation == 2, "generation 2")
    assert "rejoin" not in [answer.order for answer in first.told]
    assert coordinator.snapshot().generations[-1].reason == "MemberJoined"
    for agent in (first, second):
        agent.vanish()


def test_an_agent_that_waits_for_its_ranks_to_save_is_not_told_so_all_the_time(
    coordinator: Coordinator, agents: tuple[Agent, Agent]
) -> None:
    for index, agent in enumerate(agents):
        agent.ranks = [RankReport(rank=index, step=50)]
    until(lambda: coordinator.snapshot().status.phase == "Running", "phase Running")
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
        until(lambda: all(agent.generation == 1 for agent in pair), "the first generation")
        for step in range(1, 6):
            for index, agent in enumerate(pair):
                agent.ranks = [RankReport(rank=index, step=step)]
            told = [len(agent.told) for agent in pair]
            until(
                lambda told=told: all(len(agent.told) > n + 1 for agent, n in zip(pair, told, strict=True)),
                "the next answers",
            )
        pair[1].ranks = [RankReport(rank=1, step=5, phase="stopped")]
        until(lambda: all(agent.generation == 2 for agent in pair), "the restart")
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


@pytest.mark.full("coordinator")
def test_the_stacks_of_the_last_hang_are_written_before_the_job_ends(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, elasticity={"hangSeconds": 1.0, "maxRestarts": 0}).start()
    agent, other = Agent(coordinator, "worker-0"), Agent(coordinator, "worker-1")
    try:
        until(lambda: agent.generation == 1, "the first generation")
        for step in (1, 2):
            agent.ranks = [RankReport(rank=0, step=step)]
            told = len(agent.told)
            until(lambda told=told: len(agent.told) > told + 1, "the next answers")
        until(lambda: any(answer.stacks for answer in agent.told), "the order to write stacks")
        failed = until(coordinator.rundir.failed, "the job's end")
        closed_at = coordinator.snapshot().generations[-1].closed_at
        assert failed["at"] - closed_at > 0.9 * STACKS_SECONDS, "what an agent is given to write them"
        until(lambda: agent.told[-1].order == "end", "the order to end")
    finally:
        agent.vanish()
        other.vanish()
        coordinator.kill()


def test_a_straggler_is_named_in_the_status_the_events_and_the_metrics(
    coordinator: Coordinator, agents: tuple[Agent, Agent]
) -> None:
    for index, agent in enumerate(agents):
        agent.ranks = [RankReport(rank=index, step=50, busy_seconds=0.1 + 0.2 * index)]
    snapshot = until(lambda: (s := coordinator.snapshot()).status.stragglers and s, "naming the straggler")
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
    until(lambda: all(agent.told[-1].order == "end" for agent in agents), "the order to end")
    with coordinator.client() as client:
        for agent in agents:
            client.sync(agent.sync("leaving"))
    snapshot = coordinator.snapshot()
    assert (snapshot.events[-1].kind, snapshot.events[-1].text) == ("info", "training is complete")
    assert snapshot.generations[-1].closed_at is not None
    assert snapshot.members == []


def test_the_end_is_read_from_the_run_directory(coordinator: Coordinator, agents: tuple[Agent, Agent]) -> None:
    coordinator.rundir.mark_failed("ConfigurationError", "there is no such folder", 78)
    until(lambda: all(agent.told[-1].order == "end" for agent in agents), "the order to end")
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
        lambda: (s := coordinator.snapshot()).evaluators and all(member.ranks for member in s.members) and s,
        "evaluators and both ranks in the status",
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
    use = {"0": 0.75, "1": 0.75}
    until(lambda: any(record.get("trainerCpu") == use for record in logged(coordinator)), "a sample in the log")
    agents[1].vanish()
    with coordinator.client() as client:
        client.sync(agents[1].sync("leaving"))
    until(lambda: series("tandem_rank_cpu_cores").keys() == {"0"}, "the end of the series of the rank that left")
    until(
        lambda: {"generation", "sample", "closed", "event"} <= {record["kind"] for record in logged(coordinator)},
        "a line of each kind in the log",
    )


def logged(coordinator: Coordinator) -> list[dict[str, Any]]:
    """What the coordinator has written down, on a thread of its own."""
    return read_lines(coordinator.rundir.log / "coordinator.jsonl")[0]
