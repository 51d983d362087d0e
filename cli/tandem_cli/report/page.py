"""The page of a report: one HTML file without external resources, so that it opens offline.

Every text that comes from a run goes through `html.escape`; only what this package generates is inserted as it is. Each
picture is in the page twice, drawn for a wide and for a narrow screen, and CSS shows one of them: a picture made for a
desktop is unreadable on a phone however it is scaled. One script reads values off the charts and enlarges them; the
page's policy allows this script by its hash, and nothing that a run could contribute. Rejected: a script that draws in
the browser (a library to ship, and nothing to see in a mail preview), PNG images (blurred text, and a white block at
night).
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple, TypeVar

from tandem.formatting import (
    change,
    confidence_items,
    count_noun,
    duration,
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
    utc_time,
)
from tandem.wire.ledger import PURPOSES, format_bucket, ledger_rows
from tandem.wire.measures import Generation
from tandem.wire.status import phase_word, trouble_messages
from tandem.wire.wall_time import CAUSE_MEANINGS, CAUSE_NAMES, losses
from tandem_cli.report.by_class import class_accuracies, newest_evaluated
from tandem_cli.report.clock import Clock
from tandem_cli.report.run import RunCheckpoint, RunData, ahead, tied_count
from tandem_cli.report.summary import Summary
from tandem_coordinator import charts
from tandem_coordinator.charts import chart, completions

MAX_ROWS = 100
"""Rows of a table; of more the last are shown, and those that stand out."""

MAX_ALIKE = 2
"""Equal rows that are shown one by one; more of them become one row."""

MAX_CLASSES = 20
"""Classes that are compared; of more, those that lost most."""

MAX_EVENTS = 200
"""Events of the coordinator; of more the last are shown."""

MAX_PROMPTS, MAX_CHARACTERS = 64, 2_000
"""Prompts that are shown with their completions, and the length of each in characters."""


Entry = TypeVar("Entry")


class DrawnPicture(NamedTuple):
    """Picture that is ready for the page."""

    title: str
    finding: str
    wide: str
    """svg element for wide screens."""
    narrow: str
    """svg element for narrow screens."""


def page(
    run: RunData, summary: Summary, clock: Clock, pictures: Sequence[DrawnPicture], source: str, version: str
) -> str:
    """Build the whole page.

    Args:
        clock: clock of all times on it.
        source: the run directory, as the user named it.
        version: version of Tandem.
    """
    sections = [
        *(figure(picture) for picture in pictures),
        _nothing_yet(run, pictures),
        _completions(run),
        _checkpoints(run, clock),
        _by_class(run),
        _generations(run, clock),
        _wall_time(run),
        _ledger(run),
        _details(run, clock),
    ]
    body = [
        _header(run, summary),
        "<main>",
        *_with_contents([section for section in sections if section]),
        "</main>",
        f"<footer><p>Made by tandem report {escape(version)} from {escape(source)}, "
        f"as it was at {utc_time(run.ended_at)}.</p>{_provenance(run)}</footer>",
    ]
    return document(run.title, body)


def _provenance(run: RunData) -> str:
    """The end of the run's record, so that a page which was sent on tells whether entries were removed since."""
    if run.provenance is None:
        return ""
    entries = count_noun(run.provenance.entries, "entry", "entries")
    return f"<p>The record of the run has {entries}, the last {run.provenance.head}: tandem prove verifies it.</p>"


def _with_contents(sections: Sequence[str]) -> list[str]:
    """Put the sections below a list of those that have a heading."""
    parts, links = [], []
    for place, section in enumerate(sections, 1):
        heading = _HEADING.match(section)
        if heading is None:
            parts.append(section)
            continue
        links.append(f'<a href="#s{place}">{heading[1]}</a>')
        parts.append(section.replace("<section>", f'<section id="s{place}">', 1))
    return [f'<nav class="contents">{"".join(links)}</nav>', *parts] if links else parts


_HEADING = re.compile("<section><h2>(.*?)</h2>")


