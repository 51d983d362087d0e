"""The header of a safetensors file: name, dtype, shape and offset of each tensor, without reading its data.

(https://github.com/huggingface/safetensors, section Format.)
"""

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 100_000_000
"""Maximum size of a header, the library's own limit."""
WIDTHS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
"""Bytes per element, by the format's type names."""
LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Tensor:
    """Position of a tensor in its file."""

    name: str
    """Its name."""
    dtype: str
    """The format's type name: F32, BF16, …"""
    shape: tuple[int, ...]
    """Its shape."""
    start: int
    """First byte in the file."""
    size: int
    """Bytes."""

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def tensors(read: Callable[[int, int], bytes], size: int) -> dict[str, Tensor]:
    """Read the header of a file: all tensors by name, in the order of their data.

    Args:
        read: function that reads bytes, by offset and length.
        size: size of the file in bytes.

    Raises:
        ValueError: it is not a safetensors file. The message gives the reason.
    """
    if size < LENGTH.size:
        raise ValueError(f"it has {size} bytes")
    try:
        (length,) = LENGTH.unpack(read(0, LENGTH.size))
        if length > min(MAX_BYTES, size - LENGTH.size):
            raise ValueError(f"a header of {length} bytes")
        entries = json.loads(read(LENGTH.size, length))
        data_start = LENGTH.size + length
        unsorted = [_tensor(name, entry, data_start) for name, entry in entries.items() if name != "__metadata__"]
    except json.JSONDecodeError:
        raise ValueError("a header that is not JSON") from None
    except (KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ValueError(str(error)) from error
    if any(tensor.start + tensor.size > size for tensor in unsorted):
        raise ValueError("a tensor that ends after the file")
    return {tensor.name: tensor for tensor in sorted(unsorted, key=lambda tensor: tensor.start)}


def _tensor(name: str, entry: dict[str, Any], data_start: int) -> Tensor:
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (start, end, *shape)):
        raise ValueError("a shape or a place that is no number")
    if end - start != math.prod(shape) * WIDTHS[dtype]:
        raise ValueError(f"{name} has {end - start} bytes, which is not what {dtype} of that shape takes")
    return Tensor(name, dtype, tuple(shape), data_start + start, end - start)
