"""The description of checkpoints as text: position, origin, scores, contents, why each is kept; the findings of
verification, and what pruning would delete.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from tandem.formatting import metric_name, moment, printable, score, several, size
from tandem.rundir.checkpoint import Manifest
from tandem.rundir.lineage import DatasetCommit, GenerationRecord, Origin
from tandem_cli.checkpoints.inventory import Entry, Inventory
from tandem_cli.checkpoints.listing import STATES, Column, age, entry_json, paragraph, plain, state, table
from tandem_cli.checkpoints.pruning import Doomed, Pruning
from tandem_cli.checkpoints.verification import Verification

MAX_ANCESTORS = 12
"""Longer lineages are shown by their ends."""
MAX_DATASETS = 8
"""Of a mixture."""


def lines(entry: Entry, inventory: Inventory, width: int | None) -> list[Text]:
    """What is known of a checkpoint.

    Args:
        width: of the terminal; None: of anything else.
    """
    rows: list[tuple[str, str]] = [("folder", str(inventory.rundir.checkpoint(entry.name)))]
    if entry.at is not None:
        rows.append(("written", f"{moment(entry.at)}, {age(entry, inventory.now)} ago"))
    if entry.size is not None:
        rows.append(("size", f"{size(entry.size)} ({entry.size:,} bytes)"))
    if manifest := entry.manifest:
        rows += _position(manifest)
        rows += [("written by", _author(manifest))]
        ancestors = lineage(manifest, inventory.records)
        rows += [("lineage" if index == 0 else "", text) for index, text in enumerate(_shortened(ancestors))]
        rows += _evaluation(entry, inventory)
    rows += [("kept for", text) for text in [_kept(entry, inventory)] if text]
    rows += [("being read", reader) for reader in entry.readers]
    if entry.manifest:
        rows += _files(entry.manifest)
        if entry.manifest.versions:
            versions = ", ".join(f"{name} {version}" for name, version in sorted(entry.manifest.versions.items()))
            rows.append(("versions", versions))
    head = Text.assemble((entry.name, "bold"), "  ", (plain(state(entry)), STATES[entry.state][1]))
    found = [head]
    for label, text in rows:
        found += paragraph(label, text, width)
    return found


def lineage(manifest: Manifest, records: Sequence[GenerationRecord]) -> list[str]:
    """Where a checkpoint comes from, back to the start: a phrase for each generation."""
    known = {record.generation: record for record in records}
    step, generation = manifest.step, manifest.generation
    found: list[str] = []
    while True:
        record = known.get(generation)
        if record is None:
            parent = (
                f", which resumed from {manifest.parent}"
                if generation == manifest.generation and manifest.parent
                else ""
            )
            return [*found, f"step {step:,} by generation {generation}{parent}; its record is not there"]
        parent_ref = record.resumed_from
        if parent_ref is None or parent_ref.generation >= generation:
            begin = _beginning(record.origin)
        else:
            begin = f"{parent_ref.name} of generation {parent_ref.generation}"
        ranks = several(record.world_size, "rank")
        before = known.get(parent_ref.generation) if parent_ref else None
        data = _data([one for one in record.datasets if before is None or one not in before.datasets])
        found.append(f"step {step:,} by generation {generation} with {ranks}, from {begin}{data}")
        if parent_ref is None or parent_ref.generation >= generation:
            return found
        step, generation = parent_ref.step, parent_ref.generation


def _beginning(origin: Origin | None) -> str:
    if origin is None:
        return "the beginning"
    if origin.checkpoint is None:
        at = f" at commit {printable(origin.revision)}" if origin.revision else ""
        return f"the weights of {printable(origin.path)}{at}"
    of = f"step {origin.checkpoint.step:,}{f' of {origin.job}' if origin.job else ''}"
    return f"the weights of {of} ({printable(origin.path)})"


def _data(datasets: Sequence[DatasetCommit]) -> str:
    """Data sets that a generation is the first to read."""
    told = [f"{printable(one.id)} at commit {printable(one.commit)}" for one in datasets[:MAX_DATASETS]]
    more = [f"{len(datasets) - MAX_DATASETS} more"] if len(datasets) > MAX_DATASETS else []
    return f"; data of {', '.join([*told, *more])}" if told else ""


def as_json(entry: Entry, inventory: Inventory) -> dict[str, Any]:
    """For programs."""
    found = entry_json(entry, inventory.metric)
    if manifest := entry.manifest:
        found["manifest"] = manifest.dump()
        found["lineage"] = lineage(manifest, inventory.records)
    return found


def _position(manifest: Manifest) -> list[tuple[str, str]]:
    data = manifest.data
    if data is None:
        return [("step", f"{manifest.step:,}")]
    place = f", {data.cursor:,} samples into the next" if data.cursor else ""
    done = f"{several(data.epoch, 'epoch')} complete{place}; order of seed {data.seed}"
    return [("step", f"{manifest.step:,}"), ("data", done)]


def _author(manifest: Manifest) -> str:
    mesh = " × ".join(f"{name} {count}" for name, count in manifest.mesh.items())
    return f"generation {manifest.generation} with {several(manifest.world_size, 'rank')}{f' ({mesh})' if mesh else ''}"


def _shortened(phrases: list[str]) -> list[str]:
    if len(phrases) <= MAX_ANCESTORS:
        return phrases
    half = MAX_ANCESTORS // 2
    left_out = several(len(phrases) - 2 * half, "generation")
    return [*phrases[:half], f"… {left_out} more …", *phrases[-half:]]


def _evaluation(entry: Entry, inventory: Inventory) -> list[tuple[str, str]]:
    match entry.evaluation:
        case "evaluated":
            scores = _scores(entry.metrics)
            of = f" over {entry.evaluated_samples:,} samples" if entry.evaluated_samples else ""
            best = f"; the best {metric_name(inventory.metric)} there is" if entry.is_best else ""
            told = [("evaluated", f"{scores}{of}{best}")]
            if entry.validation:
                told.append(("validation", f"{_scores(entry.validation)}, by which the best is chosen"))
            return told
        case "skipped":
            return [("evaluated", "no: evaluators passed it over")]
        case "begun":
            return [("evaluated", "in part")]
        case "waits":
            return [("evaluated", "not yet")]
        case "off":
            return [("evaluated", "no: this job has no evaluators")]


def _scores(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{metric_name(name)} {score(name, value)}" for name, value in metrics.items())


def _kept(entry: Entry, inventory: Inventory) -> str:
    if entry.state == "counts" and inventory.job:
        who = "`tandem checkpoints prune`" if inventory.final else "the next save"
        return ", ".join(entry.kept) or f"nothing: {who} deletes it"
    match entry.state:
        case "off" | "rewound":
            return "nothing, but nobody deletes it: `tandem checkpoints prune --all` does"
        case "bad" | "stale":
            return "a person to look at it; `tandem checkpoints prune --all` deletes it"
        case _:
            return ""


def _files(manifest: Manifest) -> list[tuple[str, str]]:
    longest = max((len(entry.path) for entry in manifest.files), default=0)
    return [
        ("files" if index == 0 else "", f"{entry.path:<{longest}}  {size(entry.size):>8}")
        for index, entry in enumerate(manifest.files)
    ]


OUTCOMES = {"sound": "green", "damaged": "bold red", "unreadable": "bold red", "vanished": "dim"}


def verdict(found: Verification, width: int | None) -> list[Text]:
    """One checkpoint: a line, and one more for each further fault."""
    if found.outcome == "sound":
        texts = [f"{several(found.files, 'file')}, {size(found.size)}"]
    elif found.outcome == "vanished":
        texts = ["it was deleted meanwhile, as retention does"]
    else:
        texts = list(found.faults)
    columns = [Column(found.name), Column(f"{found.outcome:<10}"), Column("")]
    rows = [[(found.name, ""), (found.outcome.ljust(10), OUTCOMES[found.outcome]), (texts[0], "")]]
    rows += [[("", ""), ("", ""), (text, "")] for text in texts[1:]]
    _, *lines = table(columns, rows, width)
    return lines


def verdict_json(found: Verification) -> dict[str, Any]:
    """The same for programs."""
    return {
        "name": found.name,
        "outcome": found.outcome,
        "faults": list(found.faults),
        "files": found.files,
        "bytes": found.size,
    }


def plan(found: Pruning, width: int | None) -> list[Text]:
    """What would be deleted, and what stays."""
    lines = []
    if found.doomed:
        columns = [Column("TO DELETE"), Column("SIZE", is_right=True), Column("WHY")]
        rows = [[(one.name, "bold"), (size(one.size), ""), (one.why, "dim")] for one in found.doomed]
        lines += [*table(columns, rows, width), Text("")]
    columns = [Column("STAYS"), Column("KEPT FOR")]
    if found.kept:
        lines += [*table(columns, [[(name, ""), (why, "dim")] for name, why in found.kept], width), Text("")]
    total = f"{found.what} to delete, {size(found.size)} to come free"
    lines += paragraph("total", total if found.doomed else "nothing to delete", width, indent=7)
    if found.others:
        lines += paragraph("note", _others(found.others), width, indent=7, style="yellow")
    return lines


def _others(others: tuple[Doomed, ...]) -> str:
    names = ", ".join(one.name for one in others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    return f"{size(sum(one.size for one in others))} more in what does not count ({names}); --all deletes it, too"
