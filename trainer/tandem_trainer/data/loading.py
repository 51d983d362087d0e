"""Loads a data set from an installed package, a folder, or the network."""

import errno
import math
import stat
import tempfile
import time
import zlib
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Literal
from urllib.error import URLError

import numpy as np
import torch
from torch import Tensor

from tandem.job.datasets import (
    FILES,
    FOLDERS,
    NotIdx,
    data_folder,
    find_idx_files,
    open_maybe_gzip,
    raw_folder,
    read_idx_shape,
)
from tandem.job.datasets import Split as Stored
from tandem.job.tasks import CLASSES, SYNTHETIC, SYNTHETIC_SIZE, Data
from tandem.rundir import lease
from tandem.rundir.durable import TEMPORARY, is_transient
from tandem_trainer.failure import ConfigurationError, UnusableInput


def read_idx(path: Path) -> Tensor:
    """Read an IDX file of unsigned bytes.

    Returns:
        uint8 tensor with the file's shape.

    Raises:
        UnusableInput: the file does not exist, has another format, or is truncated.
        OSError: the disk fails.
    """
    try:
        with open_maybe_gzip(path) as file:
            sizes = read_idx_shape(file, path)
            size = math.prod(sizes)
            data = file.read(size)
    except NotIdx as error:
        raise UnusableInput(str(error)) from error
    except (OSError, EOFError, zlib.error) as error:
        if is_transient(error):
            raise
        raise UnusableInput(f"{path} cannot be read as an IDX file: {error}") from error
    if len(data) != size:
        raise UnusableInput(f"{path} is truncated: {len(data)} of {size} bytes")
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).reshape(sizes).copy())


Split = Literal["train", "validation", "test"]
"""Split of a data set; `validation` is the part of the training data that the job holds out."""


@dataclass(frozen=True)
class Samples:
    """One split of a data set."""

    images: Tensor
    """[N, channels, size, size], float32, normalised."""
    labels: Tensor
    """[N], int64."""
    classes: int
    """Number of different labels."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def channels(self) -> int:
        """Image channels."""
        return self.images.shape[1]

    @property
    def image_size(self) -> int:
        """Height and width, pixels."""
        return self.images.shape[2]


DOWNLOAD_SECONDS = 600.0
"""Time after which other processes take a downloading one for dead, in seconds."""

DIGITS_FILE = "sklearn/datasets/data/digits.csv.gz"
MEAN_AND_DEVIATION = {"digits": (0.3053, 0.3759), "mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}
"""Mean and standard deviation of the training images scaled to 0…1."""


def load(config: Data, split: Split) -> Samples:
    """Load one split of a data set.

    Raises:
        UnusableInput: the data does not exist and cannot be downloaded; the message says how to provide it.
        ConfigurationError: nothing is left to train or to validate with.
        OSError: the disk fails.
    """
    if split == "test":
        return _full_split(config, split)
    samples = _full_split(config, "train")
    held_out = _held_out(len(samples), config.held_out(len(samples)))
    if config.validation and (held_out.all() or not held_out.any()):
        purpose = "train" if held_out.all() else "validate"
        raise ConfigurationError(
            f"data.validation: {config.validation:g} of {len(samples)} samples leaves nothing to {purpose} with"
        )
    which = held_out if split == "validation" else ~held_out
    return samples if which.all() else Samples(samples.images[which], samples.labels[which], samples.classes)


def _held_out(samples: int, count: int) -> Tensor:
    """Return which training samples belong to the validation data: the same ones for every job on the data set."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    return order < count


def _full_split(config: Data, split: Stored) -> Samples:
    if config.name == "digits":
        return _digits(split)
    if config.name == "synthetic":
        return _synthetic(split, config.samples or SYNTHETIC, config.image_size or SYNTHETIC_SIZE)
    return _mnist(config, split)


