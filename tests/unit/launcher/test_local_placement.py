"""Who gets which cores, threads and GPUs."""

import os

import pytest

from tandem.errors import UserError
from tandem.job.resource import DistributedTrainingJob, Evaluators
from tandem_launcher.local.placement import (
    Placement,
    place,
    refuse_unpinnable,
    share_evaluator_gpus,
    share_gpus,
    usable_cores,
    visible_gpus,
)
from tests.support import manifests
from tests.support.manifests import images


def job(workers: int, gpus: int = 0, processes: int | None = None) -> DistributedTrainingJob:
    group: dict[str, object] = {"replicas": workers}
    if gpus:
        group["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    if processes:
        group["processesPerReplica"] = processes
    return manifests.job("digits", workers=group)


def with_strategy(name: str, gpus: int = 0) -> DistributedTrainingJob:
    """A job with one process."""
    group: dict[str, object] = {"processesPerReplica": 1}
    if gpus:
        group["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    trainer = images({"strategy": name})
    return manifests.job("digits", trainer=trainer, workers=group)


@pytest.mark.parametrize(
    ("cores", "workers", "processes", "threads"), [(2, 2, 1, 1), (8, 2, 1, 4), (8, 2, 2, 2), (2, 4, 1, 1), (7, 2, 1, 3)]
)
def test_ranks_share_the_cores_as_threads(cores: int, workers: int, processes: int, threads: int) -> None:
    assert place(range(cores), workers, processes, 2, pin=False) == Placement(threads=threads)


@pytest.mark.parametrize(
    ("cores", "workers", "processes", "evaluators", "expected"),
    [
        (2, 1, 1, 1, Placement(threads=1, workers=((0,),), shared=(1,))),
        (2, 1, 1, 2, Placement(threads=1, workers=((0,),), shared=(1,))),
        (2, 2, 1, 0, Placement(threads=1, workers=((0,), (1,)))),
        (8, 2, 1, 2, Placement(threads=3, workers=((0, 1, 2), (3, 4, 5)), shared=(6, 7))),
        (8, 1, 2, 3, Placement(threads=2, workers=((0, 1, 2, 3),), shared=(5, 6, 7))),
        (4, 3, 1, 8, Placement(threads=1, workers=((0,), (1,), (2,)), shared=(3,))),
    ],
)
def test_pinning_gives_trainers_and_evaluators_cores_of_their_own(
    cores: int, workers: int, processes: int, evaluators: int, expected: Placement
) -> None:
    assert place(range(cores), workers, processes, evaluators, pin=True) == expected


def test_pinning_keeps_to_the_cores_it_was_given() -> None:
    assert place((5, 9), 1, 1, 1, pin=True) == Placement(threads=1, workers=((5,),), shared=(9,))


def test_pinning_two_ranks_and_evaluators_on_two_cores_is_refused_with_the_numbers() -> None:
    with pytest.raises(UserError, match=r"a core for each of 2 ranks and one for the evaluators, 3 in all.*may use 2"):
        place(range(2), 2, 1, 2, pin=True)


def test_pinning_is_refused_where_the_system_cannot() -> None:
    with pytest.raises(UserError, match="needs Linux"):
        refuse_unpinnable("darwin")
    refuse_unpinnable("linux")


def test_usable_cores_are_those_of_this_process() -> None:
    assert set(usable_cores()) <= os.sched_getaffinity(0)
    assert usable_cores()


def test_chosen_gpus_are_the_ones_in_the_variable() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2,5"}) == ["2", "5"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []


def test_each_replica_sees_only_its_own_gpus() -> None:
    assert share_gpus(["0", "1", "2", "3"], job(2, gpus=2)) == (["0,1", "2,3"], "")
    assert share_gpus(["4", "7"], job(2)) == (["4", "7"], "")


def test_without_enough_gpus_all_train_on_cpus_and_one_line_says_so() -> None:
    shares, line = share_gpus(["0"], job(2))
    assert shares == ["", ""]
    assert "spec.workers.replicas=1" in line
    assert "\n" not in line


def test_a_replica_that_needs_more_gpus_than_there_are_gets_no_useless_advice() -> None:
    shares, line = share_gpus(["0"], job(1, processes=2))
    assert shares == [""]
    assert "--set" not in line


@pytest.mark.parametrize("strategy", ["dp", "model"])
def test_one_process_for_all_gpus_sees_all_or_as_many_as_it_asks_for(strategy: str) -> None:
    assert share_gpus(["0", "1", "2"], with_strategy(strategy)) == (["0,1,2"], "")
    assert share_gpus(["0", "1", "2"], with_strategy(strategy, gpus=2)) == (["0,1"], "")


def test_a_strategy_for_processors_sees_no_gpu() -> None:
    assert share_gpus(["0", "1"], with_strategy("hogwild")) == ([""], "")


def test_no_gpu_is_worth_a_line_only_where_one_was_asked_for() -> None:
    assert share_gpus([], job(2)) == (None, "")
    shares, line = share_gpus([], job(2, gpus=1))
    assert shares is None
    assert "no GPU" in line


def test_evaluators_get_the_gpus_that_workers_leave_and_otherwise_compute_on_cpus() -> None:
    evaluators = {"replicas": 2, "resources": {"limits": {"nvidia.com/gpu": 1}}}
    asking = job(1).model_copy(update={"spec": job(1).spec.model_copy(update={"evaluators": Evaluators(**evaluators)})})
    assert share_evaluator_gpus(["0", "1", "2"], ["0"], asking) == (["1", "2"], "")
    assert share_evaluator_gpus(["0", "1"], [""], asking) == (["0", "1"], "")
    shares, line = share_evaluator_gpus(["0", "1"], ["0"], asking)
    assert (shares, line) == ([], "1 GPU left for evaluators, which ask for 2; they compute on CPUs")
    assert share_evaluator_gpus(["0", "1"], ["0"], job(1)) == ([], "")
