"""Every strategy learns what one rank alone learns, and goes on from checkpoints of any other, on any number of
ranks."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tandem.rundir.checkpoint import WEIGHTS
from tandem.rundir.layout import RunDir
from tandem_trainer.checkpoint.file_names import OBJECT_STATES
from tandem_trainer.checkpoint.reader import read_contents
from tandem_trainer.checkpoint.state import join
from tests.support import manifests
from tests.support.paused_lm import PARTS, UNTIL
from tests.support.ranks import Ranks, losses, make_rundir, records, run, sample_ids
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(300)

STEPS = 30
MAX_PARTS = 80
"""Of batches, that a run which is killed learns before: 10 to 27 steps, of which each strategy makes its own parts."""
MODEL = {"width": 32, "layers": 3, "heads": 4, "length": 16, "dropout": 0.1}
LOOP = {"maxSteps": STEPS, "epochs": 50, "globalBatchSize": 9, "gradientClipNorm": 1.0, "microBatchSize": 2}
# Plain descent: Adam would let the last digit of a sum grow over the steps.
DESCENT = {"optimizer": {"name": "sgd", "learningRate": 0.1}}
FSDP = {"strategy": "fsdp"}


def job(path: Path, loop: dict[str, Any], processes: int = 1, tied: bool = False, **spec: Any) -> RunDir:
    """A run directory with a job that trains a language model on a page of text."""
    text = path.parent / "text"
    text.write_text("the quick brown fox jumps over the lazy dog, and " * 40)
    trainer = {
        "task": "tests.support.paused_lm:PausedLM",
        "parameters": MODEL | {"text": str(text), "tied": tied},
        "loop": LOOP | DESCENT | loop,
    }
    workers = {"processesPerReplica": processes}
    return manifests.run_directory(path, manifests.job("test", trainer=trainer, workers=workers, **spec))


@pytest.fixture(scope="module", autouse=True)
def unpaused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file that lets all go on; it is there but for runs that are killed."""
    path = tmp_path_factory.mktemp("pause") / "go-on"
    path.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PARTS, str(MAX_PARTS))
        patch.setenv(UNTIL, str(path))
        yield path


def learned_alone(path: Path, tied: bool) -> RunDir:
    """A run of one rank."""
    rundir = job(path, {}, tied=tied)
    run(rundir)
    assert losses(rundir)[STEPS] < 0.8 * losses(rundir)[1]
    return rundir


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """What one rank alone learns."""
    return learned_alone(tmp_path_factory.mktemp("alone") / "run", tied=False)


