"""The log of what a child process prints, with a bound on its size.

The child and all that it starts hold the log open for appending, so it cannot be renamed under them. It is copied to
`NAME.txt.1` and emptied, as logrotate's `copytruncate` does; a line that is printed in that moment may be lost. So a
process has at most two parts of a log, and the newest lines are always among them. On Kubernetes the kubelet rotates
the logs of containers.
"""

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

MAX_PART_BYTES = 64 * 2**20
"""Size at which a log is moved aside. Two parts of a few processes fit beside the smallest checkpoints."""
TAIL_BYTES = 64 * 1024
"""Bytes at the end of a log that are read."""
MAX_FIRST_LINE_BYTES = 512
_PART = re.compile(rb"^--- \S+ \S+ .*, part (\d+) of its output")


def earlier_part(log: Path) -> Path:
    """Return the path of the part before the current one."""
    return log.with_name(f"{log.name}.1")


def first_line(file: BinaryIO) -> bytes:
    """Return the start of a log's first line, which no other part of it has; empty while that line is not whole."""
    content = os.pread(file.fileno(), MAX_FIRST_LINE_BYTES, 0)
    line, end, _ = content.partition(b"\n")
    return line if end or len(content) == MAX_FIRST_LINE_BYTES else b""


def describe_limit(log: Path) -> str:
    """Describe what is kept of a log, when its second part begins."""
    part = MAX_PART_BYTES // 2**20
    return (
        f"{log.stem} has printed more than {part} MiB: {log.name} and {earlier_part(log).name} keep the newest "
        f"{part} to {2 * part} MiB"
    )


def limit_size(log: Path, max_bytes: int = MAX_PART_BYTES) -> int | None:
    """Move what a log contains aside if it is too large.

    Returns:
        The number of the part that begins, from 2; None if the log is small enough. From part 3 on, lines are gone.
    """
    try:
        if log.stat().st_size <= max_bytes:
            return None
        with log.open("r+b") as file:
            match = _PART.match(first_line(file))
            number = int(match[1]) + 1 if match else 2
            _keep(file, earlier_part(log), max_bytes)
            file.truncate(0)
        with log.open("ab", buffering=0) as file:
            file.write(
                f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {log.stem}, part {number} of its output; part {number - 1} "
                f"is in {earlier_part(log).name}{', older ones are deleted' if number > 2 else ''}\n".encode()
            )
    except OSError:
        # A disk that does not answer now is asked again at the next look.
        return None
    return number


def _keep(file: BinaryIO, target: Path, max_bytes: int) -> None:
    """Copy the end of a log. Where the disk has no room for it, the bound counts more than these lines."""
    # The older part first, so that its room is free.
    target.unlink(missing_ok=True)
    partial = target.with_name(f".{target.name}")
    # All of it, so that readers find their place again. Only of a child that prints faster than anybody looks, a part.
    limit = 2 * max_bytes
    file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
    try:
        with partial.open("wb") as copy:
            while copy.tell() < limit and (content := file.read(2**20)):
                copy.write(content)
        partial.replace(target)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def read_tail(log: Path) -> str:
    """Return the end of a log, with that of its earlier part where a new one has just begun; empty without a log."""
    text = b""
    with suppress(OSError), log.open("rb") as file:
        text = _last_bytes(file, TAIL_BYTES)
        if len(text) < TAIL_BYTES and _PART.match(first_line(file)):
            with suppress(OSError), earlier_part(log).open("rb") as earlier:
                # The line about the parts is none that the child has printed.
                text = _last_bytes(earlier, TAIL_BYTES - len(text)) + text.partition(b"\n")[2]
    return text.decode(errors="replace")


def _last_bytes(file: BinaryIO, count: int) -> bytes:
    file.seek(max(0, os.fstat(file.fileno()).st_size - count))
    return file.read()
