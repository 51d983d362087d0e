"""Real torchrun agents under a real coordinator, and the deaths they must survive."""

import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tandem.job.datasets import FILES
from tandem.processes.exitcode import ExitCode
from tests.support.bad_surroundings import whole_mnist
from tests.support.disks import unreadable
from tests.support.elastic import Elastic
from tests.support.lines import read_lines
from tests.support.manifests import images
from tests.support.processes import alive
from tests.support.waiting import SECONDS, until


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elastic]:
    """Two agents of one rank each, that train for as long as they are let. The tests of it follow each other."""
    with Elastic(tmp_path_factory.mktemp("group")).start("worker-0", "worker-1") as made:
        made.step_after(0, world=2)
        yield made


@pytest.mark.smoke
def test_a_killed_worker_costs_no_more_than_the_start_of_new_ones(group: Elastic) -> None:
    last = group.step_after(time.time(), world=2)
    killed = group.kill_rank("worker-1")
    first = group.step_after(killed, world=2, generation=last.generation)
    assert first.generation == last.generation + 1
    snapshot = group.snapshot()
    assert snapshot.generations[-1].reason == "WorkerFailed"
    assert snapshot.status.restarts == 1
    assert f"event=rank-ended generation={last.generation} local_rank=0 signal=9" in group.output("worker-1")


def test_a_coordinator_that_is_killed_and_comes_back_costs_no_step(group: Elastic) -> None:
    before = group.step_after(time.time(), world=2)
    killed = time.time()
    group.kill_coordinator()
    group.step_after(time.time() + 1.0, world=2)
    group.start_coordinator()
    until(lambda: (s := group.snapshot()) and s.status.phase == "Running", "adoption")
    after = group.step_after(time.time() + 4.0, world=2)
    assert (after.generation, after.pid) == (before.generation, before.pid)
    lead = [step for step in group.steps() if step.at > killed and step.rank == 0]
    assert all(later.step == earlier.step + 1 for earlier, later in pairwise(lead)), "no step is repeated or left out"


def test_the_rest_of_the_group_goes_on_when_an_agent_dies_and_grows_when_it_returns(group: Elastic) -> None:
    last = group.step_after(time.time(), world=2)
    killed = group.kill_agent("worker-0")
    alone = group.step_after(killed, world=1, generation=last.generation)
    snapshot = group.snapshot()
    assert snapshot.generations[-1].reason == "MemberLost"
    assert snapshot.generations[-1].members == ["worker-1"]

    group.start_agent("worker-0")
    again = group.step_after(alone.at, world=2, generation=alone.generation)
    records, _ = read_lines(group.rundir.log / "coordinator.jsonl")
    formed = [record for record in records if record["kind"] == "generation"]
    assert formed[-1]["generation"] == again.generation
    assert formed[-1]["reason"] == "MemberJoined"
    numbers = [record["generation"] for record in formed]
    assert numbers == sorted(set(numbers))


def test_no_two_groups_ever_step_at_the_same_time(group: Elastic) -> None:
    lead = [step for step in group.steps() if step.rank == 0]
    assert [step.generation for step in lead] == sorted(step.generation for step in lead)


def test_ranks_never_outlive_their_agent(group: Elastic) -> None:
    group.step_after(time.time(), world=2)
    ranks = group.ranks_of("worker-1")
    agent = group.agents.pop("worker-1")
    agent.kill()
    agent.wait()
    until(lambda: not any(alive(rank) for rank in ranks), "the ranks' end")


def test_a_script_that_knows_nothing_of_tandem_recovers_and_completes(tmp_path: Path) -> None:
    with Elastic(tmp_path, aware=False, total=150).start("worker-0", "worker-1") as group:
        group.step_after(0, world=2)
        killed = group.kill_rank("worker-0")
        group.step_after(killed, world=2, generation=1)
        codes = {name: agent.wait(SECONDS) for name, agent in group.agents.items()}
        assert codes == {"worker-0": 0, "worker-1": 0}
        steps = group.steps()
        assert max(step.step for step in steps) == 150
        snapshot = until(lambda: (s := group.snapshot()) and not s.members and s, "their good-bye")
        # What led to another generation, should there be one, is in these words.
        said = "\n".join([*(event.text for event in snapshot.events), *map(group.output, ("worker-0", "worker-1"))])
        assert snapshot.status.generation == 2, said
        assert snapshot.status.phase == "Succeeded"
        group.start_agent("worker-2")
        assert group.agents["worker-2"].wait(SECONDS) == 0
        assert len(group.steps()) == len(steps), "a late newcomer does not begin it anew"


def test_the_others_go_on_without_a_replica_that_fails_whatever_it_is_given(tmp_path: Path) -> None:
    with Elastic(tmp_path, replicas=3) as group:
        group.start("worker-0", "worker-1")
        group.extra["STEPS_FAIL_AFTER"] = "3"
        group.start_agent("worker-2")
        assert group.agents["worker-2"].wait(SECONDS) == ExitCode.LEFT_OUT
        group.step_after(time.time(), world=2)
        snapshot = group.snapshot()
        (told,) = [event.text for event in snapshot.events if "left out" in event.text and event.kind == "warning"]
        assert told.startswith(
            "worker-2 (node node-of-worker-2) is left out: the group failed 3 times in a row because of it"
        )
        assert snapshot.generations[-1].members == ["worker-0", "worker-1"]


