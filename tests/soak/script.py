"""A training script that is disturbed: a frozen layer, two groups of parameters out of order, moments and an average.

In double precision, so that the sums of gradients over another number of ranks change no digit that is compared.
"""

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tandem_trainer.checkpoint.train_state import Contents
from tandem_trainer.data.order import Order
from tandem_trainer.session import Session

SAMPLES, BATCH, SEED = 1797, 128, 7
ORDER = Order(SAMPLES, BATCH, SEED)
FOREVER = 1_000_000


class Digits:
    """Real digits as rows."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self._images, self._labels = torch.tensor(images) / 16, torch.tensor(labels)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self._images[number], self._labels[number]


def network() -> nn.Sequential:
    """Its first layer is frozen, and the others have one shape, so that a wrong order is no error."""
    layers = [
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 10),
    ]
    found = nn.Sequential(*layers).double()
    found[0].requires_grad_(False)
    return found


def wrong(step: int, contents: Contents) -> list[str]:
    """What is wrong with a checkpoint of the script that was taken after a step."""
    found = []
    counts = {int(tensor) for name, tensor in contents.optimizer.items() if name.endswith("/step")}
    if counts != {step}:
        found.append(f"the optimizer has counted {sorted(counts)} steps at step {step}")
    if int(contents.others["average"]) != step:
        found.append(f"the average has had {int(contents.others['average'])} updates at step {step}")
    if strange := [name for name in contents.optimizer if name.startswith("0.")]:
        found.append(f"a frozen layer has moments: {strange}")
    return found


def main() -> None:
    """Train for so many steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=FOREVER)
    steps = parser.parse_args().steps
    with Session(seed=SEED) as session:
        bare = network()
        model = session.distribute(bare)
        learning = [one for one in bare.parameters() if one.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [one for one in learning if one.ndim == 1], "lr": 1e-5, "weight_decay": 0.0},
            {"params": [one for one in learning if one.ndim > 1][::-1]},
        ]
        # A large epsilon: where gradients are small, the step is small, and not the sign of a rounding error.
        optimizer = torch.optim.AdamW(groups, lr=2e-5, weight_decay=0.01, eps=1e-3)
        average = AveragedModel(bare, multi_avg_fn=get_ema_multi_avg_fn(0.99))  # type: ignore[no-untyped-call]
        session.keep(model, optimizer, average)
        for batch in session.batches(Digits(), BATCH, epochs=FOREVER, max_steps=steps):
            images, labels = batch.data
            batch.mean(cross_entropy(model(images), labels, reduction="none")).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(bare)


if __name__ == "__main__":
    main()
