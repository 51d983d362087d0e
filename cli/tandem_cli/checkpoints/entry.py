"""The checkpoints of a run as they are found on the disk, as values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tandem.job import DistributedTrainingJob
from tandem.rundir.checkpoint import Manifest
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import GenerationRecord
from tandem.rundir.ranking import Rank

State = Literal["counts", "off", "rewound", "unknown", "damaged", "unreadable", "bad", "stale"]
"""`counts`: training may go on from it. `off`: off the lineage. `rewound`: behind a step that went wrong.
`unknown`: the lineage cannot be read. `damaged`: its manifest is not sound, and nobody has set it aside yet.
`unreadable`: the disk does not give it, or another version wrote it. `bad`, `stale`: set aside, and named so."""

Progress = Literal["evaluated", "skipped", "begun", "waits", "off"]
"""How far its evaluation is; `begun`: a part is done; `off`: the job has no evaluators."""


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
