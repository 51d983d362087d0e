"""Tensors out of IDX files, the format of the MNIST family."""

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tandem.idx import NotIdx, opened, shape
from tandem_trainer.mistake import ConfigurationError


def read_idx(path: Path) -> Tensor:
    """Read an IDX file of unsigned bytes.

    Returns:
        uint8 tensor with the file's shape.

    Raises:
        ConfigurationError: it is not one, or it is cut short.
    """
    try:
        with opened(path) as file:
            sizes = shape(file, path)
            size = math.prod(sizes)
            data = file.read(size)
    except NotIdx as error:
        raise ConfigurationError(str(error)) from error
    except (OSError, EOFError) as error:
        raise ConfigurationError(f"{path} cannot be read as an IDX file: {error}") from error
    if len(data) != size:
        raise ConfigurationError(f"{path} is cut short: {len(data)} of {size} bytes")
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).reshape(sizes).copy())