def _digits(split: Stored) -> Samples:
    """Load 1,797 real handwritten digits of 8×8 pixels (UCI, inside scikit-learn), a fifth of each class for testing.

    The file is read without importing scikit-learn, which takes 1.8 s that every recovery would pay for.
    """
    table = np.loadtxt(str(distribution("scikit-learn").locate_file(DIGITS_FILE)), delimiter=",", dtype=np.float32)
    images = torch.from_numpy(table[:, :-1]).reshape(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(table[:, -1]).to(torch.int64)
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    for digit in range(10):
        of_class = torch.nonzero(labels == digit).flatten()
        is_test[of_class[torch.randperm(len(of_class), generator=generator)[: len(of_class) // 5]]] = True
    chosen = is_test if split == "test" else ~is_test
    mean, deviation = MEAN_AND_DEVIATION["digits"]
    return Samples((images[chosen] - mean) / deviation, labels[chosen], classes=CLASSES)


def _synthetic(split: Stored, samples: int, size: int) -> Samples:
    """Generate ten smooth random patterns under noise: learnable, never trivial, the same on every machine."""
    generator = torch.Generator().manual_seed(20_240_601)
    coarse = torch.randn(10, 1, 4, 4, generator=generator)
    patterns = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=True)
    count = samples if split == "train" else max(1, samples // 5)
    generator.manual_seed(1 if split == "train" else 2)
    labels = torch.randint(10, (count,), generator=generator)
    images = torch.randn(count, 1, size, size, generator=generator).add_(patterns[labels])
    return Samples(images, labels, classes=CLASSES)


def _mnist(config: Data, split: Stored) -> Samples:
    root = Path(config.path).expanduser() if config.path else data_folder()
    if config.path and not config.download and not _is_folder(root):
        raise UnusableInput(f"data.path: {config.path} is not a folder. {_how_to_provide(config, root)}")
    pair = _read(root, config.name, split, config.download)
    if pair is None and config.download:
        _download(config, root)
        pair = _read(root, config.name, split, is_downloadable=False)
    if pair is None:
        raise UnusableInput(f"{config.name} is not in {root}. {_how_to_provide(config, root)}")
    images, labels = pair
    mean, deviation = MEAN_AND_DEVIATION[config.name]
    scaled = images.to(torch.float32).div_(255).sub_(mean).div_(deviation)
    return Samples(scaled.unsqueeze(1), labels.to(torch.int64), classes=CLASSES)


def _read(root: Path, name: str, split: Stored, is_downloadable: bool) -> tuple[Tensor, Tensor] | None:
    """Read images and labels; None if they do not exist, or are incomplete and of a download that can be repeated.

    Raises:
        UnusableInput: they are not images and labels, or may not be read.
        OSError: the disk fails.
    """
    try:
        pair = find_idx_files(root, name, split)
    except OSError as error:
        if is_transient(error):
            raise
        raise UnusableInput(f"{root} cannot be read: {error.strerror}") from error
    if pair is None:
        return None
    try:
        images, labels = read_idx(pair[0]), read_idx(pair[1])
    except UnusableInput:
        # Files outside of torchvision's folder are the user's own, and are not replaced.
        if is_downloadable and pair[0].parent == raw_folder(root, name):
            return None
        raise
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise UnusableInput(f"{pair[0]} and {pair[1]} are not images and labels of the same samples")
    return images, labels


def _is_folder(path: Path) -> bool:
    """Return whether a path is a folder. Raises OSError: the disk fails."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        if is_transient(error):
            raise
        return False


def _download(config: Data, root: Path) -> None:
    """Download with torchvision; one process does, the others wait for it.

    The download goes into a temporary folder, from which each file is moved as a whole: torchvision writes under the
    final names, and takes the remains of a killed download for the data.
    """
    import torchvision.datasets

    try:
        root.mkdir(parents=True, exist_ok=True)
        name = FOLDERS[config.name]
        lock = root / f".{name}.lease"
        deadline = time.monotonic() + DOWNLOAD_SECONDS
        while (lock_lease := lease.acquire(lock, seconds=DOWNLOAD_SECONDS)) is None:
            if time.monotonic() > deadline:
                raise UnusableInput(f"another process has been downloading {config.name} to {root} for too long")
            time.sleep(0.5)
        with lock_lease, tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=root) as temporary:
            if all(_read(root, config.name, split, is_downloadable=True) is not None for split in FILES):
                return
            getattr(torchvision.datasets, name)(temporary, download=True)
            raw = raw_folder(root, config.name)
            raw.mkdir(parents=True, exist_ok=True)
            for path in sorted(raw_folder(Path(temporary), config.name).iterdir()):
                path.replace(raw / path.name)
    except (OSError, RuntimeError) as error:
        # No network, or a read-only folder: the user has to fix that.
        is_users = isinstance(error, URLError) or getattr(error, "errno", None) == errno.EROFS
        if is_transient(error) and not is_users:
            raise
        raise UnusableInput(
            f"{config.name} could not be downloaded to {root} ({error}). {_how_to_provide(config, root)}"
        ) from error


def _how_to_provide(config: Data, root: Path) -> str:
    names = ", ".join(f"{stem}[.gz]" for pair in FILES.values() for stem in pair)
    return (
        f"Without a network, put its four IDX files ({names}) into a folder and set data.path to it, "
        f"or use a data set that needs no download: digits or synthetic."
    )
