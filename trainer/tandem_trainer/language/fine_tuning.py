"""The task `causal-lm` with `pretrained`: fine-tunes a language model of transformers (docs/language-models.md).

The loss of a row is the sum over its tokens that are learned, divided by how many such tokens a row of the data has on
average. So the mean over rows, which is what the loop computes, weighs every token of an epoch alike, on any number of
ranks and in any micro-batch; over all rows it is the mean over tokens (docs/decisions/0041-packing.md).
"""

import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import field_validator
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import Dataset

from tandem.causal_lm import HubDataset, Lora, PretrainedModel, Source
from tandem.distribution import install
from tandem.evaluation import GeometricMean, Mean, Value
from tandem.language_evaluation import Generate
from tandem.rundir.lineage import DatasetCommit, Origin
from tandem_trainer.checkpoint.state import load_weights
from tandem_trainer.data.mixture import Mixture
from tandem_trainer.data.tokenizer import EXTRA
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.language import reading
from tandem_trainer.language.attention import stays_within
from tandem_trainer.language.completing import complete
from tandem_trainer.language.decoder import decoder_parts
from tandem_trainer.language.head import MAX_LOGITS, NO_TARGET, Head, judged, opened
from tandem_trainer.language.kernels import liger
from tandem_trainer.language.lora import adapt, as_peft, has_base, load_base, merged, peft_config, tensor_plan
from tandem_trainer.language.packing import Layout, Padded, Unpadded, packed
from tandem_trainer.language.pretrained import Pretrained, is_installed, write_beside
from tandem_trainer.language.reading import Row, commit_of, format_of, whole_text
from tandem_trainer.language.token_bytes import token_bytes
from tandem_trainer.language.tokenized import (
    Columns,
    Documents,
    Encoder,
    Part,
    check,
    columns_of,
    joined,
    parts_of,
    refuse_none,
)
from tandem_trainer.models.dropout import SampleDropout
from tandem_trainer.task import Split, Task

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

PARAMETERS = "spec.trainer.parameters"
LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers that a mask keeps from seeing another document."""


class Config(PretrainedModel):
    """What `trainer.parameters` may say with `pretrained`, where the packages for it are installed."""

    @field_validator("pretrained")
    @classmethod
    def _is_there(cls, name: str) -> str:
        if not is_installed():
            raise ValueError(f"needs the package transformers, which is not installed ({install(EXTRA)})")
        return name

    @field_validator("lora")
    @classmethod
    def _has_peft(cls, lora: Lora | None) -> Lora | None:
        if lora is not None and find_spec("peft") is None:
            raise ValueError(f"needs the package peft, which is not installed ({install(EXTRA)})")
        return lora


def against_samples(config: Config, most: int) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Fields under `data` whose files cannot be learned from, and why, by the first samples of each file that is there.

    Args:
        most: samples of a file that are read.
    """
    data = config.data
    for number, source in enumerate(data.sources if data else ()):
        inner = ("mixture", number) if data and data.mixture else ()
        files = {"path": source.path, "test": source.test if isinstance(source.test, str) else None}
        for field, path in files.items():
            if path is None or source.dataset is not None or not Path(path).expanduser().is_file():
                continue
            start = source.start if field == "path" else 0
            try:
                if format_of(path, source.format) == "text":
                    whole_text(path)
                    continue
                rows = list(reading.rows(source, path, start, start + most))
                columns = columns_of(rows[0], *_named(source)) if rows else Columns()
                for row in rows:
                    check(row, columns)
            except ConfigurationError as error:
                yield (*inner, field), str(error)


def _named(data: Source) -> tuple[str | None, str | None, str | None, str | None]:
    """The columns that the job names."""
    return data.text, data.prompt, data.completion, data.messages


def against_stages(config: Config) -> Iterator[tuple[str, str]]:
    """Fields that do not go together with strategy: pipeline, and why."""
    if not config.packing:
        yield "packing", "strategy: pipeline takes rows of one length; say true"


