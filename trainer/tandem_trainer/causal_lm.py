"""The task `causal-lm`: a small language model of a text.

    python -m tandem_trainer.causal_lm runs/minigpt --prompt "The import statement"

writes a text with a checkpoint of such a run.

Tokens are the bytes of the text, or pieces of words (tandem_trainer.data.tokenizer). They are cut into passages of
`length` tokens, and all but the last `heldOut` are training data. A sample is a passage, and its loss the mean over its
tokens, in nats. Without `text` it is the English documentation that ships inside Python. With `shards`, passages are
read from a data set of any size (tandem_trainer.data.sharded).
"""

import argparse
import math
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import field_validator
from safetensors.torch import load
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tandem.evaluation import GeometricMean, Mean, Value
from tandem.job.causal_lm import SmallModel, TokenShards
from tandem.job.language_evaluation import Generate
from tandem.processes.distribution import install_command
from tandem.rundir.checkpoint import WEIGHTS, Broken, Manifest, verified_bytes
from tandem.rundir.durable import is_transient
from tandem.rundir.layout import RunDir, step_of
from tandem_trainer.checkpoint.state import load_weights
from tandem_trainer.data.sharded import Sharded
from tandem_trainer.data.tokenizer import EXTRA, BytePairs, Bytes, Tokenizer, is_installed
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.language.completing import FIELD
from tandem_trainer.models.minigpt import TENSOR_PLAN, MiniGPT, Shape, flops_per_token
from tandem_trainer.task import Split, Task, task_of

PARAMETERS = "spec.trainer.parameters"
VOCABULARY = 1024
"""Default vocabulary of `bpe`: for texts of a megabyte, and models of one million weights."""


class CausalLMConfig(SmallModel):
    """Configuration in `trainer.parameters`, checked against the installed packages."""

    @field_validator("tokenizer")
    @classmethod
    def _is_there(cls, name: str) -> str:
        if name == "bpe" and not is_installed():
            raise ValueError(f"must be bytes where the package tokenizers is not installed ({install_command(EXTRA)})")
        return name


