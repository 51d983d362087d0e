"""State of modules and optimizers as named tensors, which is checked against its module before it is loaded.

Names are those of the parameters and buffers as the user wrote the model, never positions in a list, so that a
checkpoint does not depend on the wrapper around the model, on whether it is compiled, or on the number of ranks.

Numbers, strings and lists are stored in the JSON unchanged. Other types are an object with one key:

    {"dict": {…}}  {"pairs": [[key, value], …]}  {"tuple": […]}  {"array": name}  {"number": "nan"}
    {"tensor": name}  {"on device": [type, name]}

Rejected: pickle (it runs what it reads), torch.save with weights_only (one file that cannot be verified and written in
parts), JSON alone (an average of the weights is as large as the weights).

An optimizer numbers its parameters by its own groups, a model by its definition, and the two numberings agree only
while one group holds all parameters. With a group for weight decay, a frozen backbone or a reversed list, the moments
of one parameter would be loaded for another, without an error where shapes agree. So nothing here is identified by a
number: a parameter is identified by its name in the model, a group by the parameters in it.

Tensors directly under a parameter go to a file of their own as `<parameter>/<key>`; with several optimizers as
`<optimizer>/<parameter>/<key>`. All other entries (numbers, lists of tensors as in LBFGS) go into a tree (`split`).

The state of an optimizer is what its `state_dict` returns, not its attribute `state`: optimizers around others
(Lookahead) forward the method and leave the attribute empty. Entries other than `state` and `param_groups`, and a
state_dict of another form than torch's, go into the tree unchanged. They may identify parameters by number, so only an
optimizer with the same groups in the same order loads them.
"""

import copy
import logging
import math
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tandem.errors import join_names
from tandem.job.architectures import unwrapped_name
from tandem.rundir.checkpoint import Broken
from tandem.wire.reasons import Reason
from tandem_trainer.checkpoint.sharding import is_sharded, split_all_like, split_like
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.group_model import GroupModel

log = logging.getLogger(__name__)

MAX_DIFFERENCES = 6  # in one error message


class CheckpointMismatch(ConfigurationError):  # noqa: N818 - it is what is the case
    """The checkpoint is intact but does not match the script that resumes from it; the message says in what."""

    reason = Reason.CHECKPOINT_DOES_NOT_FIT


