"""Whether a checkpoint in a format of its own is complete, as far as the format shows it.

A safetensors file is as long as its header says, a zip file of torch.save has its directory at the end, a folder of
torch.distributed.checkpoint has `.metadata` and one of the Hugging Face Trainer its state, which are written last.
"""

import json
import zipfile
from contextlib import suppress
from pathlib import Path

from tandem.rundir import tensor_header

ZIP = b"PK\x03\x04"
"""First bytes of a zip file, such as one of torch.save."""


def is_marked_complete(path: Path) -> bool:
    """Whether the format of a checkpoint shows that it is complete.

    Raises:
        OSError: it cannot be read.
    """
    if path.is_dir():
        if (path / ".metadata").is_file():
            return True
        with suppress(FileNotFoundError, ValueError):
            return isinstance(json.loads((path / "trainer_state.json").read_bytes()), dict)
        return False
    if path.suffix == ".safetensors":
        return _is_complete_safetensors(path)
    return zipfile.is_zipfile(path)


def is_truncated(path: Path) -> bool:
    """Whether a file, or one directly in a folder, has a known format and ends too early.

    Raises:
        OSError: it cannot be read.
    """
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if not file.is_file():
            continue
        if file.suffix == ".safetensors":
            if not _is_complete_safetensors(file):
                return True
        elif _begins_as_zip(file) and not zipfile.is_zipfile(file):
            return True
    return False


def _begins_as_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(ZIP)) == ZIP


def _is_complete_safetensors(path: Path) -> bool:
    size = path.stat().st_size
    with path.open("rb") as file:

        def read(start: int, length: int) -> bytes:
            file.seek(start)
            return file.read(length)

        try:
            tensors = tensor_header.tensors(read, size)
        except ValueError:
            return False
    return max((tensor.start + tensor.size for tensor in tensors.values()), default=size) == size
