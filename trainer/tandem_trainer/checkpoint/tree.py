"""State of any shape as JSON and named tensors: what a `state_dict()` gives, without pickle.

Numbers, strings and lists stand in the JSON as they are. An object with one key says what else there is:

    {"dict": {…}}  {"pairs": [[key, value], …]}  {"tuple": […]}  {"array": name}  {"number": "nan"}
    {"tensor": name}  {"on device": [type, name]}

Rejected: pickle (it runs what it reads), torch.save with weights_only (one file that cannot be verified and written in
parts), JSON alone (an average of the weights is as large as the weights).
"""

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.rundir.checkpoint import Broken

CPU = torch.device("cpu")
MOST_DEPTH = 64
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
    if depth > MOST_DEPTH:
        raise TypeError(f"{path} is nested more than {MOST_DEPTH} levels deep; does it hold itself?")
    if isinstance(value, Tensor):
        name = _named(path, value, tensors)
        return {"tensor": name} if value.device.type == "cpu" else {"on device": [value.device.type, name]}
    if isinstance(value, np.ndarray):
        return {"array": _named(path, torch.from_numpy(np.ascontiguousarray(value)), tensors)}
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
