"""The log of what a child process prints, with a bound on its size.

The child and all that it starts hold the log open for appending, so it cannot be renamed under them. It is copied to
`NAME.txt.1` and emptied, as logrotate's `copytruncate` does; a line that is printed in that moment may be lost. So a
process has at most two parts of a log, and the newest lines are always among them. On Kubernetes the kubelet rotates
the logs of containers.
"""

import os
import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAX_PART_BYTES = 64 * 2**20
"""Size at which a log is moved aside. Two parts of a few processes fit beside the smallest checkpoints."""
TAIL_BYTES = 64 * 1024
"""Bytes at the end of a log that are read."""
HEADER_BYTES = 64 * 1024
"""Bytes at the start of a part in which its header is searched: the child may print before it is written."""
_HEADER = re.compile(
    rb"--- \d{4}-\d\d-\d\d \d\d:\d\d:\d\d [^\n]*, part (\d+) of its output;"
    rb"(?:[^\n]* without (\d+) of its bytes)?[^\n]*\n"
)
_HOLE = re.compile(rb"\0{512,}")
"""A hole of a log: a child that has opened it without O_APPEND goes on at its old place after the log is emptied."""


@dataclass(frozen=True)
class PartHeader:
    """Header of a part of a log; the first part has none."""

    number: int = 1
    omitted: int = 0
    """Bytes of the part before that are not in its copy."""


def earlier_part(log: Path) -> Path:
    """Return the path of the part before the current one."""
    return log.with_name(f"{log.name}.1")


def partial_copy(log: Path) -> Path:
    """Return the path of the copy of a part until the log is emptied."""
    return log.with_name(f".{earlier_part(log).name}")


def read_part(file: BinaryIO) -> PartHeader:
    """Read the header of a part; the first part has none."""
    match = _HEADER.search(os.pread(file.fileno(), HEADER_BYTES, 0))
    return PartHeader(int(match[1]), int(match[2] or 0)) if match else PartHeader()


def describe_limit(log: Path) -> str:
    """Describe what is kept of a log, when its second part begins."""
    part = MAX_PART_BYTES // 2**20
    return (
        f"{log.stem} has printed more than {part} MiB: {log.name} and {earlier_part(log).name} keep the newest "
        f"{part} to {2 * part} MiB"
    )


class LogLimiter:
    """Limits the size of a log. A thread copies the content that is moved away, up to four times the limit: on a slow
    disk that takes seconds, and must not block the caller.

    Args:
        max_bytes: size at which the log is moved aside.
    """

    def __init__(self, log: Path, max_bytes: int = MAX_PART_BYTES) -> None:
        self._log, self._max_bytes = log, max_bytes
        self._thread: threading.Thread | None = None
        self.parts = 0
        """Number of parts that were started, as far as `poll` and `wait` know."""

    def poll(self) -> None:
        """Start to move the log aside if it is too large. Never waits for a copy."""
        if self._thread is None and _is_too_large(self._log, self._max_bytes):
            self._thread = threading.Thread(target=self._limit, name=f"limit of {self._log.name}")
            self._thread.start()
        elif self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until a copy in progress is complete, before the log is opened, or searched for its last lines."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _limit(self) -> None:
        if limit_size(self._log, self._max_bytes) is not None:
            self.parts += 1


def _is_too_large(log: Path, max_bytes: int) -> bool:
    try:
        status = log.stat()
    except OSError:
        return False
    # On the disk: holes take no room. A few file systems do not count blocks.
    return min(status.st_size, status.st_blocks * 512 or status.st_size) > max_bytes


def limit_size(log: Path, max_bytes: int = MAX_PART_BYTES) -> int | None:
    """Move what a log contains aside if it is too large.

    Returns:
        The number of the part that begins, from 2; None if the log is small enough. From part 3 on, lines are gone.
    """
    if not _is_too_large(log, max_bytes):
        return None
    try:
        # Open for the header already: as little as possible is printed before it.
        with log.open("r+b") as file, log.open("ab", buffering=0) as end:
            number = read_part(file).number + 1
            earlier_part(log).unlink(missing_ok=True)
            omitted = _copy_end(file, partial_copy(log), max_bytes)
            file.truncate(0)
            end.write(_header(log, number, omitted))
        # Only now: readers take a new copy for the sign that the log has been emptied.
        if omitted is not None:
            _rename(partial_copy(log), earlier_part(log))
    except OSError:
        # A disk that does not answer now is asked again at the next look.
        return None
    return number


def _header(log: Path, number: int, omitted: int | None) -> bytes:
    before = f"part {number - 1} is in {earlier_part(log).name}"
    if omitted is None:
        before = f"part {number - 1} could not be copied"
    elif omitted:
        before += f" without {omitted} of its bytes"
    older = ", older ones are deleted" if number > 2 else ""
    return (
        f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {log.stem}, part {number} of its output; {before}{older}\n"
    ).encode()


def _rename(partial: Path, target: Path) -> None:
    try:
        partial.replace(target)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _copy_end(file: BinaryIO, target: Path, max_bytes: int) -> int | None:
    """Copy the end of a log without its holes.

    Returns:
        The number of bytes that are not in the copy. None if there is no copy: where the disk has no room for it, the
        bound counts more than these lines.
    """
    # All of it, so that readers find their place again. Only of a child that prints faster than anybody looks, a part.
    limit = 2 * max_bytes
    try:
        with target.open("wb") as copy:
            # What is printed meanwhile too, but not for ever: the second time only the newest lines.
            for count in (limit, limit // 16):
                copy.truncate(copy.seek(0))
                omitted = file.seek(max(0, os.fstat(file.fileno()).st_size - count))
                while copy.tell() < 2 * limit and (content := file.read(2**20)):
                    omitted += len(content) - copy.write(_HOLE.sub(b"", content))
                if copy.tell() < 2 * limit:
                    break
    except OSError:
        with suppress(OSError):
            target.unlink(missing_ok=True)
        return None
    return omitted


def read_tail(log: Path, earlier_start: int = 0) -> str:
    """Return the end of a log, with that of its earlier part where a new one has just begun; empty without a log.

    Args:
        earlier_start: place in the earlier part before which nothing is returned, as it was before it was copied.
    """
    text = b""
    with suppress(OSError), log.open("rb") as file:
        text = _last_bytes(file, TAIL_BYTES)
        if len(text) < TAIL_BYTES and (match := _HEADER.search(text)):
            # The header is none of the lines that the child has printed.
            text = text[: match.start()] + text[match.end() :]
            start = max(0, earlier_start - read_part(file).omitted)
            with suppress(OSError), earlier_part(log).open("rb") as earlier:
                text = _last_bytes(earlier, TAIL_BYTES - len(text), start) + text
    return text.decode(errors="replace")


def _last_bytes(file: BinaryIO, count: int, start: int = 0) -> bytes:
    file.seek(max(start, os.fstat(file.fileno()).st_size - count))
    return file.read()
