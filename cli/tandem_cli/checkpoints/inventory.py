"""The inventory of a run's checkpoints: state, scores, readers, and the rules that keep each of them.

The order of reading matters while the run goes on. Checkpoints are listed before the lineage is read: a generation
writes its record before it commits anything, so the record of every listed checkpoint's generation is in the lineage
that is read afterwards. In the other order, the newest checkpoint of a generation that has just started would seem to
be off the lineage. Leases are read last, because they change most often.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from tandem.confidence import Estimate, Interval
from tandem.errors import UserError
from tandem.job.resource import DistributedTrainingJob
from tandem.model import whole_number
from tandem.rundir import evaluations
from tandem.rundir.catalog import read_result
from tandem.rundir.checkpoint import FILE, Broken, Manifest, OtherFormat
from tandem.rundir.durable import TEMPORARY, list_folder, read_json, read_json_or_none
from tandem.rundir.evaluations import FinalFile, Rank, direction
from tandem.rundir.layout import EARLIER_FOLDERS, RunDir
from tandem.rundir.lineage import Chain, GenerationRecord, Rewind, chain, counts, is_rewound, reach
from tandem.rundir.retention import RetentionInputs, retention_reasons

State = Literal["counts", "off", "rewound", "unknown", "damaged", "unreadable", "bad", "stale"]
"""State of a checkpoint. `counts`: training may resume from it. `off`: off the lineage. `rewound`: written after a
step that went wrong. `unknown`: the lineage cannot be read. `damaged`: its manifest is invalid, and it has not been
set aside yet. `unreadable`: the disk fails to read it, or another version wrote it. `bad`, `stale`: set aside under
that suffix."""

Progress = Literal["evaluated", "skipped", "begun", "waits", "off"]
"""Progress of an evaluation. `begun`: part of it is done. `off`: the job has no evaluators."""


_PACK = re.compile(r"([0-9a-f]{64})\.tar\.gz")
"""File name of a pack of code: its digest."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Folder of one checkpoint."""

    name: str
    """The folder's name, including .bad or .stale."""
    step: int
    """Optimizer steps completed."""
    state: State
    """Whether training may use it."""
    why: str = ""
    """Reason why it cannot be used, if known."""
    generation: int | None = None
    """The generation that wrote it."""
    size: int | None = None
    """Size of its files, in bytes."""
    written_at: float | None = None
    """Time of writing by the writer's clock, in seconds since the epoch."""
    manifest: Manifest | None = None
    """Its manifest; None if that is invalid."""
    evaluation: Progress = "off"
    """Progress of its evaluation."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Scores on the test data."""
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """95 % confidence intervals of the scores on the test data, of those that have one."""
    estimate: Estimate | None = None
    """Score that decides the best checkpoint, with its confidence interval."""
    validation: Mapping[str, float] = field(default_factory=dict)
    """Scores on the validation data, which decide the best checkpoint; empty if none is held out."""
    rank: Rank | None = None
    """Rank among the evaluated checkpoints; None if it cannot become the best."""
    evaluated_samples: int | None = None
    """Samples that the scores were computed over."""
    readers: tuple[str, ...] = ()
    """Holders of a lease on it: verb and holder."""
    keep_reasons: tuple[str, ...] = ()
    """Rules of the job's policy that keep it; empty if the next save deletes it, or it does not count."""
    is_latest: bool = False
    """Whether training would resume from it."""
    is_best: bool = False
    """Whether it has the best score of the existing checkpoints."""
    is_final: bool = False
    """Whether training ended with it."""


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """Folder or file under a temporary name."""

    name: str
    """Its name."""
    size: int
    """Bytes."""
    age: float
    """Seconds since the last change."""


