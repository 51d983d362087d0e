"""The summary of a finished run, read from its run directory."""

import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group
from rich.text import Text

from tandem import against_base
from tandem.formatting import elapsed, metric_name, number, one_line, score, several
from tandem.model import whole
from tandem.rundir import evaluations, watched
from tandem.rundir.durable import read_json_or_none
from tandem.rundir.evaluations import LastWord
from tandem.rundir.layout import RunDir, stopped_early
from tandem.rundir.lineage import batches_left_out
from tandem.rundir.log import LogReader
from tandem.rundir.records import COORDINATOR, TRAINING, Sample, Start, Step, Troubled
from tandem.rundir.watched import OVERWRITTEN, path_of
from tandem.status import STOPPED_EARLY, Compared, Troubles, told

LABEL = 12
TAIL_BYTES = 4 * 2**20
"""Of the coordinator's log: the last hours."""
MAX_WHY = 300
"""Characters of a reason."""
STEPS_BYTES, FIRST_BYTES = 2**18, 2**16
"""Of a log of training: its last thousand steps, and what it began with."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run directory holds in the end."""

    step: int | None = None
    """Steps that are saved, None if none are."""
    made: int | None = None
    """Steps that were made, saved or not; None if none are known."""
    total: int | None = None
    """Steps that were to be made."""
    loss: float | None = None
    """Of the last step that has one."""
    checkpoint: str = ""
    """The newest checkpoint's name."""
    best: str = ""
    """The best checkpoint's name."""
    best_path: str = ""
    """Where that is, in the run directory."""
    metric: str = ""
    """What `value` is."""
    value: float | None = None
    """The best checkpoint's score."""
    evaluated: int = 0
    """Checkpoints that were evaluated."""
    skipped: int = 0
    """Checkpoints that evaluators passed over."""
    failed: int = 0
    """Checkpoints that the program of `evaluators.command` could not evaluate."""
    left: int = 0
    """Committed checkpoints that were neither."""
    against_base: list[Compared] = field(default_factory=list)
    """The metrics of the base model beside those of the best checkpoint; empty where none is evaluated."""
    troubles: Troubles | None = None
    """What went wrong and did not end it."""
    stopped_early: str = ""
    """Where fewer steps were taken than announced: a sentence that says so, and why."""
    restarts: int = 0
    """Generations that were formed because something had failed or was lost."""
    missed: Sequence[str] = ()
    """Warnings about a run that ended well without doing all it promised: what, why and what helps, a sentence each."""


def result(run_dir: RunDir) -> RunResult:
    """Look at what is there."""
    saved = run_dir.committed()
    done = run_dir.done() or {}
    final = done.get("final") or {}
    words = _last_words(run_dir)
    best = evaluations.best(run_dir)
    step = final.get("step", saved[0].step if saved else None)
    logged, loss, total = _trained(run_dir)
    return RunResult(
        step=step,
        made=max((one for one in (step, logged) if one is not None), default=None),
        total=total,
        loss=loss,
        checkpoint=final.get("name", saved[0].name if saved else ""),
        best=best.name if best else "",
        best_path=str(path_of(run_dir, best.name).relative_to(run_dir.path)) if best else "",
        metric=(best and best.metric) or "",
        value=best.value if best else None,
        evaluated=sum(not word.is_note for word in words),
        skipped=sum(word.is_note and not word.is_failure for word in words),
        failed=sum(word.is_failure for word in words),
        left=sum(evaluations.fate(run_dir, manifest.reference) in ("waits", "begun") for manifest in saved),
        against_base=against_base.of_run(run_dir, best, (best and best.metric) or ""),
        troubles=troubles_of(run_dir),
        stopped_early=stopped_early(done),
        restarts=_restarts(run_dir),
        missed=_missed(run_dir, words),
    )


def missed(run_dir: RunDir) -> list[str]:
    """What was promised and not done, of a run that ended well: what, why and what helps, a sentence each."""
    return _missed(run_dir, _last_words(run_dir)) if run_dir.done() is not None else []


def _last_words(run_dir: RunDir) -> list[LastWord]:
    return [word for path in run_dir.evaluations.glob("step-*/*.json") if (word := evaluations.last_word(path))]


def _missed(run_dir: RunDir, words: Sequence[LastWord]) -> list[str]:
    """What evaluators were to evaluate and did not."""
    said = []
    notes = [(word, _why(word.path)) for word in words if word.is_note]
    failed = [(word.path.parent.name, why) for word, why in notes if word.is_failure]
    if failed:
        name, why = failed[-1]
        said.append(f"{several(len(failed), 'checkpoint')} could not be evaluated; {name}: {why}")
    if not run_dir.job_file.exists():
        return [*said, "job.json is gone: something has emptied the run directory while it was used"]
    with suppress(OSError, ValueError):
        pattern = run_dir.read_job().spec.evaluation.watch
        states = watched.records(run_dir)
        lost = sum(why == OVERWRITTEN for _, why in notes)
        if pattern is not None and not states:
            said.append(
                f"evaluators.watch: {pattern} matched nothing in {run_dir.path}; {_elsewhere(run_dir, pattern)}"
            )
        elif pattern is not None and lost:
            said.append(
                f"{lost:,} of {len(states):,} states of {states[-1].path} were overwritten before they were evaluated; "
                "keep each in a file of its own, such as ckpt-{step}.pt, or write aside and put it there by os.replace"
            )
    return said


