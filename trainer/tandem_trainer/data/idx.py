"""The IDX format of the MNIST family: a magic number with type and rank, the sizes, then the bytes."""

import gzip
import math
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tandem_trainer.data.samples import Split
from tandem_trainer.mistake import ConfigurationError

FILES: dict[Split, tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
"""Images and labels of each split, with or without `.gz`."""

UNSIGNED_BYTE = 0x08
MOST_BYTES = 2**32


def find_idx(root: Path, name: str, split: Split) -> tuple[Path, Path] | None:
    """The image and label file of a split, in `root` or where torchvision puts them; None if one is missing."""
    for folder in (root, root / name / "raw"):
        pair = [next((p for p in (folder / stem, folder / f"{stem}.gz") if p.is_file()), None) for stem in FILES[split]]
        if pair[0] and pair[1]:
            return pair[0], pair[1]
    return None


def read_idx(path: Path) -> Tensor:
    """Read an IDX file of unsigned bytes.

    Returns:
        uint8 tensor with the file's shape.

    Raises:
        ConfigurationError: it is not one, or it is cut short.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            zero, kind, rank = struct.unpack(">HBB", file.read(4))
            if zero != 0 or kind != UNSIGNED_BYTE or not 1 <= rank <= 4:
                raise ConfigurationError(f"{path} is not an IDX file of unsigned bytes")
            shape = struct.unpack(f">{rank}I", file.read(4 * rank))
            size = math.prod(shape)
            if size > MOST_BYTES:
                raise ConfigurationError(f"{path} says it has {size} bytes, more than this reads")
            data = file.read(size)
    except (OSError, EOFError, struct.error) as error:
        raise ConfigurationError(f"{path} cannot be read as an IDX file: {error}") from error
    if len(data) != size:
        raise ConfigurationError(f"{path} is cut short: {len(data)} of {size} bytes")
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).reshape(shape).copy())
