"""In what two jobs differ, so far as one must not go on with what the other has saved.

A run that is gone on with must see the samples that it would have seen, and its state must fit: so what decides about
these two must be the same. All else may change. How far a run goes, how fast it learns, and what a script of the user's
own is given are for the user to say; a session compares its data and state with the checkpoint by itself.
"""

import json
from collections.abc import Iterator
from typing import Any

from tandem.job import DistributedTrainingJob, Spec
from tandem.tasks import ImageClassification


def differences(there: DistributedTrainingJob, given: DistributedTrainingJob) -> list[str]:
    """What keeps the second job from going on with what the first has saved."""
    found = []
    if there.metadata.name != given.metadata.name:
        found.append(f"metadata.name: there {there.metadata.name}, now {given.metadata.name}")
    before, after = there.spec.trainer.task, given.spec.trainer.task
    if before != after:
        return [*found, f"spec.trainer.task: there {_shown(before)}, now {_shown(after)}"]
    return found + list(_compare("spec.trainer.config", _saved_with(there.spec), _saved_with(given.spec)))


def goes_further(there: DistributedTrainingJob, given: DistributedTrainingJob) -> bool:
    """Whether the second job has something to do where the first is complete: more epochs or steps, or a script of the
    user's own that is given something else."""
    before, after = there.spec.trainer, given.spec.trainer
    if after.task is None:
        return (before.command, before.args, before.env) != (after.command, after.args, after.env)
    return _horizon(before.settings) != _horizon(after.settings) and any(
        late > early for early, late in zip(_horizon(before.settings), _horizon(after.settings), strict=True)
    )


def _horizon(config: ImageClassification) -> tuple[float, float]:
    return config.epochs, float("inf") if config.max_steps is None else config.max_steps


def _saved_with(spec: Spec) -> dict[str, Any]:
    """What the checkpoints of a built-in task depend on, in the manifest's words."""
    if spec.trainer.task is None:
        return {}
    config = spec.trainer.settings
    return {
        "model": config.model,
        "data": {**config.data.dump(), "download": None},
        "initialWeights": config.initial_weights,
        "globalBatchSize": config.global_batch_size,
        "dropLast": config.drop_last,
        "seed": config.seed,
        # These come back with the checkpoint; the learning rate does not.
        "optimizer": {**config.optimizer.dump(), "learningRate": None},
    }


def _compare(path: str, there: Any, given: Any) -> Iterator[str]:
    if isinstance(there, dict) and isinstance(given, dict):
        for key in sorted({*there, *given}):
            yield from _compare(f"{path}.{key}", there.get(key), given.get(key))
    elif there != given:
        yield f"{path}: there {_shown(there)}, now {_shown(given)}"


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)
