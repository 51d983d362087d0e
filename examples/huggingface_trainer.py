"""A small causal language model in Hugging Face's Trainer, as an elastic run: one line more than without Tandem.

It runs by itself:  python examples/huggingface_trainer.py
as two processes:   torchrun --nproc-per-node=2 examples/huggingface_trainer.py
and as a job:       tandem run examples/huggingface-trainer.yaml

The weights begin at random and the text ships with Python, so nothing is downloaded. A token is a byte.
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from tandem_trainer.adapters.transformers import elastic

LENGTH = 64


class Passages(torch.utils.data.Dataset):
    """Passages of LENGTH bytes: of every ten, nine to train on, and one held out."""

    def __init__(self, held_out: bool = False) -> None:
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        rows = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)
        self.rows = rows[(torch.arange(len(rows)) % 10 == 9) == held_out]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    size = {"n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **size))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=200)
    steps = options.parse_args().steps

    args = TrainingArguments(
        output_dir="runs/huggingface-trainer",
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        logging_steps=10,
        save_steps=50,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = elastic(Trainer(model=make_model(), args=args, train_dataset=Passages()))
    trainer.train()


if __name__ == "__main__":
    main()