@dataclass(frozen=True, kw_only=True)
class OldCode:
    """Pack of code that no job of the run directory refers to any more."""

    digest: str
    """Digest by which a job would refer to it."""
    size: int
    """Bytes."""
    age: float
    """Seconds since the pack was stored."""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """All checkpoints of a run."""

    rundir: RunDir
    """The run directory."""
    entries: tuple[Entry, ...]
    """Newest first: by step, then by generation."""
    job: DistributedTrainingJob | None
    """The job; None where its file is missing or unreadable."""
    metric: str
    """Metric that ranks checkpoints."""
    has_lineage: bool
    """Whether the lineage could be read, so that it is known which checkpoints count."""
    records: tuple[GenerationRecord, ...]
    """The generations, oldest first; empty if there are none or one is damaged, which `faults` reports."""
    resumed_from: str | None
    """The checkpoint that the newest generation resumed from."""
    reach: int
    """Steps before the newest checkpoint that a rewind may go back; 0 once training is over."""
    final: str | None
    """The checkpoint that training ended with; None while it is running."""
    lost_best: str | None
    """The best checkpoint by best.json, if it no longer exists."""
    leftovers: tuple[Leftover, ...]
    """Temporary names; some may belong to a save in flight."""
    old_code: tuple[OldCode, ...] = ()
    """Earlier code of the run; empty if a job that may refer to it cannot be read."""
    faults: tuple[str, ...]
    """Problems with reading, a sentence each."""
    free: int | None
    """Bytes free on the disk."""

    @cached_property
    def has_intervals(self) -> bool:
        """Whether the deciding metric has confidence intervals."""
        return any(self.metric in entry.intervals for entry in self.entries)

    now: float
    """Time of the inventory, in seconds since the epoch."""

    @property
    def counting(self) -> list[Entry]:
        """Checkpoints that count, newest first."""
        return [entry for entry in self.entries if entry.state == "counts"]


@contextmanager
def _listing_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error


@_listing_errors()
def take_inventory(rundir: RunDir) -> Inventory:
    """Read the checkpoints of a run. Missing or damaged files are reported in the result, never raised.

    Raises:
        UserError: the folder of checkpoints cannot be listed.
    """
    faults: list[str] = []
    # Before the lineage, see the module's docstring.
    committed = [entry for name in rundir.checkpoint_names() if (entry := _committed(rundir, name)) is not None]
    lineage = _lineage(rundir, faults)
    records, rewinds = lineage or ([], [])
    job = _job(rundir, faults)
    best = evaluations.best(rundir)
    metric = job.spec.evaluation.metric if job else (best and best.metric) or "accuracy"
    final = _mapping(_mapping(rundir.done()).get("final")).get("name")
    resumed = records[-1].resumed_from if records else None
    # Leases last. By this machine's clock: to ask the disk's server for its time, a file would have to be written.
    readers = rundir.readers(by_own_clock=True)

    links = chain(records)
    # Without a lineage every state stays `unknown`, and nothing is latest, best or kept.
    entries = [_placed(entry, links, rewinds) for entry in committed] if lineage else committed
    entries = [_scored(entry, rundir, job, metric) for entry in entries]
    entries = [replace(entry, readers=readers.get(entry.name, ()), is_final=entry.name == final) for entry in entries]
    # Once training is over there are no more rewinds.
    rewind_steps = 0 if rundir.ended() else reach(len(rewinds))
    entries = _compared(entries, job, resumed.name if resumed else None, rewind_steps)
    set_aside, leftovers = _uncommitted(rundir)
    names = {entry.name for entry in entries}
    return Inventory(
        rundir=rundir,
        entries=tuple(
            sorted(entries + set_aside, key=lambda entry: (-entry.step, -(entry.generation or 0), entry.name))
        ),
        job=job,
        metric=metric,
        has_lineage=lineage is not None,
        records=tuple(records),
        resumed_from=resumed.name if resumed else None,
        reach=rewind_steps,
        final=final if isinstance(final, str) else None,
        lost_best=best.name if best and best.name not in names else None,
        leftovers=tuple(leftovers),
        old_code=tuple(_old_code(rundir)),
        faults=tuple(faults),
        free=_free(rundir.path),
        now=time.time(),
    )


