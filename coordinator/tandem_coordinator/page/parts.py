"""The parts of the page as HTML. The browser places each part by its name. Pure.

Everything that comes from a run goes through `html.escape`. Times stand in UTC, with the second they mean: the browser
writes them in its own zone. No part has a style or a script of its own, which the page forbids.
"""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tandem.formatting import (
    change,
    cores,
    duration,
    elapsed,
    metric_columns,
    metric_name,
    metric_title,
    moment,
    number,
    on_validation,
    reason,
    score,
    several,
    share,
    shortened,
    size,
)
from tandem.measures import Generation
from tandem.rundir.catalog import Result
from tandem.status import MemberView, Snapshot, Status, phase_word, told
from tandem_coordinator.charts import completions
from tandem_coordinator.charts.chart import Look
from tandem_coordinator.page import pictures
from tandem_coordinator.page.timeline import Key, Timeline

MAX_ROWS = 30
"""Rows of a table; of more the newest are shown."""
MAX_CHECKPOINTS = 12
MAX_EVENTS = 60
MAX_PROMPTS = 16
FAILED = '<p class="why bad">The page cannot be drawn; the log of the coordinator says why.</p>'
MAX_LENGTH = 500
"""Characters of a text that comes from a run."""
LEVELS = {"info": "", "warning": "warning", "error": "error"}


@dataclass(frozen=True)
class Glance:
    """A job at one moment, small enough to be taken every second whatever its size."""

    snapshot: Snapshot
    """With few of its members."""
    agents: int
    """How many members there are."""


def words(glance: Glance, timeline: Timeline | None, complaint: str = "") -> dict[str, str]:
    """All parts without charts.

    Args:
        timeline: None while nothing was read yet.
        complaint: why the run directory cannot be read, if so.
    """
    snapshot = glance.snapshot
    return {
        "head": _head(snapshot, timeline),
        "note": _note(timeline, complaint),
        "tiles": _tiles(snapshot.status, timeline),
        "members": _members(glance),
        "generations": _generations(snapshot, timeline),
        "completions": _completions(timeline),
        "checkpoints": _checkpoints(snapshot.status, timeline),
        "events": _events(snapshot, timeline),
    }


def charts(glance: Glance, timeline: Timeline, look: Look) -> dict[str, str]:
    """All charts for one kind of screen."""
    status = glance.snapshot.status
    return {
        "losses": _figure(pictures.losses(timeline, status, look), "No step was logged yet."),
        "speed": _figure(pictures.speed(timeline, look), "No generation was formed yet."),
        "optimization": _figure(pictures.optimization(timeline, look)),
        "values": _figure(pictures.values(timeline, look)),
        "ranks": _figure(pictures.ranks(timeline, look)),
        "histograms": _figure(pictures.histograms(timeline, look)),
        "wrong": _figure(pictures.wrong(timeline, look)),
        "use": _figure(pictures.use(timeline, glance.snapshot, look), "No process has told its use yet."),
    }


def _head(snapshot: Snapshot, timeline: Timeline | None) -> str:
    status = snapshot.status
    title = snapshot.job if timeline is None else timeline.rundir.title(snapshot.job)
    message = f'<p class="why">{_text(status.message)}</p>' if status.message else ""
    phase = f'<span class="result {status.phase}">{phase_word(status.phase, status.message)}</span>'
    return f'<div class="title"><h1>{_text(title)}</h1>{phase}</div>{message}{_troubles(status)}{_progress(status)}'


def _troubles(status: Status) -> str:
    """A line for each kind of trouble; red where it is grave."""
    kinds = {"error": "why bad", "warning": "why", "info": "note"}
    return "".join(f'<p class="{kinds[one.level]}">{_text(one.text)}</p>' for one in told(status.troubles))


