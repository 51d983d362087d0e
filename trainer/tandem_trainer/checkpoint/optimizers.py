"""The state of an optimizer, by the names of its parameters.

An optimizer numbers its parameters by its own groups, a model by its definition, and the two numbers agree only while
there is one group with everything in it: with a group for weight decay, a frozen backbone or a reversed list the
moments of one parameter would be another's, without an error where shapes agree. So nothing here is told by a number. A
parameter is known by its name in the model, a group by the parameters in it.

Tensors that stand directly under a parameter go to a file of their own as `<parameter>/<key>`; with several optimizers
as `<optimizer>/<parameter>/<key>`. Whatever else a state holds (numbers, lists of tensors as LBFGS has them, entries
that belong to no parameter) goes into a tree of JSON and tensors (tandem_trainer.checkpoint.tree), exact to the bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tandem.architectures import plain
from tandem.errors import enumerated
from tandem_trainer.checkpoint.state import DoesNotFit, own, refuse

PARAMETERS = "params"
"""In a group of torch's optimizers: its parameters."""
NOBODY = ""
"""In the place of a parameter's name: entries of an optimizer's state that belong to none."""

Rest = dict[str, dict[str, Any]]
"""By parameter and key what is no plain tensor."""


@dataclass
class OptimizerState:
    """An optimizer's state as a checkpoint holds it."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By `<parameter>/<key>`; those of a running job alias the live ones."""
    rest: Rest = field(default_factory=dict)
    """Everything else."""
    groups: list[list[str]] | None = None
    """Names of the parameters of each group; None where the checkpoint does not say."""
    hyperparameters: list[dict[str, Any]] | None = None
    """What each group holds beside its parameters; None where that is not kept."""


