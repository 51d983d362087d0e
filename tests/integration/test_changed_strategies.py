"""A run goes on under other strategies and on other numbers of ranks: `tandem run` with a manifest that was changed,
and with a rank killed under each."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.local_run import LocalRun
from tests.support.paused_lm import PARTS, UNTIL
from tests.support.ranks import losses, records, sample_ids
from tests.support.waiting import until

pytestmark = [pytest.mark.full("core", "cli", "coordinator", "trainer"), pytest.mark.timeout(900)]

ENDS_SECONDS = 600.0
"""For a run of a hundred steps, each second of which is saved, beside other tests."""
MAX_PARTS = 30
"""Of batches, that a life of a rank learns before it waits: 5 to 15 steps, each of which has its parts."""
STEPS = 100
LOOP = {"maxSteps": STEPS, "epochs": 100, "globalBatchSize": 9, "microBatchSize": 2, "gradientClipNorm": 1.0}
# Plain descent: Adam would let the last digit of a sum grow over the steps.
DESCENT = {"optimizer": {"name": "sgd", "learningRate": 0.1}}
MODEL = {"width": 32, "layers": 3, "heads": 4, "length": 16, "dropout": 0.1}

Part = tuple[dict[str, Any], int, int]
"""Options of the loop, workers, and the processes of each."""
DDP: dict[str, Any] = {"strategy": "ddp"}
FSDP: dict[str, Any] = {"strategy": "fsdp"}
HYBRID = FSDP | {"fsdp": {"shardWithin": "Worker"}}
TENSOR = FSDP | {"tensorParallel": 2}
PIPELINE = {"strategy": "pipeline", "pipeline": {"schedule": "1f1b", "stages": 2}}
ZERO_BUBBLE = {"strategy": "pipeline", "pipeline": {"schedule": "zeroBubble", "stages": 2}}
SPLIT_STAGES = PIPELINE | {"fsdp": {}}
DP, IN_LAYERS = {"strategy": "dp"}, {"strategy": "model"}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """What is learned."""
    path = tmp_path / "text"
    path.write_text("the quick brown fox jumps over the lazy dog, and " * 40)
    return path


def manifest(folder: Path, text: Path, part: Part) -> Path:
    """The job, under one strategy."""
    loop, replicas, processes = part
    spec = {
        "trainer": {
            "task": "tests.support.paused_lm:PausedLM",
            "parameters": MODEL | {"text": str(text)},
            "loop": LOOP | DESCENT | loop,
        },
        "workers": {"replicas": replicas, "processesPerReplica": processes},
        "evaluators": {"replicas": 0},
        "checkpoint": {"everySteps": 2, "keepLast": 100},
    }
    job = {"apiVersion": "tandem.dev/v1alpha1", "kind": "DistributedTrainingJob", "metadata": {"name": "changed"}}
    path = folder / "changed.yaml"
    path.write_text(yaml.safe_dump(job | {"spec": spec}))
    return path


def saves_once_more(run: LocalRun) -> None:
    """Wait for a checkpoint that is newer than all there are."""
    known = len(run.run_dir.checkpoint_names())

    def there() -> bool:
        assert run.process.poll() is None, run.output
        return len(run.run_dir.checkpoint_names()) > known

    until(there, "a checkpoint", otherwise=lambda: run.output)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([(FSDP, 4, 1), (DDP, 3, 1), (TENSOR, 1, 2)], id="fsdp-ddp-tensor"),
        pytest.param([(PIPELINE, 2, 2), (FSDP, 3, 1), (ZERO_BUBBLE, 1, 2)], id="pipeline-fsdp-pipeline"),
        pytest.param([(TENSOR, 2, 2), (DDP, 3, 1), (HYBRID, 1, 2)], id="tensor-ddp-hybrid"),
        # Pipelines that go over workers.
        pytest.param([(SPLIT_STAGES, 4, 1), (DDP, 3, 1), (PIPELINE, 2, 1)], id="split-stages-ddp-pipeline"),
        pytest.param([(HYBRID, 2, 2), (IN_LAYERS, 1, 1), (DP, 1, 1), (FSDP, 2, 1)], id="hybrid-model-dp-fsdp"),
    ],
)
def test_it_learns_what_one_rank_alone_learns(
    tmp_path: Path, text: Path, runs: list[LocalRun], parts: list[Part]
) -> None:
    go_on = tmp_path / "go-on"
    go_on.touch()
    variables = {PARTS: str(MAX_PARTS), UNTIL: str(go_on)}
    (tmp_path / "alone").mkdir()
    alone = LocalRun(tmp_path / "alone", manifest=manifest(tmp_path, text, (DDP, 1, 1)), variables=variables)
    runs.append(alone)
    assert alone.ends(ENDS_SECONDS) == 0, alone.output

    for part in parts:
        go_on.unlink()
        run = LocalRun(tmp_path, manifest=manifest(tmp_path, text, part), variables=variables)
        runs.append(run)
        saves_once_more(run)
        generations = len(run.run_dir.generation_records())
        until(lambda: run.rank_of("worker-0"), "a rank").kill()  # noqa: B023
        until(lambda: len(run.run_dir.generation_records()) > generations, "another generation")  # noqa: B023
        saves_once_more(run)
        if part is not parts[-1]:
            run.interrupt()
            until(lambda: "saving" in run.output, "Ctrl-C is heard", otherwise=lambda: run.output)  # noqa: B023
        go_on.touch()
        assert run.ends(ENDS_SECONDS) == (0 if part is parts[-1] else 130), run.output

    starts = [(record["worldSize"], record["step"]) for record in records(run.run_dir, "start")]
    sizes = [replicas * processes for _, replicas, processes in parts for _ in ("before the kill", "after it")]
    assert [size for size, _ in starts] == sizes
    assert starts[0][1] == 0
    assert all(step > 0 for _, step in starts[1:])
    assert sample_ids(run.run_dir) == sample_ids(alone.run_dir)
    assert losses(run.run_dir) == pytest.approx(losses(alone.run_dir), abs=1e-4)
    assert losses(run.run_dir)[STEPS] < 0.8 * losses(run.run_dir)[1]
