"""A GPU as NVML sees it: how busy it is, and how much of its memory is in use.

A rank measures its own with `Gpu`. For a rank that does not report its GPU, the agent does
(tandem_trainer.agent.gpu_watch). NVML needs no context on the GPU, and takes no memory of it.
"""

import os
import sys
from collections.abc import Container, Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.processes.launch import VISIBLE_GPUS

DRIVER = "/dev/nvidia-uvm"
"""Device file that a process has open once it computes on a GPU of NVIDIA, and not while it only queries NVML."""
DRIVERS = {DRIVER, "/dev/kfd"}
"""Device files of the drivers of GPUs of any vendor."""


def load() -> ModuleType | None:
    """Load and initialize NVML; None where there is none."""
    try:
        pynvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def open_driver(files: Iterable[Path], drivers: Container[str] = DRIVERS) -> Path | None:
    """Return the first of these open files of processes that is the driver of a GPU; None if none is.

    Args:
        files: `/proc/PID/fd/NUMBER`; those that are closed by now are passed over.
        drivers: paths of the drivers that count.
    """
    for file in files:
        with suppress(OSError):
            if str(file.readlink()) in drivers:
                return file
    return None


class Device:
    """One GPU.

    Args:
        nvml: the loaded library.
        visible: value of CUDA_VISIBLE_DEVICES.
        index: index among the visible GPUs; the last one where there are fewer.
    """

    def __init__(self, nvml: ModuleType, visible: str | None, index: int) -> None:
        self._nvml = nvml
        self._handle: Any = None
        # A name that is not ASCII is no GPU's.
        with suppress(nvml.NVMLError, ValueError):
            self._handle = _handle(nvml, visible, index)

    def sample(self) -> tuple[float, int] | None:
        """Measure utilization, 0 to 1, and bytes in use; None from the first time on that one of them is not known."""
        if self._handle is None:
            return None
        try:
            busy = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
            return busy, int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        except self._nvml.NVMLError:
            # A MIG partition has no utilization of its own, and a lost GPU has nothing: neither comes back.
            self._handle = None
            return None


class Gpu:
    """The GPU of this rank; looked up at the first sample after torch has initialized CUDA."""

    def __init__(self) -> None:
        self._device: Device | None = None
        self._absent = False

    def sample(self) -> tuple[float | None, int | None]:
        """Measure utilization, 0 to 1, and bytes in use; None for values that are not known."""
        if self._device is None and not self._absent:
            self._find()
        sample = None if self._device is None else self._device.sample()
        return (None, None) if sample is None else sample

    def _find(self) -> None:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return
        if (nvml := load()) is None:
            self._absent = True
            return
        # Not current_device(): that is a property of the calling thread, and this is not the training thread.
        index = min(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count() - 1)
        self._device = Device(nvml, os.environ.get(VISIBLE_GPUS), index)


def _handle(nvml: ModuleType, visible: str | None, index: int) -> Any:
    """Return the NVML handle of a visible GPU. NVML counts all GPUs of the machine, CUDA only the visible ones, which
    are listed by number or UUID."""
    if not visible:
        return nvml.nvmlDeviceGetHandleByIndex(min(index, nvml.nvmlDeviceGetCount() - 1))
    names = visible.split(",")
    name = names[min(index, len(names) - 1)].strip()
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)
