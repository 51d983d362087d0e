"""The summary of a finished run, read from its run directory."""

import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group
from rich.text import Text

from tandem.formatting import confidence, count_noun, elapsed, metric_name, number, one_line, score
from tandem.model import whole_number
from tandem.rundir import against_base, evaluations, watched
from tandem.rundir.durable import read_json_or_none
from tandem.rundir.evaluations import FinalFile
from tandem.rundir.layout import RunDir, stopped_early
from tandem.rundir.lineage import batches_left_out
from tandem.rundir.log import LogReader, last_record
from tandem.rundir.records import COORDINATOR, TRAINING, Sample, Step, TroublesRecord
from tandem.rundir.training_log import counted_until, first_start
from tandem.rundir.watched import OVERWRITTEN, checkpoint_path
from tandem.wire.status import STOPPED_EARLY, Compared, Troubles, trouble_messages

LABEL = 12
"""Width of the labels."""
MAX_REASON_LENGTH = 300
"""Length of a reason, in characters."""
STEPS_BYTES = 2**18
"""Bytes read from the end of a log of training: the last thousand steps."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Result of a run, from its run directory."""

    step: int | None = None
    """Steps that are saved; None if none are."""
    made: int | None = None
    """Steps that were taken, saved or not; None if unknown."""
    total: int | None = None
    """Steps of the whole run."""
    loss: float | None = None
    """Loss of the last step that has one."""
    checkpoint: str = ""
    """Name of the newest checkpoint."""
    best: str = ""
    """Name of the best checkpoint."""
    best_path: str = ""
    """Path of the best checkpoint in the run directory."""
    metric: str = ""
    """Metric of `value`."""
    value: float | None = None
    """Score of the best checkpoint."""
    evaluated: int = 0
    """Checkpoints that were evaluated."""
    skipped: int = 0
    """Checkpoints that evaluators skipped."""
    failed: int = 0
    """Checkpoints that the program of `evaluators.command` could not evaluate."""
    left: int = 0
    """Committed checkpoints that are neither evaluated, skipped nor failed."""
    interval: tuple[float | None, float | None] | None = None
    """95 % confidence interval of `value`."""
    tied: int | None = None
    """Number of other checkpoints that do not differ from the best by more than chance; None if it is not known."""
    against_base: list[Compared] = field(default_factory=list)
    """Metrics of the base model beside those of the best checkpoint; empty if it was not evaluated."""
    troubles: Troubles | None = None
    """Problems that did not end the run."""
    stopped_early: str = ""
    """Sentence that says that fewer steps were taken than announced, and why; empty otherwise."""
    restarts: int = 0
    """Generations formed because of a failure or a loss."""
    missed: Sequence[str] = ()
    """Warnings about a run that succeeded without doing everything it was to do: what, why and what helps, a
    sentence each."""


def result(run_dir: RunDir) -> RunResult:
    """Read the result of a run."""
    saved = run_dir.committed()
    done = run_dir.done() or {}
    final = done.get("final") or {}
    last_words = _outcomes(run_dir)
    best = evaluations.best(run_dir)
    best_path = checkpoint_path(run_dir, best.name) if best else None
    step = final.get("step", saved[0].step if saved else None)
    logged, loss, total = _trained(run_dir)
    return RunResult(
        step=step,
        made=max((steps for steps in (step, logged) if steps is not None), default=None),
        total=total,
        loss=loss,
        checkpoint=final.get("name", saved[0].name if saved else ""),
        best=best.name if best else "",
        best_path=str(best_path.relative_to(run_dir.path)) if best_path else "",
        metric=(best and best.metric) or "",
        value=best.value if best else None,
        interval=(best.low, best.high) if best else None,
        tied=best.tied if best else None,
        evaluated=sum(not word.is_note for word in last_words),
        skipped=sum(word.is_note and not word.is_failure for word in last_words),
        failed=sum(word.is_failure for word in last_words),
        left=sum(
            evaluations.evaluation_progress(run_dir, manifest.reference) in ("waits", "begun") for manifest in saved
        ),
        against_base=against_base.compare_best_with_base(run_dir, best, (best and best.metric) or ""),
        troubles=troubles_of(run_dir),
        stopped_early=stopped_early(done),
        restarts=_restarts(run_dir),
        missed=_missed(run_dir, last_words),
    )


def missed(run_dir: RunDir) -> list[str]:
    """List what a succeeded run was to do and did not: what, why and what helps, a sentence each."""
    return _missed(run_dir, _outcomes(run_dir)) if run_dir.done() is not None else []


def _outcomes(run_dir: RunDir) -> list[FinalFile]:
    return [word for path in run_dir.evaluations.glob("step-*/*.json") if (word := evaluations.parse_final_file(path))]