def _progress(status: Status) -> str:
    progress = status.progress
    if progress is None:
        return ""
    said = [f"step {progress.step:,}" + (f" of {progress.total_steps:,}" if progress.total_steps else "")]
    if progress.epoch is not None:
        said.append(f"epoch {progress.epoch:.1f}")
    if progress.remaining_seconds:
        said.append(f"about {elapsed(progress.remaining_seconds)} left")
    bar = ""
    if progress.percent is not None:
        bar = f'<progress max="100" value="{progress.percent:.1f}">{progress.percent:.0f} %</progress>'
    return f'{bar}<p class="lead">{_text(" · ".join(said))}</p>'


def _note(timeline: Timeline | None, complaint: str) -> str:
    if complaint:
        return f'<p class="why bad">The run directory cannot be read: {_text(complaint)}</p>'
    if timeline is None:
        return '<p class="note">Reading what was logged so far…</p>'
    if timeline.share_read < 0.999:
        return f'<p class="note">Reading what was logged so far: {share(timeline.share_read)}</p>'
    return ""


def _tiles(status: Status, timeline: Timeline | None) -> str:
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
            f"at step {best.step:,}{_on_validation(status, timeline)}" if best else "nothing evaluated yet",
        ),
        ("", "Training loss", number(status.loss), ""),
        ("", "Throughput", number(status.throughput), "samples a second"),
        (
            "",
            "Workers",
            f"{workers.ready} of {workers.desired}" if workers else "–",
            f"world size {status.world_size}" if status.world_size else "no group now",
        ),
        ("", "Generation", number(status.generation), several(status.restarts, "restart")),
        (
            "",
            "Newest checkpoint",
            f"step {newest.step:,}" if newest else "–",
            f"evaluated up to step {evaluated.step:,}" if evaluated else "",
        ),
        (
            "",
            "Evaluation lag",
            "–" if lag is None else several(lag, "step"),
            "behind the newest checkpoint" if lag else "",
        ),
        _use_tile(use.gpu if use else None, use.trainer_cpu if use else None, use.evaluator_cpu if use else None),
    ]
    return "".join(
        f'<div class="{kind}"><dt>{_text(name)}</dt><dd>{_text(value)}</dd><dd class="more">{_text(more)}</dd></div>'
        for kind, name, value, more in tiles
    )


def _on_validation(status: Status, timeline: Timeline | None) -> str:
    """By which score the best was chosen, where data is held out."""
    if status.best_checkpoint is None or timeline is None:
        return ""
    results = timeline.results.items()
    scores = next((one.validation for key, one in results if _is_best(key, status, timeline)), {})
    return on_validation(status.best_checkpoint.metric, scores)


def _use_tile(gpu: float | None, trainer: float | None, evaluator: float | None) -> tuple[str, str, str, str]:
    beside = f"evaluators {cores(evaluator)}" if evaluator is not None else ""
    if gpu is not None:
        return "", "GPU use", share(gpu), beside
    return (
        "",
        "Processors",
        cores(trainer),
        "of trainers" + (f", {beside}" * bool(beside)),
    )


def _members(glance: Glance) -> str:
    members = glance.snapshot.members
    if not members:
        gone = glance.snapshot.status.generation is not None
        return f'<p class="note">{"No worker is here now." if gone else "No worker has come yet."}</p>'
    slow = {straggler.replica: straggler.ratio for straggler in glance.snapshot.status.stragglers}
    rows = "".join(_member(member, slow.get(member.replica)) for member in members)
    more = glance.agents - len(members)
    left = f'<p class="note">And {more:,} more, which are at work.</p>' if more > 0 else ""
    heads = _heads(("Replica", False), ("State", False), ("Ranks", True), ("Step", True), ("Silent", True),
                   ("Processors", True), ("Where", False))  # fmt: skip
    return _table(heads, rows) + left


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
        + _number(f"{step:,}" if step is not None else "–")
        + _number(silent)
        + _number(cores(sum(busy)) if busy else "–")
        + _cell(member.address)
        + "</tr>"
    )


