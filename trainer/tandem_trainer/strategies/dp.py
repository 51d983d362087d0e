"""`nn.DataParallel`: one process copies the model onto all its GPUs in each step, and divides the samples among them.

https://pytorch.org/docs/stable/generated/torch.nn.DataParallel.html

The copies are made of the module's own attributes. So each gets what dropout draws from for its part of the samples,
and the units that are dropped are those of one rank alone.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from tandem.tasks import Loop
from tandem_trainer.models.dropout import Draws, SampleDropout
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.strategy import Strategy, devices_of


class Dp(Strategy):
    """All GPUs of one process, by samples."""

    def __init__(self, loop: Loop, group: Group) -> None:
        super().__init__(loop, group)
        self.devices = devices_of(group, "dp")

    def wrap(self, model: nn.Module) -> nn.Module:
        model = super().wrap(model)
        return model if len(self.devices) == 1 else Copies(model, [*self.devices])


class Copies(nn.DataParallel[nn.Module]):
    """DataParallel whose copies of a model draw for the samples that they have."""

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        divide_draws(replicas, len(self.device_ids))
        found: list[Any] = super().parallel_apply(replicas, inputs, kwargs)
        return found


def divide_draws(replicas: Sequence[nn.Module], count: int) -> None:
    """Give each copy what the dropout of its samples draws from.

    Args:
        replicas: the copies that have samples.
        count: parts into which the batch was to be divided; of a small one there are fewer.
    """
    parts: dict[int, list[Draws]] = {}
    for number, replica in enumerate(replicas):
        for module in replica.modules():
            if isinstance(module, SampleDropout):
                whole = module.draws
                if id(whole) not in parts:
                    parts[id(whole)] = whole.divided(count)
                module.draws = parts[id(whole)][number]
