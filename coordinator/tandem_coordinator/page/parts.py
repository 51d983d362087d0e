"""The parts of the page as HTML. The browser places each part by its name. Pure.

Everything that comes from a run goes through `html.escape`. Times are in UTC, with the second they mean: the browser
converts them to its own time zone. No part has a style or a script of its own, which the page forbids.
"""

import datetime
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import NamedTuple

from tandem.formatting import (
    change,
    confidence_items,
    cores,
    count_noun,
    duration,
    elapsed,
    interval,
    metric_columns,
    metric_name,
    metric_title,
    number,
    on_validation,
    reason,
    score,
    share,
    size,
    truncate_end,
    utc_time,
)
from tandem.rundir.catalog import EvaluationResult
from tandem.wire.measures import Generation
from tandem.wire.queue_view import queue_lines
from tandem.wire.status import MemberView, Snapshot, Status, phase_word, trouble_messages
from tandem_coordinator.charts import completions, with_difference
from tandem_coordinator.charts.chart import Viewport
from tandem_coordinator.page import pictures
from tandem_coordinator.page.timeline import Key, Timeline

MAX_TABLE_ROWS = 30
"""Maximum number of rows of a table; of more, the newest are shown."""
MAX_CHECKPOINTS = 12
MAX_EVENTS = 60
MAX_PROMPTS = 16
FAILED_NOTE = '<p class="why bad">The page cannot be drawn; the log of the coordinator says why.</p>'
NO_STEPS = "No step was logged yet. In a script of your own, tandem.log(step=step, loss=loss) in its loop logs them."
MAX_TEXT_LENGTH = 500
"""Maximum length of a text that comes from a run, in characters."""
LEVELS = {"info": "", "warning": "warning", "error": "error"}


@dataclass(frozen=True)
class Glance:
    """A small snapshot of a job, which can be taken every second whatever the size of the job."""

    snapshot: Snapshot
    """Snapshot with few of its members."""
    agents: int
    """Total number of members."""


def texts(glance: Glance, timeline: Timeline | None, complaint: str = "") -> dict[str, str]:
    """Render all parts except charts.

    Args:
        timeline: None while nothing was read yet.
        complaint: why the run directory cannot be read, if so.
    """
    snapshot = glance.snapshot
    return {
        "head": _head(snapshot, timeline),
        "note": _note(timeline, complaint),
        "tiles": _tile_list(snapshot.status, timeline),
        "members": _members(glance),
        "generations": _generations(snapshot, timeline),
        "completions": _completions(timeline),
        "checkpoints": _checkpoints(snapshot.status, timeline),
        "events": _events(snapshot, timeline),
    }


def charts(glance: Glance, timeline: Timeline, viewport: Viewport) -> dict[str, str]:
    """Draw all charts for one kind of screen."""
    status = glance.snapshot.status
    return {
        "losses": _figure(pictures.losses(timeline, status, viewport), NO_STEPS),
        "speed": _figure(pictures.speed(timeline, viewport), "No generation was formed yet."),
        "optimization": _figure(pictures.optimization(timeline, viewport)),
        "values": _figure(pictures.values(timeline, viewport)),
        "ranks": _figure(pictures.ranks(timeline, viewport)),
        "histograms": _figure(pictures.histograms(timeline, viewport)),
        "wrong": _figure(pictures.wrong(timeline, viewport)),
        "use": _figure(pictures.use(timeline, glance.snapshot, viewport), "No process has reported its use yet."),
    }


def _head(snapshot: Snapshot, timeline: Timeline | None) -> str:
    status = snapshot.status
    title = snapshot.job if timeline is None else timeline.rundir.title(snapshot.job)
    message = f'<p class="why">{_text(status.message)}</p>' if status.message else ""
    phase = f'<span class="result {status.phase}">{phase_word(status.phase, status.message)}</span>'
    queue = "".join(f'<p class="note">{_text(label)}: {_text(text)}</p>' for label, text in queue_lines(status.queue))
    title_line = f'<div class="title"><h1>{_text(title)}</h1>{phase}</div>'
    return f"{title_line}{message}{queue}{_troubles(status)}{_progress(status)}"