def _missed(run_dir: RunDir, last_words: Sequence[FinalFile]) -> list[str]:
    """List what evaluators were to evaluate and did not."""
    warnings = []
    notes = [(word, _reason(word.path)) for word in last_words if word.is_note]
    failed = [(word.path.parent.name, reason) for word, reason in notes if word.is_failure]
    if failed:
        name, reason = failed[-1]
        warnings.append(f"{count_noun(len(failed), 'checkpoint')} could not be evaluated; {name}: {reason}")
    if not run_dir.job_file.exists():
        return [*warnings, "job.json is gone: something has emptied the run directory while it was used"]
    with suppress(OSError, ValueError):
        pattern = run_dir.read_job().spec.evaluation.watch
        states = watched.records(run_dir)
        lost = sum(reason.startswith(OVERWRITTEN) for _, reason in notes)
        if pattern is not None and not states:
            warnings.append(
                f"evaluators.watch: {pattern} matched nothing in {run_dir.path}; {_elsewhere(run_dir, pattern)}"
            )
        elif pattern is not None and lost:
            warnings.append(
                f"{lost:,} of {len(states):,} states of {states[-1].path} were overwritten before they were evaluated; "
                "keep each in a file of its own, such as ckpt-{step}.pt, or write aside and put it there by os.replace"
            )
    return warnings


def _reason(note: Path) -> str:
    content = read_json_or_none(note)
    return one_line(str(content.get("why") or ""))[:MAX_REASON_LENGTH] if isinstance(content, dict) else ""


def _elsewhere(run_dir: RunDir, pattern: str) -> str:
    """Say where a match of a pattern is instead, and what helps."""
    name, folder = Path(pattern).name, Path.cwd()
    inside = next(run_dir.path.glob(f"**/{name}"), None)
    if inside is not None:
        return f"{inside.relative_to(run_dir.path)} is there: give that as the pattern"
    # Without `**`: a home folder may be large.
    places = [name, f"$TANDEM_RUN_DIR/{name}", *([] if "**" in pattern else [pattern, f"$TANDEM_RUN_DIR/{pattern}"])]
    outside = next((path for place in places for path in folder.glob(place)), None)
    lies = f"{outside} is outside of it. " if outside is not None else ""
    return f"{lies}Have the script write into the folder that the variable TANDEM_RUN_DIR names"


def _trained(run_dir: RunDir) -> tuple[int | None, float | None, int | None]:
    """Read the last step that counts, its loss, and the steps of the whole run from the logs of training."""
    with suppress(OSError, ValueError):
        logs = run_dir.training_logs()
        return *_last_step(run_dir, logs), _total(logs)
    return None, None, None


def _last_step(run_dir: RunDir, logs: Mapping[int, Path]) -> tuple[int | None, float | None]:
    """Find the last step that counts, and its loss. Logs are read from their ends, as they are long."""
    start_steps = {record.generation: record.start_step for record in run_dir.generation_records()}
    for generation in logs.keys() - start_steps:
        start = first_start(logs[generation])
        start_steps[generation] = start.step if start else 0
    limits = counted_until(start_steps)
    for generation in sorted(logs, reverse=True):
        if (last := _last_until(logs[generation], limits[generation])) is not None:
            return last
    return min(start_steps.values(), default=None) or None, None


def _last_until(path: Path, limit: float) -> tuple[int, float | None] | None:
    """Find the last step of a log up to `limit`, and the loss of the last one that has a loss."""
    size = path.stat().st_size
    for start in sorted({max(0, size - STEPS_BYTES), 0}, reverse=True):
        last, loss = None, None
        for record in LogReader(path, TRAINING, start):
            if isinstance(record, Step) and record.step <= limit:
                last = record.step
                # A script may log a loss only in every tenth step.
                loss = record.loss if "loss" in record.model_fields_set else loss
        if last is not None:
            return last, loss if loss is not None and math.isfinite(loss) else None
    return None


def _total(logs: Mapping[int, Path]) -> int | None:
    """Steps of the whole run, from the newest generation that knew them."""
    starts = (first_start(logs[generation]) for generation in sorted(logs, reverse=True))
    return next((start.total_steps for start in starts if start and start.total_steps), None)


def _restarts(run_dir: RunDir) -> int:
    counters = read_json_or_none(run_dir.beside_coordinator_file)
    return (whole_number(counters.get("restarts")) if isinstance(counters, dict) else None) or 0


def troubles_of(run_dir: RunDir) -> Troubles | None:
    """Read the coordinator's last counts of problems, and the rewinds and halvings of the whole run."""
    record = last_record(run_dir.coordinator_log, COORDINATOR, TroublesRecord, skip=Sample)
    troubles = Troubles(**record.model_dump(include=set(Troubles.model_fields))) if record else Troubles()
    with suppress(OSError, ValueError):
        rewinds = run_dir.rewind_records()
        troubles = troubles.model_copy(update={"rewinds": len(rewinds), "batches_left_out": batches_left_out(rewinds)})
        limits = run_dir.limits(run_dir.read_job())
        now = {"micro_batches_halved": len(limits), "micro_batch": min(limits, default=None)}
        troubles = troubles.model_copy(update=now)
    return troubles