def _generations(snapshot: Snapshot, timeline: Timeline | None) -> str:
    told = {one.generation: one.seen() for one in snapshot.generations}
    known = {**(timeline.generations if timeline is not None else {}), **told}
    if not known:
        return '<p class="note">None was formed yet.</p>'
    shown = sorted(known, reverse=True)[:MAX_ROWS]
    rows = "".join(_generation(known[number]) for number in shown)
    heads = _heads(("", True), ("Since", True), ("Ranks", True), ("Why it was formed", False), ("Members", False),
                   ("Lasted", True))  # fmt: skip
    return _table(heads, rows) + _left_out(len(known) - len(shown))


def _generation(one: Generation) -> str:
    opened, closed = one.opened_at, one.closed_at
    why = ": ".join(part for part in (reason(one.reason), one.detail) if part)
    names = ", ".join(one.members[:6]) + (f" and {len(one.members) - 6} more" if len(one.members) > 6 else "")
    lasted = (
        "–" if one.opened_at is None else "goes on" if closed is None else duration(max(0.0, closed - one.opened_at))
    )
    return (
        f'<tr class="{"best" if closed is None else ""}">'
        + f'<td class="n">{one.number}</td><td class="n">{_time(opened) if opened is not None else "–"}</td>'
        + _number("–" if one.world_size is None else str(one.world_size))
        + f'<td class="long">{_text(why)}</td><td class="long">{_text(names)}</td>'
        + _number(lasted)
        + "</tr>"
    )


def _checkpoints(status: Status, timeline: Timeline | None) -> str:
    if timeline is None or not (timeline.saves or timeline.results):
        return '<p class="note">None was written yet.</p>'
    keys = sorted({*timeline.saves, *timeline.results}, reverse=True)
    scored = status.best_checkpoint or status.latest_evaluation
    metric = scored.metric if scored is not None else timeline.metric
    shown = keys[:MAX_CHECKPOINTS]
    shown += [key for key in keys[MAX_CHECKPOINTS:] if _is_best(key, status, timeline)][:1]
    holds_out = any(one.validation for one in timeline.results.values())
    base = timeline.base
    known = [*timeline.results.values(), *([base] if base is not None else [])]
    metric, *others = metric_columns(metric, (result.metrics for result in known), base.metrics if base else ())
    rows = "".join(_checkpoint(key, metric, others, status, timeline, holds_out) for key in shown)
    rows += _base_model(base, metric, others, holds_out) if base is not None else ""
    heads = _heads(("Step", True), ("At", True), (metric_title(metric), True),
                   *([("Validation", True)] if holds_out else []), *((metric_title(one), True) for one in others),
                   ("Size", True), ("Stall", True), ("Generation", True), ("Evaluation", False))  # fmt: skip
    return _table(heads, rows) + _left_out(len(keys) - len(shown))


def _is_best(key: Key, status: Status, timeline: Timeline) -> bool:
    best, result = status.best_checkpoint, timeline.results.get(key)
    return best is not None and result is not None and key[0] == best.name and timeline.counts(result.checkpoint)


def _checkpoint(
    key: Key, metric: str, others: Sequence[str], status: Status, timeline: Timeline, holds_out: bool
) -> str:
    save, result = timeline.saves.get(key), timeline.results.get(key)
    reference = save.checkpoint if save else result.checkpoint if result else None
    assert reference is not None, "a key is of one of the two"
    counting = timeline.counts(reference)
    metrics = result.metrics if result else {}
    base = timeline.base.metrics if timeline.base is not None else {}
    validation = result.validation.get(metric) if result else None
    kind = "best" if _is_best(key, status, timeline) else "" if counting else "off"
    return (
        f'<tr class="{kind}">'
        + _number(f"{reference.step:,}")
        + f'<td class="n">{_time(save.at) if save else "–"}</td>'
        + _number(_score(metric, metrics, base))
        + (_number("–" if validation is None else score(metric, validation)) if holds_out else "")
        + "".join(_number(_score(other, metrics, base)) for other in others)
        + _number(size(save.size if save else None))
        + _number(duration(save.stall_seconds if save else None))
        + _number(str(reference.generation))
        + _cell(_fate(result, counting, status))
        + "</tr>"
    )


