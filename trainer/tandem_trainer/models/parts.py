"""Parts of a forward pass, for models that are cut into the stages of a pipeline."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Part(nn.Module):
    """A function of a model, and the modules whose parameters it uses."""

    def __init__(self, run: Callable[..., Any], *modules: nn.Module) -> None:
        """
        Args:
            run: what the part does.
            modules: all modules of the model that it calls or takes weights from.
        """
        super().__init__()
        self._run = run
        self.modules_used = nn.ModuleList(modules)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the function returns."""
        return self._run(*inputs, **named)
