"""Detection of weights in callbacks without a state: an average that a checkpoint would miss.

The adapters save the state of a callback that keeps its average in a `state_dict`. An average of any other callback
would silently start anew after a restart. It is detected by what the callback holds: tensors of the shapes of all
parameters that learn, which are not the model's own and change during training. A teacher does not change, and a batch
has other shapes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from tandem_trainer.failure import ConfigurationError

MAX_DEPTH = 3
"""Depth up to which nested containers are searched."""


class HiddenWeights:
    """Searches callbacks at each save.

    Args:
        model: the model that is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sums: dict[int, float] = {}

    def refuse(self, callback: object, advice: str) -> None:
        """Refuse a callback that holds weights.

        Args:
            advice: what the script should do instead.

        Raises:
            ConfigurationError: the callback holds copies of the weights that have changed since the first call.
        """
        own = {id(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())}
        shapes = Counter(parameter.shape for parameter in self._model.parameters() if parameter.requires_grad)
        tensors = [tensor for tensor in _tensors(vars(callback), MAX_DEPTH) if id(tensor) not in own]
        if not shapes or shapes - Counter(tensor.shape for tensor in tensors):
            return
        total = sum(float(tensor.detach().double().sum()) for tensor in tensors)
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
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item, depth - 1)
