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
            run: function of the part.
            modules: all modules of the model that it calls or takes weights from.
            shared: makes further keyword arguments of `run` from the part's inputs. Parts with the same `shared` in one
                stage get the result for the first of them.
            then: computation of the loss on the last part's output, if it is expensive: its operations count as the
                part's where the model is cut.
        """
        super().__init__()
        self._run, self.shared, self.then = run, shared, then
        self.modules_used = nn.ModuleList(modules)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._run(*inputs, **kwargs)
