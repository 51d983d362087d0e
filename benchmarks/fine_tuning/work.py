"""The fine-tuning job, the same on every side: a model, documents, and the steps in which they are taken.

A folder holds all of it: a Qwen2 with random weights, a tokenizer trained on the same English, prompts with completions
to train on and to hold out, and a plan for each seed. A plan lists the documents of each step. It has Tandem's order,
since the others accept any: TRL by a sampler, the plain loop by a list.

Documents are identified by digests of their tokens, so the documents of a side are compared with the plan token by
token.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from examples.small_qwen2 import trained_tokenizer
from tandem_trainer.data.order import Batches, Order, digest
from tandem_trainer.language.fine_tuning import DocumentRows, FineTuning, FineTuningConfig

LENGTH = 256
"""Tokens of a row. Longer documents are truncated."""
BATCH = 8
"""Rows of a step, over all ranks."""
LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM = 5e-4, 0.01, 1.0
"""Settings of AdamW, with a constant rate; others are torch's defaults."""
VOCABULARY = 2048
SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
"""5.2 million parameters."""
MAX_DOCUMENTS = 1000
"""Documents to train on: TRL packs that many at a time."""
HELD_OUT = 100
MODEL, TRAIN, TEST = "model", "train.jsonl", "test.jsonl"


@dataclass(frozen=True)
class Plan:
    """Steps of a run."""

    order: list[int]
    """Numbers of the rows, step after step, BATCH each."""
    ids: list[str]
    """Digest of the rows' numbers of each step, as in Tandem's training log."""
    documents: list[list[str]]
    """Digests of the documents of each step."""
    tokens: list[int]
    """Tokens of each step, without padding."""
    widths: list[int]
    """Tokens of each step, with the padding of Tandem's batches."""
    targets: float
    """Learned tokens of a row, on average over the data. Every side divides by BATCH times this: it is Tandem's loss
    (docs/decisions/0041-packing.md); by default TRL divides by the tokens of the batch."""

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.tokens)

    @property
    def padding(self) -> float:
        """Share of padding in Tandem's batches."""
        return 1 - sum(self.tokens) / sum(self.widths)

    def write(self, path: Path) -> None:
        """Write the plan for the measured processes."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """Read a plan."""
        return cls(**json.loads(path.read_text()))


def document_digest(tokens: Sequence[int]) -> str:
    """Sixteen hex digits that identify a document."""
    return hashlib.blake2b(torch.tensor(tokens, dtype=torch.int32).numpy().tobytes(), digest_size=8).hexdigest()


def split(tokens: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[str]:
    """Digests of the documents of a batch.

    Args:
        tokens: [rows, tokens].
        mask: [rows, tokens], 0 for padding; a row is a document.
        positions: without a mask: [1, tokens], the position of each token in its document.
    """
    if mask is not None:
        return [document_digest(row[present.bool()].tolist()) for row, present in zip(tokens, mask, strict=True)]
    assert positions is not None
    begins = (positions[0] == 0).nonzero().flatten().tolist()
    ends = [*begins[1:], tokens.shape[1]]
    return [document_digest(tokens[0, begin:end].tolist()) for begin, end in zip(begins, ends, strict=True)]


def samples() -> list[dict[str, str]]:
    """Prompts with completions: paragraphs of the English that ships with Python, in their order."""
    pairs = []
    for name in sorted(topics):
        for number, paragraph in enumerate(filter(None, map(str.strip, topics[name].split("\n\n"))), start=1):
            # The boundary of prompt and completion is one of tokens, so all sides tokenize them alike.
            pairs.append({"prompt": f"{name}, paragraph {number}\n", "completion": paragraph})
    return pairs


def prepare(folder: Path, count: int = MAX_DOCUMENTS, held_out: int = HELD_OUT, **shape: Any) -> None:
    """Write the model and the documents.

    Args:
        count: documents to train on.
        shape: shape of the model, if it is not SHAPE.
    """
    everything = samples()
    # Spread over all of it.
    chosen = [everything[number * len(everything) // (count + held_out)] for number in range(count + held_out)]
    every = (count + held_out) // held_out
    tests = [sample for number, sample in enumerate(chosen) if number % every == every - 1][:held_out]
    trains = [sample for sample in chosen if sample not in tests][:count]
    for name, samples_of in ((TRAIN, trains), (TEST, tests)):
        (folder / name).write_text("".join(json.dumps(sample) + "\n" for sample in samples_of))
    trained_tokenizer(VOCABULARY).save_pretrained(folder / MODEL)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        **(SHAPE | shape),
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / MODEL)


def parameters(folder: Path, packing: bool) -> dict[str, Any]:
    """`spec.trainer.parameters` of a job."""
    data = {"path": str(folder / TRAIN), "test": str(folder / TEST)}
    return {"pretrained": str(folder / MODEL), "length": LENGTH, "packing": packing, "data": data}


def loop(seed: int, steps: int) -> dict[str, Any]:
    """`spec.trainer.loop` of a job."""
    return {
        "maxSteps": steps,
        "epochs": 1_000_000,
        "globalBatchSize": BATCH,
        "dropLast": True,
        "seed": seed,
        "gradientClipNorm": CLIP_NORM,
        "optimizer": {"name": "adamw", "learningRate": LEARNING_RATE, "weightDecay": WEIGHT_DECAY},
    }


def plan(folder: Path, packing: bool, seed: int, steps: int) -> Plan:
    """Plan the steps that Tandem takes with a seed."""
    task = FineTuning(FineTuningConfig.model_validate(parameters(folder, packing)))
    rows, model = task.data("train"), task.model()
    targets = task.learned_per_sample()
    assert targets is not None
    batches = Batches(Order(len(rows), BATCH, seed, drop_last=True))
    numbers = [batches.ids(step) for step in range(steps)]
    documents = [[document for row in ids.tolist() for document in _documents(rows, row)] for ids in numbers]
    return Plan(
        order=torch.cat(numbers).tolist(),
        ids=[digest(ids) for ids in numbers],
        documents=[[document_digest(document) for document in documents_of] for documents_of in documents],
        tokens=[sum(map(len, documents_of)) for documents_of in documents],
        widths=[_width(task, model, task.collate([rows[row] for row in ids.tolist()])) for ids in numbers],
        targets=targets,
    )


def _width(task: FineTuning, model: torch.nn.Module, batch: dict[str, Tensor]) -> int:
    """Tokens of a call of the model."""
    inputs = task.layout(model, batch["documents"]).inputs(batch["tokens"])
    tokens: Tensor = inputs["input_ids"]
    return tokens.numel()


def _documents(rows: DocumentRows, number: int) -> Iterator[list[int]]:
    tokens, _, owners = rows[number]
    for owner in range(1, int(owners.max()) + 1):
        yield tokens[owners == owner].tolist()


def held_out_loss(folder: Path, model: torch.nn.Module) -> float:
    """Compute the loss in nats for each token of the held-out completions."""
    task = FineTuning(FineTuningConfig.model_validate(parameters(folder, packing=False)))
    rows = task.data("test")
    nats, count = 0.0, 0
    with torch.inference_mode():
        for number in range(len(rows)):
            tokens, targets, _ = rows[number]
            logits = model(input_ids=tokens[None]).logits[0]
            nats += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
            count += int((targets >= 0).sum())
    return nats / count
