"""The GPU of one rank, as NVML sees it: how busy it is, and how much of its memory is in use."""

import os
import sys
from types import ModuleType
from typing import Any


class Gpu:
    """The GPU of this rank: found at the first sample after torch has begun to use CUDA."""

    def __init__(self) -> None:
        self._nvml: ModuleType | None = None
        self._handle: Any = None
        self._absent = False

    def sample(self) -> tuple[float | None, int | None]:
        """Utilization from 0 to 1 and bytes in use; None for what is not known."""
        if self._absent or not self._found():
            return None, None
        assert self._nvml is not None
        try:
            busy = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
            used = int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        except self._nvml.NVMLError:
            # A partition of a GPU has no utilization of its own, a lost GPU has nothing: neither comes back.
            self._absent = True
            return None, None
        return busy, used

    def _found(self) -> bool:
        if self._handle is not None:
            return True
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return False
        try:
            import pynvml
        except ImportError:
            self._absent = True
            return False
        try:
            pynvml.nvmlInit()
            # Not current_device(): that is a property of the calling thread, and this is not the training thread.
            index = min(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count() - 1)
            self._handle = _device(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"), index)
        except (pynvml.NVMLError, ValueError, IndexError):
            self._absent = True
            return False
        self._nvml = pynvml
        return True


def _device(nvml: ModuleType, visible: str | None, index: int) -> Any:
    """NVML counts all GPUs of the machine, CUDA those that are visible; a visible one has a number or a UUID."""
    if not visible:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    name = visible.split(",")[index].strip()
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)
