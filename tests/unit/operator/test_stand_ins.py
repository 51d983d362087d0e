"""Evaluators that wait for a GPU have a stand-in on CPUs, where the job allows it, and lose it once they run."""

from typing import Any

from tandem_operator.observed import Children
from tandem_operator.stand_ins import stand_ins
from tests.support.worlds.operator_job import (
    NOW,
    decided,
    evaluator,
    heard,
    initialized,
    job,
    made,
    removed,
    surroundings,
    worker,
)

GPU: dict[str, Any] = {"resources": {"limits": {"nvidia.com/gpu": 1}}, "fallback": "CPU", "fallbackAfterSeconds": 30}
WAITS = {"phase": "Pending", "placed": None, "started": None, "ready": False, "created": NOW}
RUNS = {"created": NOW, "placed": NOW, "started": NOW}


def of_gpus(**evaluators: Any) -> Any:
    return job(status=initialized(), evaluators=GPU | evaluators)


def stand_in(of: Any, **facts: Any) -> Any:
    """The stand-in of a job with one evaluator: a pod from the template without GPUs."""
    plan = decided(of, waiting(of), snapshot=heard(), now=NOW + 31)
    (manifest,) = [pod for pod in plan.create_pods if pod["metadata"]["labels"]["tandem.dev/index"] == "1"]
    template = manifest["metadata"]["annotations"]["tandem.dev/template"]
    return evaluator(of, 1, template=template, **facts)


def waiting(of: Any, *more: Any) -> Children:
    return surroundings(of, worker(0), worker(1), evaluators=[evaluator(of, 0, **WAITS), *more])


def test_a_pod_that_waits_too_long_for_its_gpu_gets_a_stand_in_without() -> None:
    of = of_gpus()
    assert stand_ins([evaluator(of, 0, **WAITS)], of.spec, NOW + 10) == ([], 20.0)
    assert made(decided(of, waiting(of), snapshot=heard(), now=NOW + 10)) == []
    late = decided(of, waiting(of), snapshot=heard(), now=NOW + 31)
    assert (made(late), removed(late)) == (["evaluator 1"], [])
    assert late.create_pods[0]["spec"]["containers"][0]["resources"] == {"limits": {}}
    (event,) = [event for event in late.events if event.reason == "EvaluatorFallback"]
    assert event.message.startswith("evaluator 0 has waited for its GPUs for 30 s")


def test_without_a_fallback_it_waits() -> None:
    of = job(status=initialized(), evaluators={"resources": GPU["resources"]})
    assert made(decided(of, waiting(of), snapshot=heard(), now=NOW + 3000)) == []


def test_evaluators_on_cpus_have_no_stand_in() -> None:
    of = job(status=initialized(), evaluators={"fallback": "CPU"})
    assert made(decided(of, waiting(of), snapshot=heard(), now=NOW + 3000)) == []


def test_it_stays_while_the_other_starts_and_goes_once_that_runs() -> None:
    of = of_gpus()
    placed = [evaluator(of, 0, **WAITS | {"placed": NOW}), stand_in(of, **RUNS)]
    there = surroundings(of, worker(0), worker(1), evaluators=placed)
    assert removed(decided(of, there, snapshot=heard(), now=NOW + 40)) == []
    running = [evaluator(of, 0, **RUNS), stand_in(of, **RUNS)]
    there = surroundings(of, worker(0), worker(1), evaluators=running)
    assert removed(decided(of, there, snapshot=heard(), now=NOW + 40)) == ["digits-evaluator-1-aaaaa"]


def test_a_preempted_evaluator_waits_anew_and_its_stand_in_comes_again() -> None:
    of = of_gpus()
    gone = evaluator(of, 0, "digits-evaluator-0-gone", phase="Failed", deleting=True, **{**RUNS, "created": NOW - 100})
    there = surroundings(of, worker(0), worker(1), evaluators=[gone])
    assert made(decided(of, there, snapshot=heard())) == ["evaluator 0"]
    assert made(decided(of, waiting(of, gone), snapshot=heard(), now=NOW + 31)) == ["evaluator 1"]


def test_a_job_ends_when_the_stand_in_has_evaluated_everything_and_the_waiting_pod_goes() -> None:
    of = job(status=initialized(phase="Draining", completionTime="1970-01-12T13:46:40Z"), evaluators=GPU)
    done = stand_in(of, phase="Succeeded", code=0, finished=NOW - 10, **RUNS)
    plan = decided(of, waiting(of, done), snapshot=heard("Succeeded"), now=NOW + 31)
    assert plan.status.phase == "Succeeded"
    assert "digits-evaluator-0-aaaaa" in removed(plan)
