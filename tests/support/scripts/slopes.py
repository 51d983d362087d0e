"""A task whose ranks kill themselves at points of a step (faults_of_steps), for tests of groups that go on."""

import time
from dataclasses import dataclass
from pathlib import Path

from faults_of_steps import Faults, Lines
from torch import nn

from tandem_trainer.checkpoint.saving import Saver
from tandem_trainer.process_group import Group
from tandem_trainer.task import Task


@dataclass
class Config:
    folder: str
    faults: list[str]
    seconds: float = 0.0
    """Duration of a step, at least."""


class Slopes(Task[Config]):
    def data(self, split):
        self.faults = Faults(self.config.folder, self.config.faults)
        return Lines(self.faults)

    def model(self):
        for wait in Path(self.config.folder).glob("wait"):
            wait.rename(wait.with_name("waits"))
            while not wait.with_name("go").exists():
                time.sleep(0.05)
        return nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)
        )

    def optimizer(self, model, settings):
        faults, optimizer = self.faults, super().optimizer(model, settings)

        def count(optimizer, *_):
            faults.at("update")

        def taken(optimizer, *_):
            faults.at("update-done")
            faults.step = round(float(next(iter(optimizer.state.values()))["step"]))

        optimizer.register_step_pre_hook(count)
        optimizer.register_step_post_hook(taken)
        for name, parameter in model.named_parameters():
            if name in ("0.weight", "5.weight"):
                parameter.register_hook(lambda gradient, name=name: faults.at(f"backward-{name}"))
        faults.around(Group, "vote")
        faults.around(Saver, "save")
        return optimizer

    def loss(self, model, batch):
        time.sleep(self.config.seconds)
        self.faults.at("forward")
        losses = (model(batch["points"]).squeeze(1) - batch["slope"]).square()
        self.faults.at("forward-done")
        return losses
