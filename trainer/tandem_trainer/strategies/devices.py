"""The devices of strategies with one process: all GPUs that it sees."""

import logging

import torch

from tandem.tasks import StrategyName
from tandem_trainer.process_group import Group

log = logging.getLogger(__name__)


def devices_of(group: Group, strategy: StrategyName) -> tuple[torch.device, ...]:
    """All GPUs of this process, its own one first; the processor where there are none. Says so where there is one."""
    own = group.device
    if own.type == "cuda":
        others = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
        found = (own, *(other for other in others if other != own))
    else:
        found = (own,)
    if len(found) == 1:
        log.warning("strategy=%s has one device, %s: it trains as one rank with the whole model", strategy, own)
    return found
