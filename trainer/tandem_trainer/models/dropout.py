"""Per-sample dropout: its draws depend only on seed, step, sample, layer, call and unit.

So the same units are dropped for the same sample whichever rank computes it, in whatever micro-batch, and a run that
shrinks, grows and resumes has the loss curve of an undisturbed one. torch's own dropout draws from the generator of the
rank, in the order in which samples come.

A module that is called again in the same step (weights shared by layers, a recurrent loop, two views of a sample) draws
anew: its calls are counted. Activation checkpointing calls it once more in the backward pass, and that call must draw
what the first one drew. Which call it repeats is told by torch's CPU generator, which every kind of checkpointing puts
back to where it was: each call takes a number from it, and the call in the backward pass finds its own under the same
number. Rejected: a count of the calls in the backward pass (regions are computed again in any order, and not to their
end), torch's hooks for saved tensors (they know the region, but not by a public name).

In a compiled graph the calls are counted while it is traced, so a compiled model draws the same when it is called
again in a step. The compiler traces a function from its beginning again where it finds out that it has to cut the graph
there; then the calls of the first attempt do not count.

The draw is a 32-bit hash of which the upper bits are compared (tandem_trainer.data.keyed). It costs a quarter of what
torch's generator costs on a CPU. Rejected: a generator per sample (a kernel for each), Philox written in tensor
operations (ten rounds, for a quality that dropout does not need).
"""

import torch
from torch import Tensor, nn
from torch._guards import CompileContext, TraceId

from tandem_trainer.data.keyed import FIRST, LOWER, hash_in_place, mixed, signed, wrapped

_ODD = 0x9E3779B1


class Draws:
    """What the layers of one model draw from: a key for each sample of the batch that is computed."""

    def __init__(self, layers: int = 1) -> None:
        self.layers = layers
        """How many layers draw from it."""
        self.keys = torch.empty(0, dtype=torch.int32)
        self._step = (0, 0)
        self._calls: dict[int, int] = {}
        self._drawn: dict[tuple[int, int], tuple[Tensor, int]] = {}
        self._trace: TraceId | None = None
        self._calls_before: dict[int, int] = {}
        """As they were where the compiler began to trace what it traces."""

    def set(self, seed: int, step: int, ids: Tensor) -> None:
        """The samples with these ids, [N] int64, are about to be computed in this step."""
        if (seed, step) != self._step:
            self._step = (seed, step)
            self._drawn = {}
        self._calls = {}
        keys = (ids ^ (ids >> 32) * FIRST) * _ODD + (mixed(seed, step) & LOWER)
        self.keys = hash_in_place(hash_in_place(wrapped(keys)))

    def divided(self, count: int) -> list["Draws"]:
        """The draws of each chunk of a batch, which is chunked as `torch.chunk` does it."""
        parts = []
        for keys in self.keys.chunk(count):
            part = Draws(self.layers)
            part.keys, part._step = keys, self._step
            parts.append(part)
        return parts

    def of_call(self, layer: int) -> Tensor:
        """The keys that the call of a layer which happens now draws from: [N] int32, to be left as they are.

        Raises:
            RuntimeError: it repeats one of several calls, and nothing tells which.
        """
        if torch.compiler.is_compiling():
            return _called(self.keys, self._traced(layer))
        token = int(torch.randint(2**62, (), device="cpu"))
        # In a backward pass: torch itself asks in this way in its checkpointing (torch 2.15).
        if torch._C._current_graph_task_id() != -1:
            # In a pipeline other samples may have been computed in between, by other layers.
            if found := self._drawn.get((layer, token)):
                return _called(*found)
            if self._calls.get(layer):
                return _called(*self._repeated(layer))
        self._drawn[layer, token] = self.keys, self._calls.get(layer, 0)
        return _called(self.keys, self._count(layer))

    def _repeated(self, layer: int) -> tuple[Tensor, int]:
        """What an earlier call drew from, and which one it was, where no random state tells."""
        if self._calls[layer] == 1:
            return self.keys, 0
        raise RuntimeError(
            f"a dropout module that is called {self._calls[layer]} times in a step is called again in the backward "
            "pass, with another random state; leave preserve_rng_state of torch.utils.checkpoint as it is, True"
        )

    def _traced(self, layer: int) -> int:
        """The number of a call, as the compiler sees it: a constant of the graph."""
        trace = CompileContext.current_trace_id()
        if trace is not None and trace != self._trace:
            if self._trace is not None and trace.compile_id == self._trace.compile_id:
                self._calls = dict(self._calls_before)
            else:
                self._calls_before = dict(self._calls)
            self._trace = trace
        return self._count(layer)

    # What torch.compiler.assume_constant_result does; itself it would import the compiler, which takes a second.
    _traced._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _count(self, layer: int) -> int:
        number = self._calls.get(layer, 0)
        self._calls[layer] = number + 1
        return number


def _called(keys: Tensor, number: int) -> Tensor:
    """Other keys for each call; for the first one, which is the only one of most modules, the keys themselves."""
    return hash_in_place(hash_in_place(keys ^ signed(number * _ODD & LOWER))) if number else keys


class SampleDropout(nn.Module):
    """Zeroes elements with probability p and scales the others, as torch.nn.Dropout does, while training.

    Args:
        p: probability.
        layer: tells the layers of a model apart.
        draws: the model's.
    """

    def __init__(self, p: float, layer: int, draws: Draws) -> None:
        super().__init__()
        self.p, self._layer = p, layer
        self.draws: Draws = draws
        self._salt = mixed(layer) & LOWER
        self.part = (0, 1)
        """Where each activation is split over ranks, by its last dimension: which part it is given, and of how many
        equal ones. Together the parts drop what one rank alone would drop."""
        self._units = torch.empty(0, dtype=torch.int32)

    def forward(self, activations: Tensor) -> Tensor:
        """[N, …] → [N, …], for the N samples that the draws were set for."""
        if not self.training or self.p == 0.0:
            return activations
        # Where the activations are: a model may be on several devices.
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
            self._units = wrapped(units * _ODD + self._salt)
        hashed = hash_in_place(keys.unsqueeze(1) ^ self._units)
        # A hash is any 32-bit number with the same chance; p of them lie below this one.
        kept = hashed >= int(self.p * 2**32) - 2**31
        scale = kept.view(activations.shape).to(activations.dtype).mul_(1.0 / (1.0 - self.p))
        return activations * scale

    def extra_repr(self) -> str:
        """As torch prints its own."""
        return f"p={self.p}"


def key_dropout(model: nn.Module, first: int = 0) -> Draws:
    """Put SampleDropout in the place of every torch.nn.Dropout of a model; returns what they draw from.

    Args:
        first: number of its first layer; the layers of the models that learn together have different ones.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Dropout
    ]
    draws = Draws(len(found))
    for layer, (parent, name, child) in enumerate(found, start=first):
        setattr(parent, name, SampleDropout(child.p, layer, draws))
    return draws
