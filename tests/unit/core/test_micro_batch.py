"""What is known of micro-batches that did not fit: for which jobs it counts, and what of it is read."""

from pathlib import Path
from typing import Any

import pytest

from tandem.job.resource import DistributedTrainingJob
from tandem.rundir.layout import RunDir
from tandem.rundir.micro_batch import OutOfMemoryRecord, memory_settings_digest
from tests.support import manifests
from tests.support.manifests import images

SETTINGS = "0" * 32


def job(resources: dict[str, Any] | None = None, **loop: Any) -> DistributedTrainingJob:
    trainer = images({"globalBatchSize": 64, **loop})
    return DistributedTrainingJob.parse(
        manifests.manifest("test", trainer=trainer, workers={"resources": resources or {}})
    )


@pytest.mark.parametrize("change", [{"epochs": 9}, {"maxSteps": 3}, {"seed": 2}, {"rewindOn": "Never"}])
def test_a_job_that_goes_further_keeps_what_was_learnt(change: dict[str, Any]) -> None:
    assert memory_settings_digest(job(**change)) == memory_settings_digest(job())


@pytest.mark.parametrize(
    "change",
    [
        *({"globalBatchSize": 32}, {"microBatchSize": 8}, {"model": "simple-net"}, {"precision": "bfloat16"}),
        {"resources": {"limits": {"memory": "8Gi"}}},
    ],
)
def test_a_job_whose_steps_take_another_amount_of_memory_begins_without_it(change: dict[str, Any]) -> None:
    assert memory_settings_digest(job(**change)) != memory_settings_digest(job())


def test_a_record_of_the_version_before_counts() -> None:
    config = {"epochs": 3, "model": "baby-cnn", "globalBatchSize": 32}
    older = manifests.job("test", trainer=manifests.TASK | {"config": config})
    assert memory_settings_digest(older) == "79ecba857ea9199304f149760ca96c45"  # computed by that version


def test_the_first_record_of_a_generation_stays_and_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    assert rundir.misfits() == []
    first = OutOfMemoryRecord(generation=1, rank=0, samples=7, settings=SETTINGS)
    assert rundir.record_misfit(first)
    assert not rundir.record_misfit(first.model_copy(update={"rank": 1}))
    for number, content in enumerate(("", "{}", '{"samples": 1}', '"x" * 9', "[" * 70_000), start=2):
        (rundir.micro_batches / f"{number:06d}.json").write_text(content)
    assert rundir.misfits() == [first]
    assert first.limit == 3
