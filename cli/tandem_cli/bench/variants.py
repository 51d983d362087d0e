"""The jobs that a bench compares: the user's own, each with one strategy, number of workers and number of steps."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from tandem.errors import UserError
from tandem.formatting import several
from tandem.job import DistributedTrainingJob
from tandem.launch import TRACE
from tandem_cli import combinations
from tandem_cli.planning.memory import world_sizes

MIN_STEPS = 5
"""Steps of a run, at least."""
WARM_UP, WARM_UP_SHARE = 10, 4
"""Warm-up steps, which are left out: this many at most, and at most this fraction of all steps."""
NEVER = 1_000_000_000
"""Steps after which a checkpoint would be saved: a save would be part of the time, and of the memory."""
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
    loop = job.spec.trainer.settings_of_loop
    names = [combinations.own(loop)] if strategies is None else list(combinations.named(strategies, loop))
    numbers = sorted(world_sizes(workers)) if workers is not None else sorted({1, job.spec.workers.replicas})
    found: list[Variant] = []
    left_out: list[str] = []
    for strategy in names:
        refused: list[str] = []
        for number in numbers:
            try:
                found.append(_variant(job, strategy, number, steps))
            except ValidationError as error:
                refused.append(f"{strategy} with {several(number, 'worker')}: {combinations.first_of(error)}")
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


def _variant(job: DistributedTrainingJob, strategy: str, workers: int, steps: int) -> Variant:
    made = DistributedTrainingJob.parse(_manifest(job, strategy, workers, steps))
    return Variant(strategy, workers, workers * made.spec.workers.processes, made)


def _manifest(job: DistributedTrainingJob, strategy: str, workers: int, steps: int) -> dict[str, Any]:
    manifest = job.dump()
    manifest.pop("status", None)
    spec = manifest["spec"]
    loop = spec["trainer"].setdefault("config" if job.spec.trainer.is_built_in else "loop", {})
    combinations.choose(loop, strategy)
    # As many epochs as steps: the data never ends before.
    loop |= {"maxSteps": steps, "epochs": steps}
    spec["workers"] |= {"replicas": workers, "minReplicas": workers}
    spec["workers"].pop("maxReplicas", None)
    spec["evaluators"] = {"replicas": 0}
    spec["checkpoint"] |= {"everySteps": NEVER, "onExisting": "Fresh"}
    spec["checkpoint"].pop("everySeconds", None)
    spec["elasticity"] |= {"maxRestarts": 0}
    return manifest