@pytest.fixture(scope="module")
def alone_tied(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """What one rank alone learns with one weight for the first and the last layer."""
    return learned_alone(tmp_path_factory.mktemp("alone-tied") / "run", tied=True)


FULL = pytest.mark.full("trainer")
SIZED = {"wrapParameters": 3000, "reshardAfterForward": False, "prefetch": 2, "cpuOffload": True}
HYBRID = FSDP | {"fsdp": {"shardWithin": "Worker"}}
REPEATED = {"activationCheckpointing": True}
TENSOR = FSDP | {"tensorParallel": 2}


def pipeline(schedule: str, **options: Any) -> dict[str, Any]:
    """A loop with a pipeline, of two ranks by default."""
    return {"strategy": "pipeline", "pipeline": {"schedule": schedule, "stages": 2, **options}}


INTERLEAVED = pipeline("interleaved1f1b", chunks=2)
SPLIT_STAGES = pipeline("1f1b", chunks=2) | {"fsdp": {}}
COPIED_STAGES = pipeline("1f1b", chunks=2) | {"fsdp": {"shardWithin": "Worker", "reshardAfterForward": False}}
TENSOR_STAGES = pipeline("1f1b", chunks=2) | {"tensorParallel": 2}
REPEATED_1F1B = pipeline("1f1b", chunks=3) | REPEATED


@pytest.mark.parametrize(
    ("loop", "ranks", "processes", "mesh"),
    [
        pytest.param({}, 2, 1, {"data": 2}, id="ddp", marks=FULL),
        pytest.param(
            {"ddp": {"bucketMegabytes": 0.01, "staticGraph": True}}, 2, 1, {"data": 2}, id="ddp-static", marks=FULL
        ),
        pytest.param(FSDP, 2, 1, {"shard": 2}, id="fsdp", marks=FULL),
        pytest.param(FSDP | {"fsdp": SIZED}, 3, 1, {"shard": 3}, id="fsdp-by-size"),
        pytest.param(
            HYBRID | {"activationCheckpointing": True},
            4,
            2,
            {"replicate": 2, "shard": 2},
            id="hybrid",
            marks=FULL,
        ),
        pytest.param(TENSOR, 2, 2, {"tensor": 2}, id="tensor", marks=FULL),
        pytest.param(TENSOR, 4, 4, {"shard": 2, "tensor": 2}, id="tensor-and-fsdp", marks=FULL),
        pytest.param(pipeline("gpipe"), 2, 2, {"pipe": 2}, id="gpipe", marks=FULL),
        pytest.param(REPEATED_1F1B, 4, 2, {"data": 2, "pipe": 2}, id="1f1b-and-data"),
        pytest.param(INTERLEAVED, 2, 2, {"pipe": 2}, id="interleaved", marks=FULL),
        pytest.param(INTERLEAVED | REPEATED, 4, 2, {"data": 2, "pipe": 2}, id="interleaved-and-data", marks=FULL),
        pytest.param(pipeline("zeroBubble"), 2, 2, {"pipe": 2}, id="zero-bubble", marks=FULL),
        pytest.param(pipeline("1f1b", splitAt=["blocks.2"]), 2, 2, {"pipe": 2}, id="split-at", marks=FULL),
        pytest.param(SPLIT_STAGES | REPEATED, 6, 2, {"shard": 3, "pipe": 2}, id="1f1b-and-fsdp", marks=FULL),
        pytest.param(
            INTERLEAVED | {"fsdp": {"prefetch": 2}},
            4,
            2,
            {"shard": 2, "pipe": 2},
            id="interleaved-and-fsdp",
            marks=FULL,
        ),
        pytest.param(COPIED_STAGES, 8, 4, {"replicate": 2, "shard": 2, "pipe": 2}, id="1f1b-and-hybrid", marks=FULL),
        pytest.param(TENSOR_STAGES, 4, 4, {"pipe": 2, "tensor": 2}, id="1f1b-and-tensor", marks=FULL),
        pytest.param(
            TENSOR_STAGES | {"fsdp": {}}, 8, 4, {"shard": 2, "pipe": 2, "tensor": 2}, id="all-three", marks=FULL
        ),
        pytest.param(TENSOR_STAGES, 8, 4, {"data": 2, "pipe": 2, "tensor": 2}, id="tensor-and-data", marks=FULL),
    ],
)
def test_it_learns_what_one_rank_alone_learns(
    tmp_path: Path, alone: RunDir, loop: dict[str, Any], ranks: int, processes: int, mesh: dict[str, int]
) -> None:
    rundir = job(tmp_path / "run", loop, processes)
    output = run(rundir, ranks)
    ignored = output.count("setting=fsdp.cpuOffload ignored: there is no GPU")
    assert ignored == (1 if loop.get("fsdp", {}).get("cpuOffload") else 0)
    assert sample_ids(rundir) == sample_ids(alone)
    assert losses(rundir) == pytest.approx(losses(alone), abs=1e-4)
    assert rundir.committed()[-1].mesh == mesh


@pytest.mark.parametrize(
    ("loop", "ranks", "stages"),
    [
        pytest.param(pipeline("1f1b"), 2, 2, id="1f1b", marks=FULL),
        pytest.param(pipeline("1f1b", chunks=3), 4, 2, id="1f1b-and-data", marks=FULL),
        pytest.param(pipeline("1f1b", stages=3), 3, 3, id="a-stage-between", marks=FULL),
        pytest.param(pipeline("zeroBubble"), 2, 2, id="zero-bubble", marks=FULL),
        pytest.param(SPLIT_STAGES, 4, 2, id="1f1b-and-fsdp", marks=FULL),
        pytest.param(TENSOR_STAGES | {"fsdp": {}}, 8, 4, id="all-three", marks=FULL),
    ],
)
def test_stages_that_share_a_weight_learn_what_one_rank_alone_learns(
    tmp_path: Path, alone_tied: RunDir, loop: dict[str, Any], ranks: int, stages: int
) -> None:
    """The embedding is that of the first stage and of the last one."""
    rundir = job(tmp_path / "run", loop, stages, tied=True)
    run(rundir, ranks)
    assert losses(rundir) == pytest.approx(losses(alone_tied), abs=1e-4)
    found, wanted = (load_file(of.checkpoint(of.checkpoint_names()[-1]) / WEIGHTS) for of in (rundir, alone_tied))
    assert found.keys() == wanted.keys()
    assert torch.allclose(found["embedding.weight"], wanted["embedding.weight"], atol=1e-4)


@pytest.mark.full("trainer")
@pytest.mark.timeout(700)
def test_compiled_stages_learn_what_one_rank_alone_learns(tmp_path: Path, alone: RunDir) -> None:
    """For a few steps: the compiler takes most of the time, and several times as much on a busy machine."""
    rundir = job(tmp_path / "run", pipeline("1f1b", chunks=2) | {"compile": True, "maxSteps": 3}, 2)
    with Ranks(rundir, 2) as ranks:
        codes, output = ranks.finish(600)
    assert codes == [0, 0], output
    assert losses(rundir) == pytest.approx({step: losses(alone)[step] for step in (1, 2, 3)}, abs=1e-4)


@pytest.mark.full("trainer")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved1f1b"])
def test_stages_in_bfloat16_learn_what_one_rank_learns_in_it(tmp_path: Path, alone: RunDir, schedule: str) -> None:
    """Up to how its few digits are rounded, which is not up to those of float32."""
    runs = [job(tmp_path / "alone", {"precision": "bfloat16"})]
    runs.append(job(tmp_path / "stages", {"precision": "bfloat16", **pipeline(schedule)}, 2))
    for ranks, rundir in enumerate(runs, start=1):
        run(rundir, ranks)
    assert losses(runs[1])[1] == pytest.approx(losses(runs[0])[1], abs=1e-3)
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=3e-2)
    assert losses(runs[1]) != pytest.approx(losses(alone), abs=1e-4)