def document(title: str, body: Iterable[str]) -> str:
    """Build a page that loads nothing from anywhere.

    Args:
        title: title, unescaped.
        body: HTML in which everything that comes from a run is escaped.
    """
    script = f"//<![CDATA[\n{charts.script()}//]]>"
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'; base-uri 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(title)} · Tandem</title>\n"
        f"<style>\n{chart.variables()}{charts.style()}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + f"\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _header(run: RunData, summary: Summary) -> str:
    message = f'<p class="why">{_sentence(run.message)}</p>' if run.message else ""
    tiles = "".join(
        f'<div class="{kind}"><dt>{escape(name)}</dt><dd>{escape(value)}</dd>'
        + (f'<dd class="more">{escape(more)}</dd>' if more else "")
        + "</div>"
        for kind, name, value, more in _tiles(run, summary)
    )
    return (
        f'<header><div class="title"><h1>{escape(run.title)}</h1>'
        f'<span class="result {run.result}">{phase_word(run.result, run.message)}</span></div>'
        f'<p class="lead">{escape(_lead(run))}</p>{message}{_troubles(run)}<dl class="tiles">{tiles}</dl></header>'
    )


def _sentence(message: str) -> str:
    """A message as HTML: it begins with a capital, and commands in backticks are code."""
    text = escape(message[:1].upper() + message[1:])
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def _troubles(run: RunData) -> str:
    """A line for each problem, red if it is an error, and for each promise that was missed."""
    kinds = {"error": "why bad", "warning": "why", "info": "note"}
    troubles = [(kinds[trouble.level], trouble.text) for trouble in trouble_messages(run.troubles)]
    missed = [("why", f"Missed: {sentence}") for sentence in run.missed]
    return "".join(f'<p class="{kind}">{escape(text)}</p>' for kind, text in [*troubles, *missed])


def _lead(run: RunData) -> str:
    """Summarize the job in a sentence."""
    sentences = []
    if run.job is not None:
        spec = run.job.spec
        if spec.trainer.own_task is not None:
            subject = spec.trainer.own_task
        elif spec.trainer.is_built_in:
            subject = f"{spec.trainer.images.model} on {spec.trainer.images.data.name}"
        else:
            subject = " ".join([*(spec.trainer.command or []), *spec.trainer.args])
        processes = spec.workers.replicas * spec.workers.processes
        subject += f", {count_noun(processes, 'training process', 'training processes')}"
        if spec.evaluation.processes:
            subject += f", {count_noun(spec.evaluation.processes, 'evaluator')}"
        sentences.append(f"{subject}.")
    if run.ended_at:
        sentences.append(f"Started {utc_time(run.started_at)}.")
    return " ".join(sentences)


def _tiles(run: RunData, summary: Summary) -> Iterable[tuple[str, str, str, str]]:
    """Generate kind, name, value and a second line of each key figure."""
    best = run.best.evaluation if run.best else None
    # What a script without evaluators would be scored by is unknown.
    unscored = "Best score" if says_nothing(run) else f"Best test {metric_name(run.metric)}"
    yield (
        (
            "best",
            f"Best test {metric_name(run.metric)}",
            score(run.metric, best.metrics[run.metric]),
            f"at step {run.best.step:,}{on_validation(run.metric, best.validation)}"
            + confidence_items(run.metric, best.intervals.get(run.metric), tied_count(run)),
        )
        if best and run.best
        else ("", unscored, "–", "nothing evaluated")
    )
    total = f"of {run.total_steps:,}" if run.total_steps else ""
    redone = f"{summary.redone:,} done again" if summary.redone else ""
    if says_nothing(run):
        yield "", "Steps", "–", "tandem.log reports them"
    else:
        yield "", "Steps", f"{summary.steps:,}", " · ".join(part for part in (total, redone) if part)
    yield "", "Duration", duration(summary.seconds), "pauses left out" if summary.pauses else ""
    wall = None if run.ledger is None else run.ledger.wall
    if wall is not None and wall.ettr is not None:
        largest = [f"{CAUSE_NAMES[cause]} {share(seconds / wall.total)}" for cause, seconds in losses(wall)[:2]]
        yield "", "ETTR", share(wall.ettr), " · ".join(largest)
    yield "", "Throughput", number(summary.throughput), "samples a second, median"
    if summary.tokens is not None:
        learned_tokens = (
            f", {number(summary.learned_tokens)} of them learned" if summary.learned_tokens is not None else ""
        )
        yield "", "Tokens", number(summary.tokens), f"a second without padding{learned_tokens}"
    yield "", "Restarts", f"{summary.restarts:,}", count_noun(len(run.generations), "generation")
    lost = f"longest {duration(summary.stall_longest)} · {share(summary.stall_share)} of the run"
    yield (
        "",
        "Checkpoint stall",
        duration(summary.stall_median),
        "median, " + lost if summary.stall_longest is not None else "",
    )
    lag_steps = None if says_nothing(run) else summary.lag_steps
    steps = f"median, {count_noun(lag_steps, 'step')} of training" if lag_steps is not None else ""
    yield "", "Evaluation lag", duration(summary.lag_seconds), steps
    passed = f", {summary.skipped:,} skipped" if summary.skipped else ""
    yield "", "Checkpoints", f"{summary.checkpoints:,}", f"{summary.evaluated:,} evaluated{passed}"


