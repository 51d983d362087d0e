"""examples/minigpt.yaml is trained by `tandem run`, and its checkpoints write texts. Only its length is another."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import EXAMPLES
from tests.support.local_run import LocalRun, evaluations

pytestmark = [pytest.mark.timeout(300), pytest.mark.full("trainer", "evaluator", "examples")]


def written(run: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem_trainer.causal_lm", str(run), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_it_is_trained_and_evaluated_and_any_checkpoint_writes(tmp_path: Path) -> None:
    changes = ("--set", "trainer.loop.maxSteps=30", "--set", "checkpoint.everySteps=15")
    with LocalRun(tmp_path, *changes, "--set", "evaluators.policy=Every", manifest=EXAMPLES / "minigpt.yaml") as run:
        assert run.ends(280) == 0, run.output
        assert "minigpt is complete: 30 steps in " in run.output
    bits = {one["step"]: one["metrics"]["bitsPerByte"] for one in evaluations(run.path)}
    assert 8.5 > bits[15] > bits[30] > 2.0

    newest, again = (written(run.path, "--prompt", "The ", "--count", "24") for _ in range(2))
    assert newest.returncode == 0, newest.stderr
    assert newest.stdout == again.stdout
    assert newest.stdout.startswith("The ")
    assert written(run.path, "--prompt", "The ", "--count", "24", "--step", "15").stdout != newest.stdout
    assert "no such checkpoint; there are step-000000015, step-000000030" in written(run.path, "--step", "7").stderr

    weights = run.run_dir.checkpoint("step-000000030") / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    damaged = written(run.path)
    assert damaged.returncode == 2
    assert "step-000000030/weights.safetensors does not match its checksum" in damaged.stderr
