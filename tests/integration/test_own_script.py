"""The script of examples/own-script.yaml knows nothing of Tandem: plain torchrun runs it as it stands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, SCRIPTS


def torchrun(folder: Path, processes: int, epochs: int) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [str(SCRIPTS / "ends_at_once.py"), "examples/own_script.py"]
    command += ["--epochs", str(epochs), "--folder", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.full("examples")
def test_it_trains_and_resumes_under_plain_torchrun(tmp_path: Path) -> None:
    assert float(torchrun(tmp_path, processes=2, epochs=4).split("test accuracy ")[1]) > 0.8
    assert "resumed after epoch 3" in torchrun(tmp_path, processes=1, epochs=5)


def test_it_does_not_import_tandem() -> None:
    source = (ROOT / "examples/own_script.py").read_text()
    assert "import tandem" not in source
    assert "from tandem" not in source