def says_nothing(run: RunData) -> bool:
    """Whether the run is of a script that logs no steps."""
    return run.job is not None and run.job.spec.trainer.command is not None and not len(run.model_steps)


def figure(picture: DrawnPicture) -> str:
    """A picture with its title and its finding."""
    finding = f'<p class="finding">{escape(picture.finding)}</p>' if picture.finding else ""
    charted = ' class="charted"' if 'class="chart"' in picture.wide else ""
    return (
        f"<section><h2>{escape(picture.title)}</h2>{finding}"
        f'<figure{charted}><div class="wide">{picture.wide}</div><div class="narrow">{picture.narrow}</div></figure>'
        "</section>"
    )


def _nothing_yet(run: RunData, pictures: Sequence[DrawnPicture]) -> str:
    if says_nothing(run):
        return (
            '<section><p class="finding">The script logs no steps. One line in its loop, '
            "<code>tandem.log(step=step, loss=loss)</code>, shows here how far it is, its loss, its throughput and "
            "where its time goes.</p></section>"
        )
    if pictures:
        return ""
    return '<section><p class="finding">Nothing was logged yet: no step, no evaluation, no processor use.</p></section>'


class _Columns(NamedTuple):
    """The columns of the table of checkpoints that not every run has."""

    other_metrics: Sequence[str]
    """Metrics besides the deciding one."""
    holds_out: bool
    """Whether there are scores on validation data."""
    has_intervals: bool
    """Whether the deciding metric has confidence intervals."""
    ahead: frozenset[str]
    """Names of the checkpoints that were better than each before them by more than chance."""

    @property
    def unknown(self) -> list[str]:
        """The cells of a checkpoint without scores."""
        return ["–"] * (1 + self.has_intervals + self.holds_out + len(self.other_metrics))


def _checkpoints(run: RunData, clock: Clock) -> str:
    if not run.checkpoints:
        return ""
    best = run.best
    visible = _last(run.checkpoints, [c for c in run.checkpoints if c is best or c.bad])
    evaluated = [c.evaluation for c in run.checkpoints if c.evaluation]
    scored = [*run.checkpoints, *([run.base] if run.base is not None else [])]
    compared = run.base.evaluation.metrics if run.base is not None and run.base.evaluation else ()
    metric, *other_metrics = metric_columns(
        run.metric, (c.evaluation.metrics for c in scored if c.evaluation), compared
    )
    columns = _Columns(
        other_metrics,
        holds_out=any(evaluation.validation for evaluation in evaluated),
        has_intervals=any(run.metric in evaluation.intervals for evaluation in evaluated),
        ahead=ahead(run),
    )
    rows = _base_model(run.base, run.metric, columns) if run.base is not None else ""
    rows += "".join(_alike(alike, run, clock, columns) for alike in _folded(visible, best, clock))
    heads = _heads(
        # Scores first: a phone shows the first columns.
        ("Step", True), ("At", True), (metric_title(metric), True),
        *([("95 % interval", True)] if columns.has_intervals else []),
        *([("Validation", True)] if columns.holds_out else []),
        *((metric_title(other), True) for other in other_metrics), ("Generation", True), ("Size", True),
        ("Stall", True), ("Commit", True), ("Evaluation", False),
    )  # fmt: skip
    return (
        f"<section><h2>Checkpoints</h2>{_omitted(len(run.checkpoints) - len(visible))}"
        f'<div class="scroll"><table><thead>{heads}</thead><tbody>{rows}</tbody></table></div>{_unsaved(run)}</section>'
    )


