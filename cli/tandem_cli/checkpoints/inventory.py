"""The inventory of a run's checkpoints: which exist, which count, their scores, their readers, and why each is kept.

The order of the look matters while the run goes on. Checkpoints are listed before the lineage is read: a generation
writes its record before it commits anything, so every checkpoint seen has its generation's record in the lineage read
afterwards. Read the other way round, the newest checkpoint of a generation that has just begun would look as if it did
not count. Leases come last, because they change most.
"""

import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from tandem.job import DistributedTrainingJob
from tandem.model import whole
from tandem.rundir import evaluations
from tandem.rundir.catalog import read_result
from tandem.rundir.checkpoint import FILE, Broken, Manifest, OtherFormat
from tandem.rundir.durable import TEMPORARY, listed, read_json, read_json_or_none
from tandem.rundir.evaluations import LastWord, Rank, direction
from tandem.rundir.layout import EARLIER, RunDir
from tandem.rundir.lineage import Chain, GenerationRecord, Rewind, chain, counts, is_rewound, reach
from tandem.rundir.retention import Keepers, reasons

State = Literal["counts", "off", "rewound", "unknown", "damaged", "unreadable", "bad", "stale"]
"""`counts`: training may go on from it. `off`: off the lineage. `rewound`: behind a step that went wrong.
`unknown`: the lineage cannot be read. `damaged`: its manifest is not sound, and nobody has set it aside yet.
`unreadable`: the disk does not give it, or another version wrote it. `bad`, `stale`: set aside, and named so."""

Progress = Literal["evaluated", "skipped", "begun", "waits", "off"]
"""How far its evaluation is; `begun`: a part is done; `off`: the job has no evaluators."""


