"""A small language model of English, trained by Hugging Face's Trainer, which saves at intervals. Nothing of Tandem.

--inline the Trainer evaluates each state itself, on held-out text, and training waits for that

At the end it writes the end time of each step.
"""

import argparse
import json
import os
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

LENGTH = 64
PASSAGES = 512
"""Held-out passages, which are evaluated each time."""


def passages() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Passages of bytes to train on, and others to evaluate on."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    rows = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)
    samples = [{"input_ids": row, "labels": row} for row in rows]
    return samples[PASSAGES:], samples[:PASSAGES]


class Clock(TrainerCallback):
    """Records the end time of each step, in seconds since the epoch."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.time())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="steps between two states")
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--inline", action="store_true")
    options = parser.parse_args()
    train, held_out = passages()
    args = TrainingArguments(
        output_dir=os.environ["TANDEM_RUN_DIR"],
        max_steps=options.steps,
        save_steps=options.every,
        save_total_limit=2,
        eval_strategy="steps" if options.inline else "no",
        eval_steps=options.every,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=32,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4))
    clock = Clock()
    Trainer(model=model, args=args, train_dataset=train, eval_dataset=held_out, callbacks=[clock]).train()
    options.times.write_text(json.dumps(clock.ends))


if __name__ == "__main__":
    main()
