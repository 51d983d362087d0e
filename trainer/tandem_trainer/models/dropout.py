"""Per-sample dropout: its random numbers depend only on seed, step, sample, layer, call and unit.

So the same units are dropped for the same sample whichever rank computes it, in whatever micro-batch, and a run that
shrinks, grows and resumes has the loss curve of an undisturbed one. torch's own dropout draws from the generator of the
rank, in the order in which samples come.

A module that is called again in the same step (weights shared by layers, a recurrent loop, two views of a sample) draws
new numbers: its calls are counted. Activation checkpointing calls it once more in the backward pass, and that call must
draw the numbers of the first one. torch's CPU generator identifies the call that is repeated, because every kind of
checkpointing restores its state: each call draws a token from it, and the call in the backward pass finds its own under
the same token. Rejected: a count of the calls in the backward pass (regions are recomputed in any order, and not to
their end), torch's hooks for saved tensors (they know the region, but not by a public name).

In a compiled graph the calls are counted while it is traced, so a compiled model draws the same numbers when it is
called again in a step. The compiler restarts the trace of a function where it finds that it has to break the graph
there; then the calls of the first attempt do not count.

A random number is a 32-bit hash of which the upper bits are compared (tandem_trainer.data.keyed). It costs a quarter of
torch's generator on a CPU. Rejected: a generator per sample (a kernel for each), Philox written in tensor operations
(ten rounds, for a quality that dropout does not need).
"""

import torch
from torch import Tensor, nn
from torch._guards import CompileContext, TraceId

from tandem_trainer.data.keyed import FIRST, LOWER, hash_in_place, mixed, signed, wrapped

_MULTIPLIER = 0x9E3779B1


class Draws:
    """Source of the random numbers for the layers of one model: a key for each sample of the current batch."""

    def __init__(self, layers: int = 1) -> None:
        self.layers = layers
        """Number of layers that draw from it."""
        self.keys = torch.empty(0, dtype=torch.int32)
        self._step = (0, 0)
        self._calls: dict[int, int] = {}
        self._recorded_calls: dict[tuple[int, int], tuple[Tensor, int]] = {}
        self._trace: TraceId | None = None
        self._calls_before: dict[int, int] = {}
        """Calls that had been counted when the compiler started the current trace."""

    def set(self, seed: int, step: int, ids: Tensor) -> None:
        """Set the samples that are computed next: their ids, [N] int64, in a step."""
        if (seed, step) != self._step:
            self._step = (seed, step)
            self._recorded_calls = {}
        self._calls = {}
        keys = (ids ^ (ids >> 32) * FIRST) * _MULTIPLIER + (mixed(seed, step) & LOWER)
        self.keys = hash_in_place(hash_in_place(wrapped(keys)))

    def chunked(self, count: int) -> list["Draws"]:
        """Return the draws of each chunk of a batch that is split as by `torch.chunk`."""
        parts = []
        for keys in self.keys.chunk(count):
            part = Draws(self.layers)
            part.keys, part._step = keys, self._step
            parts.append(part)
        return parts

    def of_call(self, layer: int) -> Tensor:
        """Return the keys for the current call of a layer: [N] int32, not to be changed.

        Raises:
            RuntimeError: the call repeats one of several, and nothing identifies which.
        """
        if torch.compiler.is_compiling():
            return _keys_of_call(self.keys, self._traced_call(layer))
        token = int(torch.randint(2**62, (), device="cpu"))
        # Within a backward pass; torch's own checkpointing asks in this way (torch 2.15).
        if torch._C._current_graph_task_id() != -1:
            # In a pipeline other samples may have been computed in between, by other layers.
            if recorded := self._recorded_calls.get((layer, token)):
                return _keys_of_call(*recorded)
            if self._calls.get(layer):
                return _keys_of_call(*self._only_call(layer))
        self._recorded_calls[layer, token] = self.keys, self._calls.get(layer, 0)
        return _keys_of_call(self.keys, self._count(layer))

    def _only_call(self, layer: int) -> tuple[Tensor, int]:
        """Return the keys and number of an earlier call where no random state identifies it; there must be only one."""
        if self._calls[layer] == 1:
            return self.keys, 0
        raise RuntimeError(
            f"a dropout module that is called {self._calls[layer]} times in a step is called again in the backward "
            "pass, with another random state; keep preserve_rng_state=True of torch.utils.checkpoint"
        )

    def _traced_call(self, layer: int) -> int:
        """Return the number of a call, as the compiler sees it: a constant of the graph."""
        trace = CompileContext.current_trace_id()
        if trace is not None and trace != self._trace:
            if self._trace is not None and trace.compile_id == self._trace.compile_id:
                self._calls = dict(self._calls_before)
            else:
                self._calls_before = dict(self._calls)
            self._trace = trace
        return self._count(layer)

    # As torch.compiler.assume_constant_result does, which would import the compiler: that takes a second.
    _traced_call._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _count(self, layer: int) -> int:
        number = self._calls.get(layer, 0)
        self._calls[layer] = number + 1
        return number