_PACK = re.compile(r"([0-9a-f]{64})\.tar\.gz")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One checkpoint's folder."""

    name: str
    """The folder's name, with .bad or .stale."""
    step: int
    """Optimizer steps completed."""
    state: State
    """What it is good for."""
    why: str = ""
    """Why it is good for nothing, where that is known."""
    generation: int | None = None
    """The generation that wrote it."""
    size: int | None = None
    """Bytes of its files."""
    at: float | None = None
    """When it was written, seconds since the epoch of the writer's clock."""
    manifest: Manifest | None = None
    """Its manifest, where that is sound."""
    evaluation: Progress = "off"
    """How far its evaluation is."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Its scores on the test data."""
    validation: Mapping[str, float] = field(default_factory=dict)
    """Its scores on the validation data, by which the best is chosen; empty where none is held out."""
    rank: Rank | None = None
    """Where it stands among the evaluated ones; None where it cannot become the best."""
    evaluated_samples: int | None = None
    """Samples that the scores are of."""
    readers: tuple[str, ...] = ()
    """Who holds a lease on it: verb and holder."""
    kept: tuple[str, ...] = ()
    """Why the job's policy keeps it; empty for one that the next save deletes, and for one that does not count."""
    is_latest: bool = False
    """Whether training would go on from it."""
    is_best: bool = False
    """Whether it has the best score of those that are there."""
    is_final: bool = False
    """Whether training ended with it."""


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A folder or file under a temporary name."""

    name: str
    """Its name."""
    size: int
    """Bytes."""
    age: float
    """Seconds since it was last changed."""


@dataclass(frozen=True, kw_only=True)
class OldCode:
    """A pack of code that no job of the run directory names any more."""

    digest: str
    """By which a job would name it."""
    size: int
    """Bytes."""
    age: float
    """Seconds since it was put there."""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """All checkpoints of a run."""

    rundir: RunDir
    """Where they are."""
    entries: tuple[Entry, ...]
    """Newest first: by step, then by generation."""
    job: DistributedTrainingJob | None
    """The job; None where its file is missing or unreadable."""
    metric: str
    """What scores are compared by."""
    has_lineage: bool
    """Whether it is known which checkpoints count."""
    records: tuple[GenerationRecord, ...]
    """The generations, oldest first; empty if there are none or one is damaged, which `faults` then says."""
    resumed_from: str | None
    """The checkpoint that the newest generation started from."""
    reach: int
    """How far before the newest one a rewind would look for a checkpoint, in steps; 0 where training is over."""
    final: str | None
    """The checkpoint that training ended with; None while it goes on."""
    lost_best: str | None
    """The best checkpoint by best.json, if that is not there any more."""
    leftovers: tuple[Leftover, ...]
    """Temporary names, some of which belong to a save in flight."""
    old_code: tuple[OldCode, ...] = ()
    """Code that the run had before; none where a job cannot be read that may name it."""
    faults: tuple[str, ...]
    """What could not be read, a sentence each."""
    free: int | None
    """Bytes free on the disk."""
    now: float
    """When it was looked, seconds since the epoch."""

    @property
    def counting(self) -> list[Entry]:
        """Those that count, newest first."""
        return [entry for entry in self.entries if entry.state == "counts"]


def look(rundir: RunDir) -> Inventory:
    """See what is there. What is missing or damaged is told in the result, never raised.

    Raises:
        OSError: the folder of checkpoints cannot be listed.
    """
    faults: list[str] = []
    found = [entry for name in rundir.checkpoint_names() if (entry := _committed(rundir, name)) is not None]
    lineage = _lineage(rundir, faults)
    records, rewinds = lineage or ([], [])
    job = _job(rundir, faults)
    best = evaluations.best(rundir)
    metric = job.spec.evaluation.metric if job else (best and best.metric) or "accuracy"
    final = _mapping(_mapping(rundir.done()).get("final")).get("name")
    resumed = records[-1].resumed_from if records else None
    readers = rundir.readers(by_own_clock=True)

    links = chain(records)
    entries = [_placed(entry, links, rewinds) for entry in found] if lineage else found
    entries = [_scored(entry, rundir, job, metric) for entry in entries]
    entries = [replace(entry, readers=readers.get(entry.name, ()), is_final=entry.name == final) for entry in entries]
    far = 0 if rundir.ended() else reach(len(rewinds))
    entries = _compared(entries, job, resumed.name if resumed else None, far)
    aside, leftovers = _uncommitted(rundir)
    names = {entry.name for entry in entries}
    return Inventory(
        rundir=rundir,
        entries=tuple(sorted(entries + aside, key=lambda entry: (-entry.step, -(entry.generation or 0), entry.name))),
        job=job,
        metric=metric,
        has_lineage=lineage is not None,
        records=tuple(records),
        resumed_from=resumed.name if resumed else None,
        reach=far,
        final=final if isinstance(final, str) else None,
        lost_best=best.name if best and best.name not in names else None,
        leftovers=tuple(leftovers),
        old_code=tuple(_old_code(rundir)),
        faults=tuple(faults),
        free=_free(rundir.path),
        now=time.time(),
    )


def _committed(rundir: RunDir, name: str) -> Entry | None:
    """A folder under its own name; None if it vanished."""
    step = int(name.removeprefix("step-"))
    folder = rundir.checkpoint(name)
    try:
        manifest = rundir.manifest(name)
    except FileNotFoundError:
        return None
    except OtherFormat as error:
        return Entry(name=name, step=step, state="unreadable", why=str(error), size=_size(folder), at=_changed(folder))
    except Broken as error:
        return Entry(name=name, step=step, state="damaged", why=str(error), size=_size(folder), at=_changed(folder))
    except OSError as error:
        return Entry(name=name, step=step, state="unreadable", why=f"it cannot be read: {error.strerror}")
    return Entry(
        name=name,
        step=manifest.step,
        state="unknown",
        generation=manifest.generation,
        size=manifest.size,
        at=manifest.created_at,
        manifest=manifest,
    )


def _uncommitted(rundir: RunDir) -> tuple[list[Entry], list[Leftover]]:
    """What was set aside, and what has a temporary name."""
    aside = []
    for one in rundir.all_set_aside():
        body = _mapping(read_json_or_none(one.path / FILE))
        aside.append(
            Entry(
                name=one.path.name,
                step=one.step,
                state="bad" if one.is_bad else "stale",
                why=one.why,
                generation=body["generation"] if isinstance(body.get("generation"), int) else None,
                size=_size(one.path),
                at=_changed(one.path),
            )
        )
    leftovers = []
    for path in listed(rundir.checkpoints):
        if path.name.startswith(TEMPORARY):
            with suppress(FileNotFoundError):
                age = max(0.0, time.time() - path.lstat().st_mtime)
                leftovers.append(Leftover(name=path.name, size=_size(path), age=age))
    return aside, leftovers


def _old_code(rundir: RunDir) -> list[OldCode]:
    found = []
    with suppress(OSError):
        # In this order: a job is recorded before its pack is put there.
        there = [f"sha256:{one[1]}" for path in listed(rundir.code) if (one := _PACK.fullmatch(path.name))]
        needed = needed_code(rundir)
        for digest in there:
            if needed is not None and digest not in needed:
                facts = rundir.pack(digest).stat()
                found.append(OldCode(digest=digest, size=facts.st_size, age=max(0.0, time.time() - facts.st_mtime)))
    return found


def needed_code(rundir: RunDir) -> set[str] | None:
    """The digests of code that the jobs of a run directory name: its own, and those of what was moved aside in it.
    None: one of them cannot be read, so nobody can tell."""
    needed = set()
    # In the order in which a job is moved (tandem.rundir.ownership), so that none is missed.
    for name in ("", *(f"{TEMPORARY}{name}" for name in EARLIER), *EARLIER):
        try:
            job: Any = read_json(rundir.path / name / rundir.job_file.name)
            digest = job["spec"]["trainer"].get("code")
        except FileNotFoundError:
            if not name:
                return None
            continue
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None
        if digest is not None:
            needed.add(str(digest))
    return needed


def _lineage(rundir: RunDir, faults: list[str]) -> tuple[list[GenerationRecord], list[Rewind]] | None:
    try:
        records = rundir.generation_records()
        chain(records)
        return records, rundir.rewind_records()
    except ValidationError:
        faults.append(f"a file in {rundir.rewinds} is damaged; nobody can tell which checkpoints count without it")
    except (ValueError, OSError) as error:
        faults.append(str(error))
    return None


def _job(rundir: RunDir, faults: list[str]) -> DistributedTrainingJob | None:
    try:
        return rundir.read_job()
    except FileNotFoundError:
        faults.append("job.json is missing, so nobody can tell what the job's policy keeps")
    except ValidationError:
        faults.append("job.json is not a job that this version of Tandem knows")
    except (OSError, ValueError) as error:
        faults.append(f"job.json cannot be read: {error}")
    return None


def _placed(entry: Entry, links: Chain, rewinds: Sequence[Rewind]) -> Entry:
    """With its state: on the lineage or not."""
    if entry.manifest is None:
        return entry
    reference = entry.manifest.reference
    if is_rewound(rewinds, reference):
        return replace(entry, state="rewound", why="it was taken after the loss had gone wrong")
    if counts(links, reference):
        return replace(entry, state="counts")
    if reference.generation in links:
        limit = links[reference.generation]
        return replace(entry, state="off", why=f"of generation {reference.generation}, steps after {limit} were redone")
    why = f"no later generation went on from generation {reference.generation}"
    if reference.generation > max(links, default=0):
        why = f"generation {reference.generation} has left no record"
    return replace(entry, state="off", why=why)


def _scored(entry: Entry, rundir: RunDir, job: DistributedTrainingJob | None, metric: str) -> Entry:
    if entry.manifest is None:
        return entry
    reference = entry.manifest.reference
    merged = evaluations.merged_file(rundir, reference)
    result, content = read_result(LastWord(merged, reference.generation, is_note=False)) or (None, {})
    found = evaluations.fate(rundir, reference)
    progress: Progress = "waits" if job and job.spec.evaluation.processes > 0 else "off"
    if result:
        progress = "evaluated"
    elif found == "skipped" or (found == "begun" and progress == "waits"):
        progress = found
    return replace(
        entry,
        evaluation=progress,
        metrics=result.metrics if result else {},
        validation=result.validation if result else {},
        rank=result.rank(metric, direction(job, metric)) if result else None,
        evaluated_samples=whole(content.get("samples")),
    )


def _compared(
    entries: list[Entry], job: DistributedTrainingJob | None, resumed_from: str | None, far: int
) -> list[Entry]:
    """With what follows from all of them: the latest, the best, and why each is kept."""
    counting = sorted(
        (entry for entry in entries if entry.state == "counts"),
        key=lambda entry: (-entry.step, -(entry.generation or 0)),
    )
    if not counting:
        return entries
    best = min((one for one in counting if one.rank is not None), key=attrgetter("rank"), default=None)
    kept: dict[str, list[str]] = {}
    if job:
        ranks = ranks_of(counting)
        leased = {entry.name for entry in counting if entry.readers}
        keepers = Keepers(ranks, resumed_from, leased, far, begun_of(counting))
        references = [entry.manifest.reference for entry in counting if entry.manifest]
        kept = reasons(references, job.spec.checkpoint, job.spec.evaluation, keepers)
    return [
        replace(
            entry,
            is_latest=entry is counting[0],
            is_best=entry is best,
            kept=tuple(kept.get(entry.name, ())) if entry.state == "counts" else (),
        )
        for entry in entries
    ]


def begun_of(counting: Sequence[Entry]) -> set[str]:
    """Those of which evaluators have done a part."""
    return {entry.name for entry in counting if entry.evaluation == "begun"}


def ranks_of(counting: Sequence[Entry]) -> dict[str, Rank | None]:
    """Where the evaluated ones stand, by name."""
    return {entry.name: entry.rank for entry in counting if entry.metrics}


def _size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; of what vanishes meanwhile, none."""
    total = 0
    with suppress(OSError):
        if not path.is_dir() or path.is_symlink():
            return path.lstat().st_size
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += (Path(folder) / name).lstat().st_size
    return total


def _changed(path: Path) -> float | None:
    with suppress(OSError):
        return path.stat().st_mtime
    return None


def _free(path: Path) -> int | None:
    with suppress(OSError):
        return shutil.disk_usage(path).free
    return None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
