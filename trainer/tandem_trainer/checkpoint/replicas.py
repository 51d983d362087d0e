"""Compares the weights and moments of replicas while they train.

A start compares all of the state (tandem_trainer.checkpoint.restoring), which takes a pass over it. Before each save,
and after the first step of a generation, the ranks compare a sample: of weights that learn, of moments, of frozen
weights and of averages a window of up to MAX_TENSORS each, others each time. Gradients that are not averaged change all
weights, so they show at once; one wrong weight shows when its turn comes.

What is whole is compared by all ranks, and what is split by those that hold the same part: under hybrid sharding and in
several pipelines there are such ranks, and where every rank holds another part nothing is compared.

Each rank has running statistics of its own, and a script's buffers are its own business: a save gives all ranks those
of rank 0.

Ranks on different hardware may round differently, and nothing brings their weights together again. So a difference
within rounding is a warning.

Rejected: norms of gradients (what is averaged has the same bits on all ranks, what is not shows in weights and moments
after the step, and a norm costs a pass over all gradients in each step).
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import xxhash
from torch import Tensor

from tandem_trainer.agreement import ranks_of, unusual
from tandem_trainer.checkpoint.restoring import ReplicasDiffer
from tandem_trainer.checkpoint.sharding import here, place_of
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.process_group import Group

log = logging.getLogger(__name__)

MAX_TENSORS = 64
"""Tensors of a sample, of each kind: more cost more than they show."""
WINDOW = 2**14
"""Elements of each."""
ROUNDING = 1e-4
"""Relative difference of a window (its norm over that of rank 0) that counts as rounding. A hundred thousand steps that
round differently come to 2e-5, and the first step of a fine-tuning with a learning rate of 1e-5 whose gradients are not
averaged to 7e-4."""
EPSILONS = 4
"""Rounding errors of the weights' dtype that are allowed, where that is more than ROUNDING."""


WHOLE, PARTS = "whole", "parts"
"""What every rank holds all of, and what only some ranks hold the same part of."""


@dataclass(frozen=True)
class _Sample:
    """Windows of tensors."""

    windows: Mapping[tuple[str, str], Tensor]
    """By kind and name, [elements] each, on the device."""

    @cached_property
    def content(self) -> Tensor:
        """All of them, [bytes], uint8, on the CPU."""
        found = [one.view(torch.uint8).cpu() for one in self.windows.values()]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.uint8)

    @cached_property
    def layout(self) -> str:
        """A digest of what the windows are, without their values."""
        return _digest_of([(*key, str(one.dtype), len(one)) for key, one in self.windows.items()])

    @cached_property
    def digest(self) -> str:
        """A digest of the values."""
        return xxhash.xxh3_64_hexdigest(self.content.numpy().data)

    def apart_from(self, reference: Tensor) -> list[tuple[str, str]]:
        """Windows that differ by more than rounding from others of the same layout.

        Args:
            reference: their content.
        """
        found, start = [], 0
        for key, one in self.windows.items():
            end = start + one.nbytes
            # Copies, for not every type may begin at any byte.
            own, first = (part[start:end].clone().view(one.dtype) for part in (self.content, reference))
            if _differ(own, first):
                found.append(key)
            start = end
        return found


@dataclass(frozen=True)
class _Difference:
    """Ranks that should hold the same, and do not."""

    what: str
    """WHOLE or PARTS."""
    ranks: Sequence[int]
    """All of them."""
    strange: Sequence[int]
    """Those that hold something else than most of them."""


