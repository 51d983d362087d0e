"""Strategies of parallelism: how the train state is distributed over the ranks (docs/decisions/0036-strategies.md).

Each is a small module behind one interface, `strategy.Strategy`, which also serves one rank alone. The loop calls it at
four points: to split the model, before there is an optimizer; for the module to call, once the state is restored;
around each backward pass, which may communicate; and to clip gradients. A strategy that runs many micro-batches at once
takes a whole share from the loop (`runner`).
"""

import logging

from tandem.job.tasks import Loop
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.strategy import Strategy

log = logging.getLogger(__name__)


def strategy_of(loop: Loop, group: Group, per_worker: int) -> Strategy:
    """Create the strategy that a job asks for. Collective.

    Args:
        per_worker: number of ranks of each worker.

    Raises:
        ConfigurationError: the ranks of a worker cannot be divided as the job says, or the strategy is for one process.
    """
    degree = loop.tensor_parallel
    # Each strategy is imported only where it is used: their imports would delay every start.
    if loop.strategy == "dp" or loop.strategy == "model":
        if group.world_size > 1:
            raise ConfigurationError(
                f"strategy: {loop.strategy} is for one process, and there are {group.world_size} ranks; use ddp"
            )
        if loop.strategy == "dp":
            from tandem_trainer.strategies.dp import Dp

            return Dp(loop, group)
        from tandem_trainer.strategies.model import LayerSplit

        return LayerSplit(loop, group)
    # One rank has nothing to distribute: every strategy for several ranks is the plain one then.
    if group.world_size == 1:
        if loop.fsdp is not None and loop.fsdp.cpu_offload:
            log.warning("setting=fsdp.cpuOffload ignored: there is only one rank")
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
