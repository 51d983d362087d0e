"""The safetensors format: a length, a JSON header, and the bytes of all tensors. Nothing in it can be executed.

Written here because a save stages the bytes in the order of the file, slice by slice; read here because the bytes that
were checked become the tensors as they are, where the library would copy them twice.
(https://github.com/huggingface/safetensors, section Format.)
"""

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tandem.rundir.checkpoint import Broken

ALIGNMENT = 64
"""Alignment of the first tensor, in bytes. Wide types come first, so each tensor is aligned to its own element size."""
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library for the header, in bytes."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH = struct.Struct("<Q")


def ordered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in the order in which a file holds them."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))


def header(tensors: Mapping[str, Tensor]) -> bytes:
    """Serialize the length and the JSON header that precede the tensors' bytes.

    Raises:
        TypeError: a tensor has a type that the format does not know.
    """
    entries: dict[str, object] = {}
    start = 0
    for name, tensor in ordered(tensors).items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name} has dtype {tensor.dtype}, which a checkpoint cannot hold")
        size = tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + size],
        }
        start += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH.size) % ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def parse(content: memoryview) -> dict[str, Tensor]:
    """Parse a file into tensors that are views of its content.

    Raises:
        Broken: the content is not a safetensors file.
    """
    try:
        (length,) = _LENGTH.unpack_from(content)
        if length > MAX_HEADER_BYTES or length > len(content) - _LENGTH.size:
            raise ValueError(f"a header of {length} bytes")
        entries = json.loads(bytes(content[_LENGTH.size : _LENGTH.size + length]))
        data = content[_LENGTH.size + length :]
        return {name: _tensor(data, entry) for name, entry in entries.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise Broken(f"it is not a safetensors file: {error}") from error


def _tensor(data: memoryview, entry: dict[str, Any]) -> Tensor:
    dtype, shape, (start, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (start, end, *shape)):
        raise ValueError("a shape or a place that is no number")
    count = math.prod(shape)
    if end > len(data) or end - start != count * dtype.itemsize:
        raise ValueError(f"a tensor of {count} elements in bytes {start} to {end} of {len(data)}")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    place = data[start:end]
    if start % dtype.itemsize:
        # Files of other writers may be aligned less strictly, and `frombuffer` needs aligned memory.
        place = memoryview(bytearray(place))
    return torch.frombuffer(place, dtype=dtype).reshape(shape)
