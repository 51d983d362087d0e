"""The parameters of the task `causal-lm` (`trainer.parameters`): a small model that is trained from scratch, or, with
`pretrained`, a language model that is fine-tuned.

They are in core and not beside the task so that `tandem validate` needs no torch. The task checks whether the packages
that a field needs are installed.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tandem.model import Model

FROM_SCRATCH = (
    "text",
    "shards",
    "tokenizer",
    "vocabulary",
    "tokenizerFile",
    "heldOut",
    "layers",
    "heads",
    "width",
    "positions",
)
"""Parameters of a small model only."""
PREFERENCES = {"beta", "dpo", "grpo", "kto", "orpo", "ppo", "reward"}
"""Names of preference tuning methods, which this task does not do."""


class TokenShards(Model):
    """Tokens in shards, as litdata or MosaicML's streaming writes them."""

    train: Annotated[str, Field(min_length=1)]
    """Training data: a folder, or the URL of a bucket (`s3://bucket/prefix`, `gs://…`, `az://…`), with an
    `index.json`."""
    test: Annotated[str, Field(min_length=1)]
    """Evaluation data, likewise."""
    column: str = "tokens"
    """MosaicML's format only: column of the tokens."""
    window: Annotated[int, Field(ge=1, le=2**16)] = 8
    """Number of shards whose passages are shuffled together."""
    cache: str | None = None
    """Folder for shards of a bucket on each node. Default: in the temporary folder."""
    cache_bytes: Annotated[int, Field(ge=1)] | None = None
    """Maximum size of that folder for training data. Default: three windows of the largest shard, which is the
    minimum."""


class SmallModel(Model):
    """A small model that is trained from scratch."""

    text: str | None = None
    """A file, whose bytes are the text. Default: the English that ships inside Python, 0.5 MB."""
    shards: TokenShards | None = None
    """Tokens in shards, instead of `text`. Each passage has `length` + 1 of them."""
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    """`bytes`: each byte is a token. `bpe`: frequent pieces of words are tokens. Each process finds the same ones in
    the text, or takes them from `tokenizerFile`. It needs the package `tokenizers`, of the extra `language`."""
    vocabulary: Annotated[int, Field(ge=257, le=2**18)] | None = None
    """`bpe` without a file only: maximum number of tokens to learn. Default: 1024."""
    tokenizer_file: str | None = None
    """`bpe` only: a `tokenizer.json` of a byte-level BPE."""
    held_out: Annotated[float, Field(gt=0, le=0.5)] = 0.1
    """Share of the passages to evaluate with, the last ones of the text."""
    length: Annotated[int, Field(ge=8, le=8192)] = 128
    """Tokens of a passage."""
    layers: Annotated[int, Field(ge=1, le=128)] = 4
    """Layers of the model."""
    heads: Annotated[int, Field(ge=1, le=128)] = 4
    """Heads of attention in each layer."""
    width: Annotated[int, Field(ge=8, le=16384)] = 128
    """Embedding size: a multiple of twice the heads."""
    positions: Literal["rotary", "learned"] = "rotary"
    """Position encoding."""
    tied: bool = True
    """Whether the last layer shares its weights with the embedding."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability in training."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.tokenizer == "bytes" and (self.vocabulary or self.tokenizer_file):
            raise ValueError("vocabulary and tokenizerFile belong to tokenizer: bpe")
        if self.vocabulary and self.tokenizer_file:
            raise ValueError("give vocabulary or tokenizerFile, not both: a file says how many tokens it has")
        if self.shards is not None:
            if misplaced := sorted(self.model_fields_set & {"text", "held_out", "vocabulary"}):
                name = {"held_out": "heldOut"}.get(misplaced[0], misplaced[0])
                raise ValueError(f"{name} belongs to a text; with shards, tokens are made and divided already")
            if self.tokenizer == "bpe" and self.tokenizer_file is None:
                raise ValueError("with shards, tokenizer: bpe needs the tokenizerFile that made the tokens")
        if self.width % (2 * self.heads):
            raise ValueError(f"width must be a multiple of twice the {self.heads} heads")
        return self


class HubDataset(Model):
    """A data set that the library `datasets` loads, from the hub or from its cache."""

    id: str
    """Its name on the hub."""
    config: str | None = None
    """Configuration of the data set, if it has several."""
    split: str = "train"
    """The split to train on."""
    revision: str | None = None
    """Branch, tag or commit. A branch or tag is read at its commit when the run began."""


class TextSource(Model):
    """One source of training and evaluation data."""

    path: str | None = None
    """A file: plain text, JSON lines or Parquet."""
    format: Literal["text", "jsonl", "parquet"] | None = None
    """Format of the file. Default: by its suffix."""
    dataset: HubDataset | None = None
    """A data set on the hub, instead of `path`."""
    text: str | None = None
    """Column of whole texts, all of whose tokens are learned. Default: `text`, if there is one."""
    prompt: str | None = None
    """Column of prompts, which are not learned. Default: `prompt`."""
    completion: str | None = None
    """Column of completions, which are. Default: `completion`."""
    messages: str | None = None
    """Column of conversations, lists of messages with `role` and `content`, of which the assistant's are learned.
    Default: `messages`."""
    start: Annotated[int, Field(ge=0)] = 0
    """First sample of the source that is used."""
    end: Annotated[int, Field(ge=1)] | None = None
    """Sample after the last one that is used. Default: the end of the source."""
    test: Annotated[float, Field(gt=0, le=0.5)] | str = 0.1
    """Evaluation data: a share of the samples, the last ones; or a file of its own; or, for a data set on the hub, the
    name of a split."""

    @property
    def name(self) -> str:
        """Name of the source in messages."""
        return self.path or (self.dataset.id if self.dataset else "")

    def check(self) -> None:
        """Validate combinations of fields.

        Raises:
            ValueError: fields contradict each other.
        """
        if (self.path is None) == (self.dataset is None):
            raise ValueError("give exactly one of path and dataset")
        if self.format is not None and self.path is None:
            raise ValueError("format is of a file; a data set on the hub has its own")
        if (self.prompt is None) != (self.completion is None):
            raise ValueError("give prompt and completion together")
        if sum(column is not None for column in (self.text, self.prompt, self.messages)) > 1:
            raise ValueError("give only one of text, prompt with completion, and messages")
        if self.end is not None and self.end <= self.start:
            raise ValueError("end must be greater than start")


class MixtureSource(TextSource):
    """One source of a mixture."""

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Share of the rows that are trained on, relative to the other weights. Default: its number of rows, so that each
    row is used once in an epoch."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.check()
        return self


class TextData(TextSource):
    """Training and evaluation data: one source, or a mixture of several."""

    mixture: Annotated[list[MixtureSource], Field(min_length=2, max_length=256)] | None = None
    """Several sources, instead of `path` or `dataset`. Each has the fields of a single source."""

    @property
    def sources(self) -> Sequence[TextSource]:
        """All sources."""
        return self.mixture or [self]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.mixture is None:
            self.check()
            return self
        if misplaced := sorted(self.model_fields_set - {"mixture"}):
            raise ValueError(f"with mixture, {misplaced[0]} belongs to each of its sources")
        if len({source.weight is None for source in self.mixture}) > 1:
            raise ValueError("give a weight to each source of the mixture, or to none")
        return self


class Lora(Model):
    """Adapters beside the layers of a model whose own weights are frozen."""

    rank: Annotated[int, Field(ge=1, le=2**14)] = 16
    """Rank of the adapter matrices."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Scale of an adapter's output, which is multiplied with `alpha / rank`. Default: twice the rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the inputs of each adapter that is dropped in training."""
    targets: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    """Names, or suffixes of names, of the layers with adapters, such as `q_proj`. Default: all linear layers but the
    last one."""
    quantize_base: Literal["nf4"] | None = None
    """Quantize the weights of linear layers, all but the last one, to four bits (QLoRA). Default: no quantization."""


