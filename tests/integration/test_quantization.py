"""Weights and moments of few bits are the same on any number of ranks, and go on after kills."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tandem.rundir.checkpoint import WEIGHTS
from tandem.rundir.layout import RunDir, checkpoint_name
from tests.support import manifests
from tests.support.language import pretrained
from tests.support.ranks import kill_when_saved, losses, run

pytestmark = pytest.mark.timeout(300)

EIGHT = {"name": "adamw8bit", "learningRate": 0.003}
RESHARDED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tandem.rundir.layout import RunDir
from tandem_trainer.checkpoint.reader import read_contents
from tandem_trainer.checkpoint.sharding import full_tensor, is_sharded
from tandem_trainer.checkpoint.train_state import TrainState
from tandem_trainer.task import task_in

rundir = RunDir(sys.argv[1])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
task, loop = task_in(rundir), rundir.read_job().spec.trainer.settings_of_loop
model = task.model()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
state = TrainState(model, task.optimizer(model, loop.optimizer))
manifest = rundir.committed()[0]
there = read_contents(rundir.checkpoint(manifest.name), manifest)
state.check(there)
state.load(there)
found, codes = state.contents({}).optimizer, 0
assert found.keys() == there.optimizer.keys()
for name, tensor in sorted(found.items()):
    assert is_sharded(tensor) or tensor.ndim == 0, name
    assert torch.equal(full_tensor(tensor), there.optimizer[name]), name
    codes += name.endswith(".codes")
print("equal", codes)
dist.destroy_process_group()
"""


def job(path: Path, parameters: dict[str, Any], **loop: Any) -> RunDir:
    loop = {"globalBatchSize": 8, "epochs": 20, "optimizer": EIGHT} | loop
    trainer = {"task": "causal-lm", "parameters": parameters, "loop": loop}
    return manifests.run_directory(path, manifests.job("test", trainer=trainer, checkpoint={"everySteps": 5}))


def test_moments_of_8_bits_are_the_same_numbers_on_any_ranks(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog, and " * 40)
    # On three ranks rows are spread unevenly, and some ranks hold none of a matrix of two rows.
    shape = {"width": 64, "layers": 2, "heads": 2, "length": 16, "text": str(text)}
    rundir = job(tmp_path / "run", shape, maxSteps=5)
    run(rundir)
    kept = load_file(rundir.checkpoint(checkpoint_name(5)) / "state" / "optimizer.safetensors")
    codes = sum(name.endswith("/exp_avg.codes") for name in kept)
    assert codes > 10
    assert run(rundir, 3, "-c", RESHARDED, str(rundir.path)).count(f"equal {2 * codes}") == 3


@pytest.mark.full("trainer")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_group_goes_on_to_the_last_bit(tmp_path: Path, strategy: str) -> None:
    model = pretrained(tmp_path / "model", hidden_size=64, intermediate_size=128)
    parameters = {"pretrained": str(model), "length": 64, "lora": {"rank": 64, "quantizeBase": "nf4"}}
    undisturbed = job(tmp_path / "undisturbed", parameters, maxSteps=20, strategy=strategy)
    run(undisturbed, 2)
    killed = job(tmp_path / "killed", parameters, maxSteps=20, strategy=strategy)
    kill_when_saved(killed, 2)
    run(killed, 2)
    assert losses(killed) == losses(undisturbed)
    ends = [load_file(one.checkpoint(checkpoint_name(20)) / WEIGHTS) for one in (undisturbed, killed)]
    assert all(one.equal(ends[1][name]) for name, one in ends[0].items())


@pytest.mark.full("trainer")
def test_other_ranks_under_another_strategy_learn_the_same(tmp_path: Path) -> None:
    model = pretrained(tmp_path / "model", hidden_size=64, intermediate_size=128)
    parameters = {"pretrained": str(model), "length": 64, "lora": {"rank": 64, "quantizeBase": "nf4"}}
    alone = job(tmp_path / "alone", parameters, maxSteps=20)
    run(alone)
    split = job(tmp_path / "split", parameters, maxSteps=10, strategy="fsdp")
    run(split, 3)
    split.done_file.unlink()
    job(split.path, parameters, maxSteps=20)
    run(split)
    # A sum in another order moves a moment to the next code now and then.
    assert losses(split) == pytest.approx(losses(alone), rel=2e-2)
    assert losses(alone)[20] < losses(alone)[1]
