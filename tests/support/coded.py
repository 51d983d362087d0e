"""A folder of code as a user has it: a script, a module beside it, a package to install, and what is ignored."""

import zipfile
from pathlib import Path
from typing import Any

from tests.support import manifests

TRAIN = """\
import os, pathlib, sys, time
import torch, torch.distributed as dist
import tandem
from parts.setting import VALUE
import tiny_thing

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"first-step value={VALUE} answer={tiny_thing.ANSWER} sum={total.item():g} at={time.time():.2f}", flush=True)
for step in range(1, int(sys.argv[1]) + 1):
    tandem.log(step=step, loss=1.0 / step)
    time.sleep(0.2)
"""
EVALUATE = "print('evaluated')\n"


def write(folder: Path, value: int = 1) -> Path:
    """The folder; its script needs everything that --code brings."""
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(TRAIN)
    (folder / "evaluate.py").write_text(EVALUATE)
    (folder / "parts" / "__init__.py").touch()
    (folder / "parts" / "setting.py").write_text(f"VALUE = {value}\n")
    (folder / ".gitignore").write_text("*.log\n/runs/\n")
    (folder / "noise.log").write_text("not packed")
    wheel(folder)
    (folder / "requirements.txt").write_text("--no-index\n./tiny_thing-1.0-py3-none-any.whl\nnumpy>=1\n")
    return folder


def wheel(folder: Path) -> Path:
    """A package that no index has."""
    name = "tiny_thing-1.0"
    path = folder / f"{name}-py3-none-any.whl"
    of_package = {
        "tiny_thing.py": "ANSWER = 42\n",
        f"{name}.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n",
        f"{name}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{name}.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in of_package.items():
            archive.writestr(zipfile.ZipInfo(file), content)
    return path


def manifest(name: str, steps: int, workers: int = 2, evaluators: bool = True) -> dict[str, Any]:
    """A job that runs it."""
    spec: dict[str, Any] = {
        "trainer": {"command": ["python", "train.py"], "args": [str(steps)]},
        "workers": {"replicas": workers, "minReplicas": workers},
    }
    if evaluators:
        spec["evaluators"] = {"command": ["python", "evaluate.py"], "metric": "loss", "watch": "out/*.safetensors"}
    return manifests.manifest(name, **spec)