def _by_class(run: RunData) -> str:
    """The accuracy of each class: the newest checkpoint beside the best."""
    classes, newest = class_accuracies(run), newest_evaluated(run)
    if not classes or newest is None or run.best is None:
        return ""
    regressions = [row.name for row in classes if row.is_regression]
    finding = (
        f"Of {count_noun(len(classes), 'class', 'classes')}, {len(regressions) or 'none'} became worse by more than "
        f"chance since step {run.best.step:,}{': ' if regressions else ''}{', '.join(regressions[:MAX_CLASSES])}."
    )
    mark = '<span class="bad">worse</span>'
    rows = "".join(
        f"<tr><td>{escape(row.name)}</td>"
        + _cells(
            f"{row.samples:,}",
            score("accuracy", row.best.value),
            score("accuracy", row.newest.value),
            change("accuracy", row.best.value, row.newest.value),
        )
        + f"<td>{mark if row.is_regression else ''}</td></tr>"
        for row in classes[:MAX_CLASSES]
    )
    heads = _heads(
        ("Class", False), ("Samples", True), (f"Step {run.best.step:,}, the best", True),
        (f"Step {newest.step:,}, the newest", True), ("Change", True), ("By more than chance", False),
    )  # fmt: skip
    return (
        f'<section><h2>Classes since the best checkpoint</h2><p class="finding">{escape(finding)}</p>'
        f'<div class="scroll"><table><thead>{heads}</thead><tbody>{rows}</tbody></table></div></section>'
    )


def _folded(
    visible: Sequence[RunCheckpoint], best: RunCheckpoint | None, clock: Clock
) -> Iterable[list[RunCheckpoint]]:
    """Group consecutive rows that differ in nothing but their time."""
    for _, group in groupby(
        visible,
        lambda checkpoint: (
            _fate(checkpoint, clock),
            checkpoint.counts,
            checkpoint.evaluation is None and checkpoint is not best,
        ),
    ):
        alike = list(group)
        if alike[0].evaluation is None and len(alike) > MAX_ALIKE:
            yield alike
        else:
            yield from ([checkpoint] for checkpoint in alike)


def _alike(alike: Sequence[RunCheckpoint], run: RunData, clock: Clock, columns: _Columns) -> str:
    """The row of one checkpoint, or of several with the same outcome."""
    first, last = alike[0], alike[-1]
    if first is last:
        return _checkpoint(first, run, clock, columns)
    return (
        f'<tr class="{"" if first.counts else "off"}">'
        + _cells(f"{first.step:,} to {last.step:,}", _age(first, clock), *columns.unknown, *["–"] * 4)
        + f'<td class="long">{count_noun(len(alike), "checkpoint")}: {_fate(first, clock)}</td></tr>'
    )


def _age(checkpoint: RunCheckpoint, clock: Clock) -> str:
    return duration(clock.since_start(checkpoint.written_at)) if checkpoint.written_at is not None else "–"


def _checkpoint(checkpoint: RunCheckpoint, run: RunData, clock: Clock, columns: _Columns) -> str:
    metrics = checkpoint.evaluation.metrics if checkpoint.evaluation else {}
    validation = checkpoint.evaluation.validation if checkpoint.evaluation else {}
    base = run.base.evaluation.metrics if run.base is not None and run.base.evaluation else {}
    intervals = checkpoint.evaluation.intervals if checkpoint.evaluation else {}
    kind = "best" if checkpoint is run.best else "off" if not checkpoint.counts else ""
    ahead = ", better than all before" if checkpoint.counts and checkpoint.name in columns.ahead else ""
    file = f"{escape(checkpoint.path)}: " if checkpoint.path else ""
    return (
        f'<tr class="{kind}">'
        + _cells(
            f"{checkpoint.step:,}",
            _age(checkpoint, clock),
            _score(run.metric, metrics, base),
            *([interval(run.metric, intervals.get(run.metric)) or "–"] if columns.has_intervals else []),
            *([_score(run.metric, validation, {})] if columns.holds_out else []),
            *(_score(other, metrics, base) for other in columns.other_metrics),
            "–" if checkpoint.generation is None else f"{checkpoint.generation}",
            size(checkpoint.size),
            duration(checkpoint.stall_seconds),
            duration(checkpoint.commit_seconds),
        )
        + f'<td class="long">{file}{_fate(checkpoint, clock)}{ahead}</td></tr>'
    )


def _base_model(base: RunCheckpoint, metric: str, columns: _Columns) -> str:
    """The row of the base model."""
    metrics = base.evaluation.metrics if base.evaluation else {}
    intervals = base.evaluation.intervals if base.evaluation else {}
    scores = [
        _score(metric, metrics, {}),
        *([interval(metric, intervals.get(metric)) or "–"] if columns.has_intervals else []),
        *["–"] * columns.holds_out,
        *(_score(other, metrics, {}) for other in columns.other_metrics),
    ]
    fate = "evaluated" if base.evaluation else base.skipped or ""
    return "<tr>" + _cells("base model", "–", *scores, *["–"] * 4) + f'<td class="long">{escape(fate)}</td></tr>'