def _troubles(status: Status) -> str:
    """One line for each kind of trouble; red for errors."""
    kinds = {"error": "why bad", "warning": "why", "info": "note"}
    return "".join(
        f'<p class="{kinds[trouble.level]}">{_text(trouble.text)}</p>' for trouble in trouble_messages(status.troubles)
    )


def _progress(status: Status) -> str:
    progress = status.progress
    if progress is None:
        return ""
    facts = [f"step {progress.step:,}" + (f" of {progress.total_steps:,}" if progress.total_steps else "")]
    if progress.epoch is not None:
        facts.append(f"epoch {progress.epoch:.1f}")
    if progress.remaining_seconds:
        facts.append(f"about {elapsed(progress.remaining_seconds)} left")
    bar = ""
    if progress.percent is not None:
        bar = f'<progress max="100" value="{progress.percent:.1f}">{progress.percent:.0f} %</progress>'
    return f'{bar}<p class="lead">{_text(" · ".join(facts))}</p>'


def _note(timeline: Timeline | None, complaint: str) -> str:
    if complaint:
        return f'<p class="why bad">The run directory cannot be read: {_text(complaint)}</p>'
    if timeline is None:
        return '<p class="note">Reading what was logged so far…</p>'
    if timeline.share_read < 0.999:
        return f'<p class="note">Reading what was logged so far: {share(timeline.share_read)}</p>'
    return ""


def _tile_list(status: Status, timeline: Timeline | None) -> str:
    best, newest, workers, use = (
        status.best_checkpoint,
        status.latest_checkpoint,
        status.workers,
        status.utilization,
    )
    evaluated = status.latest_evaluation
    lag = status.evaluation_lag_steps
    tiles = [
        (
            "best",
            f"Best test {metric_name(best.metric)}" if best else "Best score",
            score(best.metric, best.value) if best else "–",
            f"at step {best.step:,}{_on_validation(status, timeline)}"
            + confidence_items(best.metric, (best.low, best.high), best.tied)
            if best
            else "nothing evaluated yet",
        ),
        ("", "Training loss", number(status.loss), ""),
        ("", "Throughput", number(status.throughput), f"samples a second{_tokens(status, timeline)}"),
        (
            "",
            "Workers",
            f"{workers.ready} of {workers.desired}" if workers else "–",
            f"world size {status.world_size}" if status.world_size else "no group now",
        ),
        ("", "Generation", number(status.generation), count_noun(status.restarts, "restart")),
        (
            "",
            "Newest checkpoint",
            f"step {newest.step:,}" if newest else "–",
            f"evaluated up to step {evaluated.step:,}" if evaluated else "",
        ),
        (
            "",
            "Evaluation lag",
            "–" if lag is None else count_noun(lag, "step"),
            "behind the newest checkpoint" if lag else "",
        ),
        _use_tile(use.gpu if use else None, use.trainer_cpu if use else None, use.evaluator_cpu if use else None),
    ]
    return "".join(
        f'<div class="{kind}"><dt>{_text(name)}</dt><dd>{_text(value)}</dd><dd class="more">{_text(more)}</dd></div>'
        for kind, name, value, more in tiles
    )


def _tokens(status: Status, timeline: Timeline | None) -> str:
    """The speed in tokens, if samples are text."""
    if status.throughput is None or timeline is None or timeline.tokens_per_sample is None:
        return ""
    return f" · {number(status.throughput * timeline.tokens_per_sample)} tokens"


def _on_validation(status: Status, timeline: Timeline | None) -> str:
    """The score by which the best checkpoint was chosen, if data is held out."""
    if status.best_checkpoint is None or timeline is None:
        return ""
    results = timeline.results.items()
    scores = next((result.validation for key, result in results if _is_best(key, status, timeline)), {})
    return on_validation(status.best_checkpoint.metric, scores)


