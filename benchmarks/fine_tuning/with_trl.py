"""Fine-tunes with TRL's SFTTrainer, as its documentation has it, on prompts with completions.

Settings differ from its defaults only where the other sides would differ: float32 instead of bfloat16, no checkpointing
of activations, a constant learning rate, AdamW that decays all weights, and no report but its log.

The subclass uses the order of the plan and the plan's divisor of losses, and records what it trained on.
"""

import argparse
import os
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.fine_tuning.record import Record
from benchmarks.fine_tuning.work import (
    BATCH,
    CLIP_NORM,
    LEARNING_RATE,
    LENGTH,
    MODEL,
    TEST,
    TRAIN,
    WEIGHT_DECAY,
    Plan,
    split,
)


class FixedOrder(Sampler[int]):
    """Sampler with a fixed order."""

    def __init__(self, order: list[int]) -> None:
        self._order = order

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


class Recorded(SFTTrainer):
    """SFTTrainer in the order of a plan."""

    def __init__(self, plan: Plan, record: Record, **arguments: Any) -> None:
        self.plan, self.record = plan, record
        self.evaluated: list[tuple[float, int]] = []
        super().__init__(**arguments)

    def _get_train_sampler(self, train_dataset: Sized | None = None) -> FixedOrder:
        return FixedOrder(self.plan.order)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        tokens = inputs["input_ids"]
        documents = split(tokens, inputs.get("attention_mask"), inputs.get("position_ids"))
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.record.saw(documents, tokens.numel(), loss.item())
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.model.training:
            divisor = torch.tensor(BATCH * self.plan.targets)
            return super().compute_loss(model, inputs, return_outputs, divisor)
        count = int((inputs["labels"][:, 1:] >= 0).sum())
        loss = super().compute_loss(model, inputs, return_outputs)
        self.evaluated.append((loss.item(), count))
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.evaluated = []
        metrics = super().evaluate(*args, **kwargs)
        # Its own score is a mean over batches, in which a token of a short batch counts for more.
        nats, count = sum(loss * tokens for loss, tokens in self.evaluated), sum(tokens for _, tokens in self.evaluated)
        self.record.scored(self.state.global_step, nats / count)
        return metrics


class Steps(TrainerCallback):
    """Writes a line after each step."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record.stepped(state.global_step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True, help="folder with the model and the documents")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder for its states and its record")
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--evaluate-every", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--per-rank", type=int, default=BATCH, help="rows of a micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    options = parser.parse_args()
    plan = Plan.read(options.plan)
    record = Record(options.output / f"record-{os.environ.get('RANK', '0')}-{os.getpid()}.jsonl")
    data = load_dataset("json", data_files={name: str(options.work / name) for name in (TRAIN, TEST)})
    model = AutoModelForCausalLM.from_pretrained(options.work / MODEL)
    args = SFTConfig(
        output_dir=str(options.output),
        max_steps=plan.steps,
        max_length=LENGTH,
        packing=options.packing,
        per_device_train_batch_size=options.per_rank,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=CLIP_NORM,
        eval_strategy="steps" if options.evaluate_every else "no",
        eval_steps=options.evaluate_every or None,
        save_strategy="steps" if options.save_every else "no",
        save_steps=options.save_every or 1,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    trainer = Recorded(
        plan,
        record,
        model=model,
        args=args,
        train_dataset=data[TRAIN],
        eval_dataset=data[TEST] if options.evaluate_every else None,
        processing_class=AutoTokenizer.from_pretrained(options.work / MODEL),
        optimizers=(optimizer, None),
        callbacks=[Steps(record)],
    )
    trainer.train(resume_from_checkpoint=options.resume or None)
    record.close()
    if not options.save_every:
        trainer.save_model(str(options.output / "final"))


if __name__ == "__main__":
    main()
