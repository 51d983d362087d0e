"""A flat shared memory that holds the bytes of a checkpoint's files in exactly the order in which they are written.

Training stalls only while tensors are copied here; the writer process maps the same memory and writes it out as it is,
so nothing is pickled, copied or sent a second time. The layout is the safetensors format's: a length, a JSON header,
the bytes. Reused for every save of the same state; one save is in flight at a time.
"""

import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ALIGNMENT = 64

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Region:
    """Where one file's bytes lie in the memory."""

    path: str
    """The file's path inside the checkpoint."""
    offset: int
    """First byte."""
    size: int
    """Bytes."""


def shared_memory() -> int:
    """A descriptor of anonymous shared memory, empty as yet; a process that inherits it sees what is staged."""
    return os.memfd_create("tandem-checkpoint") if hasattr(os, "memfd_create") else _unlinked_file()


class Staging:
    """Preallocated memory for the state of one run on one rank."""

    def __init__(self, descriptor: int, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Lay out files, each a dictionary of tensors, in shared memory; `regions` then tells where each lies."""
        self.signature = signature(files)
        headers = {path: _header(tensors) for path, tensors in files.items()}
        self.regions: list[Region] = []
        end = 0
        for path, tensors in files.items():
            size = len(headers[path]) + sum(tensor.nbytes for tensor in tensors.values())
            self.regions.append(Region(path, end, size))
            end += -(-size // ALIGNMENT) * ALIGNMENT
        os.ftruncate(descriptor, max(end, 1))
        self._memory = mmap.mmap(descriptor, max(end, 1))
        self._flat = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._flat.zero_()  # touch every page now, not during the first save
        self._views: list[Tensor] = []
        for region, (path, tensors) in zip(self.regions, files.items(), strict=True):
            header = headers[path]
            self._memory[region.offset : region.offset + len(header)] = header
            start = region.offset + len(header)
            for tensor in _ordered(tensors).values():
                view = self._flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                self._views.append(view)
                start += tensor.nbytes

    def copy(self, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy the tensors' values in; the layout must be the one this memory was made for."""
        assert signature(files) == self.signature
        live = [tensor.detach() for tensors in files.values() for tensor in _ordered(tensors).values()]
        torch._foreach_copy_(self._views, live)


def signature(files: Mapping[str, Mapping[str, Tensor]]) -> tuple[object, ...]:
    """What two sets of files must share to fit into the same memory."""
    return tuple(
        (path, name, tensor.dtype, tuple(tensor.shape))
        for path, tensors in files.items()
        for name, tensor in tensors.items()
    )


def _ordered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Wide types first, so that every tensor is aligned to its own size, as the format asks."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, object] = {}
    start = 0
    for name, tensor in _ordered(tensors).items():
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}, which a checkpoint cannot hold")
        assert tensor.nbytes == math.prod(tensor.shape) * tensor.element_size()
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _unlinked_file() -> int:
    """Shared memory where there is no memfd: a temporary file that nobody else can open."""
    import tempfile

    descriptor, name = tempfile.mkstemp(prefix="tandem-checkpoint-")
    Path(name).unlink()
    return descriptor
