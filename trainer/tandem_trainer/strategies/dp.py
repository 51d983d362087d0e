"""`nn.DataParallel`: one process copies the model onto all its GPUs in each step, and divides the samples among them.

https://pytorch.org/docs/stable/generated/torch.nn.DataParallel.html

The copies have the attributes of the module. So each is given the random numbers of dropout for its part of the
samples, and the units that are dropped are the same as on one rank alone.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from tandem.job.tasks import Loop
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
    """DataParallel whose copies of a model draw dropout's random numbers for their own samples."""

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        divide_draws(replicas, len(self.device_ids))
        outputs: list[Any] = super().parallel_apply(replicas, inputs, kwargs)
        return outputs


def divide_draws(replicas: Sequence[nn.Module], count: int) -> None:
    """Give each copy the random numbers of dropout for its samples.

    Args:
        replicas: the copies that have samples.
        count: number of parts into which the batch was to be divided; a small batch makes fewer.
    """
    parts: dict[int, list[Draws]] = {}
    for number, replica in enumerate(replicas):
        for module in replica.modules():
            if isinstance(module, SampleDropout):
                draws = module.draws
                # Layers that share a source must share its parts: their calls are counted together.
                if id(draws) not in parts:
                    parts[id(draws)] = draws.chunked(count)
                module.draws = parts[id(draws)][number]
