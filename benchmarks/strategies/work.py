"""The training job of the strategies: a small language model of bytes, the same on every side."""

from dataclasses import dataclass
from typing import Any

from tandem_trainer.causal_lm import CausalLM, CausalLMConfig

STRATEGIES = ("ddp", "fsdp")
RANKS = 2
LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM = 3e-4, 0.1, 1.0
"""Settings of AdamW and of its gradients that are usual for language models."""


@dataclass(frozen=True)
class Work:
    """A model and how it is trained."""

    width: int
    layers: int
    heads: int
    length: int
    """Tokens of a passage."""
    batch_size: int
    """Passages of a step, over all ranks."""
    tied: bool = True
    """Whether the first and the last layer share weights."""

    def __str__(self) -> str:
        shape = f"{self.layers} layers of {self.width}, batch {self.batch_size}×{self.length}"
        return f"{shape}, float32, AdamW, {RANKS} ranks"

    @property
    def parameters(self) -> dict[str, Any]:
        """`spec.trainer.parameters` of the task."""
        shape = {"width": self.width, "layers": self.layers, "heads": self.heads, "length": self.length}
        return shape | {"tied": self.tied}

    @property
    def task(self) -> CausalLM:
        """The task, as a job makes it."""
        return CausalLM(CausalLMConfig.parse(self.parameters))

    def loop(self, strategy: str, steps: int) -> dict[str, Any]:
        """`spec.trainer.loop` of a job."""
        return {
            "strategy": strategy,
            "maxSteps": steps,
            "epochs": 1_000_000,
            "globalBatchSize": self.batch_size,
            "dropLast": True,
            "gradientClipNorm": CLIP_NORM,
            "optimizer": {"name": "adamw", "learningRate": LEARNING_RATE, "weightDecay": WEIGHT_DECAY},
        }


LARGE = Work(width=640, layers=12, heads=10, length=32, batch_size=2)
"""Some 60 million parameters and a step with few activations, so that the state dominates the memory."""
SMALL = Work(width=256, layers=4, heads=4, length=64, batch_size=8)
"""Some 3 million parameters, with a step of about 0.1 s of a core."""
PIPELINED = Work(width=384, layers=8, heads=6, length=256, batch_size=16, tied=False)
"""Layers that divide into equal stages, and micro-batches of 1,024 tokens or more: a pass through two layers takes at
least 0.1 s, far longer than the few milliseconds in which gloo delivers its result."""
