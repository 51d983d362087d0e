"""Compares the weights and moments of replicas while they train.

A start compares all of the state (tandem_trainer.checkpoint.restoring), which takes a pass over it. Before each save,
and after the first step of a generation, the ranks compare a sample: windows of up to MAX_TENSORS tensors of each kind
(weights that learn, moments, frozen weights, averages), different ones each time. Gradients that are not averaged
change all weights, so they show at once; a single wrong weight shows when its turn comes.

Tensors that every rank holds in full are compared by all ranks, split tensors by the ranks that hold the same part:
under hybrid sharding and in several pipelines there are such ranks, and where every rank holds another part nothing is
compared.

Each rank has running statistics of its own, and a script may use buffers as it likes: a save copies those of rank 0 to
all ranks.

Ranks on different hardware may round differently, and nothing brings their weights together again. So a difference
within rounding is only a warning.

Rejected: norms of gradients (averaged gradients are identical on all ranks to the bit, others show in weights and
moments after the step, and a norm costs a pass over all gradients in each step).
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

from tandem.wire.status import RANKS_DIFFER
from tandem_trainer.agreement import deviating_ranks, ranks_of
from tandem_trainer.checkpoint.restoring import ReplicasDiffer
from tandem_trainer.checkpoint.sharding import place_of, to_local
from tandem_trainer.failure import ConfigurationError, Disagreement
from tandem_trainer.process_group import Group

log = logging.getLogger(__name__)

MAX_TENSORS = 64
"""Maximum number of tensors in a sample, for each kind; more would cost more than they show."""
WINDOW = 2**14
"""Elements that are compared of each tensor."""
ROUNDING = 1e-4
"""Relative difference of a window (its norm over that of rank 0) that counts as rounding. A hundred thousand steps that
round differently come to 2e-5, and the first step of a fine-tuning with a learning rate of 1e-5 whose gradients are not
averaged to 7e-4."""
EPSILONS = 4
"""Rounding errors of the weights' dtype that are allowed, where that is more than ROUNDING."""


FULL, PARTS = "whole", "parts"
"""Tensors that every rank holds in full, and tensors of which several ranks hold the same part."""


@dataclass(frozen=True)
class _Sample:
    """Windows of tensors that are compared together."""

    windows: Mapping[tuple[str, str], Tensor]
    """Windows by kind and name, [elements] each, on the device."""

    @cached_property
    def content(self) -> Tensor:
        """Content of all windows, [bytes], uint8, on the CPU."""
        contents = [window.view(torch.uint8).cpu() for window in self.windows.values()]
        return torch.cat(contents) if contents else torch.empty(0, dtype=torch.uint8)

    @cached_property
    def layout(self) -> str:
        """Digest of the windows' names, dtypes and lengths, without their values."""
        return _digest_of([(*key, str(window.dtype), len(window)) for key, window in self.windows.items()])

    @cached_property
    def digest(self) -> str:
        """Digest of the values."""
        return xxhash.xxh3_64_hexdigest(self.content.numpy().data)

    def beyond_rounding(self, reference: Tensor) -> list[tuple[str, str]]:
        """Return the windows that differ by more than rounding from others of the same layout.

        Args:
            reference: content of the other windows.
        """
        differing, start = [], 0
        for key, window in self.windows.items():
            end = start + window.nbytes
            # Cloned, because not every dtype may be viewed at any byte offset.
            own, first = (part[start:end].clone().view(window.dtype) for part in (self.content, reference))
            if _differ(own, first):
                differing.append(key)
            start = end
        return differing


@dataclass(frozen=True)
class _Difference:
    """Ranks that should hold the same values, and do not."""

    split: str
    """FULL or PARTS."""
    ranks: Sequence[int]
    """All ranks of the comparison."""
    strange: Sequence[int]
    """Ranks that differ from most of them."""


class GradientsNotAveraged(Disagreement, ConfigurationError):  # noqa: N818 - it is what is the case
    """Ranks hold different weights because of a mistake in the script."""

    corruption = RANKS_DIFFER