def complete(
    name: str, result: RunResult, path: str, seconds: float | None, evaluates: bool, before: int | None = None
) -> Group:
    """Summarize a run that is complete.

    Args:
        path: run directory, as the user would type it.
        seconds: duration of this `tandem run`; None if it had nothing to do.
        before: steps that were saved before it.
    """
    # A script without a session has no checkpoints of Tandem's; its log has its steps.
    steps_taken = result.step if result.step is not None else result.made
    steps = f": {count_noun(steps_taken, 'step')}" if steps_taken is not None else ""
    time = f" in {elapsed(seconds)}" if seconds is not None else ""
    if before and result.step is not None and seconds is not None:
        went_on = result.step > before
        time = (
            f", the last {number(result.step - before)}{time}"
            if went_on
            else f"; what was left took {elapsed(seconds)}"
        )
    rows: list[tuple[str, str]] = []
    if result.value is not None:
        overwritten = f"{result.best}, which your script has overwritten or deleted"
        rows.append(("best", f"{path}/{result.best_path}" if result.best_path else overwritten))
        certainty = confidence(result.metric, result.interval, result.tied)
        rows.append(("", f"{metric_name(result.metric)} {score(result.metric, result.value)}{certainty}"))
    if result.against_base:
        rows.append(("base model", against_base.format_comparisons(result.against_base)))
    if evaluates:
        unevaluated = f", {result.left} not evaluated" if result.left else ""
        failed = f", {result.failed} failed" if result.failed else ""
        counts = (
            f"{count_noun(result.evaluated, 'checkpoint')}, {result.skipped or 'none'} skipped{failed}{unevaluated}"
        )
        rows.append(("evaluated", counts))
    rows += [("missed", warning) for warning in result.missed]
    rows += _troubled(result.troubles)
    rows += [
        ("restarts", str(result.restarts)),
        ("logs", f"{path}/log"),
        ("next", f"tandem report {shlex.quote(path)}"),
    ]
    if result.stopped_early:
        reason = result.stopped_early.removeprefix(STOPPED_EARLY)
        return _lines(Text.assemble((name, "bold"), " ", (STOPPED_EARLY, "green"), f"{reason}{time}"), rows)
    return _lines(Text.assemble((name, "bold"), " is ", ("complete", "green"), f"{steps}{time}"), rows)


def saved_words(step: int | None, own_command: bool) -> str:
    """Say what is saved of a run that ends early.

    Args:
        step: step of Tandem's newest checkpoint; None if there is none.
        own_command: whether a command of the user trains, which may keep checkpoints of its own.
    """
    if step is not None:
        return f"saved after step {number(step)}"
    return "what it has saved itself stays as it is" if own_command else "nothing was saved yet"


def lost_words(result: RunResult, own_command: bool) -> str:
    """Say which steps of a run that ends early are not saved; empty if all are saved, or it is unknown.

    Args:
        own_command: whether a command of the user trains, which may keep checkpoints of its own.
    """
    if result.made is None or (result.step is None and own_command):
        return ""
    lost = result.made - (result.step or 0)
    since = "since the last save" if result.step is not None else "since the start"
    return f"{count_noun(lost, 'step')} {since}, up to step {number(result.made)}" if lost > 0 else ""


def interrupted(
    name: str, result: RunResult, path: str, resume_command: str, evaluates: bool, own_command: bool = False
) -> Group:
    """Summarize a run that the user stopped."""
    rows = [("saved", f"{path}/checkpoints/{result.checkpoint}")] if result.checkpoint else []
    rows += [("lost", lost)] if (lost := lost_words(result, own_command)) else []
    rows += _troubled(result.troubles)
    if evaluates and result.left:
        rows.append(
            ("evaluated", f"all but {count_noun(result.left, 'checkpoint')}, which the same command goes on with")
        )
    rows.append(("go on with", resume_command))
    return _lines(
        Text.assemble((name, "bold"), " was ", ("stopped", "yellow"), f"; {saved_words(result.step, own_command)}"),
        rows,
    )


def failed(
    name: str,
    message: str,
    log: str,
    tail: Sequence[str],
    retry_command: str,
    troubles: Troubles | None = None,
    lost: str = "",
) -> Group:
    """Summarize a run that has failed.

    Args:
        log: log file that says most about it; '' if none does.
        tail: its last lines.
        retry_command: command to try again; '' if that would not help.
        troubles: problems before the failure.
        lost: which steps are not saved, in words; '' if unknown.
    """
    rows = [("lost", lost)] if lost else []
    rows += _troubled(troubles)
    rows += [("log", log)] if log else []
    rows += [("try again", retry_command)] if retry_command else []
    quoted = [Text(f"    {one_line(line)}", "dim") for line in tail]
    head = Text.assemble((name, "bold"), (" failed", "red"), f": {message}")
    return Group(*_lines(head, []).renderables, *quoted, *_lines(None, rows).renderables)


def _troubled(troubles: Troubles | None) -> list[tuple[str, str]]:
    return [("trouble", trouble.text) for trouble in trouble_messages(troubles) if trouble.level != "info"]


def _lines(head: Text | None, rows: Sequence[tuple[str, str]]) -> Group:
    row_lines = [Text.assemble((f"  {label:<{LABEL}}", "dim"), value) for label, value in rows]
    return Group(*([head] if head else []), *row_lines)
