"""Reads an object of a bucket into a file, in a process of its own.

    python -P -m tandem.rundir.fetch s3://bucket/prefix NAME PATH [BYTES]

The client of object stores has threads that a forked process lacks: a loader worker would wait for them forever. So
ranks and their loader workers read buckets by this program (tandem_trainer.data.shard_files).

The file appears as a whole. The program ends with 0; with REFUSED and one sentence if somebody has to mend something;
with UNAVAILABLE and one sentence if it may pass.
"""

import os
import sys
from pathlib import Path

from tandem.rundir.store import Location, Store, StoreAccessError, StoreUnavailableError

REFUSED, UNAVAILABLE = 3, 4
"""Exit codes."""
PIECE = 16 * 2**20
"""Bytes of one request."""
PATIENCE = 60.0
"""Seconds within which a request is repeated: ranks wait."""


def fetch(store: Store, name: str, path: Path, size: int | None) -> None:
    """Read an object into a file, which appears as a whole.

    Args:
        size: bytes of the object; None: not known, at most MAX_OBJECT_BYTES of the store.

    Raises:
        FileNotFoundError: there is no such object.
        StoreAccessError, StoreUnavailableError: it could not be read.
        ValueError: it has another size.
        OSError: the disk fails.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            if size is None:
                content = store.read(name)
                if content is None:
                    raise FileNotFoundError(f"there is no {store.location}/{name}")
                file.write(content.data)
            else:
                for start in range(0, size, PIECE):
                    remaining = size - start
                    # One byte more than expected shows an object that is too long.
                    length = PIECE if remaining > PIECE else remaining + 1
                    piece = store.read_range(name, start, length)
                    if piece is None:
                        raise FileNotFoundError(f"there is no {store.location}/{name}")
                    if len(piece) != min(PIECE, remaining):
                        raise ValueError(f"{store.location}/{name} has not the {size:,} bytes that its index says")
                    file.write(piece)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def main() -> None:
    """Read the object that the arguments name."""
    url, name, path, *size = sys.argv[1:]
    try:
        fetch(Store(Location.parse(url), patience=PATIENCE), name, Path(path), int(size[0]) if size else None)
    except StoreUnavailableError as error:
        _end(error, UNAVAILABLE)
    except (StoreAccessError, FileNotFoundError, ValueError) as error:
        _end(error, REFUSED)
    except OSError as error:
        _end(error, UNAVAILABLE)


def _end(error: Exception, code: int) -> None:
    print(error, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
