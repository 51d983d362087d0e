"""Parts of a forward pass, for models that are cut into the stages of a pipeline."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


class Part(nn.Module):
    """A function of a model, and the modules whose parameters it uses."""

    def __init__(
        self,
        run: Callable[..., Any],
        *modules: nn.Module,
        shared: Callable[..., Mapping[str, Any]] | None = None,
        then: Callable[..., Any] | None = None,
    ) -> None:
        """
        Args:
            run: what the part does.
            modules: all modules of the model that it calls or takes weights from.
            shared: makes further arguments of `run` by name, of what the part is called with. Parts with the same
                `shared` that are in one stage are given what the first of them made.
            then: of the last part, what the loss does with that which the part returns, if it costs much: its
                operations count as the part's where the model is cut.
        """
        super().__init__()
        self._run, self.shared, self.then = run, shared, then
        self.modules_used = nn.ModuleList(modules)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the function returns."""
        return self._run(*inputs, **named)