class FineTuning(Task[Config]):
    """Goes on training a model that predicts the token that follows."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._source = Pretrained(config.pretrained, config.revision, config.dtype)
        # Of the training data and of the test data.
        self._targets_per_row: dict[bool, float] = {}
        self._tokens_per_row: dict[bool, float] = {}
        self._is_chunked = False
        self._is_cut = False
        """Whether the model is called part by part, in a pipeline."""
        self._stays_within = False
        """Whether the model stays within documents without a mask; with a GPU it is not asked."""
        self._last: Head | None = None
        """Its last layer, where the last part returns what that is given."""
        self._commits: dict[tuple[str, str | None], str] = {}
        """Of data sets of the hub, by id and the revision that the job names."""

    @cached_property
    def shape(self) -> "PretrainedConfig":
        """The model's configuration.

        Raises:
            ConfigurationError: the rows do not suit it.
        """
        # What else this process reads is of the same commit.
        self._source = self._source.pinned()
        found, length = self._source.config(), self.config.length
        most = getattr(found, "max_position_embeddings", None)
        if most is not None and length > most:
            raise ConfigurationError(f"{PARAMETERS}.length: {length} is more than the {most} positions of the model")
        if self.config.packing and (why := self._sees_more(found)):
            raise ConfigurationError(f"{PARAMETERS}.packing: {why}")
        return found

    def _sees_more(self, shape: "PretrainedConfig") -> str:
        """Why documents that stand together cannot be told apart for such a model; empty where they can."""
        strange = sorted(set(getattr(shape, "layer_types", None) or ()) - LAYERS)
        if strange:
            return f"a mask does not separate documents in layers of {strange[0]}; say packing: false"
        window, length = getattr(shape, "sliding_window", None), self.config.length
        if window is not None and getattr(shape, "use_sliding_window", True) and window < length:
            return (
                f"the model sees {window} tokens at most, fewer than length {length}; say packing: false, or length: "
                f"{window}"
            )
        return ""

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer."""
        _ = self.shape  # It finds out which commit.
        return self._source.tokenizer()

    def model(self) -> "PreTrainedModel":
        """Without weights, which `initialize` or a checkpoint brings."""
        found = self._source.model(self.shape)
        if self.config.packing and found._is_stateful:
            raise ConfigurationError(
                f"{PARAMETERS}.packing: a mask does not separate documents in {type(found).__name__}; say packing: "
                "false"
            )
        may = not torch.cuda.is_available() and not found._is_stateful and not self._sees_more(self.shape)
        self._stays_within = may and stays_within(found)
        if self.config.lora is not None:
            adapt(found, self.config.lora)
        if self.config.loss_chunk != 0:
            why_not = opened(found, self.config.loss_chunk)
            self._is_chunked = not why_not
            if why_not and os.environ.get("RANK", "0") == "0":
                log.warning("setting=lossChunk ignored for a %s: %s", type(found).__name__, why_not)
        return found

    def initialize(self, model: nn.Module) -> None:
        """The pretrained weights. Adapters begin as they were made, and change nothing yet."""
        if self.config.lora is None:
            self._source.load(model)
        else:
            self.load_frozen(model)

    def origin(self) -> Origin:
        """The folder, or the id on the hub with the commit."""
        return self._source.origin()

    def pin(self, origin: Origin) -> None:
        """The same commit, where the branch has another one meanwhile."""
        if origin.revision is not None and origin.path == self.config.pretrained:
            self._source = replace(self._source, revision=origin.revision)

    def dataset_commits(self) -> list[DatasetCommit]:
        """Of the hub."""
        return [DatasetCommit(id=name, revision=named, commit=found) for (name, named), found in self._commits.items()]

    def pin_datasets(self, commits: Sequence[DatasetCommit]) -> None:
        """The same commits, where branches have others meanwhile."""
        self._commits |= {(one.id, one.revision): one.commit for one in commits}

    def _pinned(self, dataset: HubDataset) -> HubDataset:
        """A data set at the commit that the run reads."""
        key = dataset.id, dataset.revision
        if key not in self._commits and (commit := commit_of(dataset)) is not None:
            self._commits[key] = commit
        return dataset.model_copy(update={"revision": self._commits.get(key, dataset.revision)})

    def settle(self, model: nn.Module) -> None:
        """Kernels for a GPU."""
        if self.config.kernels is not None:
            liger(model, self.shape.model_type)

    def load_frozen(self, model: nn.Module) -> None:
        """The pretrained weights, where adapters are trained beside them."""
        if self.config.lora is not None and not has_base(model):
            load_base(model, self._source.weights())

    def data(self, split: Split) -> "Rows":
        """Rows of documents.

        Raises:
            UnusableInput: a file cannot be read, or nothing is left.
            ConfigurationError: a library is missing, or the chat template does not suit.
        """
        purpose = "train" if split == "train" else "evaluate"
        sources = self.config.data.sources if self.config.data else [None]
        names = [source.name if source and len(sources) > 1 else "" for source in sources]
        parts, losses = [], []
        for source, name in zip(sources, names, strict=True):
            encoder = Encoder(self.tokenizer, self.config.length)
            documents = self._documents(source, split, encoder)
            refuse_none(documents, encoder.lost, purpose, name)
            if (largest := int(documents.tokens.max())) >= self.shape.vocab_size:
                raise ConfigurationError(
                    f"{PARAMETERS}.pretrained: the tokenizer has a token {largest}, and the model knows only "
                    f"{self.shape.vocab_size}; they do not belong together"
                )
            parts.append(documents)
            losses.append(encoder.lost)
        found = Rows(parts, self.config.length if self.config.packing else None)
        if split == "train":
            found.mixture = self._mixture(found.counts)
        taken = found.mixture.taken if found.mixture else found.counts
        # Of one row as it is drawn: a source that is taken more often counts for more.
        targets = [one.targets / count for one, count in zip(parts, found.counts, strict=True)]
        self._targets_per_row[split == "train"] = float(np.average(targets, weights=taken))
        tokens_per_row = [len(one.tokens) / count for one, count in zip(parts, found.counts, strict=True)]
        self._tokens_per_row[split == "train"] = float(np.average(tokens_per_row, weights=taken))
        if split == "train" and os.environ.get("RANK", "0") == "0":
            for name, documents, lost, rows, epoch in zip(names, parts, losses, found.counts, taken, strict=True):
                tokens = len(documents.tokens)
                padding = rows * self.config.length - tokens if self.config.packing else 0
                log.info(
                    "%sdocuments=%d rows=%d tokens=%d learned=%d padding=%d truncated=%d cut_off=%d "
                    "nothing_to_learn=%d%s",
                    f"source={name} " if name else "",
                    *(len(documents), rows, tokens, documents.targets, padding),
                    *(lost.truncated, lost.tokens, lost.empty),
                    f" rows_per_epoch={epoch}" if name else "",
                )
        return found

    def _mixture(self, counts: Sequence[int]) -> Mixture | None:
        """What an epoch takes of sources with these numbers of rows; None: each row once."""
        sources = (self.config.data and self.config.data.mixture) or []
        weights = [one.weight for one in sources if one.weight is not None]
        if not weights:
            return None
        try:
            return Mixture(counts, weights)
        except ValueError as error:
            raise ConfigurationError(f"{PARAMETERS}.data.mixture: {error}") from error

    def _documents(self, data: Source | None, split: Split, encoder: Encoder) -> Documents:
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
        if data.dataset is not None:
            data = data.model_copy(update={"dataset": self._pinned(data.dataset)})
        rows = list(reading.rows(data, source, start, end))
        if share is not None:
            first = len(rows) - max(1, round(len(rows) * share))
            rows = rows[:first] if split == "train" else rows[max(0, first) :]
        return encoder.documents(self._parts(data, rows))

    def _parts(self, data: Source, rows: list[Row]) -> Any:
        if not rows:
            return
        columns = columns_of(rows[0], *_named(data))
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

    def loss_sum(self, model: nn.Module, batch: Any, samples: int) -> Tensor:
        """The same, added up over the samples; where it is learned from, chunk by chunk."""
        if self._is_cut or not self._is_chunked or not torch.is_grad_enabled():
            return super().loss_sum(model, batch, samples)
        layout = self.layout(model, batch["documents"])
        found: Tensor = model(**layout.inputs(batch["tokens"]), targets=layout.laid(batch["targets"]))
        return found.sum() / self._per_row(model)

    def stage_loss(self, model: nn.Module, batch: Any, samples: int, counted: int, scale: float) -> Tensor:
        """As the task's own, chunk by chunk."""
        if self._last is None:
            return super().stage_loss(model, batch, samples, counted, scale)
        targets = batch["targets"].clone()
        targets[counted:] = NO_TARGET
        hidden = model(**self.layout(model, batch["documents"]).inputs(batch["tokens"]))
        found: Tensor = self._last.scaled_loss_sum(hidden, targets, scale / self._per_row(model))
        return found

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Value]:
        """Of the tokens that are learned: perplexity, the share that was predicted, and bits for each byte of text. And
        the loss, as `loss` gives it."""
        nats, right, rows = 0.0, 0, []
        for losses, hits in self._judged(model, batch):
            nats += losses.double().sum().item()
            right += int(hits.sum())
            rows.append(losses.sum(dim=1))
        count = int((batch["targets"] != NO_TARGET).sum())
        loss = (torch.cat(rows) / self._per_row(model)).sum()
        found: dict[str, Value] = {
            "loss": Mean(loss.double(), len(batch["targets"])),
            "perplexity": GeometricMean(nats, count),
            "accuracy": Mean(right, count),
        }
        if self._token_bytes is not None:
            learned = batch["targets"][batch["targets"] != NO_TARGET]
            found["bitsPerByte"] = Mean(nats / math.log(2), int(self._token_bytes[learned.cpu()].sum()))
        return found

    @cached_property
    def _token_bytes(self) -> Tensor | None:
        """[vocabulary]: bytes of each token; None: the tokenizer does not say them."""
        return token_bytes(self.tokenizer, self.shape.vocab_size)

    @property
    def reports_bytes(self) -> bool:
        """Whether there are bits for each byte among the metrics."""
        return self._token_bytes is not None

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
        return {**plan} if self.config.lora is None else tensor_plan(model, self.config.lora, plan, ranks)

    def pipeline_parts(self, model: nn.Module) -> dict[str, nn.Module]:
        """Embedding, layers, and what predicts. From then on the task asks for a loss as a pipeline computes it."""
        for field, why in against_stages(self.config):
            raise ConfigurationError(f"{PARAMETERS}.{field}: {why}")
        found = decoder_parts(model, with_logits=not self._is_chunked)  # type: ignore[arg-type]
        self._is_cut = True
        if self._is_chunked:
            self._last = model.get_output_embeddings()  # type: ignore[operator]
        return found

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
            products = 6.0 * weights
            if self.config.lora is not None:
                # No gradient of a frozen weight is computed.
                adapt(model, self.config.lora)
                adapters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
                products = 4.0 * weights + 6.0 * adapters
        attention = 12.0 * float(shape.num_hidden_layers * shape.hidden_size) * length
        return length * (products + attention)

    def tokens_per_sample(self) -> float | None:
        """Of a row of the training data, once that was read."""
        return self._tokens_per_row.get(True)

    def learned_per_sample(self) -> float | None:
        """Those that are predicted."""
        return self._targets_per_row.get(True)

    def exported(self, weights: dict[str, Tensor], dtype: str | None) -> dict[str, Tensor]:
        """The weights of a checkpoint as transformers knows them: adapters are added to what lies under them.

        Args:
            dtype: in which they are added; None: that of the pretrained weights.

        Raises:
            ConfigurationError: they are of another model.
        """
        if self.config.lora is None:
            return weights
        source = self._source if dtype is None else replace(self._source, dtype=dtype)
        model = source.model(self.shape)
        adapt(model, self.config.lora)
        load_base(model, source.weights())
        load_weights(model, weights)
        return merged(model)

    def write_beside(self, folder: Path, dtype: str | None) -> list[str]:
        """What makes a folder with exported weights one that transformers opens; names of the files."""
        return write_beside(self._source, folder, dtype)

    def adapter(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The adapters of a checkpoint by the names that they have in peft's files.

        Raises:
            ConfigurationError: there are none.
        """
        if self.config.lora is None:
            raise ConfigurationError("the job trains no adapters: its parameters have no lora")
        return as_peft(weights)

    def write_adapter_config(self, folder: Path) -> list[str]:
        """Write what peft reads beside an adapter; names of the files."""
        assert self.config.lora is not None
        peft_config(self.config.lora, self.config.pretrained).save_pretrained(str(folder))
        return ["adapter_config.json"]

    def _per_row(self, model: nn.Module) -> float:
        return self._targets_per_row[model.training]

    def _judged(self, model: nn.Module, batch: Any) -> Any:
        """For some rows at a time the loss of each token in nats, [rows, tokens], 0 where it is not learned, and
        whether it was predicted.

        Where nothing is learned of them, the logits of a batch are not in memory all at once.
        """
        tokens, targets, documents = batch["tokens"], batch["targets"], batch["documents"]
        is_learned_from = self._is_cut or torch.is_grad_enabled()
        in_chunks = self._is_chunked and not is_learned_from
        size = len(tokens)
        if not in_chunks and not is_learned_from:
            size = max(1, MAX_LOGITS // (tokens.shape[1] * self.shape.vocab_size))
        for first in range(0, len(tokens), size):
            rows = slice(first, first + size)
            layout = self.layout(model, documents[rows])
            inputs, wanted = layout.inputs(tokens[rows]), layout.laid(targets[rows])
            if in_chunks:
                losses, hits = judged(model, inputs, wanted)
            else:
                logits = self._logits(model, inputs)
                losses = F.cross_entropy(logits.transpose(1, 2), wanted, ignore_index=NO_TARGET, reduction="none")
                hits = logits.argmax(dim=-1) == wanted
            yield layout.rows(losses), layout.rows(hits)

    def _logits(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """[rows, tokens, vocabulary], float32."""
        found = model(**inputs)
        if self._last is not None:
            found = self._last(found)
        logits: Tensor = found if self._is_cut else found.logits
        return logits.float()

    def layout(self, model: nn.Module, documents: Tensor) -> Layout:
        """How the model is given a batch: without padding where that can be.

        Not in a pipeline, which passes on rows of one length, nor in compiled code, which would be made for each
        length; and not where a layer draws for each sample what it drops.
        """
        is_flat = self._stays_within and not self._is_cut and documents.device.type == "cpu"
        if is_flat and not isinstance(documents, FakeTensor) and not any(map(_needs_rows, model.modules())):
            return Unpadded(documents)
        # Each stage of a pipeline makes its own mask.
        return Padded(documents if self.config.packing else None, with_mask=not self._is_cut)


def _needs_rows(module: nn.Module) -> bool:
    is_compiled = getattr(module, "_compiled_call_impl", None) is not None
    return is_compiled or (isinstance(module, SampleDropout) and module.training and module.p > 0.0)


class Rows(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Rows that documents are packed into, or one document each."""

    def __init__(self, sources: Sequence[Documents], length: int | None) -> None:
        """
        Args:
            sources: documents of each; a row has documents of one source alone.
            length: tokens of a row; None: a document is a row.
        """
        self._documents = joined(sources)
        self._rows: list[list[int]] = []
        self.counts: list[int] = []
        """Rows of each source."""
        self.mixture: Mixture | None = None
        """What an epoch takes of each source; None: each row once."""
        first = 0
        for documents in sources:
            count = len(documents)
            rows = [[number] for number in range(count)] if length is None else packed(documents.lengths, length)
            self._rows += [[first + number for number in row] for row in rows]
            self.counts.append(len(rows))
            first += count

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
