"""A small model in Hugging Face's Trainer or TRL's SFTTrainer, with the adapter, for tests that kill it."""

import argparse
import tempfile
from typing import Any

import torch
from slow_steps import fail_once, pause
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from tandem_trainer.adapters.transformers import elastic

LENGTH, SAMPLES = 12, 42
KINDS = ("trainer", "mean", "sft", "lora", "sft-lora")


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of which each has another number of labels that count."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(32, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: index % (LENGTH - 2)] = -100
        return {"input_ids": ids, "labels": labels}


class Mean(nn.Module):
    """A model whose loss is a mean over samples, which takes no number of items."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        losses = nn.functional.cross_entropy(self.head(self.letters(input_ids)).transpose(1, 2), input_ids)
        return {"loss": losses}


class Pause(TrainerCallback):
    """Slow steps, so that a test can kill between two."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        pause(self._seconds)


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_training_stop = state.global_step >= self._step


def make(options: argparse.Namespace) -> Trainer:
    torch.manual_seed(7)
    settings: dict[str, Any] = {
        "output_dir": tempfile.gettempdir(),  # One that is there: the Trainer makes it, and saves nothing to it.
        "num_train_epochs": options.epochs,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 4,
        "logging_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    if options.kind == "mean":
        return Trainer(model=Mean(), args=TrainingArguments(**settings), train_dataset=Rows())
    size = {"vocab_size": 32, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, pad_token_id=0, **size, **dropout))
    lora = None
    if "lora" in options.kind:
        from peft import LoraConfig

        lora = LoraConfig(
            r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"
        )
    if options.kind in ("trainer", "lora"):
        if lora is not None:
            from peft import get_peft_model

            model = get_peft_model(model, lora)
        return Trainer(model=model, args=TrainingArguments(**settings), train_dataset=Rows())
    import datasets
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    letters = Tokenizer(models.WordLevel({f"w{number}": number for number in range(32)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="w0", eos_token="w1")
    rows = [{"input_ids": row["input_ids"].tolist()[: 4 + number % 8]} for number, row in enumerate(list_of(Rows()))]
    return SFTTrainer(
        model=model,
        args=SFTConfig(**settings, max_length=LENGTH, gradient_checkpointing=False, bf16=False),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora,
    )


def list_of(rows: Rows) -> list[dict[str, Tensor]]:
    return [rows[number] for number in range(len(rows))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, default="trainer")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--stop-at", type=int)
    options = parser.parse_args()
    trainer = elastic(make(options))
    trainer.add_callback(Pause(options.pause))
    if options.stop_at:
        trainer.add_callback(StopAt(options.stop_at))
    trainer.train()
    assert not any("tandem" in name for name in trainer.model.state_dict()), "a script may save the model as it is"
    fail_once()
    state = trainer.state
    print(f"after the loop: step={state.global_step} epoch={state.epoch:.3f} logs={len(state.log_history)}", flush=True)


if __name__ == "__main__":
    main()
