"""Dropout whose draws belong to the sample: a function of seed, step, sample, layer and unit, of nothing else.

So the same units are dropped for the same sample whichever rank computes it, in whatever micro-batch, and a run that
shrinks, grows and resumes has the loss curve of an undisturbed one. torch's own dropout draws from the generator of the
rank, in the order in which samples come.

The draw is a 32-bit hash of which the upper bits are compared (tandem_trainer.data.hashing). It costs a quarter of what
torch's generator costs on a CPU. Rejected: a generator per sample (a kernel for each), Philox written in tensor
operations (ten rounds, for a quality that dropout does not need).
"""

import torch
from torch import Tensor, nn

from tandem_trainer.data.hashing import FIRST, LOWER, hash_in_place, wrapped
from tandem_trainer.data.seed import mixed

_ODD = 0x9E3779B1


class Draws:
    """What the layers of one model draw from: a key for each sample of the batch that is computed."""

    def __init__(self) -> None:
        self.keys = torch.empty(0, dtype=torch.int32)

    def set(self, seed: int, step: int, ids: Tensor) -> None:
        """The samples with these ids, [N] int64, are about to be computed in this step."""
        keys = (ids ^ (ids >> 32) * FIRST) * _ODD + (mixed(seed, step) & LOWER)
        self.keys = hash_in_place(hash_in_place(wrapped(keys)))


class SampleDropout(nn.Module):
    """Zeroes elements with probability p and scales the others, as torch.nn.Dropout does, while training.

    Args:
        p: probability.
        layer: tells the layers of a model apart.
        draws: the model's.
    """

    def __init__(self, p: float, layer: int, draws: Draws) -> None:
        super().__init__()
        self.p, self._draws = p, draws
        self._salt = mixed(layer) & LOWER
        self._units = torch.empty(0, dtype=torch.int32)

    def forward(self, activations: Tensor) -> Tensor:
        """[N, …] → [N, …], for the N samples that the draws were set for."""
        if not self.training or self.p == 0.0:
            return activations
        keys = self._draws.keys
        if len(keys) != len(activations):
            raise RuntimeError(f"draws were set for {len(keys)} samples, not for {len(activations)}")
        count = activations[0].numel()
        if len(self._units) != count or self._units.device != keys.device:
            units = torch.arange(count, dtype=torch.int64, device=keys.device)
            self._units = wrapped(units * _ODD + self._salt)
        hashed = hash_in_place(keys.unsqueeze(1) ^ self._units)
        # A hash is any 32-bit number with the same chance; p of them lie below this one.
        kept = hashed >= int(self.p * 2**32) - 2**31
        scale = kept.view(activations.shape).to(activations.dtype).mul_(1.0 / (1.0 - self.p))
        return activations * scale

    def extra_repr(self) -> str:
        """As torch prints its own."""
        return f"p={self.p}"


def key_dropout(model: nn.Module) -> Draws:
    """Put SampleDropout in the place of every torch.nn.Dropout of a model; returns what they draw from."""
    draws = Draws()
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Dropout
    ]
    for layer, (parent, name, child) in enumerate(found):
        setattr(parent, name, SampleDropout(child.p, layer, draws))
    return draws
