"""The task `causal-lm` with `pretrained`: fine-tunes a language model of transformers (docs/language-models.md).

The loss of a row is the sum over its tokens that are learned, divided by how many such tokens a row of the data has on
average. So the mean over rows, which is what the loop computes, weighs every token of an epoch alike, on any number of
ranks and in any micro-batch; over all rows it is the mean over tokens (docs/decisions/0041-packing.md).
"""

import logging
import os
from functools import cached_property
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch.utils.data import Dataset

from tandem.evaluation import GeometricMean, Mean, Value
from tandem.language_evaluation import Generate
from tandem.model import Model
from tandem_trainer.data.tokenizer import EXTRA
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.language import reading
from tandem_trainer.language.completing import complete
from tandem_trainer.language.packing import mask, packed, positions
from tandem_trainer.language.pretrained import Pretrained, is_installed, write_beside
from tandem_trainer.language.reading import Data, Row, format_of, whole_text
from tandem_trainer.language.tokenized import Documents, Encoder, Part, columns_of, parts_of, refuse_none
from tandem_trainer.task import Split, Task

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

PARAMETERS = "spec.trainer.parameters"
NO_TARGET = -100
"""In the place of a token that is not learned, as torch's cross_entropy has it."""
MOST_LOGITS = 2**26
"""Numbers that an evaluation has in memory at once: 256 MiB."""
MINIGPT = ("text", "tokenizer", "vocabulary", "tokenizerFile", "heldOut", "layers", "heads", "width", "positions")
"""Parameters of the other kind of causal-lm."""
LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers that a mask keeps from seeing another document."""


class Config(Model):
    """What `trainer.parameters` may say with `pretrained`."""

    pretrained: Annotated[str, Field(min_length=1)]
    """A folder with a model as `save_pretrained` writes it, or the id of one on the hub."""
    revision: str | None = None
    """Branch, tag or commit of the model on the hub. Default: its main branch."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights while they are trained. `auto`: the model's own."""
    data: Data | None = None
    """What to learn from. Default: the English that ships inside Python, to try it out."""
    length: Annotated[int, Field(ge=8, le=2**17)] = 1024
    """Tokens of a row: a longer text is cut into pieces, a longer conversation is cut off."""
    packing: bool = True
    """Put several samples into a row. Otherwise each is a row of its own, padded to the longest of its batch."""

    @model_validator(mode="before")
    @classmethod
    def _is_one_kind(cls, given: Any) -> Any:
        others = [name for name in MINIGPT if isinstance(given, dict) and name in given]
        if others:
            raise ValueError(
                f"{others[0]} belongs to the small model that is trained from the beginning; with pretrained, shape "
                "and tokenizer are those of the model, and the text is given by data"
            )
        return given

    @field_validator("pretrained")
    @classmethod
    def _is_there(cls, name: str) -> str:
        if not is_installed():
            raise ValueError(f"needs the package transformers, which is not installed (pip install 'tandem[{EXTRA}]')")
        return name


