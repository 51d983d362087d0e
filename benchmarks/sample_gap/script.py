"""One epoch of a model that records its samples, with Trainer or accelerate, alone or with the adapter.

The record is what the model sees: a line for each forward pass, with the steps completed before it and the samples.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SAMPLES, BATCH = 240, 4


class Rows(Dataset[dict[str, Tensor]]):
    """Samples that carry their number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"number": torch.tensor(index), "labels": torch.tensor([index / SAMPLES])}


class Model(nn.Module):
    """Records the samples that it sees."""

    def __init__(self, record: Path) -> None:
        super().__init__()
        self.net, self.step = nn.Linear(1, 1), 0
        self._record = record

    def forward(self, number: Tensor, labels: Tensor) -> dict[str, Tensor]:
        with self._record.open("a") as file:
            file.write(json.dumps({"step": self.step, "samples": number.tolist()}) + "\n")
        return {"loss": nn.functional.mse_loss(self.net(labels), labels)}


def with_trainer(options: argparse.Namespace, model: Model, folder: Path) -> None:
    """Hugging Face's Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model.step = state.global_step

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            time.sleep(options.pause)
            if state.global_step == options.stop_at:
                control.should_save = control.should_training_stop = True

    args = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        save_strategy="no" if options.adapter else "steps",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Rows(), callbacks=[Steps()])
    if options.adapter:
        from tandem_trainer.adapters.transformers import elastic

        trainer = elastic(trainer)
    trainer.train(resume_from_checkpoint=bool(list(folder.glob("checkpoint-*"))) if not options.adapter else None)


def with_accelerate(options: argparse.Namespace, model: Model, folder: Path) -> None:
    """A loop with accelerate, which saves and resumes as its documentation shows."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Rows(), batch_size=BATCH, shuffle=True)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def train(batch: dict[str, Tensor]) -> None:
        accelerator.backward(wrapped(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(options.pause)

    if options.adapter:
        from tandem_trainer.adapters.accelerate import elastic

        with elastic(accelerator, loader, wrapped, optimizer) as run:
            for batch in run:
                model.step = run.session.step
                train(batch)
        return
    saved = sorted(folder.glob("state-*"), key=lambda path: int(path.name.split("-")[1]))
    if saved:
        accelerator.load_state(str(saved[-1]))
        model.step = int(saved[-1].name.split("-")[1])
        loader = accelerator.skip_first_batches(loader, model.step)
    for batch in loader:
        train(batch)
        model.step += 1
        if model.step == options.stop_at:
            accelerator.save_state(str(folder / f"state-{model.step}"))
            break


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=("trainer", "accelerate"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--phase", required=True)
    parser.add_argument("--adapter", action="store_true")
    parser.add_argument("--stop-at", type=int, help="save and end after so many steps; alone only")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    options = parser.parse_args()
    torch.manual_seed(0)
    record = options.folder / f"seen-{options.phase}-{os.environ['RANK']}-{os.getpid()}.jsonl"
    {"trainer": with_trainer, "accelerate": with_accelerate}[options.library](options, Model(record), options.folder)


if __name__ == "__main__":
    main()
