"""The start of a generation from the state that its ranks hold, instead of a checkpoint.

The ranks of a new group first say who holds a live state: of which generation, after which step. It counts only if no
other generation has started since, which its record in the run directory tells; otherwise another group may have gone
on from a checkpoint, and the checkpoint counts. A generation that continued this very state does not matter if this
rank was a member: it took no step without it. Of those that count, the rank that is furthest ahead is the source. The
others are one step behind at most, or new, and receive its state over the group's own network. Then all compare a
digest of what they hold, as after a restore (tandem_trainer.checkpoint.restoring).

**The log.** Rank 0 writes the log, and a step's line once a vote has settled its loss. When rank 0 is lost, so are the
lines of the last steps. Each rank therefore remembers its newest steps, and the first rank of the new generation logs
those that are missing; its record says where. Their losses travel with the gradients (`carry_loss` of
tandem_trainer.strategies.strategy), so each rank knows them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import Continuation
from tandem.rundir.log import LogReader
from tandem.rundir.records import TRAINING, Step
from tandem.wire.status import CheckpointRef
from tandem_trainer.agreement import deviating_ranks, ranks_of
from tandem_trainer.checkpoint.train_state import Contents, TrainState
from tandem_trainer.data.order import digest
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.process_group import Group
from tandem_trainer.save_interval import SaveInterval

MAX_REMEMBERED = 1_000
"""Steps that each rank remembers for the log; a vote settles at most a hundred."""
TAIL_BYTES = 2**16
"""Size of the end of a log in which its last step is searched, in bytes."""


@dataclass(slots=True)
class TakenStep:
    """A step that this rank has taken."""

    step: int
    """Steps completed."""
    taken_at: float
    """Seconds since the epoch."""
    ids: Tensor
    """[global batch], sample ids of the step."""
    rate: float | None
    """Learning rate."""
    loss: float | None = None
    """Mean loss of the global batch; None until it is known."""

    def record(self) -> Step:
        """Return its line in the training log."""
        # A loss that is None is one that a script has not logged; here it is unknown, and left out.
        record = Step(time=self.taken_at, step=self.step, samples=len(self.ids), ids=digest(self.ids), lr=self.rate)
        return record if self.loss is None else record.model_copy(update={"loss": self.loss})


@dataclass(frozen=True, kw_only=True)
class LiveState:
    """State of a run that a rank keeps when it leaves its group, besides its model and optimizer."""

    generation: int
    """Generation that it was in."""
    entered: frozenset[int]
    """Later generations that it has joined, and that were over before their first step."""
    step: int
    """Steps completed."""
    loss_spikes: dict[str, object]
    """Memory of tandem_trainer.loss_spikes."""
    samples: Mapping[int, str]
    """Digest of the samples of its generation up to a step, after its last step and the one before."""
    recent_steps: Sequence[TakenStep]
    """Newest steps, oldest first."""
    saved_at: float
    """Time of the last save, in seconds of the monotonic clock."""
    interval: SaveInterval
    """Interval between two saves."""

    @property
    def last_loss_step(self) -> int:
        """Last step whose loss is known."""
        return next((entry.step for entry in reversed(self.recent_steps) if entry.loss is not None), 0)

    def view(self) -> dict[str, Any]:
        """Return what other ranks need, to find the source; as JSON."""
        samples = {str(step): text for step, text in self.samples.items()}
        generations = [self.generation, *sorted(self.entered)]
        return {"generations": generations, "step": self.step, "lastLossStep": self.last_loss_step, "samples": samples}


@dataclass(frozen=True, kw_only=True)
class StateSource:
    """The state with which a generation goes on; the same on all ranks."""

    rank: int
    """Rank that holds it."""
    generation: int
    """Generation that took its last step."""
    step: int
    """Steps completed."""
    receivers: Sequence[int]
    """Ranks that hold another state, or none."""
    loss_spikes: dict[str, object]
    """Memory of tandem_trainer.loss_spikes."""
    checkpoint: CheckpointRef | None
    """Newest checkpoint."""
    logged: int
    """Last step that the log of that generation holds."""
    missing: Sequence[Step] = field(default_factory=list)
    """Steps after that; complete on rank 0 only."""

    @property
    def continuation(self) -> Continuation:
        """Return what the record of the new generation says."""
        return Continuation(generation=self.generation, step=self.logged)


def find_source(rundir: RunDir, group: Group, live: LiveState | None) -> StateSource | None:
    """Find the state with which this generation goes on; None if it has to start from a checkpoint. Collective.

    Raises:
        ConfigurationError: ranks have taken different samples.
        OSError: the run directory cannot be read.
    """
    newest = _newest(rundir) if group.rank == 0 else {}
    views = group.gather({**newest, "live": None if live is None else live.view()})
    newest_generation, is_continued = int(views[0]["newest"]), views[0]["continues"]
    holders = {
        rank: view["live"]
        for rank, view in enumerate(views)
        if view["live"] and newest_generation in view["live"]["generations"][: None if is_continued else 1]
    }
    if not holders:
        return None
    _compare_samples(holders)
    # The furthest one; of equals the one that knows most losses, and then the lowest rank.
    first = max(holders, key=lambda rank: (holders[rank]["step"], holders[rank]["lastLossStep"], -rank))
    step = int(holders[first]["step"])
    receivers = [rank for rank in range(group.world_size) if rank not in holders or holders[rank]["step"] != step]
    steps = {} if live is None else {entry.step: entry.record() for entry in live.recent_steps}
    facts = group.gather(
        {
            **({} if group.rank else _facts_on_disk(rundir, newest_generation, step)),
            **({} if group.rank != first or live is None else {"lossSpikes": live.loss_spikes}),
            **({"steps": [record.dump() for record in steps.values()]} if group.rank == first else {}),
        }
    )
    logged = int(facts[0]["logged"])
    if group.rank == 0:
        # This rank may know losses that the source does not, and the other way round.
        for record in map(Step.parse, facts[first]["steps"]):
            if record.step not in steps or steps[record.step].loss is None:
                steps[record.step] = record
    checkpoint = facts[0]["checkpoint"]
    return StateSource(
        rank=first,
        generation=newest_generation,
        step=step,
        receivers=receivers,
        loss_spikes=facts[first]["lossSpikes"],
        checkpoint=None if checkpoint is None else CheckpointRef.parse(checkpoint),
        logged=logged,
        missing=[steps[number] for number in sorted(steps) if logged < number <= step],
    )


def hand_over(group: Group, source: StateSource, train_state: TrainState) -> None:
    """Give the state of the source to all ranks that do not hold it. Collective.

    Raises:
        ConfigurationError: the state does not fit the objects of a rank that receives it.
    """
    if source.receivers:
        own = train_state.contents({}) if group.rank == source.rank else None
        header = group.gather({} if own is None else _header(own))[source.rank]
        contents = own or _empty(header)
        is_receiver = group.rank in source.receivers
        group.hand_over(source.rank, _tensors(contents), keeps=not is_receiver)
        if is_receiver:
            train_state.check(contents)
            train_state.load(contents)
    # Each rank has running statistics of its own; those of the source count.
    group.copy_from(source.rank, train_state.local())


def _compare_samples(holders: Mapping[int, Mapping[str, Any]]) -> None:
    """Check that ranks which hold a live state have taken the same samples up to a step that all have taken.

    Raises:
        ConfigurationError: they have not.
    """
    # A digest begins with the generation. Where one has begun for some ranks only, none has taken a step in it.
    for generation in {view["generations"][0] for view in holders.values()}:
        views = {rank: view for rank, view in holders.items() if view["generations"][0] == generation}
        ranks = list(views)
        step = min(int(view["step"]) for view in views.values())
        digests = [view["samples"].get(str(step)) for view in views.values()]
        if deviating := deviating_ranks(digests):
            raise ConfigurationError(
                f"{ranks_of([ranks[number] for number in deviating])} took other samples up to step {step:,} than the "
                "other ranks, so samples are lost or taken twice. Every rank needs the same data set in the same order"
            )


def _newest(rundir: RunDir) -> dict[str, Any]:
    """Return the number of the newest generation with a record, and whether it continued another one."""
    newest = rundir.newest_generation()
    record = rundir.generation_record(newest)
    return {"newest": newest, "continues": record is not None and record.continues is not None}


def _facts_on_disk(rundir: RunDir, generation: int, step: int) -> dict[str, Any]:
    """Return the newest checkpoint, and the last step in the log of a generation."""
    checkpoint = next((manifest.reference for manifest in rundir.committed()), None)
    record = rundir.generation_record(generation)
    path = rundir.training_log(generation)
    size = path.stat().st_size if path.exists() else 0
    logged = 0 if record is None else record.start_step
    for first in sorted({max(0, size - TAIL_BYTES), 0}, reverse=True):
        steps = [record.step for record in LogReader(path, TRAINING, first) if isinstance(record, Step)]
        if steps:
            logged = max(steps)
            break
    # Lines that the disk refused are lost; a checkpoint after them still counts.
    if checkpoint is not None and checkpoint.generation == generation:
        logged = max(logged, checkpoint.step)
    return {"checkpoint": None if checkpoint is None else checkpoint.dump(), "logged": min(logged, step)}


Files = Mapping[str, Mapping[str, Tensor]]


def _files(contents: Contents) -> Files:
    files = {"weights": contents.weights, "optimizer": contents.optimizer, "others": contents.others}
    return files if contents.average is None else files | {"average": contents.average}


def _tensors(contents: Contents) -> list[Tensor]:
    return [tensor for tensors in _files(contents).values() for tensor in tensors.values()]


def _header(contents: Contents) -> dict[str, Any]:
    """Describe contents without their values, as JSON."""
    layout = {
        file: {name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in tensors.items()}
        for file, tensors in _files(contents).items()
    }
    names = {"unrounded": sorted(contents.unrounded), "own": sorted(contents.own)}
    return {"layout": layout, "loop": contents.loop, **names}


def _empty(header: Mapping[str, Any]) -> Contents:
    """Create contents of a description, without values."""
    files: dict[str, dict[str, Tensor]] = {
        file: {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in tensors.items()}
        for file, tensors in header["layout"].items()
    }
    return Contents(
        weights=files["weights"],
        optimizer=files["optimizer"],
        others=files["others"],
        average=files.get("average"),
        unrounded=frozenset(header["unrounded"]),
        own=frozenset(header["own"]),
        loop=header["loop"],
    )