class NamedOptimizer:
    """An optimizer together with the names of its parameters.

    Args:
        model: has all of the optimizer's parameters.
        name: tells several optimizers of a run apart; empty where there is one.

    Raises:
        ValueError: a parameter is not the model's.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, name: str = "") -> None:
        self.optimizer, self.name = optimizer, name
        self._prefix = f"{name}/" if name else ""
        self._names = {id(parameter): plain(path) for path, parameter in model.named_parameters()}
        strange = sum(id(one) not in self._names for group in optimizer.param_groups for one in group[PARAMETERS])
        if strange:
            raise ValueError(
                f"the optimizer has {strange} parameters that are not the model's, and their state would be lost; "
                "keep all modules that hold them"
            )

    def owns(self, path: str) -> bool:
        """Whether a tensor's name in the file is one of this optimizer's."""
        return path.startswith(self._prefix)

    def groups(self) -> list[list[str]]:
        """Names of the parameters of each group."""
        return [[self._name(one) for one in group[PARAMETERS]] for group in self.optimizer.param_groups]

    def devices(self) -> dict[str, torch.device]:
        """For each parameter, by what the names of its tensors in the file begin with, where it is."""
        parameters = (one for group in self.optimizer.param_groups for one in group[PARAMETERS])
        return {self._prefix + self._name(one): one.device for one in parameters}

    def state(self) -> OptimizerState:
        """The state as it is now."""
        found = OptimizerState(groups=self.groups(), hyperparameters=self._hyperparameters())
        for owner, entries in self.optimizer.state.items():
            if not isinstance(owner, Tensor):
                found.rest.setdefault(NOBODY, {})[owner] = entries
                continue
            name = self._name(owner)
            for key, value in entries.items():
                if isinstance(value, Tensor) and isinstance(key, str) and "/" not in key:
                    found.tensors[f"{self._prefix}{name}/{key}"] = value
                else:
                    found.rest.setdefault(name, {})[key] = value
        return found

    def check(self, state: OptimizerState) -> None:
        """See whether a state belongs to this optimizer; nothing is changed.

        Raises:
            DoesNotFit: it belongs to another one.
        """
        here = {name for group in self.groups() for name in group}
        what = f"the state of the optimizer {self.name!r}" if self.name else "the optimizer's state"
        tensors, shapes = self._by_parameter(state.tensors), []
        if state.groups is not None:
            refuse(f"{what} is of other parameters", (name for group in state.groups for name in group), here)
        if surplus := sorted((tensors.keys() | state.rest.keys()) - here - {NOBODY}):
            raise DoesNotFit(f"{what} is of other parameters: the script lacks {enumerated(surplus)}")
        for group in self.optimizer.param_groups:
            for parameter in group[PARAMETERS]:
                for key, tensor in tensors.get(name := self._name(parameter), {}).items():
                    live = self.optimizer.state.get(parameter, {}).get(key)
                    if isinstance(live, Tensor) and live.shape != tensor.shape:
                        shapes.append(f"{name}/{key} is {list(tensor.shape)} there and {list(live.shape)} here")
        if shapes:
            raise DoesNotFit(f"{what} does not fit: {enumerated(shapes)}")
        self._matched(state)

    def load(self, state: OptimizerState) -> None:
        """Put a state back, in the types in which it was.

        Args:
            state: its tensors become the optimizer's own, so nobody else may change them.

        Raises:
            DoesNotFit: it belongs to another optimizer; this one is as it was.
        """
        self.check(state)
        tensors = self._by_parameter(state.tensors)
        states: dict[Any, Any] = dict(state.rest.get(NOBODY, {}))
        exact: list[tuple[Tensor, str, Tensor]] = []
        packed, number = [], 0
        for group, kept in zip(self.optimizer.param_groups, self._matched(state), strict=True):
            options = {key: value for key, value in group.items() if key != PARAMETERS} | (kept or {})
            packed.append({**options, PARAMETERS: list(range(number, number + len(group[PARAMETERS])))})
            for parameter in group[PARAMETERS]:
                name = self._name(parameter)
                entries: dict[str, Any] = dict(state.rest.get(name, {}))
                for key, tensor in tensors.get(name, {}).items():
                    entries[key] = tensor
                    exact.append((parameter, key, tensor))
                if entries:
                    states[number] = entries
                number += 1
        try:
            self.optimizer.load_state_dict({"state": states, "param_groups": packed})
        except (KeyError, ValueError, TypeError) as error:
            raise DoesNotFit(f"the optimizer's state does not fit it: {error!r}") from error
        for parameter, key, tensor in exact:
            # torch gives moments the type of their parameter, whatever the optimizer had.
            live = self.optimizer.state[parameter].get(key)
            if isinstance(live, Tensor) and live.dtype != tensor.dtype and live.shape == tensor.shape:
                self.optimizer.state[parameter][key] = own(tensor, live.device)

    def _name(self, parameter: Tensor) -> str:
        return self._names[id(parameter)]

    def _by_parameter(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {}
        for path, tensor in tensors.items():
            name, _, key = path.removeprefix(self._prefix).rpartition("/")
            found.setdefault(plain(name), {})[key] = tensor
        return found

    def _hyperparameters(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key != PARAMETERS} for group in self.optimizer.param_groups
        ]

    def _matched(self, state: OptimizerState) -> list[dict[str, Any] | None]:
        """For each group of the optimizer what the checkpoint's group of the same parameters holds beside them.

        Raises:
            DoesNotFit: the parameters are in other groups.
        """
        live = self.optimizer.param_groups
        if state.hyperparameters is None:
            return [None] * len(live)
        if state.groups is None:
            # The checkpoint says in which order its groups were, and no more.
            if len(state.hyperparameters) != len(live):
                raise DoesNotFit(f"the optimizer had {len(state.hyperparameters)} groups and has {len(live)} here")
            return list(state.hyperparameters)
        # Lists, because groups without parameters, which Hugging Face's Trainer makes, are told apart by their order.
        known: dict[frozenset[str], list[dict[str, Any]]] = {}
        for names, kept in zip(state.groups, state.hyperparameters, strict=True):
            known.setdefault(frozenset(names), []).append(kept)
        here = [frozenset(names) for names in self.groups()]
        strange = [sorted(names) for names in here if names and names not in known]
        if strange:
            raise DoesNotFit(
                f"the optimizer's parameters are in other groups: in none of the checkpoint's is what is in one here, "
                f"{enumerated(strange[0])}"
            )
        return [left.pop(0) if (left := known.get(names)) else None for names in here]
