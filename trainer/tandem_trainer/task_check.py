"""Says what is wrong with a task of the user's own, before anything starts: `python -m tandem_trainer.task_check`.

It imports the user's code, which neither `tandem` nor the coordinator does. The question is the job, JSON on standard
input; the answer is a list of `{"path": […], "message": …}`, JSON on standard output. What the user's code prints goes
to standard error.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.job import DistributedTrainingJob
from tandem.tasks import PRETRAINED
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.task import Task, class_of, configured, sentence

TASK = ("spec", "trainer", "task")
METRIC = ("spec", "evaluators", "metric")
FIRST_SAMPLES = 1_000
"""Of each file that are read before a job starts."""


def wrong(job: DistributedTrainingJob) -> list[dict[str, Any]]:
    """The mistakes, in the order of the manifest."""
    trainer = job.spec.trainer
    assert trainer.own_task is not None
    try:
        kind = class_of(trainer)
        config, mistakes = configured(kind, trainer.parameters or {})
    except ConfigurationError as error:
        return [{"path": TASK, "message": str(error)}]
    if mistakes:
        return [{"path": path, "message": sentence(path, message)} for path, message in mistakes]
    return [*_unlearnable(job, config), *_uncut(job, config), *_unreported(job, kind, config)]


def _unlearnable(job: DistributedTrainingJob, config: Any) -> Iterator[dict[str, Any]]:
    """What keeps the data of a pretrained model from being learned, by its first samples."""
    if not job.spec.trainer.is_fine_tuning:
        return
    from tandem_trainer.language.fine_tuning import against_samples

    for field, why in against_samples(config, FIRST_SAMPLES):
        yield {"path": ("spec", "trainer", "parameters", "data", *field), "message": why}


def _uncut(job: DistributedTrainingJob, config: Any) -> Iterator[dict[str, Any]]:
    """What keeps a pretrained model from being cut into stages, as far as the manifest shows it."""
    trainer = job.spec.trainer
    if not trainer.is_fine_tuning or trainer.settings_of_loop.strategy != "pipeline":
        return
    from tandem_trainer.language.fine_tuning import against_stages

    for field, why in against_stages(config):
        path = ("spec", "trainer", "parameters", field)
        yield {"path": path, "message": sentence(path, why)}


def _unreported(job: DistributedTrainingJob, kind: type[Task[Any]], config: Any) -> Iterator[dict[str, Any]]:
    """That a pretrained model will not have the metric that decides. Of one that is not here nothing is said: it would
    have to be downloaded."""
    evaluators, trainer = job.spec.evaluation, job.spec.trainer
    is_asked = evaluators.metric == "bitsPerByte" and evaluators.command is None and evaluators.processes > 0
    if not trainer.is_fine_tuning or not is_asked:
        return
    from tandem_trainer.language.fine_tuning import FineTuning

    name = str((trainer.parameters or {})[PRETRAINED])
    task = kind(config)
    assert isinstance(task, FineTuning)
    try:
        if not Path(name).is_dir() or task.reports_bytes:
            return
    except ConfigurationError:
        # The ranks say what is wrong with the model.
        return
    message = (
        f"{'.'.join(METRIC)}: bitsPerByte is not reported, because the tokenizer of {name} does not say how many bytes "
        "of text a token stands for; take loss, perplexity or accuracy"
    )
    yield {"path": METRIC, "message": message}


def main() -> None:
    """Entry point."""
    answer = os.dup(1)
    os.dup2(2, 1)
    mistakes = wrong(DistributedTrainingJob.read_json(sys.stdin.read()))
    with os.fdopen(answer, "w") as file:
        json.dump(mistakes, file)


if __name__ == "__main__":
    main()
