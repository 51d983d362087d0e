"""Training scripts as users write them, with torch alone and with four libraries; none has heard of Tandem.

Random weights, and text that ships with Python. Each saves in its own way, and resumes from the newest.
"""

import argparse
import glob
import os
import re
from pydoc_data.topics import topics
from typing import Any

import torch
from slow_steps import pause

LENGTH = 32
OUT = os.environ["TANDEM_RUN_DIR"]


def passages(count: int) -> list[str]:
    text = topics["specialnames"]
    return [text[start : start + LENGTH] for start in range(0, count * LENGTH, LENGTH)]


def newest(pattern: str, last_file: str = "") -> str | None:
    """The newest checkpoint that has the file written last: a kill in the middle of a save leaves half of one."""
    found = [name for name in glob.glob(f"{OUT}/{pattern}") if os.path.exists(f"{name}{last_file}")]  # noqa: PTH110, PTH207
    return max(found, key=lambda name: int(re.findall(r"\d+", name)[-1])) if found else None


def tiny_model(letters: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=letters, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2))


def settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "output_dir": OUT,
        "max_steps": options.steps,
        "save_steps": 5,
        "per_device_train_batch_size": 4,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }


def pause_after_steps(options: argparse.Namespace) -> Any:
    from transformers import TrainerCallback

    class Pause(TrainerCallback):
        def on_step_end(self, *given: Any, **others: Any) -> None:
            pause(options.pause)

    return Pause()


def trainer(options: argparse.Namespace) -> None:
    from transformers import Trainer, TrainingArguments

    rows = [torch.tensor([min(ord(letter), 255) for letter in passage]) for passage in passages(400)]
    trainer = Trainer(
        model=tiny_model(256),
        args=TrainingArguments(**settings(options)),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[pause_after_steps(options)],
    )
    trainer.train(resume_from_checkpoint=newest("checkpoint-*", "/trainer_state.json"))


def sft(options: argparse.Namespace) -> None:
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = {letter: number for number, letter in enumerate(["<pad>", "<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = SFTTrainer(
        model=tiny_model(len(letters)),
        args=SFTConfig(**settings(options), max_length=LENGTH, bf16=False, gradient_checkpointing=False),
        train_dataset=datasets.Dataset.from_list([{"text": passage} for passage in passages(400)]),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"),
        callbacks=[pause_after_steps(options)],
    )
    trainer.train(resume_from_checkpoint=newest("checkpoint-*", "/trainer_state.json"))


def lightning(options: argparse.Namespace) -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Letters(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(256, 256)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            pause(options.pause)
            return torch.nn.functional.cross_entropy(self.table(batch[:, :-1]).transpose(1, 2), batch[:, 1:])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    rows = torch.tensor([[min(ord(letter), 255) for letter in passage] for passage in passages(400)])
    ranks = int(os.environ["WORLD_SIZE"])
    made = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=options.steps,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(f"{OUT}/saved", filename="{step}", every_n_train_steps=5, save_top_k=-1)],
    )
    made.fit(Letters(), torch.utils.data.DataLoader(rows, 4, shuffle=True), ckpt_path=newest("saved/*.ckpt"))


def accelerate(options: argparse.Namespace) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    table = torch.nn.Embedding(256, 256)
    optimizer = torch.optim.AdamW(table.parameters(), lr=0.01)
    rows = torch.tensor([[min(ord(letter), 255) for letter in passage] for passage in passages(400)])
    model, optimizer, loader = accelerator.prepare(table, optimizer, torch.utils.data.DataLoader(rows, 4, shuffle=True))
    step = 0
    if saved := newest("state-*", "/random_states_0.pkl"):
        accelerator.load_state(saved)
        step = int(saved.rsplit("-", 1)[1])
    while step < options.steps:
        for batch in loader:
            loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            pause(options.pause)
            step += 1
            if step % 5 == 0:
                accelerator.save_state(f"{OUT}/state-{step}")
            if step >= options.steps:
                break


def ddp(options: argparse.Namespace) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    dist.init_process_group("gloo")
    table = torch.nn.Embedding(256, 256)
    optimizer = torch.optim.AdamW(table.parameters(), lr=0.01)
    step = epoch = 0
    if saved := newest("state-*.pt"):
        state = torch.load(saved, weights_only=True)
        table.load_state_dict(state["state_dict"])
        optimizer.load_state_dict(state["optimizer"])
        step, epoch = state["step"], state["epoch"]
    model = DistributedDataParallel(table)
    rows = torch.tensor([[min(ord(letter), 255) for letter in passage] for passage in passages(400)])
    sampler: Any = DistributedSampler(rows)  # type: ignore[arg-type, var-annotated]
    while step < options.steps:
        sampler.set_epoch(epoch)
        for batch in DataLoader(rows, 4, sampler=sampler):  # type: ignore[arg-type, var-annotated]
            loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            pause(options.pause)
            step += 1
            if step % 5 == 0 and dist.get_rank() == 0:
                state = {"state_dict": table.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step, "epoch": epoch}, f"{OUT}/state-{step}.pt.tmp")
                os.rename(f"{OUT}/state-{step}.pt.tmp", f"{OUT}/state-{step}.pt")  # noqa: PTH104
            if step >= options.steps:
                break
        epoch += 1
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    libraries = {"ddp": ddp, "trainer": trainer, "sft": sft, "lightning": lightning, "accelerate": accelerate}
    parser.add_argument("library", choices=libraries)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.2)
    options = parser.parse_args()
    torch.manual_seed(0)
    libraries[options.library](options)
    print("trained to the end", flush=True)


if __name__ == "__main__":
    main()