def _use_tile(gpu: float | None, trainer: float | None, evaluator: float | None) -> tuple[str, str, str, str]:
    detail = f"evaluators {cores(evaluator)}" if evaluator is not None else ""
    if gpu is not None:
        return "", "GPU use", share(gpu), detail
    return (
        "",
        "Processors",
        cores(trainer),
        "of trainers" + (f", {detail}" * bool(detail)),
    )


def _members(glance: Glance) -> str:
    members = glance.snapshot.members
    if not members:
        had_generation = glance.snapshot.status.generation is not None
        return f'<p class="note">{"No worker is here now." if had_generation else "No worker has come yet."}</p>'
    slow = {straggler.replica: straggler.ratio for straggler in glance.snapshot.status.stragglers}
    rows = "".join(_member(member, slow.get(member.replica)) for member in members)
    more = glance.agents - len(members)
    more_note = f'<p class="note">And {more:,} more, which are at work.</p>' if more > 0 else ""
    heads = _header_row(("Replica", False), ("State", False), ("Ranks", True), ("Step", True), ("Silent", True),
                   ("Processors", True), ("Where", False))  # fmt: skip
    return _table(heads, rows) + more_note


def _member(member: MemberView, slow: float | None) -> str:
    step = max((rank.step for rank in member.ranks), default=None)
    busy = [rank.cpu for rank in member.ranks if rank.cpu is not None]
    state = member.state + (f", {slow:.1f} times as slow as the others" if slow else "")
    silent = elapsed(member.silent_seconds) if member.silent_seconds >= 3.0 else "–"
    return (
        f'<tr class="{"alert" if slow or member.silent_seconds >= 3.0 else ""}">'
        + _cell(member.replica)
        + _cell(state)
        + _number(", ".join(str(rank.rank) for rank in member.ranks[:8]) + (" …" if member.ranks[8:] else ""))
        + _number(f"{step:,}" if step else "–")
        + _number(silent)
        + _number(cores(sum(busy)) if busy else "–")
        + _cell(member.address)
        + "</tr>"
    )


def _generations(snapshot: Snapshot, timeline: Timeline | None) -> str:
    reported = {view.generation: view.seen() for view in snapshot.generations}
    logged = timeline.generations if timeline is not None else {}
    generations = {**logged, **reported}
    for common in reported.keys() & logged.keys():
        # A coordinator that was started again has not seen the end of what came before it; the log has.
        if generations[common].closed_at is None:
            generations[common] = replace(generations[common], closed_at=logged[common].closed_at)
    if not generations:
        return '<p class="note">None was formed yet.</p>'
    numbers = sorted(generations, reverse=True)[:MAX_TABLE_ROWS]
    rows = "".join(_generation(generations[number], number == numbers[0]) for number in numbers)
    heads = _header_row(("", True), ("Since", True), ("Ranks", True), ("Why it was formed", False), ("Members", False),
                   ("Lasted", True))  # fmt: skip
    return _table(heads, rows) + _omitted_note(len(generations) - len(numbers))


def _generation(generation: Generation, is_newest: bool) -> str:
    """The row of one generation. Only the newest can go on, also where no record says when another one ended."""
    opened, closed = generation.opened_at, generation.closed_at
    reason_text = ": ".join(part for part in (reason(generation.reason), generation.detail) if part)
    names = ", ".join(generation.members[:6]) + (
        f" and {len(generation.members) - 6} more" if len(generation.members) > 6 else ""
    )
    lasted = (
        "–"
        if generation.opened_at is None or (closed is None and not is_newest)
        else "goes on"
        if closed is None
        else duration(max(0.0, closed - generation.opened_at))
    )
    return (
        f'<tr class="{"best" if closed is None and is_newest else ""}">'
        + f'<td class="n">{generation.number}</td><td class="n">{_time(opened) if opened is not None else "–"}</td>'
        + _number("–" if generation.world_size is None else str(generation.world_size))
        + f'<td class="long">{_text(reason_text)}</td><td class="long">{_text(names)}</td>'
        + _number(lasted)
        + "</tr>"
    )


