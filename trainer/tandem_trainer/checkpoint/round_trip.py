"""Tries at a save, and not weeks later at a restart, whether an object takes back the state that it gives.

A restart makes each object anew and has it load the saved state. So a copy of each object is made when the script has
made it, and at the first save at which the object has changed, the copy loads what is saved. What the copy then gives
as its own state has to be the same.

Only what is small and can be copied is tried (`MAX_BYTES`, `MAX_OBJECTS`). In a copy, weights and moments of the model,
to which a schedule refers through its optimizer, are placeholders on the meta device: they take no memory, and what
loads a state cannot change the run.

Rejected: to have the object itself load (what it does beside could disturb the run, and a method that does nothing
would pass), a copy made at the save (likewise: it has the values already), an error (a state may hold a time or a
counter that is meant to be another one).
"""

import contextlib
import copy
import gc
import json
import logging
import random
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from tandem.architectures import plain
from tandem.errors import enumerated
from tandem_trainer.checkpoint.sharding import is_sharded
from tandem_trainer.checkpoint.state import custom_loaders, join, split

log = logging.getLogger(__name__)

MAX_BYTES = 2**24
"""Tensors and arrays of an object that is tried."""
MAX_OBJECTS = 2**14
"""Python objects within it; a copy of so many takes 50 ms (measured on one core)."""
NOT_COPIED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, logging.Logger)
"""A copy has the very same ones."""
DOES_NOT_FIT = (KeyError, ValueError, TypeError, AttributeError)
"""Errors of an object that does not take a state."""


class RoundTrip:
    """One object as the script made it, to be compared at a save.

    Args:
        name: for messages: what it is kept as.
        given: the object.
        held: tensors of the run that it may refer to and that are no part of its state.
    """

    def __init__(self, name: str, given: Any, held: Iterable[Tensor] = ()) -> None:
        self._name, self._live = name, given
        placeholders = {id(one): _placeholder(one) for one in held}
        # What fails with such an error may have needed the values of a placeholder.
        self._errors = DOES_NOT_FIT if placeholders else (*DOES_NOT_FIT, RuntimeError)
        self._copy = _copied(given, placeholders)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to be tried."""
        return self._copy is None

    def problem(self) -> str:
        """What the object loses or changes, as a sentence; empty where nothing is known to be lost. Asks the object for
        its state once, also where that is over: its `state_dict` may be a collective."""
        with _undisturbed():
            return self._tried()

    def _tried(self) -> str:
        saved, copied = self._live.state_dict(), self._copy
        if copied is None:
            return ""
        kind = type(self._live).__name__
        try:
            has_changed = any(differences(saved, copied.state_dict()))
            tree, tensors = split(self._name, saved)
            device = next((one.device for one in tensors.values()), torch.device("cpu"))
            if not (state := join(json.loads(json.dumps(tree)), tensors, device)):
                return ""
            try:
                copied.load_state_dict(state)
            except self._errors as error:
                self._copy = None
                return f"{kind}.load_state_dict does not take the state that its state_dict gives: {error!r}"
            lost = sorted(differences(saved, copied.state_dict()))
        except Exception as error:
            # Without the run's weights a copy may fail where the object would not.
            log.debug("kept=%s cannot be tried: %r", self._name, error)
            self._copy = None
            return ""
        if has_changed or lost:
            self._copy = None
        return f"{kind} loses or changes {enumerated(lost)} of its state when it loads it" if lost else ""


def problems(tried: Mapping[str, RoundTrip]) -> dict[str, str]:
    """What objects lose or change, as sentences, by name."""
    found = {name: one.problem() for name, one in tried.items()}
    return {name: why for name, why in found.items() if why}


def small_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules, of those that take their state back in a way of their own, as far as they are small
    enough to be copied all together, by path; none of torch's own."""
    own_ways = custom_loaders(model) | {
        plain(path): one
        for path, one in model.named_modules()
        if type(one).set_extra_state is not nn.Module.set_extra_state
    }
    found: dict[str, nn.Module] = {}
    left = MAX_BYTES
    for path in sorted(own_ways):
        module = own_ways[path]
        tensors = [*module.parameters(), *module.buffers()]
        is_torchs = type(module).__module__.startswith("torch.nn.")
        is_inside = any(not outer or path.startswith(f"{outer}.") for outer in found)
        # Placeholders have no values that could be copied.
        is_elsewhere = any(is_sharded(one) or is_lazy(one) or one.is_meta for one in tensors)
        size = sum(one.nbytes for one in tensors)
        if not (is_torchs or is_inside or is_elsewhere) and size <= left:
            found[path] = module
            left -= size
    return found


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Where two states differ, as paths. What is on the meta device has no values, and is equal to everything."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys([*one, *other]):
            where = f"{path}/{key}".removeprefix("/")
            if key in one and key in other:
                yield from differences(one[key], other[key], where)
            else:
                yield where
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for number, (part, its) in enumerate(zip(one, other, strict=True)):
            yield from differences(part, its, f"{path}/{number}".removeprefix("/"))
    elif not _same(one, other):
        yield path


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.is_meta or other.is_meta:
            return True
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        flat = [part.detach().contiguous().reshape(-1).view(torch.uint8).cpu() for part in (one, other)]
        return torch.equal(*flat)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    if isinstance(one, Tensor | np.ndarray) or isinstance(other, Tensor | np.ndarray):
        return False
    return bool(one == other) or (one != one and other != other)