def _score(metric: str, metrics: Mapping[str, float], base: Mapping[str, float]) -> str:
    """A score, and its difference from the base model's."""
    value = metrics.get(metric)
    if value is None or value != value:
        return "–"
    formatted, before = score(metric, float(value)), base.get(metric)
    return formatted if before is None or before != before else f"{formatted} ({change(metric, before, float(value))})"


def _completions(run: RunData) -> str:
    table = completions.draw(run.completions, MAX_PROMPTS, MAX_CHARACTERS)
    return f"<section><h2>What the model writes</h2>{table}</section>" if table else ""


def _fate(checkpoint: RunCheckpoint, clock: Clock) -> str:
    """Describe the outcome of a checkpoint."""
    if checkpoint.bad is not None:
        return f'<span class="bad">bad</span>: {escape(checkpoint.bad)}'
    parts = []
    evaluation = checkpoint.evaluation
    if evaluation is not None:
        took = ""
        if evaluation.started_at is not None and evaluation.finished_at is not None:
            took = f" in {duration(clock.between(evaluation.started_at, evaluation.finished_at))}"
        parts.append(f"evaluated{took}")
    elif checkpoint.skipped is not None:
        parts.append(f"skipped: {checkpoint.skipped}")
    elif checkpoint.counts:
        parts.append("not evaluated")
    if not checkpoint.counts:
        parts.append("superseded after a restart")
    if checkpoint.on_disk:
        parts.append("on disk")
    return escape(", ".join(parts))


def _unsaved(run: RunData) -> str:
    if not run.unsaved:
        return ""
    steps = ", ".join(f"{step:,}" for step, _ in run.unsaved[:8]) + (", …" if len(run.unsaved) > 8 else "")
    reasons = ", ".join(dict.fromkeys(reasons for _, reasons in run.unsaved if reasons))[:300]
    return (
        f'<p class="note">{count_noun(len(run.unsaved), "save")} skipped, at step {steps}'
        f"{': ' + escape(reasons) if reasons else ''}.</p>"
    )


def _generations(run: RunData, clock: Clock) -> str:
    if not run.generations:
        return ""
    visible = _last(run.generations, run.generations[:1])
    rows = "".join(_generation(generation, clock) for generation in visible)
    heads = _heads(
        ("Generation", True), ("At", True), ("Ranks", True), ("From step", True), ("To step", True), ("Formed", False),
        ("Members", False), ("Ended", False),
    )  # fmt: skip
    return (
        f"<section><h2>Generations</h2>{_omitted(len(run.generations) - len(visible))}"
        f'<div class="scroll"><table><thead>{heads}</thead><tbody>{rows}</tbody></table></div></section>'
    )


def _generation(generation: Generation, clock: Clock) -> str:
    opened = duration(clock.since_start(generation.opened_at)) if generation.opened_at is not None else "–"
    formed = ": ".join(part for part in (reason(generation.reason), generation.detail) if part)
    members = ", ".join(generation.members[:6]) + (
        f" and {len(generation.members) - 6} more" if generation.members[6:] else ""
    )
    return (
        "<tr>"
        + _cells(
            f"{generation.number}",
            opened,
            "–" if generation.world_size is None else f"{generation.world_size}",
            "–" if generation.resumed_step is None else f"{generation.resumed_step:,}",
            "–" if generation.last_step is None else f"{generation.last_step:,}",
        )
        + "".join(f'<td class="long">{escape(text) or "–"}</td>' for text in (formed, members, generation.ended))
        + "</tr>"
    )


