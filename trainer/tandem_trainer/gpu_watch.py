"""The GPUs of ranks that say nothing of theirs, as the agent sees them: of scripts that start cold, of programs, and of
scripts that compute on a GPU without torch.

**The rule.** What a rank says of its GPU counts (tandem_trainer.pulse). As long as a script says nothing, the agent
stands in for it, once the rank's process or one below that has CUDA's driver open. So nothing is counted twice, and a
GPU that no rank uses, or that another job uses, is not reported. Built-in tasks and sessions always say it themselves.
Local rank i has the i-th GPU that this process may see, and the last one where it may see fewer: as a rank itself
counts.

**A thread of its own** asks NVML, once a second while there is such a rank. NVML may take seconds to begin, and does
not answer when a driver hangs; heartbeats must not wait for it, and send what is known. The thread begins a second
after it is first needed, because most ranks have said something by then; where there is no NVML it ends, and does not
come again. It looks for the driver through /proc for a thousandth of its time at most.

CUDA itself is never used here: this process starts others.

Rejected: NVML's own list of the processes on a GPU (in a container it is empty, or has the numbers of the host), and
every GPU of the node (it may be somebody else's, and belongs to no rank).
"""

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import psutil

from tandem_trainer.gpu import DRIVER, VISIBLE, Device, load, open_driver

SAMPLE_SECONDS = 1.0
"""Between two samples, and before the first one."""
SEARCH_SHARE = 0.001
"""The most of the time that is spent on looking for the driver among the open files of one rank."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """How a rank's GPU is used."""

    busy: float
    """Utilization, 0 to 1."""
    memory_bytes: int
    """Memory in use."""
    at: float
    """When, seconds of the monotonic clock."""


class GpuWatch:
    """Watches the GPUs of some of this agent's ranks. `look` is called by one thread at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pids: dict[int, int] = {}
        self._uses: dict[int, tuple[int, GpuUse]] = {}
        visible = os.environ.get(VISIBLE)
        self.absent = visible is not None and visible.strip() in ("", "-1")
        """Whether it is known that there is nothing to look at."""
        self._thread: threading.Thread | None = None

    def look(self, pids: Mapping[int, int]) -> dict[int, GpuUse]:
        """What is known of the GPUs of these processes, by local rank; from now on they are watched, and no others.

        Args:
            pids: the processes of the ranks that say nothing of their GPU.
        """
        if self.absent:
            return {}
        with self._changed:
            self._pids = dict(pids)
            if pids and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tandem-gpus", daemon=True)
                self._thread.start()
            self._changed.notify()
            return {rank: use for rank, (pid, use) in self._uses.items() if pids.get(rank) == pid}

    def _run(self) -> None:
        nvml: ModuleType | None = None
        users: dict[int, _User] = {}
        while True:
            time.sleep(SAMPLE_SECONDS)
            with self._changed:
                self._changed.wait_for(lambda: self._pids)
                pids = self._pids
            if nvml is None and (nvml := load()) is None:
                self.absent = True
                return
            uses = {}
            for local_rank, pid in pids.items():
                if (user := users.get(local_rank)) is None or user.pid != pid:
                    user = users[local_rank] = _User(pid, local_rank)
                if (use := user.use(nvml)) is not None:
                    uses[local_rank] = (pid, use)
            with self._changed:
                self._uses = uses


class _User:
    """The process of a rank, which may use a GPU, itself or through one below it."""

    def __init__(self, pid: int, local_rank: int) -> None:
        self.pid, self._local_rank = pid, local_rank
        self._driver: Path | None = None
        self._device: Device | None = None
        self._search_at = 0.0

    def use(self, nvml: ModuleType) -> GpuUse | None:
        """How its GPU is used; None while it uses none, or NVML does not say."""
        if self._driver is None or not _driver_among([self._driver]):
            self._device, self._driver = None, self._search()
            if self._driver is None:
                return None
        if self._device is None:
            self._device = Device(nvml, _visible(self._driver.parts[2]), self._local_rank)
        found = self._device.sample()
        return None if found is None else GpuUse(*found, time.monotonic())

    def _search(self) -> Path | None:
        began = time.monotonic()
        if began < self._search_at:
            return None
        files = (file for pid in _family(self.pid) for file in _open_files(pid))
        found = _driver_among(files)
        ended = time.monotonic()
        self._search_at = ended + (ended - began) / SEARCH_SHARE
        return found


def _family(pid: int) -> Iterator[int]:
    """A process and those below it. These are asked for last: psutil looks at all processes of the machine for them."""
    yield pid
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            yield child.pid


def _open_files(pid: int) -> list[Path]:
    with suppress(OSError):
        return list(Path(f"/proc/{pid}/fd").iterdir())
    return []


def _driver_among(files: Iterable[Path]) -> Path | None:
    """The driver among these open files; NVML knows that of NVIDIA alone."""
    return open_driver(files, {DRIVER})


def _visible(pid: str) -> str | None:
    """What CUDA_VISIBLE_DEVICES was when a process began; a script around it may have chosen."""
    with suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = variable.partition(b"=")
            if name == VISIBLE.encode():
                return value.decode(errors="replace")
        return None
    return os.environ.get(VISIBLE)