def _committed(rundir: RunDir, name: str) -> Entry | None:
    """Read a checkpoint under its own name; None if it vanished meanwhile."""
    step = int(name.removeprefix("step-"))
    folder = rundir.checkpoint(name)
    try:
        manifest = rundir.manifest(name)
    except FileNotFoundError:
        return None
    except OtherFormat as error:
        return Entry(
            name=name, step=step, state="unreadable", why=str(error), size=_size(folder), written_at=_changed(folder)
        )
    except Broken as error:
        return Entry(
            name=name, step=step, state="damaged", why=str(error), size=_size(folder), written_at=_changed(folder)
        )
    except OSError as error:
        return Entry(name=name, step=step, state="unreadable", why=f"it cannot be read: {error.strerror}")
    return Entry(
        name=name,
        step=manifest.step,
        state="unknown",
        generation=manifest.generation,
        size=manifest.size,
        written_at=manifest.created_at,
        manifest=manifest,
    )


def _uncommitted(rundir: RunDir) -> tuple[list[Entry], list[Leftover]]:
    """Read the checkpoints that were set aside, and the temporary names."""
    entries = []
    for folder in rundir.all_set_aside():
        # The manifest may be what is damaged: use its generation only if it is a number.
        body = _mapping(read_json_or_none(folder.path / FILE))
        entries.append(
            Entry(
                name=folder.path.name,
                step=folder.step,
                state="bad" if folder.is_bad else "stale",
                why=folder.why,
                generation=body["generation"] if isinstance(body.get("generation"), int) else None,
                size=_size(folder.path),
                written_at=_changed(folder.path),
            )
        )
    leftovers = []
    for path in list_folder(rundir.checkpoints):
        if path.name.startswith(TEMPORARY):
            with suppress(FileNotFoundError):
                age = max(0.0, time.time() - path.lstat().st_mtime)
                leftovers.append(Leftover(name=path.name, size=_size(path), age=age))
    return entries, leftovers


def _old_code(rundir: RunDir) -> list[OldCode]:
    """Read the packs of code that no job of the run directory refers to."""
    unused = []
    with suppress(OSError):
        # In this order: a job is recorded before its pack is stored.
        digests = [f"sha256:{match[1]}" for path in list_folder(rundir.code) if (match := _PACK.fullmatch(path.name))]
        needed = needed_code(rundir)
        for digest in digests:
            if needed is not None and digest not in needed:
                facts = rundir.pack(digest).stat()
                unused.append(OldCode(digest=digest, size=facts.st_size, age=max(0.0, time.time() - facts.st_mtime)))
    return unused


def needed_code(rundir: RunDir) -> set[str] | None:
    """Collect the digests of code that the jobs of a run directory refer to: its own job, and the jobs that were
    moved aside in it. Return None if one of them cannot be read, so that no pack can be called unused."""
    needed = set()
    # In the order in which a job is moved (tandem.rundir.ownership), so that a job that moves meanwhile is not missed.
    for name in ("", *(f"{TEMPORARY}{name}" for name in EARLIER_FOLDERS), *EARLIER_FOLDERS):
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
    """Read the generations and rewinds of a run; None, and a fault, if they cannot be read."""
    try:
        records = rundir.generation_records()
        # Raises ValueError if the records contradict each other.
        chain(records)
        return records, rundir.rewind_records()
    except ValidationError:
        faults.append(f"a file in {rundir.rewinds} is damaged, so it is unknown which checkpoints count")
    except (ValueError, OSError) as error:
        faults.append(str(error))
    return None


def _job(rundir: RunDir, faults: list[str]) -> DistributedTrainingJob | None:
    """Read the job of a run; None, and a fault, if it cannot be read."""
    try:
        return rundir.read_job()
    except FileNotFoundError:
        faults.append("job.json is missing, so the job's retention policy is unknown")
    except ValidationError:
        faults.append("job.json is not a job that this version of Tandem knows")
    except (OSError, ValueError) as error:
        faults.append(f"job.json cannot be read: {error}")
    return None


