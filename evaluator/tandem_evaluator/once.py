"""`python -m tandem_evaluator.once CHECKPOINT…`: evaluates checkpoints of a run once more, and records nothing.

`tandem evaluate` starts it, with the environment of an evaluator. Prints one JSON object for each checkpoint, on a line
of its own: `{"checkpoint": NAME, "step": N, "seconds": S, "metrics": {…}}`, or `{"checkpoint": NAME, "failed": WHY}`.
Everything else that is printed on the way, by the program too, goes to standard error.

A checkpoint is claimed while it is read, under a name that no evaluator of the run claims: retention leaves it alone,
and nobody waits for it.
"""

import argparse
import json
import os
import sys
import time
from contextlib import ExitStack

from tandem.job.resource import DistributedTrainingJob
from tandem.processes.exitcode import ExitCode, exit_process
from tandem.processes.launch import RUN_DIR
from tandem.rundir import lease
from tandem.rundir.checkpoint import WEIGHTS, Broken
from tandem.rundir.layout import RunDir
from tandem_evaluator.claim import claim
from tandem_evaluator.loop import survey_of
from tandem_evaluator.preparation import CannotEvaluate, enter_code, scoring_of
from tandem_evaluator.publication import OtherWeights
from tandem_evaluator.scoring import ProgramFailed, Scoring, UnusableCheckpoint, Work
from tandem_trainer.malloc import use_adapted_thresholds


def main(arguments: list[str] | None = None) -> int:
    """Evaluate the named checkpoints. Returns the exit code: FAILED if one could not be evaluated."""
    parser = argparse.ArgumentParser(prog="python -m tandem_evaluator.once", description="Evaluate checkpoints once.")
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT")
    parser.add_argument("--shards", type=int, default=1, help="pieces of the evaluation data, one after the other")
    parser.add_argument("--program", type=json.loads, help="the command of another program, a JSON list")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    use_adapted_thresholds()
    # The results have standard output for themselves: the user's program may print, and so may libraries.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    run_dir = RunDir(os.environ[RUN_DIR])
    try:
        job = with_program(run_dir.read_job(), options.program)
        if job.spec.trainer.code is not None and not enter_code(run_dir, job.spec.trainer.code, job):
            raise CannotEvaluate(ExitCode.FAILED, "the job failed before its code was there")
        scoring = scoring_of(job)
    except CannotEvaluate as error:
        print(f"tandem evaluate: {error}", file=sys.stderr, flush=True)
        return error.code
    code = ExitCode.DONE
    try:
        for name in options.checkpoints:
            try:
                answer = evaluate(run_dir, job, scoring, name, options.shards)
            except (Broken, OSError, UnusableCheckpoint, ProgramFailed, OtherWeights) as error:
                answer, code = {"checkpoint": name, "failed": str(error)}, ExitCode.FAILED
            print(json.dumps(answer), file=results, flush=True)
    finally:
        scoring.close()
    return code


def with_program(job: DistributedTrainingJob, program: list[str] | None) -> DistributedTrainingJob:
    """The job, with another program in place of what evaluates it; None leaves it as it is.

    Raises:
        CannotEvaluate: there is nothing to evaluate with.
    """
    if program is None:
        if job.spec.trainer.task is None and job.spec.evaluation.command is None:
            raise CannotEvaluate(
                ExitCode.CONFIGURATION,
                f"{job.metadata.name} has no evaluators.command; name a program: tandem evaluate RUN -- evaluate.py",
            )
        return job
    evaluators = job.spec.evaluation.model_copy(update={"command": program, "args": []})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"evaluators": evaluators})})


def evaluate(
    run_dir: RunDir, job: DistributedTrainingJob, scoring: Scoring, name: str, shards: int
) -> dict[str, object]:
    """The scores of one checkpoint.

    Args:
        name: the checkpoint's.
        shards: into how many pieces the evaluation data is cut.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        Broken: it is damaged.
        UnusableCheckpoint: it is not one of this task's model.
        ProgramFailed: the program failed twice.
        OtherWeights: other weights than its own were scored.
        OSError: the disk fails.
    """
    survey = survey_of(run_dir, job.spec.evaluation)
    references = {state.reference.name: state.reference for state in survey.scan().states}
    try:
        reference = references.get(name) or run_dir.manifest(name).reference
        folder, manifest = survey.open(reference)
    except FileNotFoundError as error:
        raise FileNotFoundError("there is no such checkpoint") from error
    started = time.time()
    with ExitStack() as stack:
        holder = lease.default_holder()
        if (checkpoint_claim := claim(run_dir.leases / f"evaluate-{name}-once-{holder}.json", holder)) is not None:
            stack.enter_context(checkpoint_claim)
        read = scoring.read(folder, manifest)
        results = []
        for shard in range(shards):
            work = Work(reference, shard, shards, holder, time.time())
            result = scoring.score(read, work, lambda: True)
            assert result is not None, "nobody asks it to leave"
            OtherWeights.check(result, "" if manifest is None else manifest.entry(WEIGHTS).digest)
            results.append(result)
        merged = scoring.merge(results)
    answer = {
        "checkpoint": name,
        "step": reference.step,
        "seconds": round(time.time() - started, 3),
        "metrics": merged.scores,
    }
    answer |= {"intervals": merged.intervals} if merged.intervals else {}
    return answer | ({"note": merged.note} if merged.note else {})


if __name__ == "__main__":
    exit_process(main())