class Replicas:
    """Compares the tensors of this rank with those of the others.

    Args:
        tensors: returns the tensors that are equal on all ranks that hold the same part of them, by kind and name.
            Kinds and names of full tensors are the same on every rank.
        mistake: returns the mistake in the script that keeps gradients from being averaged, as a sentence; empty if
            none is known.
    """

    def __init__(
        self, group: Group, tensors: Callable[[], Mapping[str, Mapping[str, Tensor]]], mistake: Callable[[], str]
    ) -> None:
        self._group, self._tensors, self._mistake = group, tensors, mistake
        self._places: Counter[tuple[str, str]] = Counter()
        """Index of the next tensor to compare, by split and kind; it keeps counting after all tensors have had their
        turn."""
        self._has_copies = True
        """Whether any two ranks hold the same parts."""
        self._has_warned = False

    def compare(self, step: int) -> None:
        """Compare the next sample on all ranks. Collective.

        Args:
            step: steps completed.

        Raises:
            ReplicasDiffer: the ranks differ.
            GradientsNotAveraged: they differ because of a mistake in the script.
        """
        if self._group.world_size == 1:
            return
        # Only digests are gathered; values are sent only where they differ.
        samples, place = self._samples()
        views = self._group.gather(
            {split: [sample.layout, sample.digest, len(sample.content)] for split, sample in samples.items()}
            | {"place": place, "mistake": self._mistake()}
        )
        self._has_copies = len({view["place"] for view in views}) < len(views)
        differences = _differences(views)
        if not differences:
            return
        strange = sorted({rank for difference in differences for rank in difference.strange})
        strange_ranks = ranks_of(strange)
        for difference in differences:
            if len({views[rank][difference.split][0] for rank in difference.ranks}) > 1:
                raise ReplicasDiffer(
                    f"after step {step:,} {ranks_of(difference.strange)} held other tensors than the other ranks: of "
                    "other names, types or shapes. All ranks must train the same model with the same optimizer",
                    difference.strange,
                )
        if not (differing := self._beyond_rounding(samples, differences, views)):
            if not self._has_warned and self._group.rank == 0:
                log.warning(
                    "step=%d the weights of %s differ by rounding from those of the others", step, strange_ranks
                )
            self._has_warned = True
            return
        kind, name = differing[0]
        finding = f"after step {step:,} {strange_ranks} held other {kind} than the other ranks"
        if mistake := next((view["mistake"] for view in views if view["mistake"]), ""):
            raise GradientsNotAveraged(f"{finding}: {mistake}", strange)
        count = sum(len(sample.windows) for sample in samples.values())
        raise ReplicasDiffer(
            f"{finding}: {len(differing)} of {count} tensors that were compared, the first {name}. Gradients of what "
            "learns are averaged where the script calls what session.distribute has returned; nothing else may change "
            "weights, such as Embedding(max_norm=…), and weights that are averaged now and then (local SGD) are none "
            "that a checkpoint of all ranks can hold",
            strange,
        )

    def _samples(self) -> tuple[dict[str, _Sample], str]:
        """Take the next windows of full tensors and of split ones, and a digest of the parts that this rank holds."""
        windows: dict[str, dict[tuple[str, str], Tensor]] = {FULL: {}, PARTS: {}}
        places = []
        for kind, tensors in self._tensors().items():
            sides: dict[str, list[tuple[str, Tensor]]] = {FULL: [], PARTS: []}
            for name, tensor in tensors.items():
                place = place_of(tensor)
                sides[PARTS if place else FULL].append((name, to_local(tensor)))
                if place:
                    places.append((kind, name, place))
            for split, named_tensors in sides.items():
                if split == FULL or self._has_copies:
                    windows[split] |= self._windows(
                        split, kind, [(name, tensor) for name, tensor in named_tensors if tensor.numel()]
                    )
        return {split: _Sample(chosen) for split, chosen in windows.items()}, _digest_of(places)

    def _windows(
        self, split: str, kind: str, named_tensors: Sequence[tuple[str, Tensor]]
    ) -> dict[tuple[str, str], Tensor]:
        first = self._places[split, kind]
        self._places[split, kind] = end = first + min(MAX_TENSORS, len(named_tensors))
        windows = {}
        for place in range(first, end):
            turn, number = divmod(place, len(named_tensors))
            name, tensor = named_tensors[number]
            positions = -(-tensor.numel() // WINDOW)
            begin = turn % positions * WINDOW
            windows[kind, name] = tensor.contiguous().reshape(-1)[begin : begin + WINDOW]
        return windows

    def _beyond_rounding(
        self, samples: Mapping[str, _Sample], differences: Sequence[_Difference], views: Sequence[Mapping[str, Any]]
    ) -> list[tuple[str, str]]:
        """Return kinds and names of the tensors that differ by more than rounding on any rank from those of the first
        rank that holds the same part. Collective."""
        local: list[tuple[str, str]] = []
        for difference in differences:
            first, is_here = difference.ranks[0], self._group.rank in difference.ranks
            content = samples[difference.split].content
            reference = (
                content.clone() if is_here else torch.empty(views[first][difference.split][2], dtype=torch.uint8)
            )
            self._group.copy_from(first, [reference])
            local += samples[difference.split].beyond_rounding(reference) if is_here else []
        return list(
            dict.fromkeys((kind, name) for view in self._group.gather({"apart": local}) for kind, name in view["apart"])
        )


def _differences(views: Sequence[Mapping[str, Any]]) -> list[_Difference]:
    differences = []
    for split in (FULL, PARTS):
        places = [view["place"] if split == PARTS else "" for view in views]
        for place in dict.fromkeys(places):
            ranks = [rank for rank, its in enumerate(places) if its == place]
            if strange := deviating_ranks([views[rank][split] for rank in ranks]):
                differences.append(_Difference(split, ranks, [ranks[number] for number in strange]))
    return differences


def _digest_of(facts: list[Any]) -> str:
    return xxhash.xxh3_128_hexdigest(repr(facts).encode())


def _differ(own: Tensor, first: Tensor) -> bool:
    if not (own.is_floating_point() or own.is_complex()):
        return not torch.equal(own, first)
    allowed = max(ROUNDING, EPSILONS * torch.finfo(own.dtype).eps)
    precise = torch.complex128 if own.is_complex() else torch.float64
    distance, norm = (torch.linalg.vector_norm(values.to(precise)) for values in (own - first, first))
    # Comparisons with NaN are false: values that are not finite show in the loss.
    return bool(distance > allowed * norm)
