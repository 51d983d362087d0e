"""The lineage of checkpoints: which of them count, from the newest generation back to the first.

Each generation writes one record, once, before its first step: the checkpoint it resumed from. Follow these from the
newest record: generation 9 resumed from step 500 of generation 7, so of generation 7 the steps up to 500 count, of
generation 8 none, and so on back. A writer of a superseded generation may wake up later and commit; its checkpoint is
either later than the step its successor resumed from, or of a generation that is not in the chain at all, so nobody
ever resumes from it or evaluates it as the newest. That is the whole argument; it needs no lock and no clock.

A generation whose ranks survived a regroup continues another one from the state that they hold, and no step is taken
again. Its record names that generation and the step, up to which it counts. So does the record of a generation whose
ranks have started with a mirror, a copy of the state in memory.

Rejected: comparing steps alone (a cut-off group runs ahead of its successor and wins), and time stamps (clocks step).

A rewind names the step that went wrong, the last step from which training may resume, and a window of data to skip.
It is a file in the run directory, not the memory of a process: the group that decides it ends, a new generation starts
from an older checkpoint, and by the lineage everything committed after that checkpoint stops counting.

Data is counted in *data steps*, the steps of a run that skips nothing. Windows are recorded in data steps, so that they
denote the same batches whatever was skipped before them.
"""

from collections.abc import Collection, Iterable, Sequence

from tandem.model import Model
from tandem.wire.status import CheckpointRef


class Origin(Model):
    """Source of the weights that a run began with (`initialWeights`, `pretrained`)."""

    path: str
    """The file or folder; for a checkpoint its folder."""
    checkpoint: CheckpointRef | None = None
    """The checkpoint; None if the source is not one."""
    job: str | None = None
    """The job that wrote it, where known."""
    digest: str | None = None
    """Digest of the checkpoint's manifest, or of the files."""
    revision: str | None = None
    """Commit of a model on a hub, whose id is the path."""


class DatasetCommit(Model):
    """A data set on a hub, as a run reads it."""

    id: str
    """Its name on the hub."""
    revision: str | None = None
    """Branch, tag or commit that the job names; None: the main branch."""
    commit: str
    """The commit that is read."""


class Continuation(Model):
    """The generation whose state, in memory, a later one has started with."""

    generation: int
    """The earlier generation's number."""
    step: int
    """Its last step that counts. Steps after it are logged by the later generation."""
    mirrored: bool = False
    """The ranks have started again, with the copy that their agents had (`elasticity.mirror`). Otherwise the ranks of
    the later one still held the state when they regrouped."""


class GenerationRecord(Model):
    """The record of a generation and of the checkpoint it resumed from. Written once, by the first rank, before the
    generation's first step."""

    generation: int
    """The generation's number."""
    resumed_from: CheckpointRef | None = None
    """The checkpoint it started from; None: from the beginning. With `continues`, the newest one at that time."""
    continues: Continuation | None = None
    """The generation that it continued with a state from memory; None: its state came from the checkpoint."""
    origin: Origin | None = None
    """Source of the initial weights, if they are not the task's own."""
    datasets: list[DatasetCommit] = []
    """Data sets of a hub that it reads, as far as the hub returned their commits."""
    world_size: int
    """Ranks in the group."""
    members: list[str] = []
    """Replicas in rank order."""
    standby: bool = False
    """Its ranks are those of a script whose loop can go on in another group, so new ones may prepare themselves before
    they join."""
    machine: dict[str, str] = {}
    """The machine of the first rank, as far as the results of a step may depend on it: `torch`, `processor`, `device`,
    and `threads` of a rank."""
    started_at: float
    """Seconds since the epoch, of the writer's clock; for people only."""

    @property
    def is_regrouped(self) -> bool:
        """Whether ranks of the generation before have lived on in it."""
        return self.continues is not None and not self.continues.mirrored

    @property
    def parent(self) -> Continuation | None:
        """The generation before it on the chain, and the last step of that one that counts; None: the beginning."""
        if self.continues is not None or self.resumed_from is None:
            return self.continues
        return Continuation(generation=self.resumed_from.generation, step=self.resumed_from.step)

    @property
    def start_step(self) -> int:
        """The step after which its log begins."""
        return 0 if (parent := self.parent) is None else parent.step


Chain = dict[int, int | None]
"""The generations that count, each with its last step that counts; None where there is no limit."""


def chain(records: Iterable[GenerationRecord]) -> Chain:
    """The generations that count, newest first, each with its last step that counts."""
    by_number = {record.generation: record for record in records}
    links: Chain = {}
    if not by_number:
        return links
    generation, limit = max(by_number), None
    while True:
        links[generation] = limit
        record = by_number.get(generation)
        # The first generation, or one whose record is missing: nothing before it can be followed.
        if record is None or (parent := record.parent) is None:
            return links
        # Records form a chain back in time; anything else would loop for ever.
        if parent.generation >= generation:
            raise ValueError(f"generation {generation} says it resumed from the later generation {parent.generation}")
        generation, limit = parent.generation, parent.step