class FineTuning(Task[Config]):
    """Goes on training a model that predicts the token that follows."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._source = Pretrained(config.pretrained, config.revision, config.dtype)
        self._targets_per_row: dict[bool, float] = {}

    @cached_property
    def shape(self) -> "PretrainedConfig":
        """The model's configuration.

        Raises:
            ConfigurationError: the rows do not suit it.
        """
        found, length = self._source.config(), self.config.length
        most = getattr(found, "max_position_embeddings", None)
        if most is not None and length > most:
            raise ConfigurationError(f"{PARAMETERS}.length: {length} is more than the {most} positions of the model")
        if self.config.packing:
            strange = sorted(set(getattr(found, "layer_types", None) or ()) - LAYERS)
            if strange:
                raise ConfigurationError(
                    f"{PARAMETERS}.packing: a mask does not separate documents in layers of {strange[0]}; say packing: "
                    "false"
                )
            window = getattr(found, "sliding_window", None)
            if window is not None and getattr(found, "use_sliding_window", True) and window < length:
                raise ConfigurationError(
                    f"{PARAMETERS}.packing: the model sees {window} tokens at most, fewer than length {length}; say "
                    f"packing: false, or length: {window}"
                )
        return found

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer."""
        return self._source.tokenizer()

    def model(self) -> "PreTrainedModel":
        """Without weights, which `initialize` or a checkpoint brings."""
        found = self._source.model(self.shape)
        if self.config.packing and found._is_stateful:
            raise ConfigurationError(
                f"{PARAMETERS}.packing: a mask does not separate documents in {type(found).__name__}; say packing: "
                "false"
            )
        return found

    def initialize(self, model: nn.Module) -> None:
        """The pretrained weights."""
        self._source.load(model)

    def data(self, split: Split) -> "Rows":
        """Rows of documents.

        Raises:
            UnusableInput: a file cannot be read, or nothing is left.
            ConfigurationError: a library is missing, or the chat template does not suit.
        """
        encoder = Encoder(self.tokenizer, self.config.length)
        documents = self._documents(split, encoder)
        refuse_none(documents, "train" if split == "train" else "evaluate")
        if (largest := int(documents.tokens.max())) >= self.shape.vocab_size:
            raise ConfigurationError(
                f"{PARAMETERS}.pretrained: the tokenizer has a token {largest}, and the model knows only "
                f"{self.shape.vocab_size}; they do not belong together"
            )
        found = Rows(documents, self.config.length if self.config.packing else None)
        self._targets_per_row[split == "train"] = documents.targets / len(found)
        if split == "train" and os.environ.get("RANK", "0") == "0":
            lost, tokens = encoder.lost, len(documents.tokens)
            log.info(
                "documents=%d rows=%d tokens=%d learned=%d padding=%d truncated=%d cut_off=%d nothing_to_learn=%d",
                *(len(documents), len(found), tokens, documents.targets, found.padding),
                *(lost.truncated, lost.tokens, lost.empty),
            )
        return found

    def _documents(self, split: Split, encoder: Encoder) -> Documents:
        data = self.config.data
        if data is None:
            texts = [Part(topics[name], True, begins=True, ends=True) for name in sorted(topics)]
            return _share(encoder.documents(([part], True) for part in texts), split, 0.1)
        source = data.test if split == "test" and isinstance(data.test, str) else None
        start, end = (0, None) if source else (data.start, data.end)
        share = data.test if isinstance(data.test, float) else None
        path = source or data.path
        if data.dataset is None and path is not None and format_of(path, data.format) == "text":
            # One text, whose pieces are its samples.
            found = encoder.documents([([Part(whole_text(path), True, begins=True)], True)])
            count = len(found)
            found = found.taken(min(start, count), min(count if end is None else end, count))
            return found if share is None else _share(found, split, share)
        rows = list(reading.rows(data, source, start, end))
        if share is not None:
            first = len(rows) - max(1, round(len(rows) * share))
            rows = rows[:first] if split == "train" else rows[max(0, first) :]
        return encoder.documents(self._parts(rows))

    def _parts(self, rows: list[Row]) -> Any:
        if not rows:
            return
        data = self.config.data
        assert data is not None
        columns = columns_of(rows[0], data.text, data.prompt, data.completion, data.messages)
        for row in rows:
            yield parts_of(row, columns, self.tokenizer), columns.text is not None

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        """[samples, tokens] each: `tokens`; `targets`, the token that follows each, where that is learned; and
        `documents`, which one of its row a token belongs to. Padding is on the right."""
        width = self.config.length if self.config.packing else max(len(tokens) for tokens, _, _ in samples)
        found = {
            "tokens": torch.zeros(len(samples), width, dtype=torch.int64),
            "targets": torch.full((len(samples), width), NO_TARGET),
            "documents": torch.zeros(len(samples), width, dtype=torch.int64),
        }
        for row, sample in enumerate(samples):
            for name, values in zip(found, sample, strict=True):
                found[name][row, : len(values)] = values
        return found

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """[samples], float32: the sum over the tokens of each that are learned, in nats, by their mean number."""
        return torch.cat([losses.sum(dim=1) for losses, _ in self._judged(model, batch)]) / self._per_row(model)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Value]:
        """Perplexity, and the share that was predicted, of the tokens that are learned."""
        nats, right, count = 0.0, 0, 0
        for losses, hits in self._judged(model, batch):
            nats += losses.double().sum().item()
            right += int(hits.sum())
        count = int((batch["targets"] != NO_TARGET).sum())
        return {"perplexity": GeometricMean(nats, count), "accuracy": Mean(right, count)}

    def complete(self, model: nn.Module, prompt: str, number: int, options: Generate) -> str:
        """What the model writes for a prompt."""
        return complete(model, self.tokenizer, self._ends, prompt, number, options)

    @cached_property
    def _ends(self) -> list[int]:
        """Tokens after which the model has nothing more to say."""
        told = getattr(self._source.generation(), "eos_token_id", None)
        found = [told] if isinstance(told, int) else list(told or [])
        end = self.tokenizer.eos_token_id
        return list(dict.fromkeys([*found, *([end] if end is not None else [])]))

    def tensor_plan(self, model: nn.Module, ranks: int) -> dict[str, str]:
        """The model's own, of the matrices inside its blocks."""
        heads = {getattr(self.shape, name, None) for name in ("num_attention_heads", "num_key_value_heads")} - {None}
        for count in heads:
            assert count is not None
            if count % ranks:
                raise ConfigurationError(f"tensorParallel: {ranks} does not divide the {count} heads of the model")
        plan = super().tensor_plan(model, ranks)
        return {name: style for name, style in plan.items() if style in ("colwise", "rowwise")}

    def flops_per_sample(self) -> float | None:
        """Of a whole row, where rows are packed."""
        if not self.config.packing:
            return None
        shape, length = self.shape, self.config.length
        with torch.device("meta"):
            model = self._source.model(shape)
            weights = sum(parameter.numel() for parameter in model.parameters())
            # The table of an embedding that is not the last layer's, too, is looked up and not multiplied with.
            weights -= 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size
        attention = 12.0 * float(shape.num_hidden_layers * shape.hidden_size) * length
        return length * (6.0 * weights + attention)

    def write_beside(self, folder: Path, dtype: str | None) -> list[str]:
        """What makes a folder with exported weights one that transformers opens; names of the files."""
        return write_beside(self._source, folder, dtype)

    def _per_row(self, model: nn.Module) -> float:
        return self._targets_per_row[model.training]

    def _judged(self, model: nn.Module, batch: Any) -> Any:
        """For some rows at a time the loss of each token in nats, [rows, tokens], 0 where it is not learned, and
        whether it was predicted.

        Where nothing is learned of them, the logits of a batch are not in memory all at once.
        """
        size = len(batch["tokens"])
        if not torch.is_grad_enabled():
            size = max(1, MOST_LOGITS // (batch["tokens"].shape[1] * self.shape.vocab_size))
        for first in range(0, len(batch["tokens"]), size):
            targets = batch["targets"][first : first + size]
            logits = self._logits(
                model, batch["tokens"][first : first + size], batch["documents"][first : first + size]
            )
            losses = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=NO_TARGET, reduction="none")
            yield losses, logits.argmax(dim=-1) == targets

    def _logits(self, model: nn.Module, tokens: Tensor, documents: Tensor) -> Tensor:
        """[rows, tokens, vocabulary], float32."""
        # Padding follows the text, and a token sees only those before it: without packing no mask is needed.
        separated = {"position_ids": positions(documents), "attention_mask": mask(documents)}
        found: Tensor = model(input_ids=tokens, use_cache=False, **(separated if self.config.packing else {})).logits
        return found.float()


