"""The jobs that a bench compares: the user's own, each with one strategy, number of workers and number of steps.

Strategies that are combined are named one after the other: `fsdp+tensor` is `fsdp` with the `tensorParallel` of the
job, `pipeline+fsdp` a pipeline whose copies split the state of their stages.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError

from tandem.errors import UserError
from tandem.formatting import several
from tandem.job import DistributedTrainingJob
from tandem.launch import TRACE
from tandem.model import RuleBroken
from tandem.tasks import StrategyName, TaskLoop
from tandem_cli.planning.memory import world_sizes

LEAST_STEPS = 5
"""Steps of a run, at least."""
WARM_UP, WARM_UP_SHARE = 10, 4
"""Warm-up steps, which are left out: this many at most, and at most this fraction of all steps."""
NEVER = 1_000_000_000
"""Steps after which a checkpoint would be saved: a save would be part of the time, and of the memory."""
TENSOR = "tensor"
"""Stands for the `tensorParallel` of the job."""
COMBINED = ("fsdp+tensor", "pipeline+fsdp", "pipeline+tensor", "pipeline+fsdp+tensor")
TRACE_STEPS = 20
"""A few more than what is recorded needs (tandem_trainer.step_trace, tandem_trainer.strategies.passes)."""


@dataclass(frozen=True)
class Variant:
    """One of the jobs."""

    strategy: str
    workers: int
    ranks: int
    """Of all workers together."""
    job: DistributedTrainingJob

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.strategy}, {several(self.workers, 'worker')}"


class Comparison(NamedTuple):
    """What is compared."""

    variants: list[Variant]
    left_out: tuple[str, ...]
    """Combinations that the job cannot take, each with the reason."""


def warm_up(steps: int) -> int:
    """How many first steps are left out."""
    return max(1, min(WARM_UP, steps // WARM_UP_SHARE))


def comparison(
    job: DistributedTrainingJob, strategies: str | None, workers: str | None, steps: int
) -> Comparison:  # fmt: skip
    """Each strategy with each number of workers that the job can take with it.

    Args:
        strategies: names, as `ddp,fsdp,fsdp+tensor`; None: that of the job.
        workers: numbers, as `1,2`; None: 1 and that of the job.
        steps: of each run.

    Raises:
        UserError: the job trains no task, one of them is no strategy or no number of workers, or the job can take a
            strategy with none of the numbers.
    """
    if job.spec.trainer.task is None:
        raise UserError(
            "tandem bench needs a job with a task (spec.trainer.task): how long a script trains and how its state lies "
            "on the ranks are its own business"
        )
    names = list(_strategies(strategies, job)) if strategies is not None else [_own(job)]
    numbers = sorted(world_sizes(workers)) if workers is not None else sorted({1, job.spec.workers.replicas})
    found: list[Variant] = []
    left_out: list[str] = []
    for strategy in names:
        refused: list[str] = []
        for number in numbers:
            try:
                found.append(_variant(job, strategy, number, steps))
            except ValidationError as error:
                refused.append(f"{strategy} with {several(number, 'worker')}: {_first(error)}")
        if len(refused) == len(numbers):
            raise UserError(f"--strategies: this job cannot take {refused[0]}")
        left_out += refused
    return Comparison(found, tuple(left_out))


def traced(variant: Variant, file: Path) -> Variant:
    """The same for as few steps as a trace needs.

    Args:
        file: where rank 0 writes it.
    """
    manifest = _manifest(variant.job, variant.strategy, variant.workers, TRACE_STEPS)
    variables = [one for one in manifest["spec"]["trainer"]["env"] if one["name"] != TRACE]
    manifest["spec"]["trainer"]["env"] = [*variables, {"name": TRACE, "value": str(file.resolve())}]
    return replace(variant, job=DistributedTrainingJob.parse(manifest))


def _own(job: DistributedTrainingJob) -> str:
    loop = job.spec.trainer.settings_of_loop
    parts: list[str] = [loop.strategy]
    parts += ["fsdp"] if loop.strategy == "pipeline" and loop.fsdp is not None else []
    parts += [TENSOR] if _splits_matrices(job) else []
    return "+".join(parts)


def _splits_matrices(job: DistributedTrainingJob) -> bool:
    loop = job.spec.trainer.settings_of_loop
    return isinstance(loop, TaskLoop) and loop.tensor_parallel > 1


def _strategies(text: str, job: DistributedTrainingJob) -> Iterator[str]:
    known = (*get_args(StrategyName), *COMBINED)
    for name in dict.fromkeys(part.strip() for part in text.split(",")):
        if name not in known:
            raise UserError(f"--strategies: {name!r} is no strategy; write some of {', '.join(known)}")
        if TENSOR in name.split("+") and not _splits_matrices(job):
            raise UserError(f"--strategies: for {name} the job has to say between how many: set tensorParallel")
        yield name


def _variant(job: DistributedTrainingJob, strategy: str, workers: int, steps: int) -> Variant:
    made = DistributedTrainingJob.parse(_manifest(job, strategy, workers, steps))
    return Variant(strategy, workers, workers * made.spec.workers.processes, made)


def _manifest(job: DistributedTrainingJob, strategy: str, workers: int, steps: int) -> dict[str, Any]:
    manifest = job.dump()
    manifest.pop("status", None)
    spec = manifest["spec"]
    loop = spec["trainer"].setdefault("config" if job.spec.trainer.is_built_in else "loop", {})
    first, *more = strategy.split("+")
    for other in get_args(StrategyName):
        if other not in (first, *more):
            loop.pop(other, None)
    if "fsdp" in more:
        loop.setdefault("fsdp", {})
    if TENSOR not in more:
        loop.pop("tensorParallel", None)
    # As many epochs as steps: the data never ends before.
    loop |= {"strategy": first, "maxSteps": steps, "epochs": steps}
    spec["workers"] |= {"replicas": workers, "minReplicas": workers}
    spec["workers"].pop("maxReplicas", None)
    spec["evaluators"] = {"replicas": 0}
    spec["checkpoint"] |= {"everySteps": NEVER, "onExisting": "Fresh"}
    spec["checkpoint"].pop("everySeconds", None)
    spec["elasticity"] |= {"maxRestarts": 0}
    return manifest


def _first(error: ValidationError) -> str:
    detail = error.errors(include_url=False)[0]
    broken = detail.get("ctx", {}).get("error")
    if isinstance(broken, RuleBroken):
        return broken.broken[0].message
    return f"{'.'.join(str(part) for part in detail['loc'])}: {detail['msg']}"
