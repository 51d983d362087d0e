"""The tensors of a safetensors file as numbers, without torch: read in windows, each byte verified before it is used.

NumPy has no bfloat16. Such a number is the upper half of a float32, so it is widened by two bytes of zeros, exactly.
(https://github.com/huggingface/safetensors, section Format.)
"""

import json
import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.checkpoints.chunks import ChunkedFile
from tandem.manifest import Broken

Floats = npt.NDArray[np.float64]

NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U8": "<u1"}
"""NumPy's names; BF16 and BOOL are made from other types."""
WIDTHS = {name: np.dtype(code).itemsize for name, code in NUMPY.items()} | {"BF16": 2, "BOOL": 1}
MOST_HEADER_BYTES = 100_000_000
"""The library's own limit."""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Tensor:
    """Where a tensor stands in its file."""

    name: str
    """Its name."""
    dtype: str
    """In the format's words: F32, BF16, …"""
    shape: tuple[int, ...]
    """Its shape."""
    start: int
    """First byte in the file."""
    size: int
    """Bytes."""

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def tensors(file: ChunkedFile) -> dict[str, Tensor]:
    """All tensors of a file by name, in the order in which it holds them.

    Raises:
        Broken: it is not a safetensors file, or has a type that is not known here.
    """
    path = file.entry.path
    if file.entry.size < _LENGTH.size:
        raise Broken(f"{path} is not a safetensors file: it has {file.entry.size} bytes")
    try:
        (length,) = _LENGTH.unpack(file.read(0, _LENGTH.size))
        if length > min(MOST_HEADER_BYTES, file.entry.size - _LENGTH.size):
            raise ValueError(f"a header of {length} bytes")
        entries = json.loads(file.read(_LENGTH.size, length))
        begin = _LENGTH.size + length
        found = [_tensor(name, entry, begin) for name, entry in entries.items() if name != "__metadata__"]
        if any(tensor.start + tensor.size > file.entry.size for tensor in found):
            raise ValueError("a tensor that ends after the file")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise Broken(f"{path} is not a safetensors file that this version reads: {error}") from error
    return {tensor.name: tensor for tensor in sorted(found, key=lambda tensor: tensor.start)}


def values(data: bytes, dtype: str) -> Floats:
    """Little-endian elements as float64, [N]."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "BOOL":
        return np.frombuffer(data, np.uint8).astype(np.float64)
    return np.frombuffer(data, NUMPY[dtype]).astype(np.float64)


def _tensor(name: str, entry: dict[str, Any], begin: int) -> Tensor:
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (start, end, *shape)):
        raise ValueError("a shape or a place that is no number")
    if end - start != math.prod(shape) * WIDTHS[dtype]:
        raise ValueError(f"{name} has {end - start} bytes, which is not what {dtype} of that shape takes")
    return Tensor(name, dtype, tuple(shape), begin + start, end - start)