class _Columns(NamedTuple):
    """The columns of the table of checkpoints that not every run has."""

    metric: str
    """The deciding metric."""
    other_metrics: Sequence[str]
    """Metrics besides it."""
    holds_out: bool
    """Whether there are scores on validation data."""
    has_intervals: bool
    """Whether the deciding metric has confidence intervals."""
    ahead: Container[Key]
    """The checkpoints that were better than each before them by more than chance."""


def _checkpoints(status: Status, timeline: Timeline | None) -> str:
    if timeline is None or not (timeline.saves or timeline.results):
        if status.latest_checkpoint is not None:
            # A save of Tandem's own is logged; of a file that the script writes, only its evaluation is.
            return '<p class="note">A checkpoint that the script writes is listed here once it has been evaluated.</p>'
        return '<p class="note">None was written yet.</p>'
    keys = sorted({*timeline.saves, *timeline.results}, reverse=True)
    scored_checkpoint = status.best_checkpoint or status.latest_evaluation
    metric = scored_checkpoint.metric if scored_checkpoint is not None else timeline.metric
    shown_keys = keys[:MAX_CHECKPOINTS]
    shown_keys += [key for key in keys[MAX_CHECKPOINTS:] if _is_best(key, status, timeline)][:1]
    base = timeline.base
    results = [*timeline.results.values(), *([base] if base is not None else [])]
    metric, *other_metrics = metric_columns(
        metric, (result.metrics for result in results), base.metrics if base else ()
    )
    columns = _Columns(
        metric,
        other_metrics,
        holds_out=any(result.validation for result in results),
        has_intervals=any(metric in result.intervals for result in results),
        ahead=timeline.ahead(metric),
    )
    rows = "".join(_checkpoint(key, columns, status, timeline) for key in shown_keys)
    rows += _base_model(base, columns) if base is not None else ""
    heads = _header_row(("Step", True), ("At", True), (metric_title(metric), True),
                   *([("95 % interval", True)] if columns.has_intervals else []),
                   *([("Validation", True)] if columns.holds_out else []),
                   *((metric_title(name), True) for name in other_metrics),
                   ("Size", True), ("Stall", True), ("Generation", True), ("Evaluation", False))  # fmt: skip
    return _table(heads, rows) + _omitted_note(len(keys) - len(shown_keys))


def _is_best(key: Key, status: Status, timeline: Timeline) -> bool:
    best, result = status.best_checkpoint, timeline.results.get(key)
    return best is not None and result is not None and key[0] == best.name and timeline.counts(result.checkpoint)


def _checkpoint(key: Key, columns: _Columns, status: Status, timeline: Timeline) -> str:
    save, result = timeline.saves.get(key), timeline.results.get(key)
    reference = save.checkpoint if save else result.checkpoint if result else None
    assert reference is not None, "a key is of one of the two"
    counting = timeline.counts(reference)
    metric, metrics = columns.metric, result.metrics if result else {}
    base = timeline.base.metrics if timeline.base is not None else {}
    validation, intervals = (result.validation, result.intervals) if result else ({}, {})
    state = _evaluation_state(result, counting, status) + (", better than all before" if key in columns.ahead else "")
    kind = "best" if _is_best(key, status, timeline) else "" if counting else "off"
    return (
        f'<tr class="{kind}">'
        + _number(f"{reference.step:,}")
        + f'<td class="n">{_time(save.saved_at) if save else "–"}</td>'
        + _number(_score(metric, metrics, base))
        + (_number(interval(metric, intervals.get(metric)) or "–") if columns.has_intervals else "")
        + (_number(_score(metric, validation, {})) if columns.holds_out else "")
        + "".join(_number(_score(other, metrics, base)) for other in columns.other_metrics)
        + _number(size(save.size if save else None))
        + _number(duration(save.stall_seconds if save else None))
        + _number(str(reference.generation))
        + _cell(state)
        + "</tr>"
    )