class Rows(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Rows that documents are packed into, or one document each."""

    def __init__(self, documents: Documents, length: int | None) -> None:
        """
        Args:
            length: tokens of a row; None: a document is a row.
        """
        self._documents = documents
        self._rows = (
            [[number] for number in range(len(documents))] if length is None else packed(documents.lengths, length)
        )
        self.padding = 0 if length is None else len(self._rows) * length - len(documents.tokens)
        """Tokens of packed rows that stand for nothing."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, targets and documents of a row, [tokens] each; documents are numbered from 1."""
        tokens, targets, owners = [], [], []
        for owner, one in enumerate(self._rows[number], start=1):
            found, learned = (torch.from_numpy(part.copy()) for part in self._documents[one])
            following = torch.full((len(found),), NO_TARGET)
            following[:-1] = torch.where(learned[1:], found[1:].long(), NO_TARGET)
            tokens.append(found.long())
            targets.append(following)
            owners.append(torch.full((len(found),), owner))
        return torch.cat(tokens), torch.cat(targets), torch.cat(owners)


def _share(documents: Documents, split: Split, share: float) -> Documents:
    """Documents to train with, or the last ones, to evaluate with."""
    count = len(documents)
    first = max(0, count - max(1, round(count * share)))
    return documents.taken(0, first) if split == "train" else documents.taken(first, count)