class CausalLM(Task[CausalLMConfig]):
    """Language model that predicts the next token."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the text; the same in every process.

        Raises:
            UnusableInput: a file is missing.
            ConfigurationError: the file is no tokenizer.
        """
        c = self.config
        if c.tokenizer == "bytes":
            return Bytes()
        if c.tokenizer_file is not None:
            return BytePairs.read(Path(c.tokenizer_file), f"{PARAMETERS}.tokenizerFile")
        content = self._text()
        # Trained without the held-out part, which the model is evaluated with.
        return BytePairs.trained(content[: round(len(content) * (1 - c.held_out))], c.vocabulary or VOCABULARY)

    def model(self) -> MiniGPT:
        """[N, length] → [N, length, vocabulary]."""
        c = self.config
        return MiniGPT(
            Shape(
                vocabulary=self.tokenizer.vocabulary,
                length=c.length,
                layers=c.layers,
                heads=c.heads,
                width=c.width,
                positions=c.positions,
                tied=c.tied,
                dropout=c.dropout,
            )
        )

    def data(self, split: Split) -> TensorDataset | Sharded:
        """Passages, [passages, length + 1], integers: each with the token that follows it.

        Raises:
            UnusableInput: a file is missing.
            ConfigurationError: the text is too short, or the tokenizer changes it.
        """
        if self.config.shards is not None:
            return self._sharded(self.config.shards, split)
        tokens, length = self.tokenizer.encode(self._text()), self.config.length
        count = max(0, len(tokens) - 1) // length
        first = count - max(1, round(count * self.config.held_out))
        if first < 1:
            raise ConfigurationError(
                f"{PARAMETERS}.text: {len(tokens)} {'bytes' if self.config.tokenizer == 'bytes' else 'tokens'} make "
                f"{count} passages of {length}, and two are needed, to train and to evaluate with"
            )
        passages = tokens[: count * length + 1].unfold(0, length + 1, length)
        return TensorDataset(passages[:first] if split == "train" else passages[first:])

    def _sharded(self, shards: TokenShards, split: Split) -> Sharded:
        source, vocabulary = getattr(shards, split), self.tokenizer.vocabulary
        return Sharded(
            source,
            window=shards.window,
            block=self.config.length + 1,
            cache=shards.cache,
            cache_bytes=shards.cache_bytes if split == "train" else None,
            transform=partial(_passage, source, shards.column, self.config.length + 1, vocabulary),
        )

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean over the tokens of each passage, in nats. [samples], float32."""
        logits, following = _predicted(model, batch)
        return F.cross_entropy(logits.transpose(1, 2), following, reduction="none").mean(dim=1)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Value]:
        """Compute bits per byte of the text; perplexity, per token; the share of tokens that were predicted; and the
        loss, as `loss` does."""
        logits, following = _predicted(model, batch)
        losses = F.cross_entropy(logits.transpose(1, 2), following, reduction="none")
        nats = losses.double().sum(dim=1)
        right = (logits.argmax(dim=-1) == following).sum(dim=1)
        lengths = self.tokenizer.lengths.to(following.device)[following].sum(dim=1)
        tokens = [following.shape[1]] * len(following)
        return {
            "loss": Mean.from_samples(losses.mean(dim=1)),
            "bitsPerByte": Mean.from_samples(nats / math.log(2), lengths),
            "perplexity": GeometricMean.from_samples(nats, tokens),
            "accuracy": Mean.from_samples(right, tokens),
        }

    def complete(self, model: nn.Module, prompts: Mapping[int, str], options: Generate) -> list[str]:
        """Complete prompts."""
        if options.chat:
            raise ConfigurationError(f"{FIELD}.chat: a model that is trained from the beginning has no chat template")
        assert isinstance(model, MiniGPT)
        count, temperature = options.max_tokens, options.temperature
        return [
            write(model, self.tokenizer, prompt.encode(), count, temperature, options.seed + number).decode(
                errors="replace"
            )
            for number, prompt in prompts.items()
        ]

    def tensor_plan(self, model: nn.Module, ranks: int) -> dict[str, str]:
        """Attention is split by heads."""
        if self.config.heads % ranks:
            raise ConfigurationError(f"tensorParallel: {ranks} does not divide the {self.config.heads} heads")
        return TENSOR_PLAN

    def pipeline_parts(self, model: nn.Module) -> dict[str, nn.Module]:
        """Embedding, blocks, and what predicts."""
        assert isinstance(model, MiniGPT)
        return model.parts()

    def flops_per_sample(self) -> float:
        """Operations of a training step for all tokens of a passage."""
        _ = self.tokenizer  # Made outside: no tensor of it belongs on that device.
        with torch.device("meta"):
            return flops_per_token(self.model()) * self.config.length

    def tokens_per_sample(self) -> int:
        """Tokens of a passage."""
        return self.config.length

    def _text(self) -> bytes:
        path = self.config.text
        if path is None:
            return "\n".join(topics[name] for name in sorted(topics)).encode()
        try:
            return Path(path).expanduser().read_bytes()
        except OSError as error:
            if is_transient(error):
                raise
            raise UnusableInput(f"{PARAMETERS}.text: {path} cannot be read: {error.strerror}") from error


def _passage(source: str, column: str, count: int, vocabulary: int, sample: Any) -> tuple[Tensor]:
    """Convert a sample of a data set in shards to a passage, [count], int64.

    Raises:
        UnusableInput: it is none.
    """
    if isinstance(sample, dict):
        if column not in sample:
            raise UnusableInput(f"{source} has no column {column}, only {', '.join(map(str, sample)) or 'none'}")
        sample = sample[column]
    # An array of MosaicML's is not writable, so it is copied.
    tokens = sample if isinstance(sample, Tensor) else torch.tensor(sample)
    if tokens.ndim != 1 or tokens.is_floating_point():
        raise UnusableInput(
            f"{source}: a sample is of shape {tuple(tokens.shape)}, {tokens.dtype}, and not a row of tokens"
        )
    if len(tokens) != count:
        raise UnusableInput(f"{source}: a sample has {len(tokens)} tokens; length {count - 1} needs {count}")
    tokens = tokens.long()
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        token = int(tokens.min() if tokens.min() < 0 else tokens.max())
        raise UnusableInput(
            f"{source} has a token {token}, and the tokenizer knows {vocabulary}; they do not belong together"
        )
    return (tokens,)


def _predicted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the logits, [N, length, vocabulary], float32, and their targets, [N, length], int64."""
    (passages,) = batch
    tokens = passages.long()
    logits: Tensor = model(tokens[:, :-1])
    return logits.float(), tokens[:, 1:]