def _base_model(result: EvaluationResult, columns: _Columns) -> str:
    """The table row of the base model."""
    unknown, metric = _number("–"), columns.metric
    return (
        "<tr>"
        + _cell("base model")
        + unknown
        + _number(_score(metric, result.metrics, {}))
        + (_number(interval(metric, result.intervals.get(metric)) or "–") if columns.has_intervals else "")
        + unknown * columns.holds_out
        + "".join(_number(_score(other, result.metrics, {})) for other in columns.other_metrics)
        + unknown * 3
        + _cell(result.skipped or "evaluated")
        + "</tr>"
    )


def _score(metric: str, metrics: Mapping[str, float], base: Mapping[str, float]) -> str:
    """Format a score, and its difference from that of the base model."""
    if metric not in metrics:
        return "–"
    text = score(metric, metrics[metric])
    return f"{text} ({change(metric, base[metric], metrics[metric])})" if metric in base else text


def _completions(timeline: Timeline | None) -> str:
    return completions.draw(timeline.completions, MAX_PROMPTS, MAX_TEXT_LENGTH) if timeline is not None else ""


def _evaluation_state(result: EvaluationResult | None, counting: bool, status: Status) -> str:
    if not counting:
        return "superseded after a restart"
    if result is not None:
        if result.is_failure:
            return result.skipped
        return "skipped" if result.skipped else "evaluated"
    return "waits to be evaluated" if status.evaluators and status.evaluators.desired else "–"


def _events(snapshot: Snapshot, timeline: Timeline | None) -> str:
    recent = [(event.at, event.kind, event.text) for event in snapshot.events]
    recent_since = min((time for time, _, _ in recent), default=float("inf"))
    earlier = [entry for entry in (timeline.events if timeline is not None else ()) if entry[0] < recent_since - 0.01]
    every = [*earlier, *recent][-MAX_EVENTS:]
    if not every:
        return '<p class="note">Nothing yet.</p>'
    return "<ol>" + "".join(_event(time, level, text) for time, level, text in reversed(every)) + "</ol>"


def _event(time: float, level: str, text: str) -> str:
    kind = LEVELS.get(level, "")
    return f'<li class="{kind}">{_time(time)} <span>{_text(text)}</span></li>'


def _figure(svg: str, placeholder: str = "") -> str:
    """A chart, or a placeholder while there is none; without a placeholder its section is hidden."""
    if svg:
        return f"<figure>{svg}</figure>"
    return f'<p class="note">{escape(placeholder)}</p>' if placeholder else ""


def _table(heads: str, rows: str) -> str:
    return f'<div class="scroll"><table><thead>{heads}</thead><tbody>{rows}</tbody></table></div>'


def _header_row(*names: tuple[str, bool]) -> str:
    cells = (f'<th class="n">{escape(name)}</th>' if right else f"<th>{escape(name)}</th>" for name, right in names)
    return f"<tr>{''.join(cells)}</tr>"


def _cell(text: str) -> str:
    return f"<td>{_text(text)}</td>"


def _number(text: str) -> str:
    return f'<td class="n">{with_difference(truncate_end(text, MAX_TEXT_LENGTH))}</td>'


def _omitted_note(count: int) -> str:
    return (
        f'<p class="note">{count:,} earlier ones are left out here; tandem report shows all.</p>' if count > 0 else ""
    )


def _time(seconds: float) -> str:
    try:
        clock = f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return "–"
    return f'<time data-at="{seconds:.3f}" title="{utc_time(seconds)}">{clock}</time>'


def _text(text: object) -> str:
    """Shorten and escape a text that comes from a run."""
    content = str(text)
    return escape(truncate_end(content, MAX_TEXT_LENGTH))