@pytest.mark.full("core", "coordinator", "trainer")
@pytest.mark.parametrize("lacks", ["the folder", "a file that can be read"])
def test_a_node_that_lacks_the_data_of_a_group_that_trains_is_left_out(tmp_path: Path, lacks: str) -> None:
    whole_mnist(tmp_path)
    config = {
        "data": {"name": "mnist", "path": "~/data", "download": False},
        "globalBatchSize": 4,
        "epochs": 1_000_000,
    }
    with Elastic(tmp_path, replicas=3, trainer=images(config)) as group:
        group.extra["HOME"] = str(tmp_path)
        group.start("worker-0", "worker-1")
        until(lambda: (s := group.snapshot()) and s.status.world_size == 2 and s.status.progress, "a group of two")
        bad = tmp_path / "bad"
        group.extra["HOME"] = str(bad)
        if lacks != "the folder":
            bad.mkdir()
            whole_mnist(bad)
            unreadable(bad / "data" / FILES["train"][0])
        group.start_agent("worker-2")
        assert group.agents["worker-2"].wait(SECONDS) == ExitCode.LEFT_OUT
        snapshot = until(lambda: (s := group.snapshot()) and s.status.world_size == 2 and s, "the group of two again")
        (told,) = [event.text for event in snapshot.events if "left out" in event.text and event.kind == "warning"]
        why = "data.path: ~/data is not a folder" if lacks == "the folder" else "OSError: [Errno 5] Input/output error"
        assert why in told
        assert group.rundir.failed() is None


def test_a_job_that_has_failed_ends_its_agents_with_the_reason(tmp_path: Path) -> None:
    with Elastic(tmp_path, elasticity={"maxRestarts": 0}).start("worker-0", "worker-1") as group:
        group.step_after(0, world=2)
        group.kill_rank("worker-0")
        codes = {agent.wait(SECONDS) for agent in group.agents.values()}
        assert codes == {int(ExitCode.FAILED)}
        assert until(group.rundir.failed, "FAILED.json")["reason"] == "RestartsExhausted"
        for name in group.agents:
            assert "Traceback" not in group.output(name).split("event=generation-closed")[-1]
        assert len({step.generation for step in group.steps()}) == 1


def test_an_agent_that_is_leaving_is_not_disturbed_by_sigterm(tmp_path: Path) -> None:
    """Whoever runs agents tells all of them to go when the first one has; the last words in their logs must stay."""
    with Elastic(tmp_path).start("worker-0", "worker-1") as group:
        group.step_after(0.0, world=2)
        group.rundir.mark_failed("ConfigurationError", "there is no such folder", 78)
        agent, log = group.agents["worker-0"], tmp_path / "worker-0.txt"
        until(lambda: "event=over" in log.read_text(), "the end of the job")
        deadline = time.monotonic() + 60
        while agent.poll() is None:
            assert time.monotonic() < deadline
            agent.terminate()
            time.sleep(0.001)
        assert agent.returncode == 78
        assert "SignalException" not in log.read_text()
        assert "Traceback" not in log.read_text()


@pytest.mark.full("core", "trainer")
def test_an_agent_that_is_there_before_the_job_is_recorded_waits_for_it(tmp_path: Path) -> None:
    """On a cluster nobody says which pod starts first."""
    with Elastic(tmp_path, replicas=1, total=5) as group:
        group.start_coordinator()
        group.rundir.job_file.rename(tmp_path / "job.json")
        group.start_agent("worker-0")
        until(lambda: "waiting for" in group.output("worker-0"), "the agent's words")
        (tmp_path / "job.json").rename(group.rundir.job_file)
        assert group.agents["worker-0"].wait(SECONDS) == 0


def test_an_agent_that_is_there_before_its_coordinator_waits_for_it(tmp_path: Path) -> None:
    """All pods of a job are made at once, and a coordinator's image may be pulled for minutes."""
    with Elastic(tmp_path, replicas=1, total=5) as group:
        group.start_agent("worker-0")
        until(lambda: "coordinator-unreachable" in group.output("worker-0"), "the agent's words")
        group.start_coordinator()
        assert group.agents["worker-0"].wait(SECONDS) == 0


@pytest.mark.full("core", "coordinator", "trainer")
def test_a_coordinator_that_holds_a_heartbeat_for_long_is_not_taken_for_away(tmp_path: Path) -> None:
    heartbeats = {"heartbeatSeconds": 14.0, "lostAfterSeconds": 60.0}
    with Elastic(tmp_path, replicas=1, elasticity=heartbeats).start("worker-0") as group:
        first = group.step_after(0.0, world=1)
        # Held for eleven seconds at least.
        group.step_after(first.at + heartbeats["heartbeatSeconds"], world=1)
        assert "coordinator-unreachable" not in group.output("worker-0")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_a_group_that_has_ipv6_addresses_alone_trains(tmp_path: Path) -> None:
    with Elastic(tmp_path, host="::1").start("worker-0", "worker-1") as group:
        group.step_after(0.0, world=2)
        found = group.snapshot()
    assert [member.address for member in found.members] == ["::1", "::1"]


def test_an_agent_with_a_wrong_token_ends_with_a_sentence(tmp_path: Path) -> None:
    with Elastic(tmp_path, replicas=1) as group:
        group.start_coordinator()
        group.extra["TANDEM_TOKEN"] = "wrong"
        group.start_agent("worker-0")
        assert group.agents["worker-0"].wait(SECONDS) == ExitCode.FAILED, "another one may be given the right one"
        assert "token is missing or wrong" in group.output("worker-0")
        assert "Traceback" not in group.output("worker-0")