def write(model: MiniGPT, tokenizer: Tokenizer, prompt: bytes, count: int, temperature: float, seed: int = 0) -> bytes:
    """Continue a text, token by token.

    Args:
        model: in evaluation mode.
        tokenizer: tokenizer that the model was trained with.
        prompt: text to continue; a line break if it is empty.
        count: number of tokens to write.
        temperature: 1 draws as the model predicts; 0 takes the most likely token.
        seed: seed of the draws.

    Returns:
        The completion, without the prompt.

    Raises:
        ConfigurationError: the tokenizer does not take the prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = tokenizer.encode(prompt or b"\n").tolist()
    prompt_length, caches, device = len(tokens), model.caches(), model.embedding.weight.device
    with torch.inference_mode():
        for _ in range(count):
            if len(tokens) <= model.shape.length:
                output = model(torch.tensor([tokens[caches[0].length :]], device=device), caches)
            else:
                # Beyond the longest sequence the positions of all tokens change with each one.
                output = model(torch.tensor([tokens[-model.shape.length :]], device=device))
            # Draws are the CPU's on any device.
            logits = output[0, -1].float().cpu()
            if temperature == 0:
                tokens.append(int(logits.argmax()))
            else:
                probabilities = (logits / temperature).softmax(dim=0)
                tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return tokenizer.decode(tokens[prompt_length:])


def main() -> None:
    """Write a text with a checkpoint."""
    parser = argparse.ArgumentParser(prog="python -m tandem_trainer.causal_lm", description="Write a text.")
    parser.add_argument("run", type=Path, help="run directory of a job with this task")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument("--count", type=int, default=400, help="tokens to write")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the most likely token")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    run_dir = RunDir(options.run)
    try:
        task = task_of(run_dir.read_job().spec.trainer)
    except (OSError, ValueError, ConfigurationError) as error:
        parser.error(f"{options.run} is not a readable run: {error}")
    if not isinstance(task, CausalLM):
        parser.error(f"{options.run} did not train a language model with this task")
    names = run_dir.checkpoint_names()
    chosen = [name for name in names if options.step in (None, step_of(name))]
    if not chosen:
        parser.error(f"{options.run} has no such checkpoint; there are {', '.join(names) or 'none'}")
    folder = run_dir.checkpoint(chosen[-1])
    try:
        weights = load(bytes(verified_bytes(folder, Manifest.load(folder).entry(WEIGHTS))))
    except (OSError, Broken) as error:
        parser.error(str(error))
    try:
        model = task.model().eval()
        load_weights(model, weights)
        prompt = options.prompt.encode(errors="surrogateescape")
        text = write(model, task.tokenizer, prompt, options.count, options.temperature, options.seed)
    except (OSError, ConfigurationError) as error:
        parser.error(str(error))
    print(options.prompt + text.decode(errors="replace"))


if __name__ == "__main__":
    # The task is created from the module of this name, whose classes are others than those of `__main__`.
    from tandem_trainer import causal_lm

    causal_lm.main()