RATE = 1000.0
"""So high that one step of plain descent is the gradient, to seven digits."""


def weights_after_one_step(path: Path, loop: dict[str, Any], ranks: int = 1, processes: int = 1) -> dict[str, Tensor]:
    """Of the same first weights, whatever the strategy."""
    once = {"maxSteps": 1, "gradientClipNorm": None, "optimizer": {"name": "sgd", "learningRate": RATE}}
    rundir = job(path, once | loop, processes)
    run(rundir, ranks)
    return load_file(rundir.checkpoint(rundir.checkpoint_names()[-1]) / WEIGHTS)


@pytest.fixture(scope="module")
def first_weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Those that all begin with: after a step that changes none of their digits."""
    stays = {"optimizer": {"name": "sgd", "learningRate": 1e-30}}
    return weights_after_one_step(tmp_path_factory.mktemp("first") / "run", stays)


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory, first_weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first gradient of one rank alone."""
    moved = weights_after_one_step(tmp_path_factory.mktemp("gradients") / "run", {})
    return {name: (first - moved[name]) / RATE for name, first in first_weights.items()}


def compressed(how: str) -> dict[str, Any]:
    """`ddp` that sends less."""
    return {"ddp": {"compression": how}}


@pytest.mark.parametrize(
    ("loop", "ranks", "processes", "error"),
    [
        pytest.param({}, 3, 1, 1e-5, id="ddp", marks=FULL),
        pytest.param(compressed("bfloat16"), 2, 1, 1e-2, id="ddp-bfloat16"),
        pytest.param(compressed("float16"), 2, 1, 1e-3, id="ddp-float16", marks=FULL),
        # Which begins to compress with the third step.
        pytest.param(compressed("powerSGD"), 2, 1, 1e-5, id="ddp-powersgd", marks=FULL),
        pytest.param(FSDP, 3, 1, 1e-5, id="fsdp", marks=FULL),
        pytest.param(HYBRID, 4, 2, 1e-5, id="hybrid", marks=FULL),
        pytest.param(TENSOR, 4, 4, 1e-5, id="tensor-and-fsdp", marks=FULL),
        pytest.param(pipeline("gpipe"), 2, 2, 1e-5, id="gpipe", marks=FULL),
        pytest.param(REPEATED_1F1B, 4, 2, 1e-5, id="1f1b-and-data", marks=FULL),
        pytest.param(INTERLEAVED, 2, 2, 1e-5, id="interleaved"),
        pytest.param(pipeline("zeroBubble"), 2, 2, 1e-5, id="zero-bubble"),
        pytest.param(SPLIT_STAGES, 4, 2, 1e-5, id="1f1b-and-fsdp", marks=FULL),
        pytest.param(TENSOR_STAGES, 4, 4, 1e-5, id="1f1b-and-tensor", marks=FULL),
        pytest.param({"strategy": "dp"}, 1, 1, 1e-5, id="dp", marks=FULL),
        pytest.param({"strategy": "model"}, 1, 1, 1e-5, id="model", marks=FULL),
    ],
)
def test_its_gradient_is_that_of_one_rank_alone(
    tmp_path: Path,
    first_weights: dict[str, Tensor],
    gradients: dict[str, Tensor],
    loop: dict[str, Any],
    ranks: int,
    processes: int,
    error: float,
) -> None:
    """Of every parameter, as far as numbers of its precision can say."""
    moved = weights_after_one_step(tmp_path / "run", loop, ranks, processes)
    assert moved.keys() == gradients.keys()
    errors = {}
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, name
        found = (first_weights[name] - moved[name]) / RATE
        errors[name] = float((found - gradient).abs().max() / gradient.abs().max())
    assert max(errors.values()) < error, errors
    # A compression that is not at work would pass for a very good one.
    assert error < 1e-4 or max(errors.values()) > error / 100, errors


