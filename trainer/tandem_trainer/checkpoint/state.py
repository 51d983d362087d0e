"""The state of modules as named tensors. A state is checked against the module before it is loaded.

Names are those of the parameters and buffers as the user wrote the model, never positions in a list, so that a
checkpoint does not depend on the wrapper around the model, on whether it is compiled, or on the number of ranks.

Numbers, strings and lists stand in the JSON as they are. An object with one key says what else there is:

    {"dict": {…}}  {"pairs": [[key, value], …]}  {"tuple": […]}  {"array": name}  {"number": "nan"}
    {"tensor": name}  {"on device": [type, name]}

Rejected: pickle (it runs what it reads), torch.save with weights_only (one file that cannot be verified and written in
parts), JSON alone (an average of the weights is as large as the weights).

An optimizer numbers its parameters by its own groups, a model by its definition, and the two numbers agree only while
there is one group with everything in it: with a group for weight decay, a frozen backbone or a reversed list the
moments of one parameter would be another's, without an error where shapes agree. So nothing here is told by a number. A
parameter is known by its name in the model, a group by the parameters in it.

Tensors that stand directly under a parameter go to a file of their own as `<parameter>/<key>`; with several optimizers
as `<optimizer>/<parameter>/<key>`. Whatever else a state holds (numbers, lists of tensors as LBFGS has them, entries
that belong to no parameter) goes into a tree of JSON and tensors (tandem_trainer.checkpoint.state), exact to the bit.

What an optimizer's `state_dict` gives is its state, and not its attribute `state`: optimizers around others (Lookahead)
forward the one and leave the other empty. Entries that are neither `state` nor `param_groups`, and a state_dict of
another form than torch's, go into the tree as they are. They may tell parameters by number, so they are taken back by
an optimizer with the same groups in the same order.
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

from tandem.architectures import plain
from tandem.errors import enumerated
from tandem.rundir.checkpoint import Broken
from tandem_trainer.checkpoint.sharding import is_sharded, split_all_like, split_like
from tandem_trainer.failure import ConfigurationError

log = logging.getLogger(__name__)

MAX_DIFFERENCES = 6
"""In a sentence for people."""


class DoesNotFit(ConfigurationError):  # noqa: N818 - it is what is the case
    """A sound checkpoint and the script that is to go on from it do not belong together; says in what they differ."""

    reason = "CheckpointDoesNotFit"


@runtime_checkable
class Selective(Protocol):
    """A module that refuses weights whose names and shapes fit."""

    def refusal(self, state: Mapping[str, Tensor]) -> str:
        """Why it does not take its part of a state; empty if it does."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that the user wrote, out of what parallelism and the compiler have put around it."""
    while True:
        if isinstance(module, DistributedDataParallel | DataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters and buffers by name; they alias the live tensors."""
    return {plain(name): value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def extra_state(model: nn.Module) -> dict[str, Any]:
    """What modules keep beside tensors (`get_extra_state`), by name."""
    return {plain(name): value for name, value in model.state_dict().items() if not isinstance(value, Tensor)}


def buffers(model: nn.Module) -> frozenset[str]:
    """Names of the tensors that are not learned, whether or not they belong to the state."""
    return frozenset(plain(name) for name, _ in model.named_buffers(remove_duplicate=False))


def check_weights(model: nn.Module, state: Mapping[str, Tensor], extra: Mapping[str, Any]) -> None:
    """See whether weights belong to a model; nothing is changed.

    Raises:
        DoesNotFit: a tensor is missing, of a shape that its module does not take, or there is one too many.
    """
    here = weights(model)
    there = {plain(name): tensor for name, tensor in state.items()}
    differing = [name for name, tensor in here.items() if name in there and there[name].shape != tensor.shape]
    loaders = custom_loaders(model) if differing else {}
    shapes = [
        f"{name} is {list(there[name].shape)} there and {list(here[name].shape)} here"
        for name in differing
        if not _accepts_shape(name, here[name], loaders, {**there, **extra})
    ]
    known = here.keys() | extra_state(model).keys()
    refuse("the weights do not fit the model", there.keys() | set(extra), known, shapes)
    for path, module in model.named_modules():
        if isinstance(module, Selective):
            prefix = f"{plain(path)}."
            own_state = {name.removeprefix(prefix): one for name, one in there.items() if name.startswith(prefix)}
            if why := module.refusal(own_state):
                raise DoesNotFit(why)


def load_weights(
    model: nn.Module, state: Mapping[str, Tensor], extra: Mapping[str, Any] | None = None, is_borrowed: bool = False
) -> None:
    """Put weights, and what modules keep beside them, into a model.

    Args:
        is_borrowed: the tensors lie in memory that is given back. torch's own way to load copies their values; modules
            that load in another way may keep them, and get copies.

    Raises:
        DoesNotFit: they belong to another one; the model is as it was.
    """
    check_weights(model, state, extra or {})
    there = {plain(name): value for name, value in [*state.items(), *(extra or {}).items()]}
    live = model.state_dict()
    if is_borrowed:
        loaders = custom_loaders(model)
        for name, one in live.items():
            # What is split is copied anyway, and less of it.
            is_given = isinstance(there[plain(name)], Tensor) and not is_sharded(one)
            if is_given and (is_extra(name) or _custom_loader(plain(name), loaders) is not None):
                there[plain(name)] = own(there[plain(name)], one.device if isinstance(one, Tensor) else CPU)
    try:
        model.load_state_dict(split_all_like(live, {name: there[plain(name)] for name in live}), strict=True)
    except (KeyError, ValueError, TypeError) as error:
        # A module's own way to load; torch's says what does not fit with a RuntimeError, as a device does that fails.
        raise DoesNotFit(f"the weights do not fit the model: {error!r}") from error
    except RuntimeError as error:
        if SIZE_MISMATCH in str(error):
            raise DoesNotFit(f"the weights do not fit the model: {error}") from error
        raise


SIZE_MISMATCH = "size mismatch for "
"""Part of torch's message for a tensor of another shape (torch 2.15)."""
EXTRA_STATE = "_extra_state"
"""Ends the name under which a module's `get_extra_state` stands in a state_dict; what it gives may be a tensor."""


def custom_loaders(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that do not load tensors as torch does, by path. They may keep the very tensors that they are given,
    as torchmetrics do, and take shapes other than theirs, as observers of quantization-aware training do.
    """
    return {
        plain(path): module
        for path, module in model.named_modules(remove_duplicate=False)
        if module._load_state_dict_pre_hooks
        or getattr(module._load_from_state_dict, "__func__", None) is not nn.Module._load_from_state_dict
    }


def is_extra(name: str) -> bool:
    """Whether a name in a state_dict is that of what a module's `get_extra_state` gives."""
    return name.rpartition(".")[2] == EXTRA_STATE


def _custom_loader(name: str, loaders: Mapping[str, nn.Module]) -> str | None:
    """The path of the innermost module that loads a tensor in its own way; None if torch loads it."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        if path in loaders:
            return path
    return None


def _accepts_shape(name: str, live: Tensor, loaders: Mapping[str, nn.Module], state: Mapping[str, Any]) -> bool:
    """Whether a module takes a tensor of another shape than its own. A copy of the module is asked."""
    if is_extra(name):
        return True
    path = _custom_loader(name, loaders)
    if path is None or is_sharded(live):
        return False
    names = {one: plain(f"{path}.{one}" if path else one) for one in loaders[path].state_dict()}
    try:
        module = copy.deepcopy(loaders[path])
    except (RuntimeError, TypeError):
        return True  # It cannot be copied, and is asked when it loads.
    try:
        module.load_state_dict(copy.deepcopy({one: state[full] for one, full in names.items() if full in state}))
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError):
        return False
    return True


def refuse(what: str, there: Iterable[str], here: Iterable[str], more: Iterable[str] = ()) -> None:
    """
    Args:
        there: names that the checkpoint has.
        here: names that the script has.
        more: other differences, as sentences.

    Raises:
        DoesNotFit: there is a difference.
    """
    there, here = set(there), set(here)
    differences = list(more)
    if missing := sorted(here - there):
        differences.append(f"the checkpoint lacks {enumerated(missing)}")
    if surplus := sorted(there - here):
        differences.append(f"the script lacks {enumerated(surplus)}")
    if differences:
        raise DoesNotFit(f"{what}: {'; '.join(differences[:MAX_DIFFERENCES])}")


def own(tensor: Tensor, device: torch.device) -> Tensor:
    """The same values in memory of their own, on a device."""
    return tensor.clone() if device.type == "cpu" else tensor.to(device)


def moment(tensor: Tensor, parameter: Tensor | None, is_by_row: bool = False) -> Tensor:
    """A tensor of an optimizer's state in memory of its own, where its parameter is, and split as that is.

    Args:
        is_by_row: whether it has a row for each row of the parameter, of another length.
    """
    # A count of steps stays on the CPU: torch itself knows which optimizers want it elsewhere.
    if parameter is None or tensor.ndim == 0:
        return own(tensor, CPU)
    if is_sharded(parameter) and (is_by_row or parameter.shape == tensor.shape):
        return split_like(parameter, tensor)
    return own(tensor, parameter.device)


CPU = torch.device("cpu")
MAX_DEPTH = 64
"""State that is nested more deeply is taken for one that holds itself."""


def split(name: str, state: object) -> tuple[Any, dict[str, Tensor]]:
    """State as JSON, and the tensors in it, which alias the live ones, under names that begin with `name`.

    Raises:
        TypeError: it holds something that is no number, text, tensor, array, or list, tuple or dict of such.
    """
    tensors: dict[str, Tensor] = {}
    return _split(name, state, tensors, 0), tensors


def join(tree: Any, tensors: Mapping[str, Tensor], device: torch.device = CPU) -> Any:
    """The state that `split` took apart; its tensors are copies.

    Args:
        device: for the tensors that were on a device of its type; all others come to the CPU.

    Raises:
        Broken: the tree is not one, or a tensor is missing.
    """
    try:
        return _join(tree, tensors, device)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Broken(f"the state that is kept beside the model does not fit together: {error!r}") from error


def put_back(into: MutableMapping[Any, Any], state: Mapping[Any, Any]) -> None:
    """Have a dictionary hold a state. What it holds already stays the same object wherever it can: a script may know
    its tensors, arrays, lists and dictionaries by other names, too.
    """
    values = {key: _put_back(into.get(key), value) for key, value in state.items()}
    into.clear()
    into.update(values)


def _put_back(old: Any, new: Any) -> Any:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        like = (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
        # A tensor that is expanded has one value in several places, and cannot be written.
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
        old[:] = [_put_back(one, value) for one, value in zip(before, new, strict=False)]
        return old
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        parts = [_put_back(one, value) for one, value in zip(old, new, strict=True)]
        return type(old)(*parts) if hasattr(old, "_fields") else tuple(parts)
    return new


def _split(path: str, value: object, tensors: dict[str, Tensor], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise TypeError(f"{path} is nested more than {MAX_DEPTH} levels deep; does it hold itself?")
    if isinstance(value, Tensor):
        name = _named(path, value, tensors)
        return {"tensor": name} if value.device.type == "cpu" else {"on device": [value.device.type, name]}
    if isinstance(value, np.ndarray):
        # Not ascontiguousarray, which gives an array without dimensions one.
        return {"array": _named(path, torch.from_numpy(np.asarray(value, order="C")), tensors)}
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


def _named(path: str, tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    while path in tensors:  # {"a/b": …, "a": {"b": …}}
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
    raise ValueError(f"nothing is called {kind!r}")


STATE, GROUPS, PARAMETERS = "state", "param_groups", "params"
"""Keys in the state_dict of torch's optimizers: state by parameter, groups, and in a group its parameters."""
NOBODY = ""
"""Stands for a parameter's name in entries of an optimizer's state that belong to no parameter."""
OWN = "(state_dict)"
"""Stands for a parameter's name: what else an optimizer's own `state_dict` gives, under BESIDE, or all of that,
under WHOLE. A version that does not know it lacks such a parameter, and refuses the checkpoint."""
BESIDE, WHOLE = "beside", "whole"

BY_ROW = ".scale"
"""Ends the names of tensors that have a row for each row of their parameter."""

LOCAL_SGD = (
    "with local SGD each rank trains weights of its own between two averages, and a checkpoint has one set of weights. "
    "Average the gradients of every step; gradient accumulation (batch.parts) or compression sends less, too"
)
"""Why weights that are averaged now and then are refused."""

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
    added: int = 0
    """How many of the groups, the last ones, were added while it trained."""


class NamedOptimizer:
    """An optimizer together with the names of its parameters.

    Args:
        model: has all of the optimizer's parameters.
        name: tells several optimizers of a run apart; empty where there is one.

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
                'hold; take the optimizer inside it alone, with distribute(model, strategy="fsdp"), which splits '
                "the state, too"
            )
        self.optimizer, self.name, self._model = optimizer, name, model
        self._has_warned = False
        self._prefix = f"{name}/" if name else ""
        self.mark_start()
        strange = sum(id(one) not in self._names for group in optimizer.param_groups for one in group[PARAMETERS])
        if strange:
            raise ValueError(
                f"the optimizer has {strange} parameters that are not the model's, and their state would be lost; "
                "keep all modules that hold them"
            )

    def mark_start(self) -> None:
        """Note the groups that the script begins with; later ones are added."""
        self._name_parameters()
        self._first_groups = len(self.optimizer.param_groups)

    def owns(self, path: str) -> bool:
        """Whether a tensor's name in the file is one of this optimizer's."""
        return path.startswith(self._prefix)

    def groups(self) -> list[list[str]]:
        """Names of the parameters of each group."""
        return [[self._name(one) for one in group[PARAMETERS]] for group in self.optimizer.param_groups]

    def parameters(self) -> dict[str, Tensor]:
        """The parameters, by what the names of their tensors in the file begin with."""
        parameters = (one for group in self.optimizer.param_groups for one in group[PARAMETERS])
        return {self._prefix + self._name(one): one for one in parameters}

    def state(self) -> OptimizerState:
        """The state as it is now, as the optimizer's `state_dict` gives it.

        Raises:
            ConfigurationError: a parameter that was added is not the model's.
        """
        given, groups = self.optimizer.state_dict(), self.groups()
        parameters = self._numbered(given, groups)
        holders = self.optimizer.param_groups if parameters is None else given[GROUPS]
        hyperparameters = [{key: value for key, value in one.items() if key != PARAMETERS} for one in holders]
        added = max(0, len(groups) - self._first_groups)
        found = OptimizerState(groups=groups, hyperparameters=hyperparameters, added=added)
        if parameters is None:
            found.rest[OWN] = {WHOLE: dict(given)}
            return found
        for number, entries in given[STATE].items():
            if number not in parameters:
                found.rest.setdefault(NOBODY, {})[number] = entries
                continue
            name = parameters[number]
            for key, value in entries.items():
                if isinstance(value, Tensor) and isinstance(key, str) and "/" not in key:
                    found.tensors[f"{self._prefix}{name}/{key}"] = value
                else:
                    found.rest.setdefault(name, {})[key] = value
        if beside := {key: value for key, value in given.items() if key not in (STATE, GROUPS)}:
            found.rest[OWN] = {BESIDE: beside}
        else:
            self._warn_of_what_is_lost(given[STATE], parameters)
        return found

    def _warn_of_what_is_lost(self, given: Mapping[Any, Mapping[Any, Any]], parameters: Mapping[Any, str]) -> None:
        """An optimizer around another one, such as SAM as it is often written, may give its own state alone."""
        inside = [one for one in vars(self.optimizer).values() if isinstance(one, torch.optim.Optimizer)]
        if self._has_warned or not inside:
            return
        named = {name: given.get(number, {}) for number, name in parameters.items()}
        lost = {
            (type(one).__name__, str(key))
            for one in inside
            for owner, entries in one.state.items()
            for key in entries
            if isinstance(owner, Tensor) and key not in named.get(self._names.get(id(owner), ""), {})
        }
        if lost:
            self._has_warned = True
            log.warning(
                "optimizer=%s holds the optimizer %s, and its state_dict does not give that one's %s, which no "
                "checkpoint has then; have it give them, and load_state_dict take them back",
                *(type(self.optimizer).__name__, min(lost)[0], enumerated(sorted(key for _, key in lost))),
            )

    def check(self, state: OptimizerState) -> None:
        """See whether a state belongs to this optimizer; nothing is changed.

        Raises:
            DoesNotFit: it belongs to another one.
        """
        groups, added = self.groups(), self._added_groups(state)
        here = {name for group in groups for name in group} | {name for names, _ in added for name in names}
        what = f"the state of the optimizer {self.name!r}" if self.name else "the optimizer's state"
        tensors, shapes = self._by_parameter(state.tensors), []
        if state.groups is not None:
            refuse(f"{what} is of other parameters", (name for group in state.groups for name in group), here)
        if any(path.endswith(BY_ROW) for path in state.tensors) and not getattr(self.optimizer, "has_scales", False):
            raise DoesNotFit(f"{what} has moments of 8 bits, as adamw8bit keeps them, and the script's is another one")
        if surplus := sorted((tensors.keys() | state.rest.keys()) - here - {NOBODY, OWN}):
            raise DoesNotFit(f"{what} is of other parameters: the script lacks {enumerated(surplus)}")
        if OWN in state.rest:
            if not self.has_custom_load:
                raise DoesNotFit(
                    f"{what} has {enumerated(sorted(map(str, *state.rest[OWN].values())))} beside that by parameter, "
                    f"which {type(self.optimizer).__name__} does not take back"
                )
            if state.groups != [*groups, *(names for names, _ in added)]:
                raise DoesNotFit(f"{what} is by the order of its parameters, and that is another one here")
        live = self._entries()
        for group in groups:
            for name in group:
                for key, tensor in tensors.get(name, {}).items():
                    one = live.get(name, {}).get(key)
                    if isinstance(one, Tensor) and one.shape != tensor.shape:
                        shapes.append(f"{name}/{key} is {list(tensor.shape)} there and {list(one.shape)} here")
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
        self.add_groups(state)
        tensors = self._by_parameter(state.tensors)
        states: dict[Any, Any] = dict(state.rest.get(NOBODY, {}))
        exact: list[tuple[str, str, Tensor]] = []
        packed, number = [], 0
        for group, kept in zip(self.optimizer.param_groups, self._matched(state), strict=True):
            options = {key: value for key, value in group.items() if key != PARAMETERS} | (kept or {})
            packed.append({**options, PARAMETERS: list(range(number, number + len(group[PARAMETERS])))})
            for parameter in group[PARAMETERS]:
                name = self._name(parameter)
                entries: dict[str, Any] = dict(state.rest.get(name, {}))
                for key, tensor in tensors.get(name, {}).items():
                    entries[key] = tensor
                    exact.append((name, key, tensor))
                if entries:
                    states[number] = entries
                number += 1
        own_state = state.rest.get(OWN, {})
        given = own_state.get(WHOLE) or {STATE: states, GROUPS: packed, **own_state.get(BESIDE, {})}
        try:
            self.optimizer.load_state_dict(given)
        except (KeyError, ValueError, TypeError) as error:
            raise DoesNotFit(f"the optimizer's state does not fit it: {error!r}") from error
        live = self._entries()
        for name, key, tensor in exact:
            # torch gives moments the type of their parameter, whatever the optimizer had.
            one = live.get(name, {}).get(key)
            if isinstance(one, Tensor) and one.dtype != tensor.dtype and one.shape == tensor.shape:
                live[name][key] = own(tensor, one.device)

    def add_groups(self, state: OptimizerState) -> None:
        """Add the groups that were added while a state came about, after `check`."""
        for names, options in self._added_groups(state):
            self.optimizer.add_param_group({**options, PARAMETERS: [self._parameters[name] for name in names]})

    def _added_groups(self, state: OptimizerState) -> list[tuple[list[str], dict[str, Any]]]:
        """The groups of a state that were added and are not there yet: names of parameters of the model, and what else
        they hold."""
        if not state.added or state.groups is None or state.hyperparameters is None:
            return []
        here = {name for group in self.groups() for name in group}
        added = list(zip(state.groups, state.hyperparameters, strict=True))[-state.added :]
        return [
            (names, options)
            for names, options in added
            if names and here.isdisjoint(names) and self._parameters.keys() >= set(names)
        ]

    @property
    def has_added_groups(self) -> bool:
        """Whether groups were added since the script began."""
        return len(self.optimizer.param_groups) > self._first_groups

    @property
    def has_custom_load(self) -> bool:
        """Whether it takes back more than torch's optimizers do."""
        one = self.optimizer
        method = getattr(one.load_state_dict, "__func__", None)
        hooks = getattr(one, "_optimizer_load_state_dict_pre_hooks", {})
        return bool(hooks) or method is not torch.optim.Optimizer.load_state_dict

    def _numbered(self, given: Mapping[str, Any], live: list[list[str]]) -> dict[Any, str] | None:
        """The names of the parameters by their numbers in a state_dict; None if that is not of torch's form.

        Args:
            live: names of the parameters of each group.
        """
        groups = given.get(GROUPS)
        if not isinstance(given.get(STATE), Mapping) or not isinstance(groups, list):
            return None
        numbers = [list(group.get(PARAMETERS, [])) for group in groups if isinstance(group, Mapping)]
        if [len(one) for one in numbers] != [len(names) for names in live]:
            return None
        found = dict(zip(chain.from_iterable(numbers), chain.from_iterable(live), strict=True))
        is_torchs = all(isinstance(given[STATE].get(number, {}), MutableMapping) for number in found)
        return found if is_torchs else None

    def _entries(self) -> dict[str, MutableMapping[Any, Any]]:
        """State that the optimizer holds now, by parameter; torch's optimizers return the dictionaries in use."""
        given = self.optimizer.state_dict()
        numbered = self._numbered(given, self.groups()) or {}
        return {name: given[STATE][number] for number, name in numbered.items() if number in given[STATE]}

    def _name_parameters(self) -> None:
        self._parameters = {plain(path): one for path, one in self._model.named_parameters()}
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}

    def _name(self, parameter: Tensor) -> str:
        if id(parameter) not in self._names:
            self._name_parameters()  # The model may have grown.
        if id(parameter) not in self._names:
            raise ConfigurationError(
                "the optimizer has got a parameter that is not the model's, and its state would be lost; keep all "
                "modules that hold parameters"
            )
        return self._names[id(parameter)]

    def _by_parameter(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {}
        for path, tensor in tensors.items():
            name, _, key = path.removeprefix(self._prefix).rpartition("/")
            found.setdefault(plain(name), {})[key] = tensor
        return found

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
