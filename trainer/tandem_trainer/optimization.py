"""Optimizers and the learning rate's path, both functions of the job's configuration."""

import math

import torch
from torch import nn

from tandem.tasks import Optimizer, Schedule


def build_optimizer(config: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over all parameters that learn."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # The multi-tensor implementations: one launch for all parameters, on CPUs too.
    if config.name == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=config.learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            fused=True,
        )
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(parameters, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)


def rate_factor(schedule: Schedule, step: int, total_steps: int) -> float:
    """What the peak learning rate is multiplied with in a step (counted from 0): warm-up, then the schedule's shape."""
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    if schedule.name == "constant":
        return 1.0
    span = max(1, total_steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / span)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1 - progress
    return schedule.final_fraction + (1 - schedule.final_fraction) * shape
