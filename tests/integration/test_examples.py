"""Every manifest in examples/ is trained word for word by `tandem run`, to its end; only its length is another."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tandem.job.datasets import FILES
from tests.support import EXAMPLES
from tests.support.local_run import LocalRun, evaluations

pytestmark = pytest.mark.timeout(600)

LONG = pytest.mark.full("examples", "trainer")
VARIANTS = (
    *("fashion-mnist", "queued", "synthetic-resnet", "own-task", "minigpt-fsdp", "minigpt-tensor"),
    *("digits-dp", "minigpt-model", "minigpt-pipeline", "minigpt-composed", "fine-tune", "fine-tune-pipeline"),
)
"""Those that differ in little from what is trained elsewhere: digits, the task of test_task, minigpt,
the strategies of test_strategies, the model of test_language and the stages of test_language_pipeline."""
ELSEWHERE = {
    "digits": "test_run.py",
    "digits-hogwild": "test_hogwild.py",
    "digits-regroup": "test_regroup.py",
    "own-script": "test_run.py",
    "language-model": "test_session.py",
    "logged-script": "test_log.py",
    "huggingface-trainer": "test_adapters.py",
    "minigpt": "test_causal_lm.py",
}
"""Those that other tests train to their end, and where."""


def shorter_queued(folder: Path) -> list[str]:
    """`tandem run` has no queue and says so; without GPUs it trains on processors."""
    return ["trainer.loop.epochs=2"]


def shorter_synthetic_resnet(folder: Path) -> list[str]:
    return ["trainer.loop.maxSteps=2", "checkpoint.everySteps=1"]


def shorter_fashion_mnist(folder: Path) -> list[str]:
    """The data would have to be downloaded: here are its files, with fewer pictures, which are drawn. Without GPUs it
    trains on processors, of which two have enough to do with as few workers as it allows."""
    write_pictures(folder / "data")
    data = [f"trainer.parameters.data.path={folder / 'data'}", "trainer.parameters.data.download=false"]
    return [*data, "trainer.loop.epochs=2", "workers.replicas=2", "evaluators.processesPerReplica=2"]


def shorter_minigpt_model(folder: Path) -> list[str]:
    """On processors it is one rank, whose threads wait for each other on a busy machine."""
    return ["trainer.loop.maxSteps=100", "checkpoint.everySteps=50"]


def shorter_fine_tune(folder: Path) -> list[str]:
    """The model and the documents are those that its script writes."""
    subprocess.run([sys.executable, EXAMPLES / "small_qwen2.py", folder / "model"], check=True, timeout=120)
    parameters = [f"pretrained={folder / 'model'}", f"data.path={folder / 'model' / 'documents.jsonl'}"]
    shorter = ["trainer.loop.maxSteps=20", "workers.replicas=1", "checkpoint.everySteps=20"]
    return [*(f"trainer.parameters.{one}" for one in parameters), *shorter]


SHORTER: dict[str, Callable[[Path], list[str]]] = {
    "fine-tune": shorter_fine_tune,
    "fine-tune-pipeline": shorter_fine_tune,
    "minigpt-model": shorter_minigpt_model,
    "queued": shorter_queued,
    "synthetic-resnet": shorter_synthetic_resnet,
    "fashion-mnist": shorter_fashion_mnist,
}
"""What is changed for a test, by example. One that is not here is trained as it stands."""
TARGETS = {
    "digits-dp": 0.95,
    "minigpt-fsdp": 2.4,
    "minigpt-tensor": 2.4,
    "minigpt-model": 2.8,
    "minigpt-pipeline": 2.4,
    "minigpt-composed": 2.4,
}
"""The score that its best checkpoint reaches, of those whose strategy is learned with; at first 0.1 and 8 bits a byte.
`digits-hogwild` has its target in test_hogwild.py."""
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))


def write_pictures(folder: Path, train: int = 256, test: int = 40) -> None:
    """The four files of FashionMNIST; each class has a bright stripe of its own."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    for split, (image_file, label_file) in FILES.items():
        labels = (np.arange(train if split == "train" else test) % 10).astype(np.uint8)
        images = draw.integers(0, 60, (len(labels), 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 4] += 180
        for name, array in ((image_file, images), (label_file, labels)):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / name).write_bytes(head + array.tobytes())


def test_other_tests_train_the_other_examples() -> None:
    assert {*SHORTER, *ELSEWHERE} <= {*NAMES}
    for name, file in ELSEWHERE.items():
        assert f"{name} is complete" in Path(__file__).with_name(file).read_text(), name


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=LONG if name in VARIANTS else ()) for name in NAMES if name not in ELSEWHERE]
)
def test_it_is_trained_to_its_end_and_its_best_checkpoint_is_named(tmp_path: Path, name: str) -> None:
    changes = SHORTER[name](tmp_path) if name in SHORTER else []
    words = [word for change in changes for word in ("--set", change)]
    with LocalRun(tmp_path, *words, manifest=EXAMPLES / f"{name}.yaml") as run:
        assert run.ends(500) == 0, run.output
        steps = run.final_step()
        assert steps > 0
        assert f"{name} is complete: {steps} steps in " in run.output
        assert run.leavings() == {}
        job = run.run_dir.read_job()
        if job.spec.evaluation.processes:
            scores = {one["step"]: one["metrics"][job.spec.evaluation.metric] for one in evaluations(run.path)}
            assert steps in scores, "its last checkpoint is evaluated"
            best = json.loads(run.run_dir.best_file.read_text())
            choose = max if job.spec.evaluation.direction == "Maximize" else min
            assert best["value"] == scores[best["step"]] == choose(scores.values())
            assert run.run_dir.checkpoint(best["name"]).is_dir()
            if name in TARGETS:
                assert choose(best["value"], TARGETS[name]) == best["value"]
