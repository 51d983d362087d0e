"""GPU use of ranks that do not report it, measured by the agent: scripts that start cold, programs, and scripts that
compute on a GPU without torch.

**The rule.** A rank's own report counts (tandem_trainer.pulse). As long as a script reports nothing, the agent measures
for it, once the rank's process or a descendant has CUDA's driver open. So nothing is counted twice, and a GPU that no
rank uses, or that another job uses, is not reported. Built-in tasks and sessions always report. Local rank i has the
i-th GPU that is visible to this process, or the last one if fewer are visible: as a rank itself counts.

**A thread of its own** queries NVML, once a second while there is such a rank. NVML may take seconds to initialize, and
does not answer when a driver hangs; heartbeats must not wait for it, and send the newest sample. The thread starts a
second after it is first needed, because most ranks report by then; where there is no NVML it ends for good. It looks
for the driver through /proc for a thousandth of its time at most.

CUDA itself is never used here: this process starts others.

Rejected: NVML's own list of the processes on a GPU (in a container it is empty, or has the numbers of the host), and
every GPU of the node (it may belong to another job, and to no rank of this one).
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

from tandem.processes.launch import VISIBLE_GPUS
from tandem_trainer.gpu import DRIVER, Device, load, open_driver

SAMPLE_SECONDS = 1.0
"""Interval between samples, and before the first one, in seconds."""
MAX_SEARCH_SHARE = 0.001
"""Maximum share of the time that is spent on looking for the driver among the open files of one rank."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Use of a rank's GPU."""

    busy: float
    """Utilization, 0 to 1."""
    memory_bytes: int
    """Memory in use, in bytes."""
    sampled_at: float
    """Time of the sample, in seconds of the monotonic clock."""


class GpuWatch:
    """Watches the GPUs of some of this agent's ranks. One thread at a time calls `poll`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pids: dict[int, int] = {}
        self._uses: dict[int, tuple[int, GpuUse]] = {}
        visible = os.environ.get(VISIBLE_GPUS)
        self.absent = visible is not None and visible.strip() in ("", "-1")
        """Whether it is known that there is no GPU, or no NVML."""
        self._thread: threading.Thread | None = None

    def poll(self, pids: Mapping[int, int]) -> dict[int, GpuUse]:
        """Return the newest samples of the GPUs of these processes, by local rank; from now on these are watched, and
        no others.

        Args:
            pids: processes of the ranks that do not report their GPU, by local rank.
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
        processes: dict[int, _GpuProcess] = {}
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
                if (process := processes.get(local_rank)) is None or process.pid != pid:
                    process = processes[local_rank] = _GpuProcess(pid, local_rank)
                if (use := process.use(nvml)) is not None:
                    uses[local_rank] = (pid, use)
            with self._changed:
                self._uses = uses


class _GpuProcess:
    """Process of a rank, which may use a GPU, itself or through a descendant."""

    def __init__(self, pid: int, local_rank: int) -> None:
        self.pid, self._local_rank = pid, local_rank
        self._driver: Path | None = None
        self._device: Device | None = None
        self._search_at = 0.0

    def use(self, nvml: ModuleType) -> GpuUse | None:
        """Measure its GPU; None while it uses none, or NVML does not answer."""
        if self._driver is None or not _driver_among([self._driver]):
            self._device, self._driver = None, self._search()
            if self._driver is None:
                return None
        if self._device is None:
            self._device = Device(nvml, _visible(self._driver.parts[2]), self._local_rank)
        sample = self._device.sample()
        return None if sample is None else GpuUse(*sample, time.monotonic())

    def _search(self) -> Path | None:
        started_at = time.monotonic()
        if started_at < self._search_at:
            return None
        files = (file for pid in _family(self.pid) for file in _open_files(pid))
        driver = _driver_among(files)
        ended = time.monotonic()
        self._search_at = ended + (ended - started_at) / MAX_SEARCH_SHARE
        return driver


def _family(pid: int) -> Iterator[int]:
    """Iterate over a process and its descendants. Descendants come last: psutil looks at all processes of the machine
    for them."""
    yield pid
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            yield child.pid


def _open_files(pid: int) -> list[Path]:
    with suppress(OSError):
        return list(Path(f"/proc/{pid}/fd").iterdir())
    return []


def _driver_among(files: Iterable[Path]) -> Path | None:
    """Return the driver among these open files; NVML knows NVIDIA's only."""
    return open_driver(files, {DRIVER})


def _visible(pid: str) -> str | None:
    """Return CUDA_VISIBLE_DEVICES as it was at the start of a process, whose script may have chosen another value than
    the agent's."""
    with suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = variable.partition(b"=")
            if name == VISIBLE_GPUS.encode():
                return value.decode(errors="replace")
        return None
    return os.environ.get(VISIBLE_GPUS)