def _keys_of_call(keys: Tensor, number: int) -> Tensor:
    """Derive the keys of a call; the first call, the only one of most modules, has the samples' own."""
    return hash_in_place(hash_in_place(keys ^ signed(number * _MULTIPLIER & LOWER))) if number else keys


class SampleDropout(nn.Module):
    """Zeroes elements with probability p and scales the others, as torch.nn.Dropout does, while training.

    Args:
        p: probability.
        layer: index that distinguishes the layers of a model.
        draws: the model's source of random numbers.
    """

    def __init__(self, p: float, layer: int, draws: Draws) -> None:
        super().__init__()
        self.p, self._layer = p, layer
        self.draws: Draws = draws
        self._salt = mixed(layer) & LOWER
        self.part = (0, 1)
        """Index of this rank's part, and number of equal parts, where each activation is split over ranks by its last
        dimension. Together the parts drop what one rank alone would drop."""
        self._units = torch.empty(0, dtype=torch.int32)

    def forward(self, activations: Tensor) -> Tensor:
        """[N, …] → [N, …], for the N samples that the draws were set for."""
        if not self.training or self.p == 0.0:
            return activations
        # On the activations' device: a model may be on several devices.
        keys = self.draws.of_call(self._layer).to(activations.device)
        if len(keys) != len(activations):
            raise RuntimeError(f"draws were set for {len(keys)} samples, not for {len(activations)}")
        if self.p == 1.0:
            return activations * 0.0
        count = activations[0].numel()
        if len(self._units) != count or self._units.device != keys.device:
            units = torch.arange(count, dtype=torch.int64, device=keys.device)
            place, parts = self.part
            if parts > 1:
                width = activations.shape[-1]
                units = units // width * (width * parts) + place * width + units % width
            self._units = wrapped(units * _MULTIPLIER + self._salt)
        hashed = hash_in_place(keys.unsqueeze(1) ^ self._units)
        # Hashes are uniform over 32 bits; a fraction p of them is below this bound.
        keep_mask = hashed >= int(self.p * 2**32) - 2**31
        scale = keep_mask.view(activations.shape).to(activations.dtype).mul_(1.0 / (1.0 - self.p))
        return activations * scale

    def extra_repr(self) -> str:
        """Return the parameters as torch prints those of its Dropout."""
        return f"p={self.p}"


def key_dropout(model: nn.Module, first: int = 0) -> Draws:
    """Replace every torch.nn.Dropout of a model by SampleDropout; returns their source of random numbers.

    Args:
        first: index of its first layer; the layers of models that learn together have different indices.
    """
    dropouts = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Dropout
    ]
    draws = Draws(len(dropouts))
    for layer, (parent, name, child) in enumerate(dropouts, start=first):
        setattr(parent, name, SampleDropout(child.p, layer, draws))
    return draws
