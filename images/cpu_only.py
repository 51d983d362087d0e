"""Removes what a CPU never loads from an installed torch for CUDA. Run by the Python that has it: `cpu_only.py`.

For builders that can reach no wheels for CPUs: most of a torch for CUDA is libraries of NVIDIA and compilers for GPUs.
Torch does not load without some of these libraries, so which can go is not written down here but seen: torch is loaded
with all that training on CPUs uses, and what the process has not mapped is removed. (Rejected: empty libraries in
place of the rest, which would save another 2 GB, and break with the next torch in ways that nobody understands.)
"""

import importlib
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))
COMPILERS = ("triton",)
"""Loaded where it is installed, and not missed where it is not."""
LOADED = ("torch.distributed.run", "torch._dynamo", "torchvision")
"""With torch itself, what brings in all that training and evaluating on CPUs load."""
LIBRARIES = ("nvidia",)
MIN_BYTES = 1 << 20
"""Smaller files are left alone: metadata, licences, headers."""


def mapped() -> set[Path]:
    """Files whose code or data this process has in memory."""
    fields = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return {Path(parts[5]).resolve() for parts in fields if len(parts) == 6 and parts[5].startswith("/")}


def unused(used: set[Path]) -> Iterator[Path]:
    """Large files of the libraries that are not among `used`."""
    for library in LIBRARIES:
        for path in (SITE / library).rglob("*"):
            if path.is_file() and path.stat().st_size >= MIN_BYTES and path.resolve() not in used:
                yield path


def main() -> None:
    """Remove it, and say how much that was."""
    for name in COMPILERS:
        shutil.rmtree(SITE / name, ignore_errors=True)
    for name in LOADED:
        importlib.import_module(name)
    removed = 0
    for path in list(unused(mapped())):
        removed += path.stat().st_size
        path.unlink()
    print(f"removed {removed / 1e9:.1f} GB that a CPU never loads")


if __name__ == "__main__":
    main()
