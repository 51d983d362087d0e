"""The lineage of checkpoints: which of them count, from the newest generation back to the first.

Each generation writes one record, once, before its first step: the checkpoint it resumed from. Follow these from the
newest record: generation 9 resumed from step 500 of generation 7, so of generation 7 the steps up to 500 count, of
generation 8 none, and so on back. A writer of a generation that was superseded may wake up later and commit; what it
commits is either later than the step its successor resumed from, or of a generation that is not in the chain at all,
so nobody ever resumes from it or evaluates it as the newest. That is the whole argument; it needs no lock, no clock.

Rejected: comparing steps alone (a cut-off group runs ahead of its successor and wins), and time stamps (clocks step).

A rewind names the step that went wrong, the last step from which training may resume, and a window of data to leave
out. It is a file of the run directory, not the memory of a process: the group that decides it ends, a new generation
starts from an older checkpoint, and by the lineage (tandem.rundir.lineage) everything committed after that checkpoint
stops to count.

Data is counted in *data steps*, the steps of a run that skips nothing. Windows are kept in these, so that they mean the
same batches whatever was skipped before them.
"""

from collections.abc import Collection, Iterable, Sequence

from tandem.model import Model
from tandem.status import CheckpointRef


class Origin(Model):
    """Where the weights come from that a run began with (`initialWeights`, `pretrained`)."""

    path: str
    """The file or folder; of a checkpoint its folder."""
    checkpoint: CheckpointRef | None = None
    """The checkpoint; None where it was none."""
    job: str | None = None
    """The job that had written it, as far as that is known."""
    digest: str | None = None
    """That of the checkpoint's manifest, or of the files."""
    revision: str | None = None
    """The commit, of a model on a hub, whose id is the path."""


class DatasetCommit(Model):
    """A data set of a hub, as a run reads it."""

    id: str
    """Its name on the hub."""
    revision: str | None = None
    """Branch, tag or commit that the job names; None: the main branch."""
    commit: str
    """The commit that is read."""


class GenerationRecord(Model):
    """Who trained from which checkpoint on. Written once, by the first rank, before the generation's first step."""

    generation: int
    """The generation's number."""
    resumed_from: CheckpointRef | None = None
    """The checkpoint it started from; None: from the beginning."""
    origin: Origin | None = None
    """Where the weights of the beginning come from, if not from the task."""
    datasets: list[DatasetCommit] = []
    """Data sets of a hub that it reads, as far as the hub told their commits."""
    world_size: int
    """Ranks in the group."""
    members: list[str] = []
    """Replicas in rank order."""
    started_at: float
    """Seconds since the epoch, of the writer's clock; for people only."""


Chain = dict[int, int | None]
"""For each generation that counts: the last step of it that counts, None where there is no limit."""


def chain(records: Iterable[GenerationRecord]) -> Chain:
    """The generations that count, newest first, each with the last step that counts."""
    known = {record.generation: record for record in records}
    links: Chain = {}
    if not known:
        return links
    generation, limit = max(known), None
    while True:
        links[generation] = limit
        record = known.get(generation)
        if record is None or record.resumed_from is None:
            return links
        parent = record.resumed_from
        if parent.generation >= generation:
            raise ValueError(f"generation {generation} says it resumed from the later generation {parent.generation}")
        generation, limit = parent.generation, parent.step


def origin_of(generation: int, records: Iterable[GenerationRecord]) -> Origin | None:
    """Where the weights come from that the history of a generation began with; None: from its task, or not known."""
    known = {record.generation: record for record in records}
    while (record := known.get(generation)) is not None and record.resumed_from is not None:
        if record.resumed_from.generation >= generation:
            return None
        generation = record.resumed_from.generation
    return record.origin if record is not None else None


FOREIGN = 0
"""The generation of a checkpoint that a script has written in its own way: nobody knows whose it was."""


def counts(links: Chain, checkpoint: CheckpointRef) -> bool:
    """Whether a checkpoint lies on the chain. One that a script has written in its own way always does."""
    if checkpoint.generation == FOREIGN:
        return True
    if checkpoint.generation not in links:
        return False
    limit = links[checkpoint.generation]
    return limit is None or checkpoint.step <= limit


