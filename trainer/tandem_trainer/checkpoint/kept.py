"""What a run keeps: model and optimizer, an average of the weights, and whatever else has a state."""

from collections.abc import Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from tandem.manifest import Broken
from tandem_trainer.checkpoint.contents import Contents, Tensors
from tandem_trainer.checkpoint.reading import AVERAGED
from tandem_trainer.checkpoint.state import load_optimizer_state, load_weights, optimizer_state, weights
from tandem_trainer.checkpoint.tree import join, split

OTHERS = "others"
"""In the manifest's `loop`: the state of everything else, as JSON."""
HYPERPARAMETERS = "hyperparameters"
"""The name of what the optimizer's groups hold beside parameters: a schedule changes them."""


@runtime_checkable
class Stateful(Protocol):
    """A schedule, a scaler, a tokenizer: anything that can tell its state and take it back."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state: numbers, text, tensors, arrays, and lists, tuples and dicts of these."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take a state back."""


class Kept:
    """Takes the state of a run apart for a checkpoint, and puts it back.

    Args:
        model: as it is, not wrapped.
        optimizer: over parameters of the model.
        average: averaged weights, a module of the same shape; evaluated in the place of the model.
        others: by name; objects with a state, or dictionaries of numbers and tensors, which are changed in place.
        hyperparameters: keep learning rates and the like, too. Not wanted where each step sets them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        average: nn.Module | None = None,
        others: Mapping[str, Stateful | MutableMapping[str, Any]] | None = None,
        hyperparameters: bool = False,
    ) -> None:
        self._model, self._optimizer, self._average = model, optimizer, average
        self._others = dict(others or {})
        self._hyperparameters = hyperparameters and optimizer is not None

    def contents(self, loop: Mapping[str, Any]) -> Contents:
        """The state as it is now; tensors alias the live ones.

        Args:
            loop: small state of the loop itself, as JSON; goes with the rest.

        Raises:
            TypeError: something has a state that a checkpoint cannot hold.
        """
        trees: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, state in self._states().items():
            trees[name], found = split(name, state)
            tensors |= found
        return Contents(
            weights=weights(self._model),
            optimizer={} if self._optimizer is None else optimizer_state(self._model, self._optimizer),
            others=tensors,
            average=None if self._average is None else weights(self._average),
            loop={**loop, **({OTHERS: trees} if trees else {}), **({AVERAGED: True} if self._average else {})},
        )

    def load(self, contents: Contents) -> None:
        """Put a state back.

        Raises:
            Broken: it does not fit.
        """
        load_weights(self._model, contents.weights)
        if self._optimizer is not None:
            load_optimizer_state(self._model, self._optimizer, contents.optimizer)
        if self._average is not None:
            load_weights(self._average, contents.weights if contents.average is None else contents.average)
        trees = contents.loop.get(OTHERS, {})
        if not isinstance(trees, dict):
            raise Broken(f"{OTHERS} is no object")
        for name, tree in trees.items():
            self._load_other(name, tree, contents.others)

    def _states(self) -> dict[str, Any]:
        states: dict[str, Any] = {}
        if self._hyperparameters:
            assert self._optimizer is not None
            groups = self._optimizer.param_groups
            states[HYPERPARAMETERS] = [
                {key: value for key, value in group.items() if key != "params"} for group in groups
            ]
        for name, other in self._others.items():
            states[name] = other if isinstance(other, MutableMapping) else other.state_dict()
        return states

    def _load_other(self, name: str, tree: Any, tensors: Tensors) -> None:
        state = join(tree, tensors)
        if name == HYPERPARAMETERS:
            groups = self._optimizer.param_groups if self._optimizer is not None and self._hyperparameters else []
            for group, kept in zip(groups, state, strict=False):
                group.update(kept)
        elif name in self._others:
            other = self._others[name]
            if isinstance(other, MutableMapping):
                other.clear()
                other.update(state)
            else:
                _load(name, other, state)


def _load(name: str, other: Stateful, state: Any) -> None:
    try:
        other.load_state_dict(state)
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise Broken(f"the state of {name!r} does not fit it: {error}") from error
