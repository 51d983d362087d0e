"""A LightningModule, with the adapter, for tests that kill it."""

import argparse
import os
import warnings
from typing import Any

import lightning
import torch
from slow_steps import fail_once, pause
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tandem_trainer.adapters.lightning import Elastic


class Module(lightning.LightningModule):
    """Knows nothing of Tandem."""

    def __init__(self, pause: float) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.pause = pause

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        pause(self.pause)
        inputs, targets = batch
        return mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class StopAt(lightning.Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: lightning.Trainer, *others: Any) -> None:
        trainer.should_stop = trainer.global_step >= self._step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--stop-at", type=int)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(3)
    loader = DataLoader(TensorDataset(torch.randn(42, 5), torch.randn(42, 1)), batch_size=4, shuffle=True)
    ranks = int(os.environ["WORLD_SIZE"])
    elastic = Elastic(loader)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", ranks)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[elastic, *([StopAt(options.stop_at)] if options.stop_at else [])],
    )
    trainer.fit(Module(options.pause), elastic.loader)
    fail_once()
    print(f"after the loop: step={trainer.global_step} epoch={trainer.current_epoch}", flush=True)


if __name__ == "__main__":
    main()
