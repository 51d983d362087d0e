"""The task `causal-lm` with `pretrained`: fine-tunes a language model of transformers (docs/language-models.md).

The loss of a row is the sum over its target tokens, divided by the mean number of such tokens in a row of the data. So
the mean over rows, which the loop computes, weighs every token of an epoch equally, on any number of ranks and in any
micro-batch; over all rows it is the mean over tokens (docs/decisions/0041-packing.md).
"""

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
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

from tandem.evaluation import GeometricMean, Mean, Value
from tandem.job.causal_lm import HubDataset, Lora, PretrainedModel, TextSource
from tandem.job.language_evaluation import Generate
from tandem.processes.distribution import install_command
from tandem.rundir.lineage import DatasetCommit, Origin
from tandem_trainer.checkpoint.state import load_weights
from tandem_trainer.data.mixture import Mixture
from tandem_trainer.data.tokenizer import EXTRA
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.language import reading
from tandem_trainer.language.attention import stays_within
from tandem_trainer.language.completing import complete
from tandem_trainer.language.decoder import decoder_parts
from tandem_trainer.language.head import MAX_LOGITS, NO_TARGET, Head, enable_chunked_loss, token_losses
from tandem_trainer.language.kernels import liger
from tandem_trainer.language.lora import adapt, as_peft, has_base, load_base, merged, peft_config, tensor_plan
from tandem_trainer.language.packing import BatchLayout, Padded, Unpadded, pack_rows
from tandem_trainer.language.pretrained import Pretrained, is_installed, write_beside
from tandem_trainer.language.reading import SampleRow, commit_of, format_of, whole_text
from tandem_trainer.language.token_bytes import token_bytes
from tandem_trainer.language.tokenized import (
    Columns,
    Documents,
    Encoder,
    Segment,
    check,
    columns_of,
    concatenate,
    refuse_empty,
    segments_of,
)
from tandem_trainer.models.dropout import SampleDropout
from tandem_trainer.task import Split, Task

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

