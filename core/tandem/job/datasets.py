"""Data sets on a disk: the folder of downloads, and the IDX format of the MNIST family."""

import gzip
import math
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Literal


def cache_folder(variables: Mapping[str, str] = os.environ) -> Path:
    """Tandem's folder in the user's cache; it need not exist."""
    return Path(variables.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tandem"


def data_folder(variables: Mapping[str, str] = os.environ) -> Path:
    """The folder of downloaded data sets."""
    return cache_folder(variables) / "data"


def private_folder(path: Path) -> Path | None:
    """A folder that only this user can access, created if it is missing. None if that is impossible.

    The permissions of an existing folder are restricted; a link, or another user's folder, is not used.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        facts = path.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
            return None
        if stat.S_IMODE(facts.st_mode) != 0o700:
            path.chmod(0o700)
    except OSError:
        return None
    return path


Split = Literal["train", "test"]
Bytes = gzip.GzipFile | IO[bytes]
"""A file opened for reading."""
FILES: dict[Split, tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
"""Files of images and labels of each split, with or without `.gz`."""
FOLDERS = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}
"""torchvision's name of each data set, and of the folder of its files."""
UNSIGNED_BYTE = 0x08
MAX_BYTES = 2**32


class NotIdx(Exception):  # noqa: N818 - a state of the file
    """A file that cannot be read as IDX; the message names it and the reason."""


def raw_folder(root: Path, data: str) -> Path:
    """The folder in which torchvision stores the files of a data set."""
    return root / FOLDERS[data] / "raw"


def find_idx_files(root: Path, data: str, split: Split) -> tuple[Path, Path] | None:
    """The image and label files of a split, in `root` or in torchvision's folder; None if one is missing."""
    for folder in (root, raw_folder(root, data)):
        pair = [next((p for p in (folder / stem, folder / f"{stem}.gz") if p.is_file()), None) for stem in FILES[split]]
        if pair[0] and pair[1]:
            return pair[0], pair[1]
    return None


def open_maybe_gzip(path: Path) -> Bytes:
    """Open a file that may be compressed with gzip. Raises OSError."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def read_idx_shape(file: Bytes, path: Path) -> tuple[int, ...]:
    """Read the header, up to the first data byte: the size of each dimension.

    Raises:
        NotIdx: it is no IDX file of unsigned bytes, or too large.
        OSError, EOFError: the file cannot be read, or is no gzip file.
    """
    try:
        zero, kind, rank = struct.unpack(">HBB", file.read(4))
        if zero != 0 or kind != UNSIGNED_BYTE or not 1 <= rank <= 4:
            raise NotIdx(f"{path} is not an IDX file of unsigned bytes")
        sizes: tuple[int, ...] = struct.unpack(f">{rank}I", file.read(4 * rank))
    except struct.error:
        raise NotIdx(f"{path} cannot be read as an IDX file: it ends before its header does") from None
    if math.prod(sizes) > MAX_BYTES:
        raise NotIdx(f"{path} has {math.prod(sizes)} bytes by its header, more than the maximum of {MAX_BYTES}")
    return sizes