def _base_model(result: Result, metric: str, others: Sequence[str], holds_out: bool) -> str:
    """The row of the model that training began with."""
    unknown = _number("–")
    return (
        "<tr>"
        + _cell("base model")
        + unknown
        + _number(_score(metric, result.metrics, {}))
        + unknown * holds_out
        + "".join(_number(_score(other, result.metrics, {})) for other in others)
        + unknown * 3
        + _cell(result.skipped or "evaluated")
        + "</tr>"
    )


def _score(metric: str, metrics: Mapping[str, float], base: Mapping[str, float]) -> str:
    """A score, and how it differs from that of the base model."""
    if metric not in metrics:
        return "–"
    found = score(metric, metrics[metric])
    return f"{found} ({change(metric, base[metric], metrics[metric])})" if metric in base else found


def _completions(timeline: Timeline | None) -> str:
    return completions.draw(timeline.completions, MAX_PROMPTS, MAX_LENGTH) if timeline is not None else ""


def _fate(result: Result | None, counting: bool, status: Status) -> str:
    if not counting:
        return "superseded after a restart"
    if result is not None:
        if result.is_failure:
            return result.skipped
        return "skipped" if result.skipped else "evaluated"
    return "waits to be evaluated" if status.evaluators and status.evaluators.desired else "–"


def _events(snapshot: Snapshot, timeline: Timeline | None) -> str:
    told = [(event.at, event.kind, event.text) for event in snapshot.events]
    before = min((at for at, _, _ in told), default=float("inf"))
    earlier = [entry for entry in (timeline.events if timeline is not None else ()) if entry[0] < before - 0.01]
    every = [*earlier, *told][-MAX_EVENTS:]
    if not every:
        return '<p class="note">Nothing yet.</p>'
    return "<ol>" + "".join(_event(at, level, text) for at, level, text in reversed(every)) + "</ol>"


def _event(at: float, level: str, text: str) -> str:
    kind = LEVELS.get(level, "")
    return f'<li class="{kind}">{_time(at)} <span>{_text(text)}</span></li>'


def _figure(svg: str, otherwise: str = "") -> str:
    """A drawing, or what is said while there is none; with nothing to say its section is hidden."""
    if svg:
        return f"<figure>{svg}</figure>"
    return f'<p class="note">{escape(otherwise)}</p>' if otherwise else ""


def _table(heads: str, rows: str) -> str:
    return f'<div class="scroll"><table><thead>{heads}</thead><tbody>{rows}</tbody></table></div>'


def _heads(*names: tuple[str, bool]) -> str:
    cells = (f'<th class="n">{escape(name)}</th>' if right else f"<th>{escape(name)}</th>" for name, right in names)
    return f"<tr>{''.join(cells)}</tr>"


def _cell(text: str) -> str:
    return f"<td>{_text(text)}</td>"


def _number(text: str) -> str:
    return f'<td class="n">{_text(text)}</td>'


def _left_out(count: int) -> str:
    return (
        f'<p class="note">{count:,} earlier ones are left out here; tandem report shows all.</p>' if count > 0 else ""
    )


def _time(at: float) -> str:
    try:
        clock = f"{datetime.datetime.fromtimestamp(at, datetime.UTC):%H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return "–"
    return f'<time data-at="{at:.3f}" title="{moment(at)}">{clock}</time>'


def _text(text: object) -> str:
    """A text that comes from a run: short, and harmless."""
    words_ = str(text)
    return escape(shortened(words_, MAX_LENGTH))