def _placed(entry: Entry, links: Chain, rewinds: Sequence[Rewind]) -> Entry:
    """Set an entry's state: on the lineage or not."""
    if entry.manifest is None:
        return entry
    reference = entry.manifest.reference
    # A rewind disqualifies a checkpoint even if its generation is on the lineage.
    if is_rewound(rewinds, reference):
        return replace(entry, state="rewound", why="it was taken after the loss had gone wrong")
    if counts(links, reference):
        return replace(entry, state="counts")
    # Off the lineage; say why: the step was redone, the generation was abandoned, or its record is missing.
    if reference.generation in links:
        limit = links[reference.generation]
        return replace(entry, state="off", why=f"of generation {reference.generation}, steps after {limit} were redone")
    reason = f"no later generation went on from generation {reference.generation}"
    if reference.generation > max(links, default=0):
        reason = f"generation {reference.generation} has no record"
    return replace(entry, state="off", why=reason)


def _scored(entry: Entry, rundir: RunDir, job: DistributedTrainingJob | None, metric: str) -> Entry:
    """Set an entry's scores and the progress of its evaluation."""
    if entry.manifest is None:
        return entry
    reference = entry.manifest.reference
    merged = evaluations.merged_file(rundir, reference)
    result, content = read_result(FinalFile(merged, reference.generation, is_note=False)) or (None, {})
    fate = evaluations.evaluation_progress(rundir, reference)
    progress: Progress = "waits" if job and job.spec.evaluation.processes > 0 else "off"
    if result:
        progress = "evaluated"
    elif fate == "skipped" or (fate == "begun" and progress == "waits"):
        # Without evaluators, an evaluation that was begun is not going to be completed: it stays `off`.
        progress = fate
    return replace(
        entry,
        evaluation=progress,
        metrics=result.metrics if result else {},
        intervals=result.intervals if result else {},
        estimate=result.estimates.get(metric) if result else None,
        validation=result.validation if result else {},
        rank=result.rank(metric, direction(job, metric)) if result else None,
        evaluated_samples=whole_number(content.get("samples")),
    )


def _compared(
    entries: list[Entry], job: DistributedTrainingJob | None, resumed_from: str | None, rewind_steps: int
) -> list[Entry]:
    """Set what follows from all checkpoints together: the latest, the best, and the rules that keep each."""
    counting = sorted(
        (entry for entry in entries if entry.state == "counts"),
        key=lambda entry: (-entry.step, -(entry.generation or 0)),
    )
    if not counting:
        return entries
    best = min((entry for entry in counting if entry.rank is not None), key=attrgetter("rank"), default=None)
    keep_reasons: dict[str, list[str]] = {}
    # The rules of retention as the trainer applies them at the next save.
    if job:
        ranks = ranks_of(counting)
        leased = {entry.name for entry in counting if entry.readers}
        keepers = RetentionInputs(ranks, resumed_from, leased, rewind_steps, partly_evaluated(counting))
        references = [entry.manifest.reference for entry in counting if entry.manifest]
        keep_reasons = retention_reasons(references, job.spec.checkpoint, job.spec.evaluation, keepers)
    return [
        replace(
            entry,
            is_latest=entry is counting[0],
            is_best=entry is best,
            keep_reasons=tuple(keep_reasons.get(entry.name, ())) if entry.state == "counts" else (),
        )
        for entry in entries
    ]


def partly_evaluated(counting: Sequence[Entry]) -> set[str]:
    """Names of the checkpoints whose evaluation is partly done."""
    return {entry.name for entry in counting if entry.evaluation == "begun"}


def ranks_of(counting: Sequence[Entry]) -> dict[str, Rank | None]:
    """Ranks of the evaluated checkpoints, by name."""
    return {entry.name: entry.rank for entry in counting if entry.metrics}


def _size(path: Path) -> int:
    """Measure the bytes of a file, or of all files in a folder; files that vanish meanwhile count as 0."""
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
