"""A save under CUDA: every bit of it comes back, and training goes on while it is written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from tandem.job.tasks import Optimizer
from tandem.rundir.checkpoint import DataPosition
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import GenerationRecord
from tandem_trainer.checkpoint.restoring import restore
from tandem_trainer.checkpoint.saving import Author, Outcome, Saver
from tandem_trainer.checkpoint.state import NamedOptimizer, weights
from tandem_trainer.checkpoint.train_state import TrainState
from tandem_trainer.models import build
from tandem_trainer.process_group import Group
from tandem_trainer.task import torch_optimizer
from tandem_trainer.train import averaged
from tests.support import manifests
from tests.support.ranks import Ranks, make_rundir, records

# Of CUDA and its drivers, which are those of the machine.
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]


class Training:
    """A model that learns in float16, with all that a checkpoint may hold."""

    def __init__(self, device: torch.device, optimizer: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = build("cnn", 1, 8, 10).to(device)
        average = averaged(self.model, 0.9)
        assert average is not None
        self.average: AveragedModel = average
        self.optimizer = torch_optimizer(Optimizer.model_validate({"name": optimizer}), self.model)
        self.scaler = torch.amp.GradScaler(device.type)
        self.kept = TrainState(self.model, self.optimizer, self.average, {"scaler": self.scaler})
        self._images = torch.randn(64, 1, 8, 8, device=device)

    def step(self) -> None:
        with torch.autocast(self._images.device.type, dtype=torch.float16):
            loss = self.model(self._images).float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.average.update_parameters(self.model)

    def state(self) -> dict[str, Tensor]:
        """A copy of all tensors, on the device where they are."""
        parts = {
            "model": weights(self.model),
            "optimizer": NamedOptimizer(self.model, self.optimizer).state().tensors,
            "average": weights(self.average.module),
        }
        return {f"{part}/{name}": one.clone() for part, tensors in parts.items() for name, one in tensors.items()}


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_what_is_restored_is_what_was_saved_bit_for_bit_though_the_next_step_began_at_once(
    tmp_path: Path, device: torch.device, optimizer: str
) -> None:
    rundir = manifests.run_directory(tmp_path, manifests.job("test"))
    assert rundir.record_generation(GenerationRecord(generation=1, world_size=1, started_at=0.0))
    training = Training(device, optimizer, seed=0)
    for _ in range(3):
        training.step()
    outcomes: list[Outcome] = []
    saver = Saver(rundir, Author(1, None, 1), lambda: None, outcomes.append)
    before, scale = training.state(), training.scaler.state_dict()
    saver.save(3, DataPosition(seed=0, epoch=0, cursor=0), training.kept.contents({}))
    training.step()
    saver.close()
    assert [outcome.get("committed") for outcome in outcomes] == ["step-000000003"]
    assert any(not torch.equal(one, before[name]) for name, one in training.state().items()), "the next step changed it"

    other = Training(device, optimizer, seed=1)
    restored = restore(rundir, Group(0, 1, 0, device), lambda found: other.kept.check(found.contents))
    assert restored.loaded is not None
    other.kept.load(restored.loaded.contents)
    restored.release()
    found = other.state()
    assert found.keys() == before.keys()
    assert [name for name, one in found.items() if not torch.equal(one, before[name])] == []
    assert {one.device.type for name, one in found.items() if name.startswith("model/")} == {device.type}
    assert other.scaler.state_dict() == scale


def test_steps_are_taken_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """A state of 134 MB: training stands still while it is copied into memory, and not while it goes to the disk."""
    config: dict[str, Any] = {"model": "resnet-18", "data": {"name": "digits"}, "globalBatchSize": 16, "maxSteps": 60}
    rundir: RunDir = make_rundir(tmp_path, config, checkpoint={"everySteps": 20})
    with Ranks(rundir, 1) as ranks:
        codes, output = ranks.finish(500)
    assert codes == [0], output
    saved = records(rundir, "checkpoint")[0]
    assert (saved["step"], saved["bytes"] > 100_000_000) == (20, True)
    assert saved["stallSeconds"] < saved["commitSeconds"]
    half = saved["time"] - saved["commitSeconds"] / 2
    steps = [record["step"] for record in records(rundir, "step") if record["time"] < half]
    assert max(steps) > 20, "no step was taken while half of the checkpoint was written"