def _wall_time(run: RunData) -> str:
    """The wall time by cause, and advice."""
    wall = None if run.ledger is None else run.ledger.wall
    if wall is None or wall.ettr is None:
        return ""
    rows = [("training", wall.training), *losses(wall)]
    body = "".join(
        f"<tr><td>{_titled(CAUSE_NAMES[cause])}</td>"
        f'{_cells(duration(seconds), share(seconds / wall.total))}<td class="long">{CAUSE_MEANINGS[cause]}</td></tr>'
        for cause, seconds in rows
    )
    body += f"<tr><td>Total</td>{_cells(duration(wall.total), share(1.0))}<td></td></tr>"
    body += (
        '<tr class="off"><td>Evaluators</td>'
        f'{_cells("–", "–")}<td class="long">how far evaluations slow steps down is not measured</td></tr>'
    )
    finding = (
        f"{share(wall.ettr)} of the time since the submission moved training forward (ETTR); steps were repeated "
        f"{count_noun(wall.setbacks, 'time')}, and {count_noun(wall.saves, 'save')} blocked training."
    )
    if wall.interval_seconds is not None:
        finding += f" checkpoint.every: Auto saves every {duration(wall.interval_seconds)} now."
    if wall.mirror_seconds is not None:
        finding += f" Mirrors are taken every {duration(wall.mirror_seconds)}."
    advice = f'<p class="finding">Advice: {escape(wall.advice)}.</p>' if wall.advice else ""
    heads = _heads(("For", False), ("Time", True), ("Share", True), ("Meaning", False))
    return (
        f'<section><h2>Time since the submission</h2><p class="finding">{finding}</p>{advice}'
        f'<div class="scroll"><table><thead>{heads}</thead><tbody>{body}</tbody></table></div></section>'
    )


def _ledger(run: RunData) -> str:
    """GPU-hours, CPU-hours and cost: a row for each purpose, and the sums; and the requests to the bucket."""
    columns = list(ledger_rows(run.ledger))
    bucket = None if run.ledger is None else run.ledger.bucket
    note = "" if bucket is None else f"<p>Bucket: {escape(format_bucket(bucket))}</p>"
    if not columns:
        return f"<section><h2>Hours and cost</h2>{note}</section>" if note else ""
    rows = [(purpose, [getattr(hours, purpose) for _, hours, _ in columns]) for purpose in PURPOSES]
    lines = [(_titled(purpose), values) for purpose, values in rows if any(values)]
    lines.append(("Total", [hours.total for _, hours, _ in columns]))
    body = "".join(
        f"<tr><td>{name}</td>"
        + "".join(
            _cells(written(value), share(value / hours.total))
            for value, (_, hours, written) in zip(values, columns, strict=True)
        )
        + "</tr>"
        for name, values in lines
    )
    heads = _heads(
        ("For", False), *(head for name, _, _ in columns for head in ((_titled(name), True), ("Share", True)))
    )
    return (
        "<section><h2>Hours and cost</h2>"
        f'<div class="scroll"><table><thead>{heads}</thead><tbody>{body}</tbody></table></div>{note}</section>'
    )


def _titled(name: str) -> str:
    return f"{name[0].upper()}{name[1:]}"


def _details(run: RunData, clock: Clock) -> str:
    parts = []
    if run.faults:
        items = "".join(f"<li>{escape(fault)}</li>" for fault in run.faults[:MAX_EVENTS])
        parts.append(f'<details open="open"><summary>What could not be read</summary><ul>{items}</ul></details>')
    if run.events:
        items = "".join(
            f"<li>{duration(clock.since_start(event.time))}: {escape(event.text)}"
            + (f" ({escape(event.level)})" if event.level != "info" else "")
            + "</li>"
            for event in run.events[-MAX_EVENTS:]
        )
        parts.append(f"<details><summary>Events of the coordinator</summary><ul>{items}</ul></details>")
    if run.job_text:
        parts.append(f"<details><summary>The job</summary><pre>{escape(run.job_text)}</pre></details>")
    return f"<section>{''.join(parts)}</section>" if parts else ""


def _heads(*names: tuple[str, bool]) -> str:
    return "<tr>" + "".join(f"<th{_numeric(right)}>{escape(name)}</th>" for name, right in names) + "</tr>"


def _numeric(right: bool) -> str:
    return ' class="n"' if right else ""


def _cells(*values: str) -> str:
    return "".join(f'<td class="n">{charts.with_difference(value)}</td>' for value in values)


def _last(entries: Sequence[Entry], always: Sequence[Entry]) -> list[Entry]:
    """Select the last rows, and those that must not be missing, in order."""
    chosen = {id(entry) for entry in (*entries[-MAX_ROWS:], *always[-MAX_ROWS:])}
    return [entry for entry in entries if id(entry) in chosen]


def _omitted(count: int) -> str:
    return f'<p class="note">{count:,} earlier ones are left out here; the logs have them.</p>' if count else ""
