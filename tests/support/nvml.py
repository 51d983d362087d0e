"""NVML as tests play it: that of a node with four GPUs."""

from types import SimpleNamespace

BUSY = {"GPU-a": 91, "GPU-b": 92, "GPU-c": 93, "GPU-d": 94}
"""In the order in which NVML counts all GPUs of the machine."""


class NVMLError(Exception):
    """As pynvml has it."""


class Nvml:
    """What of pynvml is used."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self.broken = False
        self.begun = 0
        self.asked: list[str] = []
        """Of which GPUs, in turn."""

    def nvmlInit(self) -> None:
        self.begun += 1
        if self.broken:
            raise NVMLError

    def nvmlDeviceGetCount(self) -> int:
        return len(BUSY)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index not in range(len(BUSY)):
            raise NVMLError
        return list(BUSY)[index]

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        if name not in BUSY:
            raise NVMLError
        return name

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        self.asked.append(handle)
        if handle in self.lost:
            raise NVMLError
        return SimpleNamespace(gpu=BUSY[handle])

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=BUSY[handle] * 2**20)
