"""examples/minigpt.yaml is trained by `tandem run`, and its checkpoints write texts. Only its length is another, and
once its tokenizer and its optimizer."""

import math
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


@pytest.mark.parametrize("others", [(), ("trainer.parameters.tokenizer=bpe", "trainer.loop.optimizer.name=muon")])
def test_it_is_trained_and_evaluated_and_any_checkpoint_writes(tmp_path: Path, others: tuple[str, ...]) -> None:
    changes = ("trainer.loop.maxSteps=30", "checkpoint.everySteps=15", "evaluators.policy=Every", *others)
    words = [word for change in changes for word in ("--set", change)]
    with LocalRun(tmp_path, *words, manifest=EXAMPLES / "minigpt.yaml") as run:
        assert run.ends(280) == 0, run.output
        assert "minigpt is complete: 30 steps in " in run.output
    metrics = {one["step"]: one["metrics"] for one in evaluations(run.path)}
    assert 8.5 > metrics[15]["bitsPerByte"] > metrics[30]["bitsPerByte"] > 2.0
    for scores in metrics.values():
        assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]), rel=1e-5)

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
