"""Running out of memory in a pass: what counts as that, and what is left for the next generation."""

from pathlib import Path

import pytest
import torch

from tandem.job.resource import DistributedTrainingJob
from tandem.processes.exitcode import ExitCode
from tandem.rundir.layout import RunDir
from tandem_trainer.ending import code_of
from tandem_trainer.failure import MicroBatchHalved, SampleTooLarge
from tandem_trainer.micro_batch import MicroBatch, PassDidNotFit, is_out_of_memory
from tandem_trainer.process_group import Group
from tandem_trainer.rank_context import RankContext
from tests.support import manifests
from tests.support.manifests import images


def job(**config: int) -> DistributedTrainingJob:
    trainer = images({"globalBatchSize": 64, **config})
    return DistributedTrainingJob.parse(manifests.manifest("test", trainer=trainer))


def micro_batch(folder: Path, generation: int = 1, **config: int) -> MicroBatch:
    group = Group(0, 1, 0, torch.device("cpu"))
    return MicroBatch(job(**config), RankContext(RunDir(folder), group, generation, ["worker-0"], None))


def failed(samples: int) -> PassDidNotFit:
    error = PassDidNotFit(samples)
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nIf reserved is large …")
    return error


def test_the_allocators_of_gpus_and_of_cpus_are_understood_and_no_other_error_is() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**56)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"))


def test_half_is_left_for_the_next_generation_and_the_job_may_ask_for_less(tmp_path: Path) -> None:
    assert micro_batch(tmp_path).max_samples is None
    with pytest.raises(MicroBatchHalved, match=r"^9 samples .*\(CUDA out of memory[^)]*\); .* takes 4 at the most$"):
        micro_batch(tmp_path).halve(failed(9))
    found = micro_batch(tmp_path, generation=2)
    assert (found.proven_limit, found.max_samples) == (4, 4)
    assert micro_batch(tmp_path, microBatchSize=16).max_samples == 16, "another job has learnt nothing"
    with pytest.raises(MicroBatchHalved):
        found.halve(failed(3))
    assert micro_batch(tmp_path, generation=3).max_samples == 1


def test_the_smaller_of_what_was_learnt_and_what_the_job_says_is_taken(tmp_path: Path) -> None:
    with pytest.raises(MicroBatchHalved):
        micro_batch(tmp_path, microBatchSize=16).halve(failed(16))
    assert micro_batch(tmp_path, generation=2, microBatchSize=16).max_samples == 8


def test_one_sample_is_a_failure_that_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SampleTooLarge, match=r"^1 sample in one forward pass .* tandem plan"):
        micro_batch(tmp_path).halve(failed(1))
    assert RunDir(tmp_path).misfits() == []


def test_the_exit_codes_tell_one_from_the_other(tmp_path: Path) -> None:
    assert code_of(MicroBatchHalved("half"), RunDir(tmp_path), has_peers=True) == ExitCode.OUT_OF_MEMORY
    assert code_of(SampleTooLarge("one"), RunDir(tmp_path), has_peers=True) == ExitCode.FAILED
