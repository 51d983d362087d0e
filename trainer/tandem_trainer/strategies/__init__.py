"""Strategies of parallelism: how the state of training lies on the ranks (docs/decisions/0036-strategies.md).

Each is a small module behind one interface, `strategy.Strategy`, which is also what one rank alone needs. The loop asks
it four times: to split the model, before there is an optimizer; for the module that is called, once the state is
restored; whether a backward pass communicates; and to clip. One that runs many micro-batches at once takes a whole
share from it (`runner`).
"""

import logging

from tandem.tasks import Loop, TaskLoop
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.strategy import Strategy

log = logging.getLogger(__name__)


def strategy_of(loop: Loop, group: Group, per_worker: int) -> Strategy:
    """The strategy that a job asks for. Collective.

    Args:
        per_worker: ranks of each worker.

    Raises:
        ConfigurationError: the ranks of a worker cannot be divided as the job says, or the strategy is for one process.
    """
    degree = loop.tensor_parallel if isinstance(loop, TaskLoop) else 1
    # What stands in the way of a start that is needed quickly is imported by those alone that need it.
    if loop.strategy == "dp" or loop.strategy == "model":
        if group.world_size > 1:
            raise ConfigurationError(
                f"strategy: {loop.strategy} is for one process, and there are {group.world_size} ranks; take ddp"
            )
        if loop.strategy == "dp":
            from tandem_trainer.strategies.dp import Dp

            return Dp(loop, group)
        from tandem_trainer.strategies.model import LayerSplit

        return LayerSplit(loop, group)
    if group.world_size == 1:
        if loop.fsdp is not None and loop.fsdp.cpu_offload:
            log.warning("setting=fsdp.cpuOffload ignored: one rank splits nothing")
        return Strategy(loop, group)
    if loop.strategy == "hogwild":
        from tandem_trainer.strategies.hogwild import Hogwild

        return Hogwild(loop, group)
    if loop.strategy == "fsdp":
        from tandem_trainer.strategies.fsdp import Fsdp

        return Fsdp(loop, group, per_worker, degree)
    if loop.strategy == "pipeline":
        from tandem_trainer.strategies.pipeline import Pipelined

        return Pipelined(loop, group, per_worker, degree)
    from tandem_trainer.strategies.ddp import Ddp

    return Ddp(loop, group)
