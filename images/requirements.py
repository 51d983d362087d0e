"""Writes the requirements of the image layers, from pyproject.toml and constraints.txt: `requirements.py EXTRA FOLDER`.

Writes into FOLDER, one requirement a line: `torch.txt` (the requirements of EXTRA that are torch itself), `rest.txt`
(all others of the distribution and EXTRA), `constraints.txt` (the allowed versions) and `constraints-without-cuda.txt`.
The files are the same for the same content, whatever else of pyproject.toml has changed, so a builder keeps the layers
that depend on them.

Runs while an image is built, on the Python of the base image, so it imports nothing that has to be installed.
"""

import os
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

TORCH = ("torch", "torchvision")
"""Packages that come from the index TORCH_INDEX, and form the large layer."""
CUDA_PACKAGES = re.compile(r"^(cuda-|nvidia-(?!ml-py)|triton)")
"""Packages whose pins fit the torch of the default index; builds for another CUDA, or for none, need others."""


def split(required: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split requirements into torch's and the others."""
    torch = [line for line in required if re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower() in TORCH]
    return torch, [line for line in required if line not in torch]


def main(extra: str, folder: Path) -> None:
    """Write the files."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    torch, other_requirements = split([*project["dependencies"], *project["optional-dependencies"][extra]])
    pins = Path("constraints.txt").read_text().splitlines()
    files = {
        "torch.txt": torch,
        "rest.txt": other_requirements,
        "constraints.txt": pins,
        "constraints-without-cuda.txt": [line for line in pins if not CUDA_PACKAGES.match(line)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        path = folder / name
        path.write_text("".join(f"{line}\n" for line in lines))
        # Some builders compare times as well.
        os.utime(path, (0, 0))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
