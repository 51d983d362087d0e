"""Checkpoints as text: position, origin, scores, files, the rules that keep each; results of verification, and the
plan of pruning."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from tandem.confidence import Interval
from tandem.formatting import confidence, count_noun, metric_name, printable, score, size, utc_time
from tandem.rundir.checkpoint import Manifest
from tandem.rundir.lineage import DatasetCommit, GenerationRecord, Origin
from tandem_cli.checkpoints.inventory import Entry, Inventory
from tandem_cli.checkpoints.listing import STATES, Column, age, entry_json, paragraph, plain, state, table
from tandem_cli.checkpoints.pruning import Doomed, Pruning
from tandem_cli.checkpoints.verification import Verification

MAX_ANCESTORS = 12
"""Generations of a lineage that are shown; of a longer one, the first and the last."""
MAX_DATASETS = 8
"""Data sets of a mixture that are shown."""


def lines(entry: Entry, inventory: Inventory, width: int | None) -> list[Text]:
    """Describe a checkpoint.

    Args:
        width: columns of the terminal; None if the output is not a terminal.
    """
    rows: list[tuple[str, str]] = [("folder", str(inventory.rundir.checkpoint(entry.name)))]
    if entry.written_at is not None:
        rows.append(("written", f"{utc_time(entry.written_at)}, {age(entry, inventory.now)} ago"))
    if entry.size is not None:
        rows.append(("size", f"{size(entry.size)} ({entry.size:,} bytes)"))
    if manifest := entry.manifest:
        rows += _position(manifest)
        rows += [("written by", _author(manifest))]
        ancestors = lineage(manifest, inventory.records)
        rows += [("lineage" if index == 0 else "", text) for index, text in enumerate(_shortened(ancestors))]
        rows += _evaluation(entry, inventory)
    rows += [("kept for", text) for text in [_retained_for(entry, inventory)] if text]
    rows += [("being read", reader) for reader in entry.readers]
    if entry.manifest:
        rows += _files(entry.manifest)
        if entry.manifest.versions:
            versions = ", ".join(f"{name} {version}" for name, version in sorted(entry.manifest.versions.items()))
            rows.append(("versions", versions))
    head = Text.assemble((entry.name, "bold"), "  ", (plain(state(entry)), STATES[entry.state][1]))
    lines = [head]
    for label, text in rows:
        lines += paragraph(label, text, width)
    return lines


def lineage(manifest: Manifest, records: Sequence[GenerationRecord]) -> list[str]:
    """Trace a checkpoint back to the start: a phrase for each generation."""
    by_generation = {record.generation: record for record in records}
    step, generation = manifest.step, manifest.generation
    phrases: list[str] = []
    while True:
        record = by_generation.get(generation)
        # The record of a generation may be lost; the manifest still names the parent.
        if record is None:
            is_own = generation == manifest.generation and manifest.parent
            source = f", which resumed from {manifest.parent}" if is_own else ""
            return [*phrases, f"step {step:,} by generation {generation}{source}; its record is missing"]
        parent = record.parent
        # A generation resumes from an older one; anything else is damage, and would loop for ever.
        if parent is None or parent.generation >= generation:
            begin = _beginning(record.origin)
        elif record.continues is None and record.resumed_from is not None:
            begin = f"{record.resumed_from.name} of generation {parent.generation}"
        else:
            way = "without a restart" if record.is_regrouped else "from memory"
            begin = f"step {parent.step:,} of generation {parent.generation}, {way}"
        ranks = count_noun(record.world_size, "rank")
        # Data sets that the generation before had read are not repeated.
        before = by_generation.get(parent.generation) if parent else None
        data = _data([dataset for dataset in record.datasets if before is None or dataset not in before.datasets])
        phrases.append(f"step {step:,} by generation {generation} with {ranks}, from {begin}{data}")
        if parent is None or parent.generation >= generation:
            return phrases
        step, generation = parent.step, parent.generation


def _beginning(origin: Origin | None) -> str:
    if origin is None:
        return "the beginning"
    if origin.checkpoint is None:
        commit = f" at commit {printable(origin.revision)}" if origin.revision else ""
        return f"the weights of {printable(origin.path)}{commit}"
    source = f"step {origin.checkpoint.step:,}{f' of {origin.job}' if origin.job else ''}"
    return f"the weights of {source} ({printable(origin.path)})"


def _data(datasets: Sequence[DatasetCommit]) -> str:
    """Name the data sets that a generation is the first to read."""
    names = [f"{printable(dataset.id)} at commit {printable(dataset.commit)}" for dataset in datasets[:MAX_DATASETS]]
    more = [f"{len(datasets) - MAX_DATASETS} more"] if len(datasets) > MAX_DATASETS else []
    return f"; data of {', '.join([*names, *more])}" if names else ""


def as_json(entry: Entry, inventory: Inventory) -> dict[str, Any]:
    """Describe a checkpoint as JSON."""
    record = entry_json(entry, inventory.metric)
    if manifest := entry.manifest:
        record["manifest"] = manifest.dump()
        record["lineage"] = lineage(manifest, inventory.records)
    return record


def _position(manifest: Manifest) -> list[tuple[str, str]]:
    data = manifest.data
    if data is None:
        return [("step", f"{manifest.step:,}")]
    place = f", {data.cursor:,} samples into the next" if data.cursor else ""
    done = f"{count_noun(data.epoch, 'epoch')} complete{place}; order of seed {data.seed}"
    return [("step", f"{manifest.step:,}"), ("data", done)]


def _author(manifest: Manifest) -> str:
    mesh = " × ".join(f"{name} {count}" for name, count in manifest.mesh.items())
    return (
        f"generation {manifest.generation} with {count_noun(manifest.world_size, 'rank')}{f' ({mesh})' if mesh else ''}"
    )


def _shortened(phrases: list[str]) -> list[str]:
    if len(phrases) <= MAX_ANCESTORS:
        return phrases
    half = MAX_ANCESTORS // 2
    omitted = count_noun(len(phrases) - 2 * half, "generation")
    return [*phrases[:half], f"… {omitted} more …", *phrases[-half:]]


def _evaluation(entry: Entry, inventory: Inventory) -> list[tuple[str, str]]:
    match entry.evaluation:
        case "evaluated":
            scores = _scores(entry.metrics, entry.intervals)
            samples = f" over {entry.evaluated_samples:,} samples" if entry.evaluated_samples else ""
            best = f"; the best {metric_name(inventory.metric)} there is" if entry.is_best else ""
            rows = [("evaluated", f"{scores}{samples}{best}")]
            if entry.validation:
                rows.append(("validation", f"{_scores(entry.validation)}, by which the best is chosen"))
            return rows
        case "skipped":
            return [("evaluated", "no: evaluators skipped it")]
        case "begun":
            return [("evaluated", "in part")]
        case "waits":
            return [("evaluated", "not yet")]
        case "off":
            return [("evaluated", "no: this job has no evaluators")]


def _scores(metrics: Mapping[str, float], intervals: Mapping[str, Interval] | None = None) -> str:
    ends = intervals or {}
    return ", ".join(
        f"{metric_name(name)} {score(name, value)}{confidence(name, ends.get(name))}" for name, value in metrics.items()
    )


def _retained_for(entry: Entry, inventory: Inventory) -> str:
    if entry.state == "counts" and inventory.job:
        actor = "`tandem checkpoints prune`" if inventory.final else "the next save"
        return ", ".join(entry.keep_reasons) or f"nothing: {actor} deletes it"
    match entry.state:
        case "off" | "rewound":
            return "nothing; only `tandem checkpoints prune --all` deletes it"
        case "bad" | "stale":
            return "inspection; `tandem checkpoints prune --all` deletes it"
        case _:
            return ""


def _files(manifest: Manifest) -> list[tuple[str, str]]:
    longest = max((len(entry.path) for entry in manifest.files), default=0)
    return [
        ("files" if index == 0 else "", f"{entry.path:<{longest}}  {size(entry.size):>8}")
        for index, entry in enumerate(manifest.files)
    ]


OUTCOMES = {"sound": "green", "damaged": "bold red", "unreadable": "bold red", "vanished": "dim"}


def verdict(verification: Verification, width: int | None) -> list[Text]:
    """Describe the verification of a checkpoint: a line, and one more for each further fault."""
    if verification.outcome == "sound":
        texts = [f"{count_noun(verification.files, 'file')}, {size(verification.size)}"]
    elif verification.outcome == "vanished":
        texts = ["it was deleted meanwhile, as retention does"]
    else:
        texts = list(verification.faults)
    columns = [Column(verification.name), Column(f"{verification.outcome:<10}"), Column("")]
    rows = [[(verification.name, ""), (verification.outcome.ljust(10), OUTCOMES[verification.outcome]), (texts[0], "")]]
    rows += [[("", ""), ("", ""), (text, "")] for text in texts[1:]]
    _, *lines = table(columns, rows, width)
    return lines


def verdict_json(verification: Verification) -> dict[str, Any]:
    """Describe the verification of a checkpoint as JSON."""
    return {
        "name": verification.name,
        "outcome": verification.outcome,
        "faults": list(verification.faults),
        "files": verification.files,
        "bytes": verification.size,
    }


def plan(pruning: Pruning, width: int | None) -> list[Text]:
    """Describe the plan of pruning: the checkpoints to delete, and those that stay."""
    lines = []
    if pruning.doomed:
        columns = [Column("TO DELETE"), Column("SIZE", is_right=True), Column("WHY")]
        rows = [[(doomed.name, "bold"), (size(doomed.size), ""), (doomed.reason, "dim")] for doomed in pruning.doomed]
        lines += [*table(columns, rows, width), Text("")]
    columns = [Column("STAYS"), Column("KEPT FOR")]
    if pruning.retained:
        lines += [
            *table(columns, [[(name, ""), (reason, "dim")] for name, reason in pruning.retained], width),
            Text(""),
        ]
    total = f"{pruning.what} to delete, {size(pruning.size)} to be freed"
    lines += paragraph("total", total if pruning.doomed else "nothing to delete", width, indent=7)
    if pruning.unneeded:
        lines += paragraph("note", _unneeded(pruning.unneeded), width, indent=7, style="yellow")
    return lines


def _unneeded(unneeded: tuple[Doomed, ...]) -> str:
    names = ", ".join(doomed.name for doomed in unneeded[:3]) + (
        f" and {len(unneeded) - 3} more" if len(unneeded) > 3 else ""
    )
    return (
        f"{size(sum(doomed.size for doomed in unneeded))} more in what does not count ({names}); --all deletes it, too"
    )
