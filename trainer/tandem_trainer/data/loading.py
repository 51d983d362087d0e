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

from tandem.datasets import FILES, FOLDERS, NotIdx, data_folder, find, opened, raw_folder, shape
from tandem.datasets import Split as Stored
from tandem.rundir import lease
from tandem.rundir.durable import TEMPORARY, may_pass
from tandem.tasks import CLASSES, SYNTHETIC, SYNTHETIC_SIZE, Data
from tandem_trainer.failure import ConfigurationError, UnusableInput


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


Split = Literal["train", "validation", "test"]
"""`validation`: what the job holds out of the training data."""


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
"""How long one process may download before others think it dead."""

DIGITS_FILE = "sklearn/datasets/data/digits.csv.gz"
MEAN_AND_DEVIATION = {"digits": (0.3053, 0.3759), "mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}
"""Of the training images scaled to 0…1."""


def load(config: Data, split: Split) -> Samples:
    """Load one split of a data set.

    Raises:
        UnusableInput: the data is not there and cannot be had; says how to provide it.
        ConfigurationError: nothing is left to train or to validate with.
        OSError: the disk fails.
    """
    if split == "test":
        return _whole(config, split)
    samples = _whole(config, "train")
    held_out = _held_out(len(samples), config.held_out(len(samples)))
    if config.validation and (held_out.all() or not held_out.any()):
        purpose = "train" if held_out.all() else "validate"
        raise ConfigurationError(
            f"data.validation: {config.validation:g} of {len(samples)} samples leaves nothing to {purpose} with"
        )
    which = held_out if split == "validation" else ~held_out
    return samples if which.all() else Samples(samples.images[which], samples.labels[which], samples.classes)


def _held_out(samples: int, count: int) -> Tensor:
    """Whether each training sample belongs to the validation data: the same ones for every job on the data set."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    return order < count


def _whole(config: Data, split: Stored) -> Samples:
    if config.name == "digits":
        return _digits(split)
    if config.name == "synthetic":
        return _synthetic(split, config.samples or SYNTHETIC, config.image_size or SYNTHETIC_SIZE)
    return _mnist(config, split)


def _digits(split: Stored) -> Samples:
    """1,797 real handwritten digits of 8×8 pixels (UCI, inside scikit-learn), a fifth of each class to test with.

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
    """Ten smooth random patterns under noise: learnable, never trivial, the same on every machine."""
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
    found = _read(root, config.name, split, config.download)
    if found is None and config.download:
        _download(config, root)
        found = _read(root, config.name, split, can_be_had_again=False)
    if found is None:
        raise UnusableInput(f"{config.name} is not in {root}. {_how_to_provide(config, root)}")
    images, labels = found
    mean, deviation = MEAN_AND_DEVIATION[config.name]
    scaled = images.to(torch.float32).div_(255).sub_(mean).div_(deviation)
    return Samples(scaled.unsqueeze(1), labels.to(torch.int64), classes=CLASSES)


def _read(root: Path, name: str, split: Stored, can_be_had_again: bool) -> tuple[Tensor, Tensor] | None:
    """Images and labels; None if they are not there, or not whole and of a download that can be made again.

    Raises:
        UnusableInput: they are no images and labels, or may not be read.
        OSError: the disk fails.
    """
    try:
        pair = find(root, name, split)
    except OSError as error:
        if may_pass(error):
            raise
        raise UnusableInput(f"{root} cannot be read: {error.strerror}") from error
    if pair is None:
        return None
    try:
        images, labels = read_idx(pair[0]), read_idx(pair[1])
    except UnusableInput:
        # What is not where torchvision puts it is the user's own.
        if can_be_had_again and pair[0].parent == raw_folder(root, name):
            return None
        raise
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise UnusableInput(f"{pair[0]} and {pair[1]} are not images and labels of the same samples")
    return images, labels


def _is_folder(path: Path) -> bool:
    """Whether it is a folder. Raises OSError: the disk fails."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        if may_pass(error):
            raise
        return False


def _download(config: Data, root: Path) -> None:
    """Let torchvision download; one process does, the others wait for it.

    Into a folder of its own, of which each file is moved whole: torchvision writes into the names that others look for,
    and takes what a killed download has left for the data.
    """
    import torchvision.datasets

    try:
        root.mkdir(parents=True, exist_ok=True)
        name = FOLDERS[config.name]
        lock = root / f".{name}.lease"
        deadline = time.monotonic() + DOWNLOAD_SECONDS
        while (held := lease.acquire(lock, seconds=DOWNLOAD_SECONDS)) is None:
            if time.monotonic() > deadline:
                raise UnusableInput(f"another process has been downloading {config.name} to {root} for too long")
            time.sleep(0.5)
        with held, tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=root) as aside:
            if all(_read(root, config.name, split, can_be_had_again=True) is not None for split in FILES):
                return
            getattr(torchvision.datasets, name)(aside, download=True)
            raw = raw_folder(root, config.name)
            raw.mkdir(parents=True, exist_ok=True)
            for path in sorted(raw_folder(Path(aside), config.name).iterdir()):
                path.replace(raw / path.name)
    except (OSError, RuntimeError) as error:
        # No network, or nothing may be written there: the user's to put right.
        is_users = isinstance(error, URLError) or getattr(error, "errno", None) == errno.EROFS
        if may_pass(error) and not is_users:
            raise
        raise UnusableInput(
            f"{config.name} could not be downloaded to {root} ({error}). {_how_to_provide(config, root)}"
        ) from error


def _how_to_provide(config: Data, root: Path) -> str:
    names = ", ".join(f"{stem}[.gz]" for pair in FILES.values() for stem in pair)
    return (
        f"Without a network, put its four IDX files ({names}) into a folder and set data.path to it, "
        f"or take a data set that needs no download: digits or synthetic."
    )