def _copied(given: Any, placeholders: Mapping[int, Tensor]) -> Any:
    """A copy that has placeholders in the place of the run's tensors; None if it is large, or cannot be copied."""
    try:
        if (parts := _parts(given, placeholders.keys())) is None:
            return None
        memo: dict[int, Any] = dict(placeholders)
        # An optimizer's own way to be copied leaves out what a class around another one adds.
        optimizers = [one for one in parts if isinstance(one, torch.optim.Optimizer)]
        memo |= {id(one): object.__new__(type(one)) for one in optimizers}
        for one in optimizers:
            vars(memo[id(one)]).update(copy.deepcopy(vars(one), memo))
        return copy.deepcopy(given, memo)
    except Exception as error:
        log.debug("a %s cannot be copied: %r", type(given).__name__, error)
        return None


def _placeholder(one: Tensor) -> Tensor:
    empty = torch.empty(one.shape, dtype=one.dtype, device="meta")
    return nn.Parameter(empty, one.requires_grad) if isinstance(one, nn.Parameter) else empty


def _parts(given: Any, left_out: Set[int]) -> list[Any] | None:
    """What a copy of an object would copy; None if that takes much time or memory, or would end or start something."""
    found, waiting, seen, size = [], [given], {id(given)}, 0
    while waiting:
        found.append(one := waiting.pop())
        if isinstance(one, Tensor):
            if is_lazy(one) or is_sharded(one):
                return None
            size += one.nbytes
        elif isinstance(one, np.ndarray):
            size += one.nbytes
        elif isinstance(one, str | bytes | bytearray):
            size += len(one)
        elif isinstance(one, list | tuple | dict | set | frozenset) and len(one) > MAX_OBJECTS:
            return None
        if hasattr(type(one), "__del__") or (isinstance(one, DataLoader) and one.num_workers):
            # What has a finalizer may hold a file or a process; a loader with workers would start others.
            return None
        if size > MAX_BYTES or len(seen) > MAX_OBJECTS:
            return None
        for part in gc.get_referents(one):
            if id(part) not in seen and id(part) not in left_out and not isinstance(part, NOT_COPIED):
                seen.add(id(part))
                waiting.append(part)
    return found


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """What is drawn at random here does not change what is drawn afterwards, and no copy warns."""
    drawn, drawn_by_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(drawn)
            np.random.set_state(drawn_by_numpy)