PARAMETERS = "spec.trainer.parameters"
MASKABLE_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers in which a mask separates documents."""


class FineTuningConfig(PretrainedModel):
    """Configuration in `trainer.parameters` with `pretrained`, checked against the installed packages."""

    @field_validator("pretrained")
    @classmethod
    def _is_there(cls, name: str) -> str:
        if not is_installed():
            raise ValueError(f"needs the package transformers, which is not installed ({install_command(EXTRA)})")
        return name

    @field_validator("lora")
    @classmethod
    def _has_peft(cls, lora: Lora | None) -> Lora | None:
        if lora is not None and find_spec("peft") is None:
            raise ValueError(f"needs the package peft, which is not installed ({install_command(EXTRA)})")
        return lora


def sample_problems(config: FineTuningConfig, max_samples: int) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Check the first samples of each local file; yields fields under `data` that cannot be learned from, and the
    reasons.

    Args:
        config: configuration of the task.
        max_samples: maximum samples of a file that are read.
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
                rows = list(reading.read_rows(source, path, start, start + max_samples))
                columns = columns_of(rows[0], *_named_columns(source)) if rows else Columns()
                for row in rows:
                    check(row, columns)
            except ConfigurationError as error:
                yield (*inner, field), str(error)


def _named_columns(data: TextSource) -> tuple[str | None, str | None, str | None, str | None]:
    """Return the columns that the job names."""
    return data.text, data.prompt, data.completion, data.messages


def stage_problems(config: FineTuningConfig) -> Iterator[tuple[str, str]]:
    """Check a configuration for strategy: pipeline; yields fields that do not go together with it, and the reasons."""
    if not config.packing:
        yield "packing", "strategy: pipeline needs rows of one length; set it to true"


class FineTuning(Task[FineTuningConfig]):
    """Fine-tuning of a pretrained causal language model."""

    def __init__(self, config: FineTuningConfig) -> None:
        super().__init__(config)
        self._source = Pretrained(config.pretrained, config.revision, config.dtype)
        # Means of the training data (True) and of the test data (False).
        self._targets_per_row: dict[bool, float] = {}
        self._tokens_per_row: dict[bool, float] = {}
        self._filtered_samples = ""
        self._is_chunked = False
        self._is_pipelined = False
        """Whether the model is called part by part, in a pipeline."""
        self._stays_within = False
        """Whether the model stays within documents without a mask; not checked with a GPU."""
        self._last_layer: Head | None = None
        """Last layer of the model, if the last part of a pipeline returns its inputs."""
        self._commits: dict[tuple[str, str | None], str] = {}
        """Commits of data sets of the hub, by id and the revision that the job names."""

    @cached_property
    def shape(self) -> "PretrainedConfig":
        """The model's configuration.

        Raises:
            ConfigurationError: the rows do not fit the model.
        """
        # Everything else that this process reads is of the same commit.
        self._source = self._source.pinned()
        config, length = self._source.config(), self.config.length
        max_positions = getattr(config, "max_position_embeddings", None)
        if max_positions is not None and length > max_positions:
            raise ConfigurationError(
                f"{PARAMETERS}.length: {length} is more than the {max_positions} positions of the model"
            )
        if self.config.packing and (problem := self._packing_problem(config)):
            raise ConfigurationError(f"{PARAMETERS}.packing: {problem}")
        return config

    def _packing_problem(self, shape: "PretrainedConfig") -> str:
        """Return the reason why documents in one row cannot be separated for such a model; empty if they can."""
        unmaskable = sorted(set(getattr(shape, "layer_types", None) or ()) - MASKABLE_LAYERS)
        if unmaskable:
            return f"a mask does not separate documents in layers of {unmaskable[0]}; set packing: false"
        window, length = getattr(shape, "sliding_window", None), self.config.length
        if window is not None and getattr(shape, "use_sliding_window", True) and window < length:
            return (
                f"the model sees {window} tokens at most, fewer than length {length}; set packing: false, or length: "
                f"{window}"
            )
        return ""

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer."""
        _ = self.shape  # Pins the commit.
        return self._source.tokenizer()

    def model(self) -> "PreTrainedModel":
        """Build the model without weights, which `initialize` or a checkpoint loads."""
        model = self._source.model(self.shape)
        if self.config.packing and model._is_stateful:
            raise ConfigurationError(
                f"{PARAMETERS}.packing: a mask does not separate documents in {type(model).__name__}; set packing: "
                "false"
            )
        is_candidate = (
            not torch.cuda.is_available() and not model._is_stateful and not self._packing_problem(self.shape)
        )
        self._stays_within = is_candidate and stays_within(model)
        if self.config.lora is not None:
            adapt(model, self.config.lora)
        if self.config.loss_chunk != 0:
            problem = enable_chunked_loss(model, self.config.loss_chunk)
            self._is_chunked = not problem
            if problem and os.environ.get("RANK", "0") == "0":
                log.warning("setting=lossChunk ignored for a %s: %s", type(model).__name__, problem)
        return model

    def initialize(self, model: nn.Module) -> None:
        """Load the pretrained weights. Adapters are initialized so that they change nothing yet."""
        if self.config.lora is None:
            self._source.load(model)
        else:
            self.load_frozen(model)

    def origin(self) -> Origin:
        """Return the folder, or the id on the hub with the commit."""
        return self._source.origin()

    def pin(self, origin: Origin) -> None:
        """Use the commit of the run, where the branch has another one meanwhile."""
        if origin.revision is not None and origin.path == self.config.pretrained:
            self._source = replace(self._source, revision=origin.revision)

    def dataset_commits(self) -> list[DatasetCommit]:
        """Return the commits of data sets of the hub."""
        return [
            DatasetCommit(id=name, revision=revision, commit=commit)
            for (name, revision), commit in self._commits.items()
        ]

    def pin_datasets(self, commits: Sequence[DatasetCommit]) -> None:
        """Use the commits of the run, where branches have others meanwhile."""
        self._commits |= {(dataset.id, dataset.revision): dataset.commit for dataset in commits}

    def _pinned(self, dataset: HubDataset) -> HubDataset:
        """Return a data set at the commit that the run reads."""
        key = dataset.id, dataset.revision
        if key not in self._commits and (commit := commit_of(dataset)) is not None:
            self._commits[key] = commit
        return dataset.model_copy(update={"revision": self._commits.get(key, dataset.revision)})

    def settle(self, model: nn.Module) -> None:
        """Install kernels for a GPU."""
        if self.config.kernels is not None:
            liger(model, self.shape.model_type)

    def load_frozen(self, model: nn.Module) -> None:
        """Load the pretrained weights, if adapters are trained beside them."""
        if self.config.lora is not None and not has_base(model):
            load_base(model, self._source.weights())

    def data(self, split: Split) -> "DocumentRows":
        """Return rows of documents.

        Raises:
            UnusableInput: a file cannot be read, or no documents are left.
            ConfigurationError: a library is missing, or the chat template cannot be used.
        """
        purpose = "train" if split == "train" else "evaluate"
        sources = self.config.data.sources if self.config.data else [None]
        names = [source.name if source and len(sources) > 1 else "" for source in sources]
        parts, stats_by_source = [], []
        for source, name in zip(sources, names, strict=True):
            encoder = Encoder(self.tokenizer, self.config.length)
            documents = self._documents(source, split, encoder)
            refuse_empty(documents, encoder.stats, purpose, name)
            if (largest := int(documents.tokens.max())) >= self.shape.vocab_size:
                raise ConfigurationError(
                    f"{PARAMETERS}.pretrained: the tokenizer has a token {largest}, and the model knows only "
                    f"{self.shape.vocab_size}; they do not belong together"
                )
            parts.append(documents)
            stats_by_source.append(encoder.stats)
        dataset = DocumentRows(parts, self.config.length if self.config.packing else None)
        if split == "train":
            dataset.mixture = self._mixture(dataset.counts)
            by_source = zip(names, (stats.filtered() for stats in stats_by_source), strict=True)
            self._filtered_samples = "; ".join(f"{name}: {text}" if name else text for name, text in by_source if text)
        epoch_counts = dataset.mixture.taken if dataset.mixture else dataset.counts
        # Means of a row as it is drawn: a source with a larger weight counts for more.
        targets = [documents.targets / count for documents, count in zip(parts, dataset.counts, strict=True)]
        self._targets_per_row[split == "train"] = float(np.average(targets, weights=epoch_counts))
        tokens_per_row = [len(documents.tokens) / count for documents, count in zip(parts, dataset.counts, strict=True)]
        self._tokens_per_row[split == "train"] = float(np.average(tokens_per_row, weights=epoch_counts))
        if split == "train" and os.environ.get("RANK", "0") == "0":
            for name, documents, stats, rows, epoch in zip(
                names, parts, stats_by_source, dataset.counts, epoch_counts, strict=True
            ):
                tokens = len(documents.tokens)
                padding = rows * self.config.length - tokens if self.config.packing else 0
                log.info(
                    "%sdocuments=%d rows=%d tokens=%d learned=%d padding=%d truncated=%d cut_off=%d "
                    "nothing_to_learn=%d%s",
                    f"source={name} " if name else "",
                    *(len(documents), rows, tokens, documents.targets, padding),
                    *(stats.truncated, stats.tokens, stats.empty),
                    f" rows_per_epoch={epoch}" if name else "",
                )
        return dataset

    def _mixture(self, counts: Sequence[int]) -> Mixture | None:
        """Return the mixture of sources with these numbers of rows; None: each row once."""
        sources = (self.config.data and self.config.data.mixture) or []
        weights = [source.weight for source in sources if source.weight is not None]
        if not weights:
            return None
        try:
            return Mixture(counts, weights)
        except ValueError as error:
            raise ConfigurationError(f"{PARAMETERS}.data.mixture: {error}") from error

    def _documents(self, data: TextSource | None, split: Split, encoder: Encoder) -> Documents:
        if data is None:
            texts = [Segment(topics[name], True, has_start=True, has_end=True) for name in sorted(topics)]
            return _split_share(encoder.documents(([part], True) for part in texts), split, 0.1)
        source = data.test if split == "test" and isinstance(data.test, str) else None
        start, end = (0, None) if source else (data.start, data.end)
        share = data.test if isinstance(data.test, float) else None
        path = source or data.path
        if data.dataset is None and path is not None and format_of(path, data.format) == "text":
            # The file is one text, whose pieces are the samples.
            documents = encoder.documents([([Segment(whole_text(path), True, has_start=True)], True)])
            count = len(documents)
            documents = documents.select(min(start, count), min(count if end is None else end, count))
            return documents if share is None else _split_share(documents, split, share)
        if data.dataset is not None:
            data = data.model_copy(update={"dataset": self._pinned(data.dataset)})
        rows = list(reading.read_rows(data, source, start, end))
        if share is not None:
            first = len(rows) - max(1, round(len(rows) * share))
            rows = rows[:first] if split == "train" else rows[max(0, first) :]
        return encoder.documents(self._segments(data, rows))

    def _segments(self, data: TextSource, rows: list[SampleRow]) -> Any:
        if not rows:
            return
        columns = columns_of(rows[0], *_named_columns(data))
        for row in rows:
            yield segments_of(row, columns, self.tokenizer), columns.text is not None

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        """Collate rows to [samples, tokens] each: `tokens`; `targets`, the next token, or NO_TARGET where it is not
        learned; and `documents`, the number of the document in its row that a token belongs to. Padding is on the
        right."""
        width = self.config.length if self.config.packing else max(len(tokens) for tokens, _, _ in samples)
        batch = {
            "tokens": torch.zeros(len(samples), width, dtype=torch.int64),
            "targets": torch.full((len(samples), width), NO_TARGET),
            "documents": torch.zeros(len(samples), width, dtype=torch.int64),
        }
        for row, sample in enumerate(samples):
            for name, values in zip(batch, sample, strict=True):
                batch[name][row, : len(values)] = values
        return batch

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Compute the sum over the target tokens of each sample, in nats, divided by their mean number. [samples],
        float32."""
        return torch.cat([losses.sum(dim=1) for losses, _ in self._token_losses(model, batch)]) / self._mean_targets(
            model
        )

    def loss_sum(self, model: nn.Module, batch: Any, samples: int) -> Tensor:
        """Compute the sum of the losses; chunk by chunk in training."""
        if self._is_pipelined or not self._is_chunked or not torch.is_grad_enabled():
            return super().loss_sum(model, batch, samples)
        layout = self.layout(model, batch["documents"])
        losses: Tensor = model(**layout.inputs(batch["tokens"]), targets=layout.arrange(batch["targets"]))
        return losses.sum() / self._mean_targets(model)

    def stage_loss(self, model: nn.Module, batch: Any, samples: int, distinct_samples: int, scale: float) -> Tensor:
        """Compute the loss of a stage, chunk by chunk."""
        if self._last_layer is None:
            return super().stage_loss(model, batch, samples, distinct_samples, scale)
        targets = batch["targets"].clone()
        targets[distinct_samples:] = NO_TARGET
        hidden = model(**self.layout(model, batch["documents"]).inputs(batch["tokens"]))
        loss: Tensor = self._last_layer.scaled_loss_sum(hidden, targets, scale / self._mean_targets(model))
        return loss

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Value]:
        """Compute perplexity, the share of predicted tokens and bits per byte of text, over the target tokens. And the
        loss, as `loss` does."""
        chunks = [(losses.double().sum(dim=1), hits.sum(dim=1)) for losses, hits in self._token_losses(model, batch)]
        nats, predicted = (torch.cat(rows) for rows in zip(*chunks, strict=True))
        targets = batch["targets"].cpu()
        counts = (targets != NO_TARGET).sum(dim=1)
        values: dict[str, Value] = {
            "loss": Mean.from_samples(nats / self._mean_targets(model)),
            "perplexity": GeometricMean.from_samples(nats, counts),
            "accuracy": Mean.from_samples(predicted, counts),
        }
        if self._token_bytes is not None:
            lengths = torch.where(targets == NO_TARGET, 0, self._token_bytes[targets.clamp(min=0)]).sum(dim=1)
            values["bitsPerByte"] = Mean.from_samples(nats / math.log(2), lengths)
        return values

    @cached_property
    def _token_bytes(self) -> Tensor | None:
        """Bytes of each token, [vocabulary]; None: the tokenizer does not tell."""
        return token_bytes(self.tokenizer, self.shape.vocab_size)

    @property
    def reports_bytes(self) -> bool:
        """Whether the metrics include bits per byte."""
        return self._token_bytes is not None

    def complete(self, model: nn.Module, prompts: Mapping[int, str], options: Generate) -> list[str]:
        """Complete prompts."""
        return complete(model, self.tokenizer, self._end_tokens, prompts, options)

    @cached_property
    def _end_tokens(self) -> list[int]:
        """Tokens that end a completion."""
        configured = getattr(self._source.generation(), "eos_token_id", None)
        tokens = [configured] if isinstance(configured, int) else list(configured or [])
        end = self.tokenizer.eos_token_id
        return list(dict.fromkeys([*tokens, *([end] if end is not None else [])]))

    def tensor_plan(self, model: nn.Module, ranks: int) -> dict[str, str]:
        """Return the model's own plan, for the matrices inside its blocks."""
        heads = {getattr(self.shape, name, None) for name in ("num_attention_heads", "num_key_value_heads")} - {None}
        for count in heads:
            assert count is not None
            if count % ranks:
                raise ConfigurationError(f"tensorParallel: {ranks} does not divide the {count} heads of the model")
        plan = super().tensor_plan(model, ranks)
        return {**plan} if self.config.lora is None else tensor_plan(model, self.config.lora, plan, ranks)

    def pipeline_parts(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return embedding, layers, and the prediction. From then on the task computes losses for a pipeline."""
        for field, reason in stage_problems(self.config):
            raise ConfigurationError(f"{PARAMETERS}.{field}: {reason}")
        parts = decoder_parts(model, with_logits=not self._is_chunked)  # type: ignore[arg-type]
        self._is_pipelined = True
        if self._is_chunked:
            self._last_layer = model.get_output_embeddings()  # type: ignore[operator]
        return parts

    def flops_per_sample(self) -> float | None:
        """Operations of a training step for a whole row; None if rows are not packed."""
        if not self.config.packing:
            return None
        shape, length = self.shape, self.config.length
        with torch.device("meta"):
            model = self._source.model(shape)
            weights = sum(parameter.numel() for parameter in model.parameters())
            # An embedding that does not share its table with the last layer only looks it up.
            weights -= 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size
            products = 6.0 * weights
            if self.config.lora is not None:
                # Frozen weights need no gradient.
                adapt(model, self.config.lora)
                adapters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
                products = 4.0 * weights + 6.0 * adapters
        attention = 12.0 * float(shape.num_hidden_layers * shape.hidden_size) * length
        return length * (products + attention)

    def tokens_per_sample(self) -> float | None:
        """Mean tokens of a row of the training data, once the data is read."""
        return self._tokens_per_row.get(True)

    def learned_per_sample(self) -> float | None:
        """Mean target tokens of a row."""
        return self._targets_per_row.get(True)

    def filtered_samples(self) -> str:
        """Samples of the training data that nothing is learned from, by source, once the data is read."""
        return self._filtered_samples

    def exported(self, weights: dict[str, Tensor], dtype: str | None) -> dict[str, Tensor]:
        """Convert the weights of a checkpoint to transformers' form: adapters are merged into the base.

        Args:
            weights: weights of the checkpoint.
            dtype: dtype of the merge; None: that of the pretrained weights.

        Raises:
            ConfigurationError: the weights are of another model.
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
        """Write the files with which transformers opens a folder of exported weights; returns their names."""
        return write_beside(self._source, folder, dtype)

    def adapter(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the adapters of a checkpoint by their names in peft's files.

        Raises:
            ConfigurationError: the job trains no adapters.
        """
        if self.config.lora is None:
            raise ConfigurationError("the job trains no adapters: its parameters have no lora")
        return as_peft(weights)

    def write_adapter_config(self, folder: Path) -> list[str]:
        """Write the configuration that peft reads beside an adapter; returns the names of the files."""
        assert self.config.lora is not None
        peft_config(self.config.lora, self.config.pretrained).save_pretrained(str(folder))
        return ["adapter_config.json"]

    def _mean_targets(self, model: nn.Module) -> float:
        return self._targets_per_row[model.training]

    def _token_losses(self, model: nn.Module, batch: Any) -> Any:
        """Iterate over chunks of rows: the loss of each token in nats, [rows, tokens], 0 where it is not learned, and
        whether it was predicted.

        In evaluation, the logits of a batch are not in memory all at once.
        """
        tokens, targets, documents = batch["tokens"], batch["targets"], batch["documents"]
        is_training = self._is_pipelined or torch.is_grad_enabled()
        in_chunks = self._is_chunked and not is_training
        size = len(tokens)
        if not in_chunks and not is_training:
            size = max(1, MAX_LOGITS // (tokens.shape[1] * self.shape.vocab_size))
        for first in range(0, len(tokens), size):
            rows = slice(first, first + size)
            layout = self.layout(model, documents[rows])
            inputs, arranged_targets = layout.inputs(tokens[rows]), layout.arrange(targets[rows])
            if in_chunks:
                losses, hits = token_losses(model, inputs, arranged_targets)
            else:
                logits = self._compute_logits(model, inputs)
                losses = F.cross_entropy(
                    logits.transpose(1, 2), arranged_targets, ignore_index=NO_TARGET, reduction="none"
                )
                hits = logits.argmax(dim=-1) == arranged_targets
            yield layout.restore(losses), layout.restore(hits)

    def _compute_logits(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Compute the logits. [rows, tokens, vocabulary], float32."""
        output = model(**inputs)
        if self._last_layer is not None:
            output = self._last_layer(output)
        logits: Tensor = output if self._is_pipelined else output.logits
        return logits.float()

    def layout(self, model: nn.Module, documents: Tensor) -> BatchLayout:
        """Return the layout in which the model gets a batch: without padding if possible.

        Padding stays in a pipeline, which passes on rows of one length, in compiled code, which would be compiled for
        each length, and where dropout draws by sample.
        """
        is_flat = self._stays_within and not self._is_pipelined and documents.device.type == "cpu"
        if is_flat and not isinstance(documents, FakeTensor) and not any(map(_needs_rows, model.modules())):
            return Unpadded(documents)
        # Each stage of a pipeline computes its own mask.
        return Padded(documents if self.config.packing else None, with_mask=not self._is_pipelined)


def _needs_rows(module: nn.Module) -> bool:
    is_compiled = getattr(module, "_compiled_call_impl", None) is not None
    return is_compiled or (isinstance(module, SampleDropout) and module.training and module.p > 0.0)


class DocumentRows(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Data set of rows into which documents are packed, or of one document each."""

    def __init__(self, sources: Sequence[Documents], length: int | None) -> None:
        """
        Args:
            sources: documents of each source; a row has documents of one source only.
            length: tokens of a row; None: a document is a row.
        """
        self._documents = concatenate(sources)
        self._rows: list[list[int]] = []
        self.counts: list[int] = []
        """Number of rows of each source."""
        self.mixture: Mixture | None = None
        """Rows that an epoch takes of each source; None: each row once."""
        first = 0
        for documents in sources:
            count = len(documents)
            rows = [[number] for number in range(count)] if length is None else pack_rows(documents.lengths, length)
            self._rows += [[first + number for number in row] for row in rows]
            self.counts.append(len(rows))
            first += count

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, targets and documents of a row, [tokens] each; documents are numbered from 1."""
        tokens, targets, owners = [], [], []
        for owner, document in enumerate(self._rows[number], start=1):
            row_tokens, is_learned = (torch.from_numpy(part.copy()) for part in self._documents[document])
            following = torch.full((len(row_tokens),), NO_TARGET)
            following[:-1] = torch.where(is_learned[1:], row_tokens[1:].long(), NO_TARGET)
            tokens.append(row_tokens.long())
            targets.append(following)
            owners.append(torch.full((len(row_tokens),), owner))
        return torch.cat(tokens), torch.cat(targets), torch.cat(owners)


def _split_share(documents: Documents, split: Split, share: float) -> Documents:
    """Return the documents of a split: the last ones are for evaluation."""
    count = len(documents)
    first = max(0, count - max(1, round(count * share)))
    return documents.select(0, first) if split == "train" else documents.select(first, count)