@pytest.mark.parametrize(
    ("how", "error", "steps"),
    [
        pytest.param("float16", 1e-3, STEPS, id="float16", marks=FULL),
        pytest.param("bfloat16", 1e-2, STEPS, id="bfloat16", marks=FULL),
        # What two columns leave out of a gradient is added to later ones, so it learns more slowly at first.
        pytest.param("powerSGD", 1e-4, 3, id="powersgd"),
    ],
)
def test_with_compressed_gradients_it_learns_too(
    tmp_path: Path, alone: RunDir, how: str, error: float, steps: int
) -> None:
    rundir = job(tmp_path / "run", compressed(how))
    run(rundir, 2)
    found, wanted = losses(rundir), losses(alone)
    assert sample_ids(rundir) == sample_ids(alone)
    assert [found[step] for step in range(1, steps + 1)] == pytest.approx(list(wanted.values())[:steps], abs=error)
    assert found != pytest.approx(wanted, abs=1e-5), "compression is at work"
    assert found[STEPS] < 0.8 * found[1]


HALF = "tests.support.scripts.half_on_cpu"


def scaler_of(rundir: RunDir) -> dict[str, Any]:
    """What the newest checkpoint holds of the loss's scaler."""
    manifest = rundir.committed()[0]
    contents = read_contents(rundir.checkpoint(manifest.name), manifest)
    state: dict[str, Any] = join(contents.loop[OBJECT_STATES]["scaler"], contents.others)
    return state


