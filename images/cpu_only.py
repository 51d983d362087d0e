"""Removes the parts of an installed CUDA build of torch that a CPU never loads. Run by the Python that it is installed
in: `cpu_only.py`.

For builders that cannot reach wheels for CPUs: most of a CUDA build is NVIDIA's libraries and compilers for GPUs. Torch
does not load without some of these libraries, so the removable ones are not listed here but determined: torch is loaded
with everything that training on CPUs uses, and libraries that the process has not mapped are removed. (Rejected: empty
libraries in place of the rest, which would save another 2 GB, and break with the next torch in ways that are hard to
understand.)
"""

import importlib
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))
COMPILERS = ("triton",)
"""Packages that are loaded if they are installed, and not needed otherwise."""
LOADED = ("torch.distributed.run", "torch._dynamo", "torchvision")
"""Modules that, with torch itself, import everything that training and evaluation on CPUs load."""
LIBRARIES = ("nvidia",)
MIN_BYTES = 1 << 20
"""Smaller files are kept: metadata, licences, headers."""


def mapped() -> set[Path]:
    """Files that this process has mapped into memory."""
    fields = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return {Path(parts[5]).resolve() for parts in fields if len(parts) == 6 and parts[5].startswith("/")}


def unused(used: set[Path]) -> Iterator[Path]:
    """Large files of the libraries that are not among `used`."""
    for library in LIBRARIES:
        for path in (SITE / library).rglob("*"):
            if path.is_file() and path.stat().st_size >= MIN_BYTES and path.resolve() not in used:
                yield path


def main() -> None:
    """Remove the unused files, and print their total size."""
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
