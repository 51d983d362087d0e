"""Says what is wrong with a task of the user's own, before anything starts: `python -m tandem_trainer.task_check`.

It imports the user's code, which neither `tandem` nor the coordinator does. The question is the job's `spec.trainer`,
JSON on standard input; the answer is a list of `{"path": […], "message": …}`, JSON on standard output. What the user's
code prints goes to standard error.
"""

import json
import os
import sys
from typing import Any

from tandem.job import Trainer
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.task import class_of, configured, sentence

TASK = ("spec", "trainer", "task")


def wrong(trainer: Trainer) -> list[dict[str, Any]]:
    """The mistakes, in the order of the manifest."""
    assert trainer.own_task is not None
    try:
        _, mistakes = configured(class_of(trainer), trainer.parameters or {})
    except ConfigurationError as error:
        return [{"path": TASK, "message": str(error)}]
    return [{"path": path, "message": sentence(path, message)} for path, message in mistakes]


def main() -> None:
    """Entry point."""
    answer = os.dup(1)
    os.dup2(2, 1)
    mistakes = wrong(Trainer.read_json(sys.stdin.read()))
    with os.fdopen(answer, "w") as file:
        json.dump(mistakes, file)


if __name__ == "__main__":
    main()