@pytest.mark.full("trainer")
def test_stages_in_float16_leave_out_the_steps_that_one_rank_leaves_out(tmp_path: Path, alone: RunDir) -> None:
    """The first ones, in which the gradient overflows; and they go on with the scale of their checkpoint."""
    half = {"precision": "float16"}
    whole, stages = (
        job(tmp_path / "whole", half),
        job(tmp_path / "stages", half | pipeline("1f1b") | {"maxSteps": 30}, 2),
    )
    run(whole, 1, "-m", HALF)
    run(stages, 2, "-m", HALF)
    job(stages.path, half | pipeline("1f1b"), 2)
    run(stages, 2, "-m", HALF)
    assert [record["step"] for record in records(stages, "start")] == [0, 30]
    assert scaler_of(stages) == scaler_of(whole)
    assert scaler_of(whole)["_growth_tracker"] < STEPS, "no step was left out"
    assert losses(stages) == pytest.approx(losses(whole), rel=1e-2)
    assert losses(stages) != pytest.approx(losses(alone), abs=1e-4)


@pytest.mark.parametrize("kind", ["fused", pytest.param("clips", marks=FULL), pytest.param("splits", marks=FULL)])
def test_ranks_with_weights_of_their_own_leave_out_the_same_steps(tmp_path: Path, kind: str) -> None:
    with Ranks(RunDir(tmp_path), 2, "-m", "tests.support.scripts.agreed", kind) as ranks:
        codes, output = ranks.finish()
    assert codes == [0, 0], output
    first, second = (json.loads(line) for line in output.splitlines() if line.startswith("[["))
    scales = [8.0, 4.0, 4.0, 2.0, 1.0, 1.0]
    assert first == [[weight, scale] for weight, scale in zip([-1, -1, -4, -4, -4, -10], scales, strict=True)]
    assert second == [[weight, scale] for weight, scale in zip([-1, -1, -4, -4, -4, -4], scales, strict=True)]


@pytest.mark.full("trainer")
def test_stages_of_an_image_model_learn_what_one_rank_alone_learns(tmp_path: Path) -> None:
    config = {"model": "cnn", "data": {"name": "digits"}, "globalBatchSize": 96, "maxSteps": STEPS, "epochs": 50}
    config |= {"optimizer": {"name": "sgd", "learningRate": 0.05}}
    runs = [make_rundir(tmp_path / "alone", config)]
    workers = {"processesPerReplica": 2}
    runs.append(make_rundir(tmp_path / "stages", config | pipeline("1f1b", splitAt=["classifier.0"]), workers=workers))
    for ranks, rundir in enumerate(runs, start=1):
        run(rundir, ranks)
    assert sample_ids(runs[1]) == sample_ids(runs[0])
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), abs=1e-4)


def kill_after_checkpoints(rundir: RunDir, ranks: int, unpaused: Path) -> None:
    """Train until there is another checkpoint at least, then kill the last rank."""
    known = len(rundir.checkpoint_names())
    unpaused.unlink()
    with Ranks(rundir, ranks) as group:
        until(lambda: len(rundir.checkpoint_names()) > known, "a checkpoint")
        os.kill(group.processes[-1].pid, signal.SIGKILL)
        unpaused.touch()
        group.finish()
    assert not rundir.ended()


