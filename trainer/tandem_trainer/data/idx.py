"""Tensors out of IDX files, the format of the MNIST family."""

import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tandem.file_errors import may_pass
from tandem.idx import NotIdx, opened, shape
from tandem_trainer.errors import UnusableInput


def read_idx(path: Path) -> Tensor:
    """Read an IDX file of unsigned bytes.

    Returns:
        uint8 tensor with the file's shape.

    Raises:
        UnusableInput: it is not there, is not one, or is cut short.
        OSError: the disk fails.
    """
    try:
        with opened(path) as file:
            sizes = shape(file, path)
            size = math.prod(sizes)
            data = file.read(size)
    except NotIdx as error:
        raise UnusableInput(str(error)) from error
    except (OSError, EOFError, zlib.error) as error:
        if may_pass(error):
            raise
        raise UnusableInput(f"{path} cannot be read as an IDX file: {error}") from error
    if len(data) != size:
        raise UnusableInput(f"{path} is cut short: {len(data)} of {size} bytes")
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).reshape(sizes).copy())