class PretrainedModel(Model):
    """A pretrained language model that is fine-tuned."""

    pretrained: Annotated[str, Field(min_length=1)]
    """A folder with a model as `save_pretrained` writes it, or the id of a model on the hub."""
    revision: str | None = None
    """Branch, tag or commit of the model on the hub. Default: its main branch."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the weights in training. `auto`: the model's own."""
    data: TextData | None = None
    """Training and evaluation data. Default: the English text that ships inside Python, to try it out."""
    length: Annotated[int, Field(ge=8, le=2**17)] = 1024
    """Tokens of a row: a longer text is cut into pieces, a longer conversation is cut off."""
    packing: bool = True
    """Pack several samples into a row. Otherwise each is a row of its own, padded to the longest of its batch."""
    lora: Lora | None = None
    """Train adapters instead of the weights themselves."""
    kernels: Literal["liger"] | None = None
    """Compute norms, rotary positions and gated layers with the kernels of the package `liger-kernel`, on GPUs alone.
    Default: with torch's."""
    loss_chunk: Annotated[int, Field(ge=0)] | None = None
    """Tokens whose logits are in memory at once. 0: those of a whole micro-batch. Default: as many as take 256 MiB."""

    @model_validator(mode="before")
    @classmethod
    def _is_one_kind(cls, parameters: Any) -> Any:
        misplaced = [name for name in FROM_SCRATCH if isinstance(parameters, dict) and name in parameters]
        if misplaced:
            raise ValueError(
                f"{misplaced[0]} belongs to the small model that is trained from scratch; with pretrained, shape and "
                "tokenizer are those of the model, and data gives the text"
            )
        return parameters


def parameters_of(parameters: object) -> type[SmallModel] | type[PretrainedModel]:
    """The model class of the parameters in `trainer.parameters`."""
    return PretrainedModel if isinstance(parameters, dict) and "pretrained" in parameters else SmallModel


def is_folder_name(pretrained: str) -> bool:
    """Whether a name can only be a folder: an id on the hub is one word, or two with a slash between them."""
    return pretrained.startswith((".", "/", "~")) or pretrained.count("/") > 1 or pretrained.endswith("/")
