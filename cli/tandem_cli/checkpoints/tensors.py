"""The tensors of a safetensors file as numbers, without torch: read in windows, each byte verified before it is used.

NumPy has no bfloat16. Such a number is the upper half of a float32, so it is widened by two bytes of zeros, exactly.
(https://github.com/huggingface/safetensors, section Format.)
"""

import numpy as np
import numpy.typing as npt

from tandem import tensor_header
from tandem.rundir.checkpoint import Broken
from tandem.tensor_header import Tensor
from tandem_cli.checkpoints.chunks import ChunkedFile

__all__ = ["NUMPY", "WIDTHS", "Floats", "Tensor", "tensors", "values"]

Floats = npt.NDArray[np.float64]

NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U8": "<u1"}
"""NumPy's names; BF16 and BOOL are made from other types."""
WIDTHS = {name: np.dtype(code).itemsize for name, code in NUMPY.items()} | {"BF16": 2, "BOOL": 1}


def tensors(file: ChunkedFile) -> dict[str, Tensor]:
    """All tensors of a file by name, in the order in which it holds them.

    Raises:
        Broken: it is not a safetensors file, or has a type that is not known here.
    """
    path = file.entry.path
    try:
        found = tensor_header.tensors(file.read, file.entry.size)
        if strange := {tensor.dtype for tensor in found.values()} - WIDTHS.keys():
            raise ValueError(f"a tensor of {min(strange)}")
    except ValueError as error:
        raise Broken(f"{path} is not a safetensors file that this version reads: {error}") from error
    return found


def values(data: bytes, dtype: str) -> Floats:
    """Little-endian elements as float64, [N]."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "BOOL":
        return np.frombuffer(data, np.uint8).astype(np.float64)
    return np.frombuffer(data, NUMPY[dtype]).astype(np.float64)
