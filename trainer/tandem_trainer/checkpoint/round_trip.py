"""Tests at a save, and not weeks later at a restart, whether an object can load the state that it saves.

A restart creates each object anew and has it load the saved state. So each object is copied when the script has created
it, and at the first save at which the object has changed, the copy loads what is saved. The copy's own state must then
equal the saved one.

Only small objects that can be copied are tested (`MAX_BYTES`, `MAX_OBJECTS`), because a second copy of a large state
may not fit into memory; a warning names larger ones. In a copy, weights and moments of the model, to which a schedule
refers through its optimizer, are placeholders on the meta device: they take no memory, and loading a state cannot
change the run.

Rejected: loading into the object itself (side effects could disturb the run, and a method that does nothing would
pass), a copy made at the save (it would pass, too: it has the values already), an error instead of a warning (a state
may hold a time or a counter that changes on purpose).
"""

import copy
import gc
import json
import logging
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from tandem.errors import join_names
from tandem.job.architectures import unwrapped_name
from tandem_trainer.checkpoint.sharding import is_sharded
from tandem_trainer.checkpoint.state import custom_loaders, join, split
from tandem_trainer.data.keyed import random_state_restored

log = logging.getLogger(__name__)

MAX_BYTES = 2**24
"""Maximum size of tensors and arrays in an object that is tested, in bytes."""
MAX_OBJECTS = 2**14
"""Maximum number of Python objects within it; a copy of so many takes 50 ms (measured on one core)."""
NOT_COPIED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, logging.Logger)
"""Types whose objects a copy shares with the original."""
LOAD_ERRORS = (KeyError, ValueError, TypeError, AttributeError)
"""Errors by which an object rejects a state."""


class _TooLarge(Exception):  # noqa: N818 - it says why an object is not tested
    """An object is larger than MAX_BYTES or MAX_OBJECTS."""


class RoundTrip:
    """One object as the script created it, for a comparison at a save.

    Args:
        name: name under which the object is saved, for messages.
        live: the object.
        run_tensors: tensors of the run that it may refer to and that are not part of its state.
    """

    def __init__(self, name: str, live: Any, run_tensors: Iterable[Tensor] = ()) -> None:
        self._name, self._live = name, live
        placeholders = {id(tensor): _placeholder(tensor) for tensor in run_tensors}
        # With placeholders, a RuntimeError may only mean that their values were needed, so it is not taken for a
        # rejection.
        self._errors = LOAD_ERRORS if placeholders else (*LOAD_ERRORS, RuntimeError)
        self.is_too_large = False
        """Whether the object is not tested because of its size."""
        # Copied now, before training changes the object: a copy made at a save would have the right values already.
        try:
            self._copy = _copy_of(live, placeholders)
        except _TooLarge:
            self._copy, self.is_too_large = None, True

    @property
    def is_finished(self) -> bool:
        """Whether the test is finished."""
        return self._copy is None

    def problem(self) -> str:
        """Return what the object loses or changes, as a sentence; empty if nothing is known to be lost.

        Asks the object for its state once, also after the test has finished: its `state_dict` may be a collective.
        """
        with random_state_restored(), warnings.catch_warnings():
            # Copies may warn of what the objects have warned of.
            warnings.simplefilter("ignore")
            return self._try()

    def _try(self) -> str:
        # Before the early return, on every rank alike: `state_dict` may be a collective.
        saved, copied = self._live.state_dict(), self._copy
        if copied is None:
            return ""
        kind = type(self._live).__name__
        try:
            has_changed = any(differences(saved, copied.state_dict()))
            # Through JSON and tensors, exactly as a checkpoint does it.
            tree, tensors = split(self._name, saved)
            device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
            if not (state := join(json.loads(json.dumps(tree)), tensors, device)):
                return ""
            try:
                copied.load_state_dict(state)
            except self._errors as error:
                self._copy = None
                return f"{kind}.load_state_dict does not take the state that its state_dict gives: {error!r}"
            # The copy has loaded the state. Whatever its own state lacks now, a restart would lose.
            lost = sorted(differences(saved, copied.state_dict()))
        except Exception as error:
            # Without the run's weights a copy may fail where the object itself would not.
            log.debug("kept=%s cannot be tested: %r", self._name, error)
            self._copy = None
            return ""
        # A state that equals the copy's proves nothing yet: an object that ignores its state would pass. Test again at
        # the next save.
        if has_changed or lost:
            self._copy = None
        return f"{kind} loses or changes {join_names(lost)} of its state when it loads it" if lost else ""


