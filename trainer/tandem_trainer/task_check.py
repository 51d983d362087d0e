"""Checks a task of the user's own before anything starts: `python -m tandem_trainer.task_check`.

It imports the user's code, which neither `tandem` nor the coordinator does. The input is the job, JSON on standard
input; the output is a list of `{"path": […], "message": …}`, JSON on standard output. Prints of the user's code go to
standard error.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.job.resource import DistributedTrainingJob
from tandem.job.tasks import PRETRAINED
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.task import Task, class_of, configured, sentence

TASK = ("spec", "trainer", "task")
METRIC = ("spec", "evaluators", "metric")
MAX_CHECKED_SAMPLES = 1_000
"""Maximum samples of each file that are read before a job starts."""


def mistakes_of(job: DistributedTrainingJob) -> list[dict[str, Any]]:
    """Return the mistakes, in the order of the manifest."""
    trainer = job.spec.trainer
    assert trainer.own_task is not None
    try:
        kind = class_of(trainer)
        config, mistakes = configured(kind, trainer.task_parameters)
    except ConfigurationError as error:
        return [{"path": TASK, "message": str(error)}]
    if mistakes:
        return [{"path": path, "message": sentence(path, message)} for path, message in mistakes]
    return [*_data_mistakes(job, config), *_stage_mistakes(job, config), *_metric_mistakes(job, kind, config)]


def _data_mistakes(job: DistributedTrainingJob, config: Any) -> Iterator[dict[str, Any]]:
    """Check the data of a pretrained model, by its first samples."""
    if not job.spec.trainer.is_fine_tuning:
        return
    from tandem_trainer.language.fine_tuning import sample_problems

    for field, reason in sample_problems(config, MAX_CHECKED_SAMPLES):
        yield {"path": ("spec", "trainer", "parameters", "data", *field), "message": reason}


def _stage_mistakes(job: DistributedTrainingJob, config: Any) -> Iterator[dict[str, Any]]:
    """Check that a pretrained model can be cut into stages, as far as the manifest shows it."""
    trainer = job.spec.trainer
    if not trainer.is_fine_tuning or trainer.settings_of_loop.strategy != "pipeline":
        return
    from tandem_trainer.language.fine_tuning import stage_problems

    for field, reason in stage_problems(config):
        path = ("spec", "trainer", "parameters", field)
        yield {"path": path, "message": sentence(path, reason)}


def _metric_mistakes(job: DistributedTrainingJob, kind: type[Task[Any]], config: Any) -> Iterator[dict[str, Any]]:
    """Check that a pretrained model will have the metric that selects checkpoints. A model that is not a local folder
    is not checked: it would have to be downloaded."""
    evaluators, trainer = job.spec.evaluation, job.spec.trainer
    is_selected = evaluators.metric == "bitsPerByte" and evaluators.command is None and evaluators.processes > 0
    if not trainer.is_fine_tuning or not is_selected:
        return
    from tandem_trainer.language.fine_tuning import FineTuning

    name = str((trainer.parameters or {})[PRETRAINED])
    task = kind(config)
    assert isinstance(task, FineTuning)
    try:
        if not Path(name).is_dir() or task.reports_bytes:
            return
    except ConfigurationError:
        # The ranks report what is wrong with the model.
        return
    message = (
        f"{'.'.join(METRIC)}: bitsPerByte is not reported, because the tokenizer of {name} does not say how many bytes "
        "of text a token stands for; use loss, perplexity or accuracy"
    )
    yield {"path": METRIC, "message": message}


def main() -> None:
    """Read a job from standard input, and write its mistakes to standard output."""
    output = os.dup(1)
    os.dup2(2, 1)
    mistakes = mistakes_of(DistributedTrainingJob.read_json(sys.stdin.read()))
    with os.fdopen(output, "w") as file:
        json.dump(mistakes, file)


if __name__ == "__main__":
    main()