@runtime_checkable
class Selective(Protocol):
    """A module that may refuse weights although their names and shapes match."""

    def refusal(self, state: Mapping[str, Tensor]) -> str:
        """Return the reason why the module rejects its part of a state; empty if it accepts it."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that the user wrote, without the wrappers of parallelism and the compiler."""
    while True:
        is_parallel = isinstance(module, DistributedDataParallel | DataParallel | GroupModel)
        inner = getattr(module, "module" if is_parallel else "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's parameters and buffers by name; they alias the live tensors."""
    return {unwrapped_name(name): value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def extra_state(model: nn.Module) -> dict[str, Any]:
    """Return the extra state of modules (`get_extra_state`) by name."""
    return {unwrapped_name(name): value for name, value in model.state_dict().items() if not isinstance(value, Tensor)}


def buffers(model: nn.Module) -> frozenset[str]:
    """Return the names of all buffers, persistent or not."""
    return frozenset(unwrapped_name(name) for name, _ in model.named_buffers(remove_duplicate=False))


def check_weights(model: nn.Module, state: Mapping[str, Tensor], extra: Mapping[str, Any]) -> None:
    """Check that weights match a model, without changing it.

    Raises:
        CheckpointMismatch: a tensor is missing or unexpected, or has a shape that its module does not accept.
    """
    live = weights(model)
    saved = {unwrapped_name(name): tensor for name, tensor in state.items()}
    differing = [name for name, tensor in live.items() if name in saved and saved[name].shape != tensor.shape]
    loaders = custom_loaders(model) if differing else {}
    shapes = [
        f"{name} is {list(saved[name].shape)} there and {list(live[name].shape)} here"
        for name in differing
        if not _accepts_shape(name, live[name], loaders, {**saved, **extra})
    ]
    names = live.keys() | extra_state(model).keys()
    refuse("the weights do not fit the model", saved.keys() | set(extra), names, shapes)
    for path, module in model.named_modules():
        if isinstance(module, Selective):
            prefix = f"{unwrapped_name(path)}."
            own_state = {name.removeprefix(prefix): tensor for name, tensor in saved.items() if name.startswith(prefix)}
            if reason := module.refusal(own_state):
                raise CheckpointMismatch(reason)


def load_weights(
    model: nn.Module, state: Mapping[str, Tensor], extra: Mapping[str, Any] | None = None, is_borrowed: bool = False
) -> None:
    """Load weights and the extra state of modules into a model.

    Args:
        is_borrowed: the tensors lie in memory that is released afterwards. torch's own loading copies their values;
            modules with a custom loader may keep the tensors themselves, and get copies.

    Raises:
        CheckpointMismatch: the weights belong to another model; the model is unchanged.
    """
    check_weights(model, state, extra or {})
    saved = {unwrapped_name(name): value for name, value in [*state.items(), *(extra or {}).items()]}
    live = model.state_dict()
    if is_borrowed:
        loaders = custom_loaders(model)
        for name, current in live.items():
            # Sharded tensors are copied by split_all_like below, and only this rank's shard of them.
            is_plain_tensor = isinstance(saved[unwrapped_name(name)], Tensor) and not is_sharded(current)
            if is_plain_tensor and (is_extra(name) or _custom_loader(unwrapped_name(name), loaders) is not None):
                saved[unwrapped_name(name)] = own(
                    saved[unwrapped_name(name)], current.device if isinstance(current, Tensor) else CPU
                )
    try:
        model.load_state_dict(split_all_like(live, {name: saved[unwrapped_name(name)] for name in live}), strict=True)
    except (KeyError, ValueError, TypeError) as error:
        # Raised by custom loaders. torch itself reports a mismatch as a RuntimeError, and so does a failing device.
        raise CheckpointMismatch(f"the weights do not fit the model: {error!r}") from error
    except RuntimeError as error:
        if SIZE_MISMATCH in str(error):
            raise CheckpointMismatch(f"the weights do not fit the model: {error}") from error
        raise


SIZE_MISMATCH = "size mismatch for "
"""Part of torch's error message for a tensor of another shape (torch 2.15)."""
EXTRA_STATE = "_extra_state"
"""Suffix of the name of a module's extra state in a state_dict; the state itself may be a tensor."""


def custom_loaders(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that do not load tensors as torch does, by path. They may keep the very tensors that they are
    passed, as torchmetrics do, and accept other shapes, as observers of quantization-aware training do."""
    return {
        unwrapped_name(path): module
        for path, module in model.named_modules(remove_duplicate=False)
        if module._load_state_dict_pre_hooks
        or getattr(module._load_from_state_dict, "__func__", None) is not nn.Module._load_from_state_dict
    }


def is_extra(name: str) -> bool:
    """Return whether a name in a state_dict is that of a module's extra state."""
    return name.rpartition(".")[2] == EXTRA_STATE


def _custom_loader(name: str, loaders: Mapping[str, nn.Module]) -> str | None:
    """Return the path of the innermost module with a custom loader that loads a tensor; None if torch loads it."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        if path in loaders:
            return path
    return None


def _accepts_shape(name: str, live: Tensor, loaders: Mapping[str, nn.Module], state: Mapping[str, Any]) -> bool:
    """Return whether a module accepts a tensor of another shape than its own; tried on a copy of the module."""
    if is_extra(name):
        return True
    path = _custom_loader(name, loaders)
    if path is None or is_sharded(live):
        return False
    names = {key: unwrapped_name(f"{path}.{key}" if path else key) for key in loaders[path].state_dict()}
    try:
        module = copy.deepcopy(loaders[path])
    except (RuntimeError, TypeError):
        return True  # It cannot be copied; the real load will show it.
    try:
        module.load_state_dict(copy.deepcopy({key: state[full] for key, full in names.items() if full in state}))
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError):
        return False
    return True


def refuse(subject: str, saved: Iterable[str], live: Iterable[str], more: Iterable[str] = ()) -> None:
    """Compare the names that a checkpoint has with those that the script has.

    Args:
        subject: how the error message begins.
        saved: names that the checkpoint has.
        live: names that the script has.
        more: other differences, as sentences.

    Raises:
        CheckpointMismatch: there is a difference.
    """
    saved, live = set(saved), set(live)
    differences = list(more)
    if missing := sorted(live - saved):
        differences.append(f"the checkpoint lacks {join_names(missing)}")
    if surplus := sorted(saved - live):
        differences.append(f"the script lacks {join_names(surplus)}")
    if differences:
        raise CheckpointMismatch(f"{subject}: {'; '.join(differences[:MAX_DIFFERENCES])}")


def own(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a tensor on a device, in memory of its own."""
    return tensor.clone() if device.type == "cpu" else tensor.to(device)


def moment(tensor: Tensor, parameter: Tensor | None, is_by_row: bool = False) -> Tensor:
    """Return a copy of an optimizer's tensor on its parameter's device, sharded as the parameter is.

    Args:
        is_by_row: the tensor has a row for each row of the parameter, of another length.
    """
    # Step counts stay on the CPU: `Optimizer.load_state_dict` moves them for the optimizers that need it.
    if parameter is None or tensor.ndim == 0:
        return own(tensor, CPU)
    if is_sharded(parameter) and (is_by_row or parameter.shape == tensor.shape):
        return split_like(parameter, tensor)
    return own(tensor, parameter.device)


CPU = torch.device("cpu")
MAX_DEPTH = 64
"""Depth of nesting above which a state is assumed to contain itself."""


def split(name: str, state: object) -> tuple[Any, dict[str, Tensor]]:
    """Split a state into JSON and tensors, which alias the live ones, under names that begin with `name`.

    Raises:
        TypeError: the state holds something other than numbers, text, tensors, arrays, and lists, tuples and dicts of
            these.
    """
    tensors: dict[str, Tensor] = {}
    return _split(name, state, tensors, 0), tensors


def join(tree: Any, tensors: Mapping[str, Tensor], device: torch.device = CPU) -> Any:
    """Join a state that `split` took apart; its tensors are copies.

    Args:
        device: device of the tensors that were on a device of its type; all others stay on the CPU.

    Raises:
        Broken: the tree is malformed, or a tensor is missing.
    """
    try:
        return _join(tree, tensors, device)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Broken(f"the saved state of the optimizer or another object is inconsistent: {error!r}") from error


def put_back(into: MutableMapping[Any, Any], state: Mapping[Any, Any]) -> None:
    """Replace the entries of a dictionary by those of a state, in place.

    Values that exist already are updated in place where possible: a script may hold references to the tensors, arrays,
    lists and dictionaries.
    """
    values = {key: _put_back(into.get(key), value) for key, value in state.items()}
    into.clear()
    into.update(values)


def _put_back(old: Any, new: Any) -> Any:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        like = (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
        # An expanded tensor has one value in several places, and cannot be written.
        if not like or 0 in old.stride():
            return new
        with torch.no_grad():
            return old.copy_(new)
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        if (old.shape, old.dtype) != (new.shape, new.dtype) or not old.flags.writeable:
            return new
        np.copyto(old, new)
        return old
    if isinstance(old, MutableMapping) and isinstance(new, Mapping):
        put_back(old, new)
        return old
    if isinstance(old, list) and isinstance(new, list):
        before = [*old, *[None] * len(new)]
        old[:] = [_put_back(element, value) for element, value in zip(before, new, strict=False)]
        return old
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        parts = [_put_back(element, value) for element, value in zip(old, new, strict=True)]
        return type(old)(*parts) if hasattr(old, "_fields") else tuple(parts)
    return new


def _split(path: str, value: object, tensors: dict[str, Tensor], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise TypeError(f"{path} is nested more than {MAX_DEPTH} levels deep; does it hold itself?")
    if isinstance(value, Tensor):
        name = _add_tensor(path, value, tensors)
        return {"tensor": name} if value.device.type == "cpu" else {"on device": [value.device.type, name]}
    if isinstance(value, np.ndarray):
        # Not ascontiguousarray, which adds a dimension to arrays without any.
        return {"array": _add_tensor(path, torch.from_numpy(np.asarray(value, order="C")), tensors)}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"number": repr(value)}
    if isinstance(value, Mapping):
        items = [(key, _split(f"{path}/{key}", item, tensors, depth + 1)) for key, item in value.items()]
        if all(isinstance(key, str) for key, _ in items):
            return {"dict": dict(items)}
        return {"pairs": [[_split(path, key, {}, depth + 1), item] for key, item in items]}
    if isinstance(value, list | tuple):
        parts = [_split(f"{path}/{number}", item, tensors, depth + 1) for number, item in enumerate(value)]
        return parts if isinstance(value, list) else {"tuple": parts}
    raise TypeError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold; it takes numbers, text, tensors, arrays, "
        "and lists, tuples and dicts of these"
    )


def _add_tensor(path: str, tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    while path in tensors:  # the keys of {"a/b": …, "a": {"b": …}} collide
        path += "'"
    tensors[path] = tensor
    return path


def _join(tree: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    if isinstance(tree, list):
        return [_join(item, tensors, device) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    match kind:
        case "dict":
            return {key: _join(item, tensors, device) for key, item in content.items()}
        case "pairs":
            return {_join(key, tensors, device): _join(item, tensors, device) for key, item in content}
        case "tuple":
            return tuple(_join(item, tensors, device) for item in content)
        case "tensor":
            return tensors[content].clone()
        case "on device":
            kind, name = content
            return tensors[name].clone() if kind != device.type else tensors[name].to(device, copy=True)
        case "array":
            return tensors[content].clone().numpy()
        case "number":
            return float(content)
    raise ValueError(f"unknown kind {kind!r}")


STATE, GROUPS, PARAMETERS = "state", "param_groups", "params"
"""Keys in the state_dict of torch's optimizers: state by parameter, groups, and the parameters of a group."""
NO_PARAMETER = ""
"""Placeholder for a parameter's name: entries of an optimizer's state that belong to no parameter."""
CUSTOM_STATE = "(state_dict)"
"""Placeholder for a parameter's name: what an optimizer's `state_dict` returns besides torch's keys, under
EXTRA_ENTRIES, or all of it, under FULL_STATE_DICT. A version of Tandem that does not know it misses such a parameter,
and refuses the checkpoint."""
EXTRA_ENTRIES, FULL_STATE_DICT = "beside", "whole"

BY_ROW = ".scale"
"""Suffix of the names of tensors that have a row for each row of their parameter."""

LOCAL_SGD = (
    "with local SGD each rank trains weights of its own between two averages, and a checkpoint has one set of weights. "
    "Average the gradients of every step; gradient accumulation (batch.parts) or compression sends less, too"
)
"""Error message for optimizers that average the weights only every few steps."""

OtherEntries = dict[str, dict[str, Any]]
"""Entries that are not plain tensors, by parameter and key."""


@dataclass
class OptimizerState:
    """State of an optimizer as a checkpoint holds it."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Tensors by `<parameter>/<key>`; those of a running job alias the live ones."""
    other_entries: OtherEntries = field(default_factory=dict)
    """Entries that are not plain tensors."""
    groups: list[list[str]] | None = None
    """Names of the parameters of each group; None if the checkpoint does not record them."""
    hyperparameters: list[dict[str, Any]] | None = None
    """Each group's entries other than its parameters; None if they are not part of the state."""
    added: int = 0
    """Number of groups, the last ones, that were added during training."""


class NamedOptimizer:
    """An optimizer together with the names of its parameters.

    Args:
        model: has all of the optimizer's parameters.
        name: distinguishes several optimizers of a run; empty if there is only one.

    Raises:
        ConfigurationError: no rank has all of the optimizer's state.
        ValueError: a parameter is not the model's.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, name: str = "") -> None:
        # By their names: the import of torch.distributed.optim takes time.
        kinds = {kind.__name__ for kind in type(optimizer).__mro__}
        if "PostLocalSGDOptimizer" in kinds:
            raise ConfigurationError(f"{type(optimizer).__name__}: {LOCAL_SGD}")
        if "ZeroRedundancyOptimizer" in kinds:
            raise ConfigurationError(
                f"{type(optimizer).__name__} splits its state over the ranks, and none has what a checkpoint would "
                'hold; use the optimizer inside it alone, with distribute(model, strategy="fsdp"), which splits '
                "the state, too"
            )
        self.optimizer, self.name, self._model = optimizer, name, model
        self._has_warned = False
        self._prefix = f"{name}/" if name else ""
        self.mark_start()
        strange = sum(
            id(parameter) not in self._names for group in optimizer.param_groups for parameter in group[PARAMETERS]
        )
        if strange:
            raise ValueError(
                f"the optimizer has {strange} parameters that are not the model's, so their state would be lost; pass "
                "all modules that hold them, too"
            )

    def mark_start(self) -> None:
        """Record the groups that exist when the script starts; later ones count as added."""
        self._name_parameters()
        self._first_groups = len(self.optimizer.param_groups)

    def owns(self, path: str) -> bool:
        """Return whether a tensor's name in the file belongs to this optimizer."""
        return path.startswith(self._prefix)

    def groups(self) -> list[list[str]]:
        """Return the names of the parameters of each group."""
        return [[self._name(parameter) for parameter in group[PARAMETERS]] for group in self.optimizer.param_groups]

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters, by the prefix of their tensors' names in the file."""
        parameters = (parameter for group in self.optimizer.param_groups for parameter in group[PARAMETERS])
        return {self._prefix + self._name(parameter): parameter for parameter in parameters}

    def state(self) -> OptimizerState:
        """Return the current state, as the optimizer's `state_dict` reports it.

        Raises:
            ConfigurationError: a parameter that was added is not the model's.
        """
        state_dict, groups = self.optimizer.state_dict(), self.groups()
        parameters = self._numbered(state_dict, groups)
        holders = self.optimizer.param_groups if parameters is None else state_dict[GROUPS]
        hyperparameters = [{key: value for key, value in group.items() if key != PARAMETERS} for group in holders]
        added = max(0, len(groups) - self._first_groups)
        state = OptimizerState(groups=groups, hyperparameters=hyperparameters, added=added)
        if parameters is None:
            state.other_entries[CUSTOM_STATE] = {FULL_STATE_DICT: dict(state_dict)}
            return state
        for number, entries in state_dict[STATE].items():
            if number not in parameters:
                state.other_entries.setdefault(NO_PARAMETER, {})[number] = entries
                continue
            name = parameters[number]
            for key, value in entries.items():
                if isinstance(value, Tensor) and isinstance(key, str) and "/" not in key:
                    state.tensors[f"{self._prefix}{name}/{key}"] = value
                else:
                    state.other_entries.setdefault(name, {})[key] = value
        if extra_entries := {key: value for key, value in state_dict.items() if key not in (STATE, GROUPS)}:
            state.other_entries[CUSTOM_STATE] = {EXTRA_ENTRIES: extra_entries}
        else:
            self._warn_of_inner_state(state_dict[STATE], parameters)
        return state

    def _warn_of_inner_state(self, state: Mapping[Any, Mapping[Any, Any]], parameters: Mapping[Any, str]) -> None:
        """Warn of state of an inner optimizer that the outer one's `state_dict` omits, as SAM is often written."""
        inside = [inner for inner in vars(self.optimizer).values() if isinstance(inner, torch.optim.Optimizer)]
        if self._has_warned or not inside:
            return
        saved_entries = {name: state.get(number, {}) for number, name in parameters.items()}
        lost = {
            (type(inner).__name__, str(key))
            for inner in inside
            for owner, entries in inner.state.items()
            for key in entries
            if isinstance(owner, Tensor) and key not in saved_entries.get(self._names.get(id(owner), ""), {})
        }
        if lost:
            self._has_warned = True
            log.warning(
                "optimizer=%s holds the optimizer %s, and its state_dict does not include that one's %s, so "
                "checkpoints lack them; include them in state_dict and restore them in load_state_dict",
                *(type(self.optimizer).__name__, min(lost)[0], join_names(sorted(key for _, key in lost))),
            )

    def check(self, state: OptimizerState) -> None:
        """Check that a state matches this optimizer, without changing it.

        Raises:
            CheckpointMismatch: the state belongs to another optimizer.
        """
        groups, added = self.groups(), self._added_groups(state)
        live_names = {name for group in groups for name in group} | {name for names, _ in added for name in names}
        subject = f"the state of the optimizer {self.name!r}" if self.name else "the optimizer's state"
        tensors, shapes = self._by_parameter(state.tensors), []
        if state.groups is not None:
            refuse(f"{subject} is of other parameters", (name for group in state.groups for name in group), live_names)
        if any(path.endswith(BY_ROW) for path in state.tensors) and not getattr(self.optimizer, "has_scales", False):
            raise CheckpointMismatch(f"{subject} has 8-bit moments of adamw8bit, but the script uses another optimizer")
        if surplus := sorted((tensors.keys() | state.other_entries.keys()) - live_names - {NO_PARAMETER, CUSTOM_STATE}):
            raise CheckpointMismatch(f"{subject} is of other parameters: the script lacks {join_names(surplus)}")
        if CUSTOM_STATE in state.other_entries:
            if not self.has_custom_load:
                entries = sorted(map(str, *state.other_entries[CUSTOM_STATE].values()))
                raise CheckpointMismatch(
                    f"{subject} has {join_names(entries)} beside that by parameter, which"
                    f" {type(self.optimizer).__name__} does not load"
                )
            if state.groups != [*groups, *(names for names, _ in added)]:
                raise CheckpointMismatch(f"{subject} depends on the order of its parameters, which has changed")
        live = self._entries()
        for group in groups:
            for name in group:
                for key, tensor in tensors.get(name, {}).items():
                    current = live.get(name, {}).get(key)
                    if isinstance(current, Tensor) and current.shape != tensor.shape:
                        shapes.append(f"{name}/{key} is {list(tensor.shape)} there and {list(current.shape)} here")
        if shapes:
            raise CheckpointMismatch(f"{subject} does not fit: {join_names(shapes)}")
        self._matched_hyperparameters(state)

    def load(self, state: OptimizerState) -> None:
        """Load a state, with the dtypes that it was saved with.

        Args:
            state: its tensors become the optimizer's own, so the caller must not change them.

        Raises:
            CheckpointMismatch: the state belongs to another optimizer; this one is unchanged.
        """
        self.check(state)
        self.add_groups(state)
        tensors = self._by_parameter(state.tensors)
        states: dict[Any, Any] = dict(state.other_entries.get(NO_PARAMETER, {}))
        exact: list[tuple[str, str, Tensor]] = []
        packed, number = [], 0
        for group, hyperparameters in zip(
            self.optimizer.param_groups, self._matched_hyperparameters(state), strict=True
        ):
            options = {key: value for key, value in group.items() if key != PARAMETERS} | (hyperparameters or {})
            packed.append({**options, PARAMETERS: list(range(number, number + len(group[PARAMETERS])))})
            for parameter in group[PARAMETERS]:
                name = self._name(parameter)
                entries: dict[str, Any] = dict(state.other_entries.get(name, {}))
                for key, tensor in tensors.get(name, {}).items():
                    entries[key] = tensor
                    exact.append((name, key, tensor))
                if entries:
                    states[number] = entries
                number += 1
        custom = state.other_entries.get(CUSTOM_STATE, {})
        state_dict = custom.get(FULL_STATE_DICT) or {STATE: states, GROUPS: packed, **custom.get(EXTRA_ENTRIES, {})}
        try:
            self.optimizer.load_state_dict(state_dict)
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointMismatch(f"the optimizer's state does not fit it: {error!r}") from error
        live = self._entries()
        for name, key, tensor in exact:
            # torch casts moments to their parameter's dtype when it loads them; restore the saved dtype.
            current = live.get(name, {}).get(key)
            if isinstance(current, Tensor) and current.dtype != tensor.dtype and current.shape == tensor.shape:
                live[name][key] = own(tensor, current.device)

    def add_groups(self, state: OptimizerState) -> None:
        """Add the parameter groups that a state has and the optimizer lacks, after `check`."""
        for names, options in self._added_groups(state):
            self.optimizer.add_param_group({**options, PARAMETERS: [self._parameters[name] for name in names]})

    def _added_groups(self, state: OptimizerState) -> list[tuple[list[str], dict[str, Any]]]:
        """Return the groups of a state that were added during training and do not exist yet: names of the model's
        parameters, and the group's other entries."""
        if not state.added or state.groups is None or state.hyperparameters is None:
            return []
        live_names = {name for group in self.groups() for name in group}
        added = list(zip(state.groups, state.hyperparameters, strict=True))[-state.added :]
        return [
            (names, options)
            for names, options in added
            if names and live_names.isdisjoint(names) and self._parameters.keys() >= set(names)
        ]

    @property
    def has_added_groups(self) -> bool:
        """Whether groups were added since the script started."""
        return len(self.optimizer.param_groups) > self._first_groups

    @property
    def has_custom_load(self) -> bool:
        """Whether the optimizer loads more than torch's optimizers do."""
        optimizer = self.optimizer
        method = getattr(optimizer.load_state_dict, "__func__", None)
        hooks = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", {})
        return bool(hooks) or method is not torch.optim.Optimizer.load_state_dict

    def _numbered(self, state_dict: Mapping[str, Any], live: list[list[str]]) -> dict[Any, str] | None:
        """Return the names of the parameters by their numbers in a state_dict; None if it does not have torch's form.

        Args:
            live: names of the parameters of each group.
        """
        groups = state_dict.get(GROUPS)
        if not isinstance(state_dict.get(STATE), Mapping) or not isinstance(groups, list):
            return None
        numbers = [list(group.get(PARAMETERS, [])) for group in groups if isinstance(group, Mapping)]
        if [len(group) for group in numbers] != [len(names) for names in live]:
            return None
        names = dict(zip(chain.from_iterable(numbers), chain.from_iterable(live), strict=True))
        is_torchs = all(isinstance(state_dict[STATE].get(number, {}), MutableMapping) for number in names)
        return names if is_torchs else None

    def _entries(self) -> dict[str, MutableMapping[Any, Any]]:
        """Return the optimizer's current state by parameter; torch's optimizers return the dictionaries in use."""
        state_dict = self.optimizer.state_dict()
        numbered = self._numbered(state_dict, self.groups()) or {}
        return {name: state_dict[STATE][number] for number, name in numbered.items() if number in state_dict[STATE]}

    def _name_parameters(self) -> None:
        self._parameters = {unwrapped_name(path): parameter for path, parameter in self._model.named_parameters()}
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}

    def _name(self, parameter: Tensor) -> str:
        if id(parameter) not in self._names:
            self._name_parameters()  # the model may have new parameters
        if id(parameter) not in self._names:
            raise ConfigurationError(
                "a parameter was added to the optimizer that is not the model's, so its state would be lost; pass all "
                "modules that hold parameters"
            )
        return self._names[id(parameter)]

    def _by_parameter(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        by_name: dict[str, dict[str, Tensor]] = {}
        for path, tensor in tensors.items():
            name, _, key = path.removeprefix(self._prefix).rpartition("/")
            by_name.setdefault(unwrapped_name(name), {})[key] = tensor
        return by_name

    def _matched_hyperparameters(self, state: OptimizerState) -> list[dict[str, Any] | None]:
        """Return, for each group of the optimizer, the hyperparameters of the checkpoint's group of the same
        parameters.

        Raises:
            CheckpointMismatch: the parameters are in other groups.
        """
        live = self.optimizer.param_groups
        if state.hyperparameters is None:
            return [None] * len(live)
        if state.groups is None:
            # The checkpoint records the order of its groups, not their parameters.
            if len(state.hyperparameters) != len(live):
                raise CheckpointMismatch(
                    f"the optimizer had {len(state.hyperparameters)} groups and has {len(live)} here"
                )
            return list(state.hyperparameters)
        # Lists, because several groups may have no parameters, as in Hugging Face's Trainer; they match by order.
        saved_groups: dict[frozenset[str], list[dict[str, Any]]] = {}
        for names, hyperparameters in zip(state.groups, state.hyperparameters, strict=True):
            saved_groups.setdefault(frozenset(names), []).append(hyperparameters)
        live_groups = [frozenset(names) for names in self.groups()]
        strange = [sorted(names) for names in live_groups if names and names not in saved_groups]
        if strange:
            raise CheckpointMismatch(
                "the optimizer's parameters are grouped differently: no group of the checkpoint has exactly the "
                "parameters "
                f"{join_names(strange[0])}"
            )
        return [candidates.pop(0) if (candidates := saved_groups.get(names)) else None for names in live_groups]
