"""Copies of parameters in a lower precision, as autocast makes them."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the copies that are made while the mode is on."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ids = {id(parameter) for parameter in parameters}
        self.sizes: dict[int, int] = {}
        """Bytes of each copy, by the id of its parameter."""
        self.alive = 0
        """Bytes of all copies that exist now."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the copy that it makes."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and id(args[0]) in self._ids:
            self.sizes[id(args[0])] = result.nbytes
            self.alive += result.nbytes
            weakref.finalize(result.untyped_storage(), self._subtract, result.nbytes)
        return result

    def _subtract(self, size: int) -> None:
        self.alive -= size