def problems(trips: Mapping[str, RoundTrip]) -> dict[str, str]:
    """Return what objects lose or change, as sentences, by name."""
    by_name = {name: trip.problem() for name, trip in trips.items()}
    return {name: sentence for name, sentence in by_name.items() if sentence}


def small_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules with a custom way to load their state, by path; only as many as are small enough to
    be copied, and none of torch's own."""
    own_ways = custom_loaders(model) | {
        unwrapped_name(path): module
        for path, module in model.named_modules()
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }
    selected: dict[str, nn.Module] = {}
    remaining_bytes = MAX_BYTES
    for path in sorted(own_ways):
        module = own_ways[path]
        tensors = [*module.parameters(), *module.buffers()]
        # torch's own modules are trusted, and a module inside a selected one is copied with it.
        is_torchs = type(module).__module__.startswith("torch.nn.")
        is_inside = any(not outer or path.startswith(f"{outer}.") for outer in selected)
        # Placeholders have no values that could be copied.
        is_elsewhere = any(is_sharded(tensor) or is_lazy(tensor) or tensor.is_meta for tensor in tensors)
        size = sum(tensor.nbytes for tensor in tensors)
        if not (is_torchs or is_inside or is_elsewhere) and size <= remaining_bytes:
            selected[path] = module
            remaining_bytes -= size
    return selected


def differences(first: Any, second: Any, path: str = "") -> Iterator[str]:
    """Yield the paths at which two states differ. Tensors on the meta device have no values, and equal everything."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in dict.fromkeys([*first, *second]):
            key_path = f"{path}/{key}".removeprefix("/")
            if key in first and key in second:
                yield from differences(first[key], second[key], key_path)
            else:
                yield key_path
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        for number, (part, its) in enumerate(zip(first, second, strict=True)):
            yield from differences(part, its, f"{path}/{number}".removeprefix("/"))
    elif not _equal(first, second):
        yield path


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.is_meta or second.is_meta:
            return True
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        flat = [part.detach().contiguous().reshape(-1).view(torch.uint8).cpu() for part in (first, second)]
        return torch.equal(*flat)
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return (first.dtype, first.shape) == (second.dtype, second.shape) and first.tobytes() == second.tobytes()
    if isinstance(first, Tensor | np.ndarray) or isinstance(second, Tensor | np.ndarray):
        return False
    return bool(first == second) or (first != first and second != second)


def _copy_of(live: Any, placeholders: Mapping[int, Tensor]) -> Any:
    """Copy an object, with placeholders for the run's tensors; None if it cannot be copied.

    Raises:
        _TooLarge: the copy would take too much time or memory.
    """
    try:
        if (parts := _copied_objects(live, placeholders.keys())) is None:
            return None
        memo: dict[int, Any] = dict(placeholders)
        # `Optimizer.__getstate__` omits attributes that a wrapping class adds, so optimizers are copied by their
        # `vars`.
        optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
        memo |= {id(optimizer): object.__new__(type(optimizer)) for optimizer in optimizers}
        for optimizer in optimizers:
            vars(memo[id(optimizer)]).update(copy.deepcopy(vars(optimizer), memo))
        return copy.deepcopy(live, memo)
    except _TooLarge:
        raise
    except Exception as error:
        log.debug("a %s cannot be copied: %r", type(live).__name__, error)
        return None


def _placeholder(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _copied_objects(live: Any, excluded: Set[int]) -> list[Any] | None:
    """Return the objects that a copy would copy; None if that could start or end something.

    Raises:
        _TooLarge: it would take much time or memory.
    """
    objects, waiting, seen_ids, size = [], [live], {id(live)}, 0
    while waiting:
        objects.append(current := waiting.pop())
        if isinstance(current, Tensor):
            if is_lazy(current) or is_sharded(current):
                return None
            size += current.nbytes
        elif isinstance(current, np.ndarray):
            size += current.nbytes
        elif isinstance(current, str | bytes | bytearray):
            size += len(current)
        elif isinstance(current, list | tuple | dict | set | frozenset) and len(current) > MAX_OBJECTS:
            raise _TooLarge
        if hasattr(type(current), "__del__") or (isinstance(current, DataLoader) and current.num_workers):
            # What has a finalizer may hold a file or a process; a loader with workers would start others.
            return None
        if size > MAX_BYTES or len(seen_ids) > MAX_OBJECTS:
            raise _TooLarge
        # The same references that `deepcopy` would follow, as far as the garbage collector knows them.
        for part in gc.get_referents(current):
            if id(part) not in seen_ids and id(part) not in excluded and not isinstance(part, NOT_COPIED):
                seen_ids.add(id(part))
                waiting.append(part)
    return objects
