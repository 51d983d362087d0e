"""Copies of the weights in a callback that has no state: an average that a checkpoint would not have.

A callback that keeps its average in a `state_dict` of its own is kept by the adapters. One that does not would begin
anew after a restart, without a word. It is found by what it holds: tensors of the shapes of all parameters that learn,
which are not the model's own and change while it trains. A teacher does not change, and a batch has other shapes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from tandem_trainer.failure import ConfigurationError

DEPTH = 3
"""Containers in containers that are looked into."""


class HiddenWeights:
    """Looks into callbacks at each save.

    Args:
        model: what is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sums: dict[int, float] = {}

    def refuse(self, callback: object, advice: str) -> None:
        """
        Args:
            advice: what the script does instead.

        Raises:
            ConfigurationError: the callback holds copies of the weights that have changed since the first look.
        """
        own = {id(one) for one in (*self._model.parameters(), *self._model.buffers())}
        wanted = Counter(one.shape for one in self._model.parameters() if one.requires_grad)
        found = [one for one in _tensors(vars(callback), DEPTH) if id(one) not in own]
        if not wanted or wanted - Counter(one.shape for one in found):
            return
        total = sum(float(one.detach().double().sum()) for one in found)
        if self._sums.setdefault(id(callback), total) != total:
            name = type(callback).__name__
            raise ConfigurationError(f"{name} holds copies of the weights that checkpoints do not have; {advice}")


def _tensors(value: object, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif depth and isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one, depth - 1)
