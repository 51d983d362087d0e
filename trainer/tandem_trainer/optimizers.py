"""Optimizers that a job can name, over the trainable parameters of a model."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tandem.job.tasks import Optimizer
from tandem_trainer.checkpoint.sharding import is_sharded
from tandem_trainer.failure import ConfigurationError


def torch_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Create the optimizer over all trainable parameters.

    Raises:
        ConfigurationError: the model has no parameters for this optimizer.
    """
    groups = by_mesh(parameter for parameter in model.parameters() if parameter.requires_grad)
    match settings.name:
        case "sgd":
            # The multi-tensor implementations: one launch for all parameters, on CPUs too.
            sgd = torch.optim.SGD(
                groups,
                lr=settings.learning_rate,
                momentum=settings.momentum,
                weight_decay=settings.weight_decay,
                # The fused kernel does not take tensors that are split over ranks (torch 2.15).
                fused=None if any(is_sharded(parameter) for parameter in model.parameters()) else True,
            )
            # GradScaler leaves a step out itself then. In a first step that the fused code leaves out, it makes
            # momentum without values, which the next step adds (torch 2.15).
            sgd._step_supports_amp_scaling = False
            return sgd
        case "muon":
            return muon(model, settings)
        case "adamw8bit":
            from tandem_trainer.adamw8bit import AdamW8bit

            return AdamW8bit(groups, lr=settings.learning_rate, weight_decay=settings.weight_decay)
        case "adamw":
            kind: type[torch.optim.Adam] = torch.optim.AdamW
        case "adam":
            kind = torch.optim.Adam
    return kind(groups, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Group parameters by the ranks that hold them: a multi-tensor implementation takes those of one mesh only (torch
    2.15)."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": members} for members in groups.values()]


def muon(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Create Muon for the matrices of hidden layers, and AdamW for all other parameters, as Muon's author advises
    (https://kellerjordan.github.io/posts/muon/).

    Muon's steps are scaled to the size that AdamW's have, so that learning rate and weight decay of AdamW serve both
    (https://arxiv.org/abs/2502.16982, section 2.2).

    Raises:
        ConfigurationError: the model has no such matrix.
    """
    matrices = hidden_matrices(model)
    if not matrices:
        raise ConfigurationError(
            f"optimizer.name: muon is for matrices between the first and the last layer of a model, and "
            f"{type(model).__name__} has none; use adamw"
        )
    matrix_ids = {id(matrix) for matrix in matrices}
    remaining = [
        parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) not in matrix_ids
    ]
    rates: dict[str, Any] = {
        "lr": settings.learning_rate,
        "momentum": settings.momentum,
        "weight_decay": settings.weight_decay,
    }
    parts: list[torch.optim.Optimizer] = []
    if any(is_sharded(matrix) for matrix in matrices):
        from tandem_trainer.sharded_muon import ShardedMuon

        parts.append(ShardedMuon(matrices, **rates))
    else:
        parts.append(torch.optim.Muon(matrices, **rates, adjust_lr_fn="match_rms_adamw"))
    if remaining:
        rate = settings.adamw_learning_rate or settings.learning_rate
        parts.append(torch.optim.AdamW(by_mesh(remaining), lr=rate, weight_decay=settings.weight_decay, fused=True))
    return CombinedOptimizer(parts)


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters with two dimensions, except embeddings (and layers that share their weights) and
    the first and the last module that has parameters of its own: input and output are no hidden layers.

    Kernels of convolutions have four dimensions: torch's Muon takes none of them.
    """
    owners = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    outside: list[nn.Module] = [owner for owner in owners if isinstance(owner, nn.Embedding | nn.EmbeddingBag)]
    outside += owners[:1] + owners[-1:]
    excluded = {id(parameter) for module in outside for parameter in module.parameters(recurse=False)}
    return [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.ndim == 2 and id(parameter) not in excluded
    ]


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers, each over parameters of its own, as one: with the groups and the state of all of them.

    The groups and the state are the very same objects in the parts. So a schedule that sets the rate of a group, and a
    checkpoint that sets the state, reach the part that steps with it.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        """
        Args:
            parts: optimizers that have taken no step. Nothing else may step with them.
        """
        self._parts = tuple(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of each part. Returns the result of the closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as any optimizer does."""
        super().load_state_dict(state_dict)
        self._share()  # Loading has made new groups and a new state.

    def _share(self) -> None:
        start = 0
        for part in self._parts:
            end = start + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[start:end], self.state
            start = end
        assert start == len(self.param_groups), "a group belongs to no part"