MAX_REWINDS = 3
"""So many at most over a run; then it has failed, because skipping data does not help."""
MAX_LEFT_OUT = 0.5
"""At most this part of the run's data is left out: a run that skips all of it would end at once, and call it done."""
MARGIN = 8
"""Batches left out on either side of the bad one; doubled with every further rewind."""
SPAN = 20
"""Length of the moving average that detects a loss spike, in steps. A spike is therefore detected up to this many steps
after it began."""


class Rewind(Model):
    """One decision to go back."""

    number: int
    """Counted from 1 over the whole run."""
    generation: int
    """The generation that decided it."""
    bad_step: int
    """The first step whose loss was bad."""
    loss: float | None = None
    """That loss; None where it was NaN or infinite."""
    resume_before: int
    """Only checkpoints of steps before this one may be resumed from."""
    skip_from: int
    """First data step left out."""
    skip_to: int
    """First data step after the window."""


def is_rewound(rewinds: Iterable[Rewind], checkpoint: CheckpointRef) -> bool:
    """Whether a checkpoint lies behind a step that went wrong, in a generation that had not been rewound yet."""
    return any(
        checkpoint.generation <= rewind.generation and checkpoint.step >= rewind.resume_before for rewind in rewinds
    )


Window = tuple[int, int]


def windows(rewinds: Iterable[Rewind]) -> list[Window]:
    """The data left out, merged and in order: half-open ranges of data steps."""
    merged: list[Window] = []
    for start, end in sorted((rewind.skip_from, rewind.skip_to) for rewind in rewinds):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def batches_left_out(rewinds: Iterable[Rewind]) -> int:
    """How many batches no step sees."""
    return sum(end - start for start, end in windows(rewinds))


def data_step(step: int, skipped: Sequence[Window]) -> int:
    """Which data a step (counted from 0) takes."""
    for start, end in skipped:
        if step < start:
            break
        step += end - start
    return step


def steps_left_out(total_data_steps: int, skipped: Sequence[Window]) -> int:
    """How many steps fewer a run takes because of what it leaves out."""
    return sum(max(0, min(end, total_data_steps) - min(start, total_data_steps)) for start, end in skipped)


def reach(rewinds: int) -> int:
    """How many steps before the newest checkpoint one must lie, for the next rewind to find it old enough.

    A loss is looked at before each save, so the first bad step comes after the newest checkpoint, or, where it takes
    the mean of SPAN steps to tell, less than SPAN before it; and the margin lies before that.

    Args:
        rewinds: how many there were.
    """
    return SPAN + MARGIN * 2**rewinds if rewinds < MAX_REWINDS else 1


def decide(
    earlier: Sequence[Rewind],
    generation: int,
    bad_step: int,
    loss: float | None,
    total_data_steps: int,
    checkpoints: Collection[int] = (),
) -> Rewind | None:
    """The next rewind, or None if there were too many already or too little data would be left to learn from.

    Training goes back to a checkpoint before the margin. Where none is so old, any checkpoint from before the bad step
    is taken, the oldest of these: a smaller margin costs less than the whole run.

    Args:
        bad_step: the first bad step, counted from 1.
        total_data_steps: steps of the run, were nothing left out.
        checkpoints: steps of the checkpoints that count.
    """
    if len(earlier) >= MAX_REWINDS:
        return None
    skipped = windows(earlier)
    margin = MARGIN * 2 ** len(earlier)
    first = max(0, bad_step - 1 - margin)
    if not any(step <= first for step in checkpoints):
        first = min((step for step in checkpoints if step < bad_step), default=first)
    found = Rewind(
        number=len(earlier) + 1,
        generation=generation,
        bad_step=bad_step,
        loss=loss,
        resume_before=first + 1,
        skip_from=data_step(first, skipped),
        skip_to=data_step(bad_step - 1 + margin, skipped) + 1,
    )
    left_out = steps_left_out(total_data_steps, windows([*earlier, found]))
    return found if left_out <= MAX_LEFT_OUT * total_data_steps else None
