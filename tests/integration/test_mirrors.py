"""Ranks that restart with the state that their agents' memory holds (`elasticity.mirror`)."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.processes.launch import MIRROR
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import Continuation
from tandem_trainer.checkpoint.mirror import FILES_PER_RANK, create_memory
from tests.support.elastic import Elastic
from tests.support.manifests import images
from tests.support.ranks import Ranks, losses, make_rundir, records, run, sample_ids
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(300)

# Plain descent: Adam would let the last digit of a sum grow over the steps.
SMALL: dict[str, Any] = {
    "model": "cnn",
    "data": {"name": "digits"},
    "epochs": 100,
    "globalBatchSize": 256,
    "optimizer": {"name": "sgd", "learningRate": 0.002},
}
LARGE = SMALL | {"model": "resnet-18", "strategy": "fsdp", "globalBatchSize": 16}
"""A state of 134 MB, of which two ranks have a part each."""
NEVER = {"everySteps": 1_000_000}


class Nodes:
    """Memory of agents that live on: every rank of `Ranks` is on a node of its own."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        value = create_memory(count)
        monkeypatch.setenv(MIRROR, value)
        self.descriptors = [int(number) for number in value.partition(":")[2].split(",")]

    def files(self, node: int) -> list[int]:
        """Descriptors of a node's memory."""
        return self.descriptors[FILES_PER_RANK * node :][:FILES_PER_RANK]

    def lose(self, node: int) -> None:
        """Empty a node's memory, as if it had been replaced."""
        for descriptor in self.files(node):
            os.ftruncate(descriptor, 0)

    def damage(self, node: int) -> None:
        """Change a byte in each file of a node."""
        for descriptor in self.files(node):
            if os.fstat(descriptor).st_size > 5_000:
                byte = os.pread(descriptor, 1, 5_000)[0]
                os.pwrite(descriptor, bytes([byte ^ 1]), 5_000)


def kill_when_mirrored(rundir: RunDir, world_size: int, mirrors: int = 1) -> None:
    """Train until there are more mirrors, and kill all ranks, the last one first. The others may not notice by
    themselves: a message of gloo may be lost with the connection, and in a job their agents end them."""
    generation = rundir.newest_generation() + 1
    with Ranks(rundir, world_size) as ranks:

        def count() -> int:
            log = rundir.training_log(generation)
            return log.read_text().count('"kind":"mirror"') if log.exists() else 0

        until(lambda: count() >= mirrors, "mirrors", otherwise=ranks.describe)
        for process in reversed(ranks.processes):
            process.kill()
        ranks.finish()


def test_a_killed_group_of_two_continues_as_three_from_memory_with_the_samples_and_losses_of_an_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = make_rundir(tmp_path / "undisturbed", SMALL, checkpoint=NEVER)
    run(undisturbed)
    Nodes(3, monkeypatch)
    rundir = make_rundir(tmp_path / "killed", SMALL, checkpoint=NEVER, elasticity={"mirror": True})
    kill_when_mirrored(rundir, 2)
    assert not rundir.checkpoint_names()
    run(rundir, 3)
    step = records(rundir, "start")[1]["step"]
    assert step > 0
    assert rundir.generation_records()[1].continues == Continuation(generation=1, step=step, mirrored=True)
    assert sample_ids(rundir) == sample_ids(undisturbed)
    torch.testing.assert_close(losses(rundir), losses(undisturbed), rtol=2e-3, atol=2e-3)


def test_shards_of_a_lost_node_come_from_its_neighbour_and_nothing_that_is_damaged_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(2, monkeypatch)
    rundir = make_rundir(tmp_path / "run", LARGE, checkpoint=NEVER, elasticity={"mirror": True})
    kill_when_mirrored(rundir, 2)
    nodes.lose(0)
    kill_when_mirrored(rundir, 2)
    assert records(rundir, "start")[1]["step"] > 0, "the other node has a copy of each part"
    # Of every part there is only what is damaged.
    nodes.damage(0)
    nodes.damage(1)
    with Ranks(rundir, 2) as ranks:
        until(lambda: len(records(rundir, "start")) == 3, "a start", otherwise=ranks.describe)
        for process in ranks.processes:
            process.kill()
        _, output = ranks.finish()
    assert "passed over" in output
    assert "does not match its checksum" in output
    assert records(rundir, "start")[-1]["step"] == 0, "there is no checkpoint on disk"


def test_ranks_restart_from_the_memory_of_their_agents_and_of_the_agents_of_others(tmp_path: Path) -> None:
    trainer = images(SMALL | {"epochs": 5_000})
    with Elastic(tmp_path, trainer=trainer, checkpoint=NEVER, elasticity={"mirror": True}) as elastic:
        elastic.start("worker-0", "worker-1")
        rundir = elastic.rundir
        until(lambda: records(rundir, "mirror"), "a mirror", otherwise=lambda: elastic.output("worker-0"))
        elastic.kill_rank("worker-1")
        until(lambda: len(records(rundir, "start")) == 2, "a restart", otherwise=lambda: elastic.output("worker-0"))
        newest = rundir.newest_generation()
        until(lambda: '"kind":"mirror"' in rundir.training_log(newest).read_text(), "a mirror")
        # Rank 0, its agent and what that agent holds are gone.
        elastic.kill_agent("worker-0")
        elastic.start_agent("worker-0")
        until(lambda: len(records(rundir, "start")) >= 3, "a restart", otherwise=lambda: elastic.output("worker-1"))
    starts = [record["step"] for record in records(rundir, "start")]
    assert 0 < starts[1] < starts[2]
    assert all(record.continues.mirrored for record in rundir.generation_records()[1:])