def _why(note: Path) -> str:
    content = read_json_or_none(note)
    return one_line(str(content.get("why") or ""))[:MAX_WHY] if isinstance(content, dict) else ""


def _elsewhere(run_dir: RunDir, pattern: str) -> str:
    """Where a match of a pattern lies instead, and what helps."""
    name, here = Path(pattern).name, Path.cwd()
    inside = next(run_dir.path.glob(f"**/{name}"), None)
    if inside is not None:
        return f"{inside.relative_to(run_dir.path)} is there: give that as the pattern"
    # Not with `**`: a home folder may be large.
    places = [name, f"$TANDEM_RUN_DIR/{name}", *([] if "**" in pattern else [pattern, f"$TANDEM_RUN_DIR/{pattern}"])]
    outside = next((path for place in places for path in here.glob(place)), None)
    lies = f"{outside} is outside of it. " if outside is not None else ""
    return f"{lies}Have the script write into the folder that the variable TANDEM_RUN_DIR names"


def _trained(run_dir: RunDir) -> tuple[int | None, float | None, int | None]:
    """The last step that counts, its loss, and the steps of the whole run, as far as the logs of training tell."""
    with suppress(OSError, ValueError):
        logs = run_dir.training_logs()
        return *_last_step(run_dir, logs), _total(logs)
    return None, None, None


def _last_step(run_dir: RunDir, logs: Mapping[int, Path]) -> tuple[int | None, float | None]:
    """The last step that counts, and its loss. Logs are read from their ends, as they are long."""
    began = {one.generation: one.resumed_from.step if one.resumed_from else 0 for one in run_dir.generation_records()}
    most: int | None = None
    for generation in sorted({*began, *logs}, reverse=True):
        if (path := logs.get(generation)) is not None:
            if (last := _last_until(path, most)) is not None:
                return last
            start = _start(path)
            began.setdefault(generation, start.step if start else 0)
        most = min(began[generation], began[generation] if most is None else most)
    return most or None, None


def _last_until(path: Path, most: int | None) -> tuple[int, float | None] | None:
    """The last step of a log that is not behind `most`, and the loss of the last one that has one."""
    size = path.stat().st_size
    for start in sorted({max(0, size - STEPS_BYTES), 0}, reverse=True):
        last, loss = None, None
        for record in LogReader(path, TRAINING, start):
            if isinstance(record, Step) and (most is None or record.step <= most):
                last = record.step
                # A script may log the loss of every tenth step only.
                loss = record.loss if "loss" in record.model_fields_set else loss
        if last is not None:
            return last, loss if loss is not None and math.isfinite(loss) else None
    return None


def _total(logs: Mapping[int, Path]) -> int | None:
    """Steps of the whole run, as the newest generation that knew it says."""
    starts = (_start(logs[generation]) for generation in sorted(logs, reverse=True))
    return next((start.total_steps for start in starts if start and start.total_steps), None)


def _start(path: Path) -> Start | None:
    """What a generation began with."""
    begin = LogReader(path, TRAINING, bite=FIRST_BYTES).read() or ()
    return next((record for record in begin if isinstance(record, Start)), None)


def _restarts(run_dir: RunDir) -> int:
    beside = read_json_or_none(run_dir.beside_coordinator_file)
    return (whole(beside.get("restarts")) if isinstance(beside, dict) else None) or 0


def troubles_of(run_dir: RunDir) -> Troubles | None:
    """The last word of the coordinator, and the rewinds and halvings of the whole run."""
    path = run_dir.coordinator_log
    found = Troubles()
    with suppress(OSError, ValueError):
        for record in LogReader(path, COORDINATOR, max(0, path.stat().st_size - TAIL_BYTES), skip=Sample):
            if isinstance(record, Troubled):
                found = Troubles(**record.model_dump(include=set(Troubles.model_fields)))
        rewinds = run_dir.rewind_records()
        found = found.model_copy(update={"rewinds": len(rewinds), "batches_left_out": batches_left_out(rewinds)})
        limits = run_dir.limits(run_dir.read_job())
        now = {"micro_batches_halved": len(limits), "micro_batch": min(limits, default=None)}
        found = found.model_copy(update=now)
    return found


