"""Data sets in shards, written by the libraries whose formats they are.

litdata needs an older python-dateutil than the operator's kubernetes, and MosaicML's streaming an older numpy and
transformers than ours. So each has a folder of its own, made once by the hash of its pins, which comes before the
environment's packages in the processes that use it.
"""

import fcntl
import hashlib
import importlib
import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.buckets import CACHE


def packages(name: str) -> Path:
    """The folder with a library: `litdata` or `streaming`."""
    pins = Path(__file__).parent / f"{name}.txt"
    ready = CACHE / f"{name}-{hashlib.sha256(pins.read_bytes()).hexdigest()[:16]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (ready / "complete").exists():
            shutil.rmtree(ready, ignore_errors=True)
            uv = str(Path(sys.executable).parent / "uv")
            command = [uv, "pip", "install", "-q", "--no-deps", "--python", sys.executable, "--target", str(ready)]
            subprocess.run([*command, "-r", str(pins)], check=True)
            (ready / "complete").touch()
    return ready


@contextmanager
def library(name: str) -> Iterator[None]:
    """Make a library importable in this process."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(packages(name)))
        with warnings.catch_warnings():
            # Importing them warns of what is theirs.
            warnings.simplefilter("ignore")
            importlib.import_module(name)
            yield


def write_mds(
    folder: Path, samples: int, per_shard: int = 10, length: int = 17, compression: str | None = None
) -> None:
    """Write rows of tokens, of which the first is the sample's number modulo 256, with their numbers."""
    from streaming import MDSWriter

    columns = {"tokens": f"ndarray:int32:{length}", "number": "int"}
    size = per_shard * (4 * length + 8 + 4) + 8 + 500
    options: dict[str, Any] = {"compression": compression, "hashes": ["xxh64"], "size_limit": size}
    with MDSWriter(out=str(folder), columns=columns, **options) as writer:
        for number in range(samples):
            writer.write({"tokens": row(number, length), "number": number})


def write_litdata(folder: Path, samples: int, per_shard: int = 10, length: int = 17) -> None:
    """Write dictionaries with tokens and the sample's number."""
    from litdata.streaming.cache import Cache

    folder.mkdir(parents=True)
    cache = Cache(str(folder), chunk_size=per_shard)
    for number in range(samples):
        cache[number] = {"tokens": row(number, length), "number": number}
    cache.done()
    cache.merge()


def write_tokens(folder: Path, samples: int, per_shard: int = 10, length: int = 17) -> None:
    """Write one long text of tokens as litdata does, in chunks."""
    import torch
    from litdata.streaming.cache import Cache
    from litdata.streaming.item_loader import TokensLoader

    folder.mkdir(parents=True)
    cache = Cache(str(folder), chunk_size=per_shard * length, item_loader=TokensLoader(length))
    for number in range(samples):
        cache[number] = torch.from_numpy(row(number, length))
    cache.done()
    cache.merge()


def row(number: int, length: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """Tokens of a sample, which follow each other."""
    return ((number + np.arange(length)) % 256).astype(np.int32)


def index_of(folder: Path) -> dict[str, Any]:
    """The index of a data set."""
    return dict(json.loads((folder / "index.json").read_text()))
