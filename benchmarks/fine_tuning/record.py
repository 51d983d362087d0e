"""The training record of a side, a line for each step, as all sides but Tandem write it; Tandem's training log has
the same data."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any


@dataclass(frozen=True)
class Step:
    """Part of a step that one rank took."""

    step: int
    """Number of the step, from 1."""
    at: float
    """End of the step, in seconds since the epoch."""
    loss: float
    """Loss of all micro-batches together."""
    documents: list[str]
    """Digests of the documents that it was trained on."""
    width: int
    """Tokens of its batches, with padding."""


@dataclass(frozen=True)
class Score:
    """Evaluation on the held-out documents."""

    step: int
    at: float
    """Time of the result."""
    loss: float
    """Nats for each token."""


@dataclass(frozen=True)
class Resumed:
    """Cost of a kill."""

    lost: int
    """Documents that the model never learned from."""
    repeated: int
    recomputed: int
    """Steps that were computed again, since the last saved state."""
    first: float
    """Seconds from the kill to the end of the first step after it."""
    seconds: float
    """Seconds from the kill to the end of the first step that had not been taken before."""

    def __str__(self) -> str:
        data = f"{self.lost} documents lost, {self.repeated} repeated, {self.recomputed} steps computed again"
        return f"{data}, {self.first:.1f} s to the next step, {self.seconds:.1f} s to the next new one"


class Record:
    """Writes lines, each before the next step starts, as a rank that is killed writes no more."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._documents: list[str] = []
        self._width, self._loss = 0, 0.0

    def saw(self, documents: Sequence[str], width: int, loss: float) -> None:
        """Record a micro-batch."""
        self._documents += documents
        self._width += width
        self._loss += loss

    def stepped(self, step: int) -> None:
        """Record the end of a step."""
        self._write(step=step, at=time(), loss=self._loss, documents=self._documents, width=self._width)
        self._documents, self._width, self._loss = [], 0, 0.0

    def scored(self, step: int, loss: float) -> None:
        """Record an evaluation."""
        self._write(kind="score", step=step, at=time(), loss=loss)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._file.write(json.dumps(fields) + "\n")


def read(path: Path) -> tuple[list[Step], list[Score]]:
    """Read the lines so far, without one that is incomplete."""
    text = path.read_text() if path.exists() else ""
    steps, scores = [], []
    for line in text[: text.rfind("\n") + 1].splitlines():
        fields = json.loads(line)
        if fields.pop("kind", "") == "score":
            scores.append(Score(**fields))
        else:
            steps.append(Step(**fields))
    return steps, scores