class Replicas:
    """The tensors of this rank, to be compared with those of the others.

    Args:
        tensors: those that are the same on all ranks that hold the same part of them, by kind and name. Kinds and names
            of those that are whole are the same on every rank.
        mistake: what in the script keeps gradients from being averaged, as a sentence; empty if nothing is known.
    """

    def __init__(
        self, group: Group, tensors: Callable[[], Mapping[str, Mapping[str, Tensor]]], mistake: Callable[[], str]
    ) -> None:
        self._group, self._tensors, self._mistake = group, tensors, mistake
        self._places: Counter[tuple[str, str]] = Counter()
        """By what it is and kind the index of the next tensor to compare; it keeps counting after a pass over all."""
        self._has_copies = True
        """Whether any other rank holds the same parts as another one."""
        self._has_warned = False

    def compare(self, step: int) -> None:
        """See that the ranks hold the same. Collective.

        Args:
            step: steps completed.

        Raises:
            ReplicasDiffer: they do not.
            ConfigurationError: they do not, because of a mistake in the script.
        """
        if self._group.world_size == 1:
            return
        samples, place = self._samples()
        views = self._group.gather(
            {what: [one.layout, one.digest, len(one.content)] for what, one in samples.items()}
            | {"place": place, "mistake": self._mistake()}
        )
        self._has_copies = len({view["place"] for view in views}) < len(views)
        differences = _differences(views)
        if not differences:
            return
        who = ranks_of(sorted({rank for one in differences for rank in one.strange}))
        for one in differences:
            if len({views[rank][one.what][0] for rank in one.ranks}) > 1:
                raise ReplicasDiffer(
                    f"after step {step:,} {ranks_of(one.strange)} held other tensors than the other ranks: of other "
                    "names, types or shapes. All ranks must train the same model with the same optimizer"
                )
        if not (apart := self._apart(samples, differences, views)):
            if not self._has_warned and self._group.rank == 0:
                log.warning("step=%d the weights of %s differ by rounding from those of the others", step, who)
            self._has_warned = True
            return
        kind, name = apart[0]
        who = f"after step {step:,} {who} held other {kind} than the other ranks"
        if mistake := next((view["mistake"] for view in views if view["mistake"]), ""):
            raise ConfigurationError(f"{who}: {mistake}")
        count = sum(len(one.windows) for one in samples.values())
        raise ReplicasDiffer(
            f"{who}: {len(apart)} of {count} tensors that were compared, the first {name}. Gradients of what learns "
            "are averaged where the script calls what session.distribute has returned; nothing else may change "
            "weights, such as Embedding(max_norm=…), and weights that are averaged now and then (local SGD) are none "
            "that a checkpoint of all ranks can hold"
        )

    def _samples(self) -> tuple[dict[str, _Sample], str]:
        """The next windows of what is whole and of what is split, and which parts this rank holds."""
        found: dict[str, dict[tuple[str, str], Tensor]] = {WHOLE: {}, PARTS: {}}
        places = []
        for kind, tensors in self._tensors().items():
            sides: dict[str, list[tuple[str, Tensor]]] = {WHOLE: [], PARTS: []}
            for name, one in tensors.items():
                place = place_of(one)
                sides[PARTS if place else WHOLE].append((name, here(one)))
                if place:
                    places.append((kind, name, place))
            for what, some in sides.items():
                if what == WHOLE or self._has_copies:
                    found[what] |= self._windows(what, kind, [(name, one) for name, one in some if one.numel()])
        return {what: _Sample(windows) for what, windows in found.items()}, _digest_of(places)

    def _windows(self, what: str, kind: str, some: Sequence[tuple[str, Tensor]]) -> dict[tuple[str, str], Tensor]:
        first = self._places[what, kind]
        self._places[what, kind] = end = first + min(MAX_TENSORS, len(some))
        found = {}
        for place in range(first, end):
            turn, number = divmod(place, len(some))
            name, one = some[number]
            windows = -(-one.numel() // WINDOW)
            begin = turn % windows * WINDOW
            found[kind, name] = one.contiguous().reshape(-1)[begin : begin + WINDOW]
        return found

    def _apart(
        self, samples: Mapping[str, _Sample], differences: Sequence[_Difference], views: Sequence[Mapping[str, Any]]
    ) -> list[tuple[str, str]]:
        """Kinds and names of the tensors that differ on any rank from those of the first rank that holds the same by
        more than rounding. Collective."""
        mine: list[tuple[str, str]] = []
        for one in differences:
            first, is_here = one.ranks[0], self._group.rank in one.ranks
            content = samples[one.what].content
            reference = content.clone() if is_here else torch.empty(views[first][one.what][2], dtype=torch.uint8)
            self._group.copy_from(first, [reference])
            mine += samples[one.what].apart_from(reference) if is_here else []
        return list(
            dict.fromkeys((kind, name) for view in self._group.gather({"apart": mine}) for kind, name in view["apart"])
        )


def _differences(views: Sequence[Mapping[str, Any]]) -> list[_Difference]:
    found = []
    for what in (WHOLE, PARTS):
        places = [view["place"] if what == PARTS else "" for view in views]
        for place in dict.fromkeys(places):
            ranks = [rank for rank, its in enumerate(places) if its == place]
            if strange := unusual([views[rank][what] for rank in ranks]):
                found.append(_Difference(what, ranks, [ranks[number] for number in strange]))
    return found


def _digest_of(facts: list[Any]) -> str:
    return xxhash.xxh3_128_hexdigest(repr(facts).encode())


def _differ(own: Tensor, first: Tensor) -> bool:
    if not (own.is_floating_point() or own.is_complex()):
        return not torch.equal(own, first)
    allowed = max(ROUNDING, EPSILONS * torch.finfo(own.dtype).eps)
    precise = torch.complex128 if own.is_complex() else torch.float64
    distance, norm = (torch.linalg.vector_norm(one.to(precise)) for one in (own - first, first))
    # What is not finite is not compared: the loss will tell.
    return bool(distance > allowed * norm)
