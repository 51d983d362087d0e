"""The numeric differences between two checkpoints, tensor by tensor. Without torch.

Both are read side by side in windows, each byte verified before it is used, so two models larger than the memory can be
compared. Bytes decide equality; numbers measure the rest. A file whose checksums agree is not read at all. NumPy has no
bfloat16: such an element is the upper half of a float32, so it is widened by two bytes of zeros, exactly
(https://github.com/huggingface/safetensors, section Format).
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tandem.rundir import tensor_header
from tandem.rundir.checkpoint import CHUNK_BYTES, Broken, FileEntry, Manifest
from tandem.rundir.tensor_header import Tensor
from tandem_cli.checkpoints.manifest_diff import Change, FileDifference, TensorDifference
from tandem_cli.checkpoints.verification import ChunkedFile

__all__ = ["NUMPY", "WIDTHS", "Floats", "Tensor", "tensors", "values"]

Floats = npt.NDArray[np.float64]

NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U8": "<u1"}
"""NumPy's names of dtypes; BF16 and BOOL are converted."""
WIDTHS = {name: np.dtype(code).itemsize for name, code in NUMPY.items()} | {"BF16": 2, "BOOL": 1}
"""Bytes of an element, by dtype."""


def tensors(file: ChunkedFile) -> dict[str, Tensor]:
    """Read the header of a file: all tensors by name, in the order of the file.

    Raises:
        Broken: the file is not a safetensors file, or has an unknown dtype.
    """
    path = file.entry.path
    try:
        by_name = tensor_header.tensors(file.read, file.entry.size)
        if strange := {tensor.dtype for tensor in by_name.values()} - WIDTHS.keys():
            raise ValueError(f"a tensor of {min(strange)}")
    except ValueError as error:
        raise Broken(f"{path} is not a safetensors file that this version reads: {error}") from error
    return by_name


def values(data: bytes, dtype: str) -> Floats:
    """Convert little-endian elements to float64, [N]."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "BOOL":
        return np.frombuffer(data, np.uint8).astype(np.float64)
    return np.frombuffer(data, NUMPY[dtype]).astype(np.float64)


WINDOW = CHUNK_BYTES // 8
"""Elements compared at once: as float64 they take as much memory as a chunk."""


def compare(
    first: tuple[Path, Manifest], second: tuple[Path, Manifest], tick: Callable[[int], None] = lambda count: None
) -> list[FileDifference]:
    """Compare the files of two checkpoints, each specified as its folder and manifest.

    Args:
        tick: called with the bytes of the first that were compared.

    Raises:
        FileNotFoundError: a checkpoint is gone.
        Broken: a checkpoint is damaged.
    """
    before = {file.path: file for file in first[1].files}
    after = {file.path: file for file in second[1].files}
    differences = []
    for path in [*before, *(path for path in after if path not in before)]:
        entry, other = before.get(path), after.get(path)
        sizes = (entry.size if entry else None, other.size if other else None)
        if entry is None or other is None:
            differences.append(FileDifference(path, "added" if entry is None else "removed", (), *sizes))
        elif entry.xxh3 == other.xxh3 or not path.endswith(".safetensors"):
            tick(entry.size)
            differences.append(FileDifference(path, "equal" if entry.xxh3 == other.xxh3 else "different", (), *sizes))
        else:
            changes = _tensors(first[0], entry, second[0], other, tick)
            differences.append(FileDifference(path, "different", tuple(changes), *sizes))
    return differences


def _tensors(
    folder: Path, entry: FileEntry, other_folder: Path, other_entry: FileEntry, tick: Callable[[int], None]
) -> list[TensorDifference]:
    with ExitStack() as opened:
        file = opened.enter_context(ChunkedFile(folder, entry))
        other_file = opened.enter_context(ChunkedFile(other_folder, other_entry))
        before, after = tensors(file), tensors(other_file)
        differences = []
        for name in [*before, *(name for name in after if name not in before)]:
            if name not in after:
                differences.append(TensorDifference(name, "removed", before=_kind(before[name])))
            elif name not in before:
                differences.append(TensorDifference(name, "added", after=_kind(after[name])))
            else:
                differences.append(_difference(file, before[name], other_file, after[name]))
            tick(before[name].size if name in before else 0)
        return differences


def _difference(file: ChunkedFile, before: Tensor, other_file: ChunkedFile, after: Tensor) -> TensorDifference:
    kinds = (_kind(before), _kind(after))
    if before.shape != after.shape:
        return TensorDifference(before.name, "reshaped", *kinds)
    measure = _Measure()
    is_equal = before.dtype == after.dtype
    for first in range(0, before.count, WINDOW):
        count = min(WINDOW, before.count - first)
        data, other_data = _window(file, before, first, count), _window(other_file, after, first, count)
        if before.dtype == after.dtype and data == other_data:
            measure.add_equal(values(data, before.dtype))
        else:
            is_equal = False
            measure.add(values(data, before.dtype), values(other_data, after.dtype))
    if is_equal:
        return TensorDifference(before.name, "equal", *kinds, largest=0.0, relative=0.0, not_finite=measure.not_finite)
    change: Change = "different" if before.dtype == after.dtype else "retyped"
    return TensorDifference(before.name, change, *kinds, measure.largest, measure.relative, measure.not_finite)


def _window(file: ChunkedFile, tensor: Tensor, first: int, count: int) -> bytes:
    width = WIDTHS[tensor.dtype]
    return file.read(tensor.start + first * width, count * width)


class _Measure:
    """Sums over windows, for the measures of a tensor's difference."""

    def __init__(self) -> None:
        self.largest, self._difference, self._norm, self._bad = 0.0, 0.0, 0.0, [0, 0]

    @property
    def relative(self) -> float | None:
        """Relative difference, as in TensorDifference."""
        if self._difference == 0:
            return 0.0
        return float(np.sqrt(self._difference / self._norm)) if self._norm > 0 else None

    @property
    def not_finite(self) -> tuple[int, int]:
        """Counts of elements that are not finite, as in TensorDifference."""
        return self._bad[0], self._bad[1]

    def add_equal(self, both: Floats) -> None:
        finite = np.isfinite(both)
        self._norm += float(np.square(both[finite]).sum())
        bad = int(both.size - np.count_nonzero(finite))
        self._bad = [self._bad[0] + bad, self._bad[1] + bad]

    def add(self, before: Floats, after: Floats) -> None:
        finite_before, finite_after = np.isfinite(before), np.isfinite(after)
        self._bad[0] += int(before.size - np.count_nonzero(finite_before))
        self._bad[1] += int(after.size - np.count_nonzero(finite_after))
        both = finite_before & finite_after
        if both.any():
            difference = after[both] - before[both]
            self.largest = max(self.largest, float(np.abs(difference).max()))
            self._difference += float(np.square(difference).sum())
            self._norm += float(np.square(before[both]).sum())


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
