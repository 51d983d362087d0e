"""The reference: the loop that one writes with torch and transformers, on prompts with completions. One process.

Each document is a row, padded to the longest of its batch. No log, no checkpoint but the last, no evaluation.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.fine_tuning.record import Record
from benchmarks.fine_tuning.work import BATCH, CLIP_NORM, LEARNING_RATE, LENGTH, MODEL, TRAIN, WEIGHT_DECAY, Plan, split


def documents(folder: Path, tokenizer: Any) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels of each document, [tokens]."""
    pairs = []
    for line in (folder / TRAIN).read_text().splitlines():
        sample = json.loads(line)
        prompt = tokenizer(sample["prompt"])["input_ids"]
        tokens = torch.tensor([*prompt, *tokenizer(sample["completion"])["input_ids"], tokenizer.eos_token_id])
        labels = tokens.clone()
        labels[: len(prompt)] = -100
        pairs.append((tokens[:LENGTH], labels[:LENGTH]))
    return pairs


def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """[rows, tokens] each."""
    tokens, labels = zip(*samples, strict=True)
    return {
        "input_ids": pad_sequence(tokens, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    plan = Plan.read(options.plan)
    record = Record(options.output / f"record-0-{os.getpid()}.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(options.work / MODEL)
    rows = documents(options.work, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(options.work / MODEL).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    divisor = torch.tensor(BATCH * plan.targets)
    loader = DataLoader(rows, batch_size=BATCH, sampler=plan.order, collate_fn=collate)
    for step, batch in enumerate(loader, start=1):
        digests = split(batch["input_ids"], batch["attention_mask"], None)
        loss = model(**batch, use_cache=False, num_items_in_batch=divisor).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        record.saw(digests, batch["input_ids"].numel(), loss.item())
        record.stepped(step)
    record.close()
    model.save_pretrained(options.output / "final")


if __name__ == "__main__":
    main()
