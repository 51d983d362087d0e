"""Run one evaluator process: `python -m tandem_evaluator --index I`, or N of them for a pod: `--processes N`.

Exit codes: DONE when training is over and everything is merged. PREEMPTED on SIGTERM and INTERRUPTED on SIGINT, not
DONE: the operator would take the exit code 0 on a drained node for an evaluator that has finished, and the rest would
never be evaluated. CONFIGURATION if the job cannot be evaluated as it is specified, with a one-line reason.
"""

import argparse
import os
import re
import signal
import sys
import time
from contextlib import suppress
from types import FrameType

from tandem.job.resource import DistributedTrainingJob
from tandem.processes import launch
from tandem.processes.exitcode import ExitCode, exit_process
from tandem.processes.launch import POLL_SECONDS, wait_for_job
from tandem.rundir.durable import is_transient, list_folder
from tandem.rundir.layout import RunDir
from tandem.rundir.watched import WATCHED
from tandem_evaluator.crew import run_processes
from tandem_evaluator.evaluator_log import EvaluatorLog
from tandem_evaluator.preparation import CannotEvaluate, choose_gpus, enter_code, scoring_of
from tandem_trainer.malloc import use_adapted_thresholds

RETRY_SECONDS = 0.5
"""Delay after which the exit is tried again after a signal."""
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tandem_evaluator", description="Evaluate a run's checkpoints.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--index", type=int, help="index of this process within its replica, from 0")
    which.add_argument("--processes", type=int, help="number of processes to start, with the indices from 0")
    options = parser.parse_args(arguments)
    if options.processes is not None:
        return run_processes(options.processes)
    index: int = options.index
    # One thread unless the user sets another number, before anything loads a mathematics library: several evaluators
    # share a machine with each other and with data loading, and idle cores are used by more processes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    use_adapted_thresholds()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        rundir, name = _whereabouts(index)
        job = _wait_for_job(rundir)
        return ExitCode.DONE if job is None else _evaluate(rundir, name, index, job)
    except CannotEvaluate as error:
        print(f"tandem evaluator: {error}", file=sys.stderr, flush=True)
        return error.code


def _whereabouts(index: int) -> tuple[RunDir, str]:
    """The run directory, and the name of this process."""
    missing = [variable for variable in (launch.RUN_DIR, launch.REPLICA) if not os.environ.get(variable)]
    if missing:
        raise CannotEvaluate(
            ExitCode.USAGE, f"the variable {' and '.join(missing)} must be set; `tandem run` does that"
        )
    replica = os.environ[launch.REPLICA]
    if index < 0 or not _NAME.match(replica):
        raise CannotEvaluate(ExitCode.USAGE, f"{replica}-{index} cannot be the name of an evaluator process")
    return RunDir(os.environ[launch.RUN_DIR]), f"{replica}-{index}"


def _wait_for_job(rundir: RunDir) -> DistributedTrainingJob | None:
    try:
        return wait_for_job(rundir, lambda line: print(line, flush=True), os.environ.get(launch.UID, ""))
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise CannotEvaluate(ExitCode.CONFIGURATION, f"{rundir.job_file} is not a valid job: {reason}") from error
    except OSError as error:
        raise CannotEvaluate(ExitCode.FAILED, f"{rundir.job_file} cannot be read: {error}") from error


def _evaluate(rundir: RunDir, name: str, index: int, job: DistributedTrainingJob) -> ExitCode:
    if job.spec.trainer.task is None and job.spec.evaluation.command is None:
        raise CannotEvaluate(
            ExitCode.CONFIGURATION, f"{job.metadata.name} trains by a command and has no evaluators.command"
        )
    if job.spec.evaluation.processes == 0:
        raise CannotEvaluate(
            ExitCode.CONFIGURATION, f"evaluation is turned off in {job.metadata.name}: evaluators.replicas is 0"
        )

    gpus = choose_gpus(job.spec.evaluation.processes_per_replica, index)
    try:
        log = EvaluatorLog(rundir, name, gpus)
    except OSError as error:
        code = ExitCode.FAILED if is_transient(error) else ExitCode.CONFIGURATION
        raise CannotEvaluate(code, f"the run directory cannot be written: {error}") from error
    with log:
        if job.spec.trainer.code is not None and not enter_code(rundir, job.spec.trainer.code, job):
            return ExitCode.DONE
        _wait_for_training(rundir)
        from tandem_evaluator.base_model import BaseWeights
        from tandem_evaluator.loop import Evaluator

        scoring = scoring_of(job)
        base = BaseWeights(rundir) if job.spec.trainer.is_fine_tuning else None
        evaluator = Evaluator(rundir, job.spec.evaluation, name, scoring, log, base)
        interrupted = False

        def leave(number: int, _: FrameType | None) -> None:
            nonlocal interrupted
            interrupted = number == signal.SIGINT
            evaluator.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, leave)
        try:
            code = evaluator.run()
        finally:
            scoring.close()
        return ExitCode.INTERRUPTED if interrupted and code == ExitCode.PREEMPTED else code


def _wait_for_training(rundir: RunDir) -> None:
    """Wait in a pod until the first ranks have loaded everything: those that use Tandem then record their generation,
    and of others a checkpoint appears. Before there is nothing to evaluate, and on shared cores ranks would load torch
    more slowly if evaluators did so at the same time. `tandem run` lowers the priority of evaluators once ranks train,
    which leaves little time to load anything from then on: there they load at once."""
    if not os.environ.get(launch.UID):
        return
    # A failing disk is handled in the loop.
    with suppress(OSError):
        while not (rundir.newest_generation() or list_folder(rundir.path / WATCHED) or rundir.ended()):
            time.sleep(POLL_SECONDS)


def _leave(number: int, _: FrameType | None) -> None:
    """Exit at once: before the loop starts, the process holds nothing that it would have to release."""
    # Python swallows exceptions in callbacks of weak references, such as those at the end of each import.
    signal.signal(signal.SIGALRM, lambda _, frame: _leave(number, frame))
    signal.setitimer(signal.ITIMER_REAL, RETRY_SECONDS)
    raise SystemExit(ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.PREEMPTED)


if __name__ == "__main__":
    try:
        exit_process(main())
    except SystemExit as leaving:
        signal.setitimer(signal.ITIMER_REAL, 0)
        exit_process(leaving.code)
