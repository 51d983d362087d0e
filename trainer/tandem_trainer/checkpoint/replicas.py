"""Compares the weights of replicas while they train.

A start compares all of the state (tandem_trainer.checkpoint.restoring), which takes a pass over it. Before each save,
and after the first step of a generation, the ranks compare a sample: a window of up to MAX_TENSORS weights, others each
time. Gradients that are not averaged change all weights, so they show at once; one wrong weight shows when its turn
comes.

Only weights that learn and are whole on every rank are compared. Each rank has running statistics of its own, and a
script's buffers are its own business. Under fsdp every rank holds another part.

Ranks on different hardware may round differently, and nothing brings their weights together again. So a difference
within rounding is a warning.
"""

import logging
from collections.abc import Callable, Mapping

import torch
import xxhash
from torch import Tensor

from tandem_trainer.agreement import ranks_of, unusual
from tandem_trainer.checkpoint.restoring import ReplicasDiffer
from tandem_trainer.checkpoint.sharding import here
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.process_group import Group

log = logging.getLogger(__name__)

MAX_TENSORS = 64
"""Weights of a sample: more cost more than they show."""
WINDOW = 2**14
"""Elements of each."""
ROUNDING = 1e-4
"""Relative difference of a window (its norm over that of rank 0) that counts as rounding. A hundred thousand steps that
round differently come to 2e-5, and the first step of a fine-tuning with a learning rate of 1e-5 whose gradients are not
averaged to 7e-4."""
EPSILONS = 4
"""Rounding errors of the weights' dtype that are allowed, where that is more than ROUNDING."""


class Replicas:
    """The weights of this rank, to be compared with those of the others.

    Args:
        learned: the weights that learn and are whole on every rank, by name; the same names on every rank.
        mistake: what in the script keeps gradients from being averaged, as a sentence; empty if nothing is known.
    """

    def __init__(self, group: Group, learned: Callable[[], Mapping[str, Tensor]], mistake: Callable[[], str]) -> None:
        self._group, self._learned, self._mistake = group, learned, mistake
        self._place = 0
        """Index of the next weight to compare; it keeps counting after a pass over all weights."""
        self._has_warned = False

    def compare(self, step: int) -> None:
        """See that the ranks hold the same. Collective.

        Args:
            step: steps completed.

        Raises:
            ReplicasDiffer: they do not.
            ConfigurationError: they do not, because of a mistake in the script.
        """
        if self._group.world_size == 1 or not (sample := self._sample()):
            return
        content = torch.cat([one.view(torch.uint8).cpu() for one in sample.values()])
        digest = xxhash.xxh3_64_hexdigest(content.numpy().data)
        views = self._group.gather({"digest": digest, "mistake": self._mistake()})
        strange = unusual([view["digest"] for view in views])
        if not strange:
            return
        if not (apart := self._apart(sample, content)):
            if not self._has_warned and self._group.rank == 0:
                words = "step=%d the weights of %s differ by rounding from those of the others"
                log.warning(words, step, ranks_of(strange))
            self._has_warned = True
            return
        who = f"after step {step:,} {ranks_of(strange)} held other weights than the other ranks"
        if mistake := next((view["mistake"] for view in views if view["mistake"]), ""):
            raise ConfigurationError(f"{who}: {mistake}")
        names = f"{len(apart)} of {len(sample)} that were compared, the first {apart[0]}"
        raise ReplicasDiffer(
            f"{who}: {names}. Gradients of what learns are averaged where the script calls what session.distribute has "
            "returned; nothing else may change weights, such as Embedding(max_norm=…)"
        )

    def _sample(self) -> dict[str, Tensor]:
        """The next windows, [elements] each, on the device."""
        weights = [(name, here(one)) for name, one in self._learned().items() if one.numel()]
        first, self._place = self._place, self._place + min(MAX_TENSORS, len(weights))
        found = {}
        for place in range(first, self._place):
            turn, number = divmod(place, len(weights))
            name, one = weights[number]
            windows = -(-one.numel() // WINDOW)
            begin = turn % windows * WINDOW
            found[name] = one.contiguous().reshape(-1)[begin : begin + WINDOW]
        return found

    def _apart(self, sample: Mapping[str, Tensor], content: Tensor) -> list[str]:
        """Names of the weights that differ on any rank from those of rank 0 by more than rounding. Collective."""
        reference = content.clone()
        self._group.copy_from_first([reference])
        found, start = [], 0
        for name, one in sample.items():
            end = start + one.nbytes
            # Copies, for not every type may begin at any byte.
            own, first = (part[start:end].clone().view(one.dtype) for part in (content, reference))
            if _differ(own, first):
                found.append(name)
            start = end
        names = {name for view in self._group.gather({"names": found}) for name in view["names"]}
        return [name for name in sample if name in names]


def _differ(own: Tensor, first: Tensor) -> bool:
    if not (own.is_floating_point() or own.is_complex()):
        return not torch.equal(own, first)
    allowed = max(ROUNDING, EPSILONS * torch.finfo(own.dtype).eps)
    precise = torch.complex128 if own.is_complex() else torch.float64
    distance, norm = (torch.linalg.vector_norm(one.to(precise)) for one in (own - first, first))
    # What is not finite is not compared: the loss will tell.
    return bool(distance > allowed * norm)
