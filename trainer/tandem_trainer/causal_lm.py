"""The task `causal-lm`: a small language model of the bytes of a text.

    python -m tandem_trainer.causal_lm runs/minigpt --prompt "The import statement"

writes a text with a checkpoint of such a run.

The text is cut into passages of `length` tokens, and all but the last `heldOut` are trained on. A sample is a passage,
and its loss the mean over its tokens, in nats. Without `text` it is the English documentation that ships inside Python.
"""

import argparse
import math
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from safetensors.torch import load
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tandem.evaluation import GeometricMean, Mean, Value
from tandem.model import Model
from tandem.rundir.checkpoint import WEIGHTS, Broken, Manifest, verified_bytes
from tandem.rundir.durable import may_pass
from tandem.rundir.layout import RunDir, step_of
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.models.minigpt import MiniGPT, Shape, flops_per_token
from tandem_trainer.task import Split, Task, task_of

BYTES = 256


class Config(Model):
    """What `trainer.parameters` may say."""

    text: str | None = None
    """A file, whose bytes are the text. Default: the English that ships inside Python, some 700 KB."""
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
    def _divides(self) -> "Config":
        if self.width % (2 * self.heads):
            raise ValueError(f"width must be a multiple of twice the {self.heads} heads")
        return self


class CausalLM(Task[Config]):
    """Predicts the byte that follows."""

    def model(self) -> MiniGPT:
        """[N, length] → [N, length, 256]."""
        c = self.config
        return MiniGPT(
            Shape(
                vocabulary=BYTES,
                length=c.length,
                layers=c.layers,
                heads=c.heads,
                width=c.width,
                positions=c.positions,
                tied=c.tied,
                dropout=c.dropout,
            )
        )

    def data(self, split: Split) -> TensorDataset:
        """Passages, [passages, length + 1], uint8: each with the byte that follows it.

        Raises:
            UnusableInput: the file is not there.
            ConfigurationError: the text is too short.
        """
        text, length = self._text(), self.config.length
        count = max(0, len(text) - 1) // length
        first = count - max(1, round(count * self.config.held_out))
        if first < 1:
            raise ConfigurationError(
                f"spec.trainer.parameters.text: {len(text)} bytes make {count} passages of {length}, and two are "
                "needed, to train and to evaluate with"
            )
        passages = text[: count * length + 1].unfold(0, length + 1, length)
        return TensorDataset(passages[:first] if split == "train" else passages[first:])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean over the tokens of each passage, in nats. [samples], float32."""
        logits, following = _predicted(model, batch)
        return F.cross_entropy(logits.transpose(1, 2), following, reduction="none").mean(dim=1)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Value]:
        """Bits for each byte, perplexity, and the share of bytes that were predicted."""
        logits, following = _predicted(model, batch)
        nats = F.cross_entropy(logits.transpose(1, 2), following, reduction="none").double().sum()
        right = (logits.argmax(dim=-1) == following).sum()
        return {
            "bitsPerByte": Mean(nats / math.log(2), following.numel()),
            "perplexity": GeometricMean(nats, following.numel()),
            "accuracy": Mean(right, following.numel()),
        }

    def flops_per_sample(self) -> float:
        """Of all tokens of a passage."""
        with torch.device("meta"):
            return flops_per_token(self.model()) * self.config.length

    def _text(self) -> Tensor:
        """[bytes], uint8."""
        given = self.config.text
        if given is None:
            content = "\n".join(topics[name] for name in sorted(topics)).encode()
        else:
            try:
                content = Path(given).expanduser().read_bytes()
            except OSError as error:
                if may_pass(error):
                    raise
                raise UnusableInput(
                    f"spec.trainer.parameters.text: {given} cannot be read: {error.strerror}"
                ) from error
        return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _predicted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Logits, [N, length, 256], float32, and the bytes that they are for, [N, length]."""
    (passages,) = batch
    tokens = passages.long()
    logits: Tensor = model(tokens[:, :-1])
    return logits.float(), tokens[:, 1:]


def write(model: MiniGPT, prompt: bytes, count: int, temperature: float, seed: int = 0) -> bytes:
    """Go on with a text, byte by byte.

    Args:
        model: in evaluation mode, on the CPU.
        prompt: what to go on from; a line break if it is empty.
        count: bytes to write.
        temperature: 1 draws as the model predicts; 0 takes what is most likely.

    Returns:
        What was written, without the prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt or b"\n")
    begin = len(tokens)
    with torch.inference_mode():
        for _ in range(count):
            seen = torch.tensor([tokens[-model.shape.length :]])
            logits = model(seen)[0, -1].float()
            if temperature == 0:
                tokens.append(int(logits.argmax()))
            else:
                odds = (logits / temperature).softmax(dim=0)
                tokens.append(int(torch.multinomial(odds, 1, generator=generator)))
    return bytes(tokens[begin:])


def main() -> None:
    """Write a text with a checkpoint."""
    parser = argparse.ArgumentParser(prog="python -m tandem_trainer.causal_lm", description="Write a text.")
    parser.add_argument("run", type=Path, help="run directory of a job with this task")
    parser.add_argument("--step", type=int, help="of the checkpoint; default: the newest")
    parser.add_argument("--prompt", default="", help="what to go on from")
    parser.add_argument("--count", type=int, default=400, help="bytes to write")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the most likely byte")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    run_dir = RunDir(options.run)
    try:
        task = task_of(run_dir.read_job().spec.trainer)
    except (OSError, ValueError, ConfigurationError) as error:
        parser.error(f"{options.run} is no run that can be read: {error}")
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
    model = task.model().eval()
    model.load_state_dict(weights)
    text = write(model, options.prompt.encode(), options.count, options.temperature, options.seed)
    print(options.prompt + text.decode(errors="replace"))


if __name__ == "__main__":
    # The task is made from the module of this name, whose classes are others than those of `__main__`.
    from tandem_trainer import causal_lm

    causal_lm.main()