def origin_of(generation: int, records: Iterable[GenerationRecord]) -> Origin | None:
    """Source of the weights that the history of a generation began with; None if it is the task, or not known."""
    by_number = {record.generation: record for record in records}
    while (record := by_number.get(generation)) is not None and (parent := record.parent) is not None:
        # Damaged: it would loop for ever.
        if parent.generation >= generation:
            return None
        generation = parent.generation
    return record.origin if record is not None else None


FOREIGN_GENERATION = 0
"""Generation of a checkpoint that a script wrote in its own format: the generation that wrote it is unknown."""


def counts(links: Chain, checkpoint: CheckpointRef) -> bool:
    """Whether a checkpoint is on the chain. One that a script wrote in its own format always is."""
    if checkpoint.generation == FOREIGN_GENERATION:
        return True
    if checkpoint.generation not in links:
        return False
    limit = links[checkpoint.generation]
    return limit is None or checkpoint.step <= limit


MAX_REWINDS = 3
"""Maximum number of rewinds in a run. With one more the run fails, because skipping data does not help."""
MAX_SKIPPED_SHARE = 0.5
"""Maximum share of the run's data to skip: a run that skips all of it would end at once, and count as complete."""
MARGIN = 8
"""Batches to skip on either side of the bad one; doubled with every further rewind."""
SPIKE_SPAN_STEPS = 20
"""Length of the moving average that detects a loss spike, in steps. A spike is therefore detected up to this many steps
after it started."""


class Rewind(Model):
    """A decision to go back to an older checkpoint and skip data."""

    number: int
    """Number of the rewind, counted from 1 over the whole run."""
    generation: int
    """The generation that decided it."""
    bad_step: int
    """The first step whose loss was bad."""
    loss: float | None = None
    """The loss of that step; None if it was NaN or infinite."""
    resume_before: int
    """Only checkpoints of steps before this one may be resumed from."""
    skip_from: int
    """First data step to skip."""
    skip_to: int
    """First data step after the window."""


def is_rewound(rewinds: Iterable[Rewind], checkpoint: CheckpointRef) -> bool:
    """Whether a checkpoint is at or after a step that went wrong, in a generation that had not been rewound yet."""
    return any(
        checkpoint.generation <= rewind.generation and checkpoint.step >= rewind.resume_before for rewind in rewinds
    )


Window = tuple[int, int]


def windows(rewinds: Iterable[Rewind]) -> list[Window]:
    """The data to skip, merged and in order: half-open ranges of data steps."""
    merged: list[Window] = []
    for start, end in sorted((rewind.skip_from, rewind.skip_to) for rewind in rewinds):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def batches_left_out(rewinds: Iterable[Rewind]) -> int:
    """Number of batches that no step sees."""
    return sum(end - start for start, end in windows(rewinds))


def data_step(step: int, skipped: Sequence[Window]) -> int:
    """The data step that a step (counted from 0) takes."""
    for start, end in skipped:
        # Windows are in order: none of the further ones lies before this step.
        if step < start:
            break
        step += end - start
    return step


def steps_left_out(total_data_steps: int, skipped: Sequence[Window]) -> int:
    """Number of steps by which skipped data shortens a run."""
    return sum(max(0, min(end, total_data_steps) - min(start, total_data_steps)) for start, end in skipped)


def reach(rewinds: int) -> int:
    """Minimum distance of a checkpoint from the newest one, in steps, for the next rewind to resume from it.

    A loss is checked before each save, so the first bad step comes after the newest checkpoint, or, where only the
    mean of SPIKE_SPAN_STEPS steps shows it, less than SPIKE_SPAN_STEPS before it; and the margin lies before that.

    Args:
        rewinds: number of rewinds so far.
    """
    return SPIKE_SPAN_STEPS + MARGIN * 2**rewinds if rewinds < MAX_REWINDS else 1


def decide(
    earlier: Sequence[Rewind],
    generation: int,
    bad_step: int,
    loss: float | None,
    total_data_steps: int,
    checkpoints: Collection[int] = (),
) -> Rewind | None:
    """The next rewind; None if there were too many already, or if too little data would remain.

    Training goes back to a checkpoint before the margin. Where none is that old, the oldest checkpoint from before the
    bad step is used: a smaller margin costs less than the whole run.

    Args:
        bad_step: the first bad step, counted from 1.
        total_data_steps: steps of the run if no data were skipped.
        checkpoints: steps of the checkpoints that count.
    """
    if len(earlier) >= MAX_REWINDS:
        return None
    # Steps of this run become data steps, so that the window denotes the same batches later.
    skipped = windows(earlier)
    # Each rewind doubles the margin, for the one before has not skipped enough.
    margin = MARGIN * 2 ** len(earlier)
    first = max(0, bad_step - 1 - margin)
    if not any(step <= first for step in checkpoints):
        first = min((step for step in checkpoints if step < bad_step), default=first)
    rewind = Rewind(
        number=len(earlier) + 1,
        generation=generation,
        bad_step=bad_step,
        loss=loss,
        resume_before=first + 1,
        skip_from=data_step(first, skipped),
        skip_to=data_step(bad_step - 1 + margin, skipped) + 1,
    )
    skipped_steps = steps_left_out(total_data_steps, windows([*earlier, rewind]))
    return rewind if skipped_steps <= MAX_SKIPPED_SHARE * total_data_steps else None
