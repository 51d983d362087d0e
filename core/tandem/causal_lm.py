"""What `trainer.parameters` of the task `causal-lm` may say: of a small model that is trained from the beginning, or,
with `pretrained`, of a language model that is fine-tuned.

It stands here and not beside the task so that `tandem validate` knows it without torch. Whether a package that a field
needs is installed is another question, which the task asks.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tandem.model import Model

FROM_SCRATCH = ("text", "tokenizer", "vocabulary", "tokenizerFile", "heldOut", "layers", "heads", "width", "positions")
"""Parameters that only a small model has."""
PREFERENCES = {"beta", "dpo", "grpo", "kto", "orpo", "ppo", "reward"}
"""What people write who look for preference tuning, which this task does not do."""


class SmallModel(Model):
    """A small model that is trained from the beginning."""

    text: str | None = None
    """A file, whose bytes are the text. Default: the English that ships inside Python, 0.5 MB."""
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    """`bytes`: each byte is a token. `bpe`: frequent pieces of words are, which each process finds for itself in the
    text, always the same, or takes from `tokenizerFile`. It needs the package `tokenizers`, of the extra `language`."""
    vocabulary: Annotated[int, Field(ge=257, le=2**18)] | None = None
    """`bpe` without a file only: the most tokens that are learned. Default: 1024."""
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
    """Numbers for each token between layers: a multiple of twice the heads."""
    positions: Literal["rotary", "learned"] = "rotary"
    """How the model knows the order of tokens."""
    tied: bool = True
    """Whether the last layer has the weights of the embedding."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of what each part of the model writes that is dropped in training."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.tokenizer == "bytes" and (self.vocabulary or self.tokenizer_file):
            raise ValueError("vocabulary and tokenizerFile belong to tokenizer: bpe")
        if self.vocabulary and self.tokenizer_file:
            raise ValueError("give vocabulary or tokenizerFile, not both: a file says how many tokens it has")
        if self.width % (2 * self.heads):
            raise ValueError(f"width must be a multiple of twice the {self.heads} heads")
        return self


class HubDataset(Model):
    """A data set that the library `datasets` loads: of the hub, or in its cache."""

    id: str
    """Its name on the hub."""
    config: str | None = None
    """Which of its parts, where it has several."""
    split: str = "train"
    """The split to train on."""
    revision: str | None = None
    """Branch, tag or commit. A branch or tag is read at the commit that it had when the run began."""


class Source(Model):
    """One source: what to learn from, and what to evaluate with."""

    path: str | None = None
    """A file: plain text, JSON lines or Parquet."""
    format: Literal["text", "jsonl", "parquet"] | None = None
    """Of the file. Default: by the ending of its name."""
    dataset: HubDataset | None = None
    """In place of `path`: a data set on the hub."""
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
    """The one after the last. Default: to the end."""
    test: Annotated[float, Field(gt=0, le=0.5)] | str = 0.1
    """What to evaluate with: a share of the samples, the last ones; or a file of its own; or, of a data set on the hub,
    the name of a split."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.path or (self.dataset.id if self.dataset else "")

    def check(self) -> None:
        """
        Raises:
            ValueError: fields contradict each other.
        """
        if (self.path is None) == (self.dataset is None):
            raise ValueError("give exactly one of path and dataset")
        if self.format is not None and self.path is None:
            raise ValueError("format is of a file; a data set on the hub has its own")
        if (self.prompt is None) != (self.completion is None):
            raise ValueError("give prompt and completion together")
        if sum(one is not None for one in (self.text, self.prompt, self.messages)) > 1:
            raise ValueError("give only one of text, prompt with completion, and messages")
        if self.end is not None and self.end <= self.start:
            raise ValueError("end must be greater than start")


class MixtureSource(Source):
    """One source of a mixture."""

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Its part of the rows that are trained on; the ratios of weights count. Default: by its own number of rows, so
    that each is taken once in an epoch."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.check()
        return self


class Data(Source):
    """What to learn from, and what to evaluate with."""

    mixture: Annotated[list[MixtureSource], Field(min_length=2, max_length=256)] | None = None
    """Several sources, in place of `path` or `dataset`. Each has all that is said of one here."""

    @property
    def sources(self) -> Sequence[Source]:
        """All there are."""
        return self.mixture or [self]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.mixture is None:
            self.check()
            return self
        if others := sorted(self.model_fields_set - {"mixture"}):
            raise ValueError(f"with mixture, {others[0]} is said of each of its sources")
        if len({one.weight is None for one in self.mixture}) > 1:
            raise ValueError("give a weight to each source of the mixture, or to none")
        return self


class Lora(Model):
    """Adapters beside the layers of a model whose own weights stay as they are."""

    rank: Annotated[int, Field(ge=1, le=2**14)] = 16
    """Rows of the narrow matrices."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """What an adapter adds is multiplied with `alpha / rank`. Default: twice the rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the inputs of each adapter that is dropped in training."""
    targets: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    """Names of the layers that have adapters, or the ends of names, such as `q_proj`. Default: all linear layers but
    the last one."""
    quantize_base: Literal["nf4"] | None = None
    """Round the weights of linear layers, all but the last one, to four bits (QLoRA). Default: they stay what they
    are."""


class PretrainedModel(Model):
    """A pretrained language model that is fine-tuned."""

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
    lora: Lora | None = None
    """Train adapters instead of the weights themselves."""
    kernels: Literal["liger"] | None = None
    """Compute norms, rotary positions and gated layers with the kernels of the package `liger-kernel`, on GPUs alone.
    Default: with torch's."""
    loss_chunk: Annotated[int, Field(ge=0)] | None = None
    """Tokens whose logits are in memory at once. 0: those of a whole micro-batch. Default: as many as take 256 MiB."""

    @model_validator(mode="before")
    @classmethod
    def _is_one_kind(cls, given: Any) -> Any:
        others = [name for name in FROM_SCRATCH if isinstance(given, dict) and name in given]
        if others:
            raise ValueError(
                f"{others[0]} belongs to the small model that is trained from the beginning; with pretrained, shape "
                "and tokenizer are those of the model, and the text is given by data"
            )
        return given


def parameters_of(parameters: object) -> type[SmallModel] | type[PretrainedModel]:
    """The model of what stands in `trainer.parameters`."""
    return PretrainedModel if isinstance(parameters, dict) and "pretrained" in parameters else SmallModel


def is_folder_name(pretrained: str) -> bool:
    """Whether a name can only be meant as a folder: an id on the hub is one word, or two with a slash between them."""
    return pretrained.startswith((".", "/", "~")) or pretrained.count("/") > 1 or pretrained.endswith("/")