@pytest.mark.parametrize(
    ("parts", "steps"),
    [
        pytest.param([(FSDP, 3, 1), (TENSOR, 4, 4), (SPLIT_STAGES, 4, 2)], 100, id="split-stages"),
        pytest.param([(FSDP, 3, 1), (TENSOR, 4, 4), ({}, 2, 1), (HYBRID, 4, 2)], 200, id="hybrid", marks=FULL),
    ],
)
def test_any_strategy_goes_on_from_checkpoints_of_any_other(
    tmp_path: Path, unpaused: Path, parts: list[tuple[dict[str, Any], int, int]], steps: int
) -> None:
    """With kills between: the ranks of one generation never end well, but for the last."""
    adam = {"optimizer": {"name": "adamw", "learningRate": 0.003}, "emaDecay": 0.9, "maxSteps": steps}
    undisturbed = job(tmp_path / "undisturbed", adam, tied=True)
    run(undisturbed)
    path = tmp_path / "killed"
    for loop, ranks, processes in parts:
        rundir = job(path, adam | loop, processes, tied=True, checkpoint={"everySteps": 5, "keepLast": 100})
        kill_after_checkpoints(rundir, ranks, unpaused)
    run(job(path, adam, tied=True, checkpoint={"everySteps": 5, "keepLast": 100}))
    assert [record["worldSize"] for record in records(rundir, "start")] == [*(ranks for _, ranks, _ in parts), 1]
    assert all(record["step"] > 0 for record in records(rundir, "start")[1:])
    assert sample_ids(rundir) == sample_ids(undisturbed)
    assert losses(rundir) == pytest.approx(losses(undisturbed), abs=2e-3)


@pytest.mark.parametrize(
    ("other", "tied"),
    [
        pytest.param(FSDP, False, id="fsdp", marks=FULL),
        pytest.param({}, False, id="ddp", marks=FULL),
        pytest.param({}, True, id="ddp-with-a-shared-weight", marks=FULL),
        pytest.param(SPLIT_STAGES, True, id="split-stages-with-a-shared-weight", marks=FULL),
        pytest.param(TENSOR_STAGES | {"fsdp": {}}, False, id="all-three", marks=FULL),
    ],
)
def test_a_pipeline_goes_on_from_other_strategies_and_they_from_it(
    tmp_path: Path, unpaused: Path, other: dict[str, Any], tied: bool
) -> None:
    """Killed in between. Over so few steps Adam does not let the last digits grow."""
    adam = {"optimizer": {"name": "adamw", "learningRate": 0.003}, "emaDecay": 0.9, "maxSteps": 60}
    undisturbed = job(tmp_path / "undisturbed", adam, tied=tied)
    run(undisturbed)
    path = tmp_path / "killed"
    # Ranks of a worker, where a worker has several.
    most = 4 if "tensorParallel" in other else 2 if "pipeline" in other else 1
    first, last = max(2, most), 2 * most if most > 1 else 3
    parts: list[tuple[dict[str, Any], int, int]] = [(other, first, most), (pipeline("1f1b"), 4, 2), (INTERLEAVED, 2, 2)]
    for loop, ranks, processes in parts:
        rundir = job(path, adam | loop, processes, tied=tied, checkpoint={"everySteps": 2, "keepLast": 100})
        kill_after_checkpoints(rundir, ranks, unpaused)
    run(job(path, adam | other, most, tied=tied, checkpoint={"everySteps": 2, "keepLast": 100}), last)
    assert [record["worldSize"] for record in records(rundir, "start")] == [first, 4, 2, last]
    assert all(record["step"] > 0 for record in records(rundir, "start")[1:])
    assert sample_ids(rundir) == sample_ids(undisturbed)
    assert losses(rundir) == pytest.approx(losses(undisturbed), abs=1e-4)
    final, wanted = (of.checkpoint(of.checkpoint_names()[-1]) / WEIGHTS for of in (rundir, undisturbed))
    averages = load_file(wanted)
    assert {name: one.shape for name, one in load_file(final).items()} == {n: o.shape for n, o in averages.items()}
    for name, average in load_file(final).items():
        assert torch.allclose(average, averages[name], atol=2e-3), name
