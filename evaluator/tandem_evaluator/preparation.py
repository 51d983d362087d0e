"""Prepares a process to evaluate: its GPUs, the job's code, and the way to score a checkpoint."""

import os
import sys
from typing import TYPE_CHECKING

from tandem.job.resource import DistributedTrainingJob
from tandem.processes.exitcode import ExitCode
from tandem.processes.launch import EVALUATOR_GPUS, VISIBLE_GPUS
from tandem.processes.requirements import prepare_code
from tandem.rundir.code import CodeError, JobEnded
from tandem.rundir.layout import RunDir
from tandem_evaluator.evaluator_log import log_event

if TYPE_CHECKING:
    from tandem_evaluator.scoring import Scoring


class CannotEvaluate(Exception):  # noqa: N818 - it says what happened
    """This process cannot do its work; carries the exit code and one line for the user."""

    def __init__(self, code: ExitCode, line: str) -> None:
        super().__init__(line)
        self.code = code


def choose_gpus(processes: int, index: int) -> float:
    """Leave only this process's share of the pod's GPUs visible, before anything computes on one.
    Returns the number of its GPUs, a fraction where several processes share one.

    Args:
        processes: number of processes of the pod. With more of them than GPUs, several share one.
        index: index of this process, from 0.
    """
    visible = os.environ.get(VISIBLE_GPUS)
    if visible is None:
        names = [str(number) for number in range(int(os.environ.get(EVALUATOR_GPUS, "0")))]
    else:
        names = [name for name in visible.split(",") if name]
    if not names:
        own: list[str] = []
    elif processes >= len(names):
        own = [names[index % len(names)]]
    else:
        own = names[index * len(names) // processes : (index + 1) * len(names) // processes]
    os.environ[VISIBLE_GPUS] = ",".join(own)
    return len(own) if processes < len(names) else len(names) / processes


def enter_code(rundir: RunDir, digest: str, job: DistributedTrainingJob) -> bool:
    """Switch to the job's code; False if the job has failed before it arrived."""
    try:
        code = prepare_code(rundir, digest, log_event)
    except JobEnded:
        return False
    except CodeError as error:
        raise CannotEvaluate(ExitCode.CONFIGURATION, str(error)) from error
    except OSError as error:
        raise CannotEvaluate(ExitCode.FAILED, f"the job's code cannot be prepared: {error}") from error
    code.enter()
    if job.spec.evaluation.command is None:
        # The scoring is imported by this very process: the packages of the job have to be found, but must not replace
        # Tandem's own.
        sys.path.extend(code.places)
    return True


def scoring_of(job: DistributedTrainingJob) -> "Scoring":
    """The way to evaluate the job's checkpoints."""
    evaluators = job.spec.evaluation
    if job.spec.trainer.own_task is not None and evaluators.command is None:
        from tandem_evaluator.program import TASK_PROGRAM

        evaluators = evaluators.model_copy(update={"command": [*TASK_PROGRAM]})
    if evaluators.command is not None:
        from tandem_evaluator.program import ProgramScoring

        return ProgramScoring(evaluators)
    # These load torch.
    from tandem_evaluator.device import compute_of
    from tandem_evaluator.evaluation import Evaluation, TaskScoring
    from tandem_trainer.failure import ConfigurationError

    try:
        evaluation = Evaluation.load(job.spec.trainer.images, compute_of(evaluators))
        return TaskScoring(evaluation, job.spec.elasticity.on_corruption != "Off")
    except ConfigurationError as error:
        raise CannotEvaluate(ExitCode.CONFIGURATION, str(error)) from error
    except OSError as error:
        raise CannotEvaluate(ExitCode.FAILED, f"the data cannot be read: {error}") from error
