"""A task of your own: how a disease went on after a year, from ten measurements of each of 442 patients. See
own-task.yaml."""

from typing import Literal

import torch
from pydantic import BaseModel, Field
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.nn.functional import huber_loss
from torch.utils.data import TensorDataset

from tandem_trainer.task import Max, Mean, Split, Task


class Config(BaseModel):
    """What own-task.yaml may say under `parameters`."""

    width: int = Field(default=32, ge=1)
    activation: Literal["relu", "tanh"] = "relu"
    dropout: float = Field(default=0.1, ge=0, lt=1)


class DiseaseProgression(Task[Config]):
    """Regression with two hidden layers."""

    def model(self) -> nn.Module:
        """[samples, 10] to [samples, 1]."""
        width, activation = self.config.width, nn.ReLU if self.config.activation == "relu" else nn.Tanh
        hidden = [nn.Linear(10, width), activation(), nn.Linear(width, width), activation()]
        return nn.Sequential(*hidden, nn.Dropout(self.config.dropout), nn.Linear(width, 1))

    def data(self, split: Split) -> TensorDataset:
        """Measurements [samples, 10] and progression [samples]; every fifth patient is left to test with."""
        inputs, targets = (torch.from_numpy(array).float() for array in load_diabetes(return_X_y=True))
        is_test = torch.arange(len(targets)) % 5 == 0
        chosen = is_test if split == "test" else ~is_test
        return TensorDataset(inputs[chosen] * 20, targets[chosen] / 100)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """One for each sample."""
        inputs, targets = batch
        return huber_loss(model(inputs).squeeze(1), targets, reduction="none")

    def metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Mean | Max]:
        """What this batch adds to the mean error, to the largest one, and to the loss."""
        inputs, targets = batch
        predicted = model(inputs).squeeze(1)
        errors, losses = (predicted - targets).abs(), huber_loss(predicted, targets, reduction="none")
        return {
            "loss": Mean.from_samples(losses),
            "meanError": Mean.from_samples(errors),
            "largestError": Max(errors.max()),
        }
