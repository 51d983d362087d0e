"""The jobs that a bench compares: the user's job, each time with one strategy, number of workers and number of
steps."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from tandem.errors import UserError
from tandem.formatting import count_noun
from tandem.job.resource import DistributedTrainingJob
from tandem.processes.launch import TRACE
from tandem_cli import combinations
from tandem_cli.planning.memory import world_sizes

MIN_STEPS = 5
"""Minimum steps of a run."""
WARM_UP, WARM_UP_SHARE = 10, 4
"""Warm-up steps, which are excluded: at most this many, and at most this fraction of all steps."""
NEVER = 1_000_000_000
"""Steps between checkpoints: none is saved, as a save would add to time and memory."""
TRACE_STEPS = 20
"""Steps of a traced run: a few more than the recording needs (tandem_trainer.step_trace,
tandem_trainer.strategies.passes)."""


@dataclass(frozen=True)
class Variant:
    """Job with one strategy and number of workers."""

    strategy: str
    workers: int
    ranks: int
    """Ranks of all workers together."""
    job: DistributedTrainingJob

    @property
    def name(self) -> str:
        """Name for people."""
        return f"{self.strategy}, {count_noun(self.workers, 'worker')}"


class Comparison(NamedTuple):
    """Variants to compare."""

    variants: list[Variant]
    left_out: tuple[str, ...]
    """Combinations that the job does not support, each with the reason."""


def warm_up(steps: int) -> int:
    """Number of first steps that are excluded."""
    return max(1, min(WARM_UP, steps // WARM_UP_SHARE))


def comparison(
    job: DistributedTrainingJob, strategies: str | None, workers: str | None, steps: int
) -> Comparison:  # fmt: skip
    """Combine each strategy with each number of workers that the job supports.

    Args:
        strategies: names, such as `ddp,fsdp,fsdp+tensor`; None for the job's.
        workers: numbers, such as `1,2`; None for 1 and the job's.
        steps: steps of each run.

    Raises:
        UserError: the job has no task, a strategy or a number of workers is invalid, or the job supports a strategy
            with none of the numbers.
    """
    if job.spec.trainer.task is None:
        raise UserError(
            "tandem bench needs a job with a task (spec.trainer.task): how long a script trains and how its state lies "
            "on the ranks are its own business"
        )
    loop = job.spec.trainer.settings_of_loop
    names = [combinations.strategy_of(loop)] if strategies is None else list(combinations.parse_names(strategies, loop))
    numbers = sorted(world_sizes(workers)) if workers is not None else sorted({1, job.spec.workers.replicas})
    variants: list[Variant] = []
    unsupported: list[str] = []
    for strategy in names:
        refused: list[str] = []
        for number in numbers:
            try:
                variants.append(_variant(job, strategy, number, steps))
            except ValidationError as error:
                refused.append(f"{strategy} with {count_noun(number, 'worker')}: {combinations.first_error(error)}")
        if len(refused) == len(numbers):
            raise UserError(f"--strategies: this job cannot take {refused[0]}")
        unsupported += refused
    return Comparison(variants, tuple(unsupported))


def traced(variant: Variant, file: Path) -> Variant:
    """Make a variant that runs only the steps that a trace needs.

    Args:
        file: file that rank 0 writes the trace to.
    """
    manifest = _manifest(variant.job, variant.strategy, variant.workers, TRACE_STEPS)
    variables = [variable for variable in manifest["spec"]["trainer"]["env"] if variable["name"] != TRACE]
    manifest["spec"]["trainer"]["env"] = [*variables, {"name": TRACE, "value": str(file.resolve())}]
    return replace(variant, job=DistributedTrainingJob.parse(manifest))


def _variant(job: DistributedTrainingJob, strategy: str, workers: int, steps: int) -> Variant:
    parsed = DistributedTrainingJob.parse(_manifest(job, strategy, workers, steps))
    return Variant(strategy, workers, workers * parsed.spec.workers.processes, parsed)


def _manifest(job: DistributedTrainingJob, strategy: str, workers: int, steps: int) -> dict[str, Any]:
    manifest = job.dump()
    manifest.pop("status", None)
    spec = manifest["spec"]
    loop = spec["trainer"].setdefault("loop" if job.spec.trainer.config is None else "config", {})
    combinations.choose(loop, strategy)
    # As many epochs as steps, so that the data does not end first.
    loop |= {"maxSteps": steps, "epochs": steps}
    spec["workers"] |= {"replicas": workers, "minReplicas": workers}
    spec["workers"].pop("maxReplicas", None)
    spec["evaluators"] = {"replicas": 0}
    spec["checkpoint"] |= {"everySteps": NEVER, "onExisting": "Fresh"}
    spec["checkpoint"].pop("everySeconds", None)
    spec["elasticity"] |= {"maxRestarts": 0}
    return manifest
