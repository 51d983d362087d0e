"""The machine of a rank, as far as the bits of a step may depend on it. `tandem prove` shows what differs where steps
are taken again."""

import platform
from contextlib import suppress
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")
MODEL = "model name"


def describe_machine(device: torch.device) -> dict[str, str]:
    """Describe torch, the processor with the instructions that torch uses, the device, and the threads of a rank."""
    processor = f"{_processor_model() or platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "torch": torch.__version__,
        "processor": processor,
        "device": name,
        "threads": str(torch.get_num_threads()),
    }


def _processor_model() -> str:
    """Model of the processor; empty where the kernel does not tell."""
    with suppress(OSError), CPU_INFO.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() == MODEL:
                return " ".join(value.split())
    return ""