def complete(
    name: str, found: RunResult, shown: str, seconds: float | None, evaluates: bool, before: int | None = None
) -> Group:
    """A run that is complete.

    Args:
        shown: the run directory as the user would type it.
        seconds: how long this `tandem run` took; None if it had nothing to do.
        before: steps that were saved before it.
    """
    # Of a script without a session no checkpoint of ours is known, but what it has logged.
    made = found.step if found.step is not None else found.made
    steps = f": {several(made, 'step')}" if made is not None else ""
    time = f" in {elapsed(seconds)}" if seconds is not None else ""
    if before and found.step is not None and seconds is not None:
        went_on = found.step > before
        time = (
            f", the last {number(found.step - before)}{time}" if went_on else f"; what was left took {elapsed(seconds)}"
        )
    rows: list[tuple[str, str]] = []
    if found.value is not None:
        rows.append(("best", f"{shown}/{found.best_path}"))
        rows.append(("", f"{metric_name(found.metric)} {score(found.metric, found.value)}"))
    if found.against_base:
        rows.append(("base model", against_base.told(found.against_base)))
    if evaluates:
        left = f", {found.left} not evaluated" if found.left else ""
        failed = f", {found.failed} failed" if found.failed else ""
        counts = f"{several(found.evaluated, 'checkpoint')}, {found.skipped or 'none'} skipped{failed}{left}"
        rows.append(("evaluated", counts))
    rows += [("missed", one) for one in found.missed]
    rows += _troubled(found.troubles)
    rows += [
        ("restarts", str(found.restarts)),
        ("logs", f"{shown}/log"),
        ("next", f"tandem report {shlex.quote(shown)}"),
    ]
    if found.stopped_early:
        words = found.stopped_early.removeprefix(STOPPED_EARLY)
        return _lines(Text.assemble((name, "bold"), " ", (STOPPED_EARLY, "green"), f"{words}{time}"), rows)
    return _lines(Text.assemble((name, "bold"), " is ", ("complete", "green"), f"{steps}{time}"), rows)


def saved_words(step: int | None, own_command: bool) -> str:
    """What is saved of a run that does not go on.

    Args:
        step: of the newest checkpoint of ours, None if there is none.
        own_command: a command of the user's own trains, and may keep checkpoints of its own.
    """
    if step is not None:
        return f"saved after step {number(step)}"
    return "what it has saved itself stays as it is" if own_command else "nothing was saved yet"


def lost_words(found: RunResult, own_command: bool) -> str:
    """Which steps a run that does not go on has made and not saved; empty if all are saved, or that is not known.

    Args:
        own_command: a command of the user's own trains, and may keep checkpoints of its own.
    """
    if found.made is None or (found.step is None and own_command):
        return ""
    lost = found.made - (found.step or 0)
    since = "since the last save" if found.step is not None else "since the start"
    return f"{several(lost, 'step')} {since}, up to step {number(found.made)}" if lost > 0 else ""


def interrupted(
    name: str, found: RunResult, shown: str, again: str, evaluates: bool, own_command: bool = False
) -> Group:
    """A run that the user stopped."""
    rows = [("saved", f"{shown}/checkpoints/{found.checkpoint}")] if found.checkpoint else []
    rows += [("lost", lost)] if (lost := lost_words(found, own_command)) else []
    rows += _troubled(found.troubles)
    if evaluates and found.left:
        rows.append(("evaluated", f"all but {several(found.left, 'checkpoint')}, which the same command goes on with"))
    rows.append(("go on with", again))
    return _lines(
        Text.assemble((name, "bold"), " was ", ("stopped", "yellow"), f"; {saved_words(found.step, own_command)}"), rows
    )


def failed(
    name: str,
    message: str,
    log: str,
    tail: Sequence[str],
    again: str,
    troubles: Troubles | None = None,
    lost: str = "",
) -> Group:
    """A run that has failed for good.

    Args:
        log: the file that says most about it, '' if none does.
        tail: its last lines.
        again: how to try again, '' where that would not help.
        troubles: what went wrong before that and did not end it.
        lost: which steps it has made and not saved, in words; '' if none are known.
    """
    rows = [("lost", lost)] if lost else []
    rows += _troubled(troubles)
    rows += [("log", log)] if log else []
    rows += [("try again", again)] if again else []
    quoted = [Text(f"    {one_line(line)}", "dim") for line in tail]
    head = Text.assemble((name, "bold"), (" failed", "red"), f": {message}")
    return Group(*_lines(head, []).renderables, *quoted, *_lines(None, rows).renderables)


def _troubled(troubles: Troubles | None) -> list[tuple[str, str]]:
    return [("trouble", one.text) for one in told(troubles) if one.level != "info"]


def _lines(head: Text | None, rows: Sequence[tuple[str, str]]) -> Group:
    listed = [Text.assemble((f"  {label:<{LABEL}}", "dim"), value) for label, value in rows]
    return Group(*([head] if head else []), *listed)
