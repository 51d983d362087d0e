"""What a side has trained on, a line a step, as all but Tandem write it. Tandem's training log says the same."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any


@dataclass(frozen=True)
class Step:
    """One rank's part of a step."""

    step: int
    """Steps completed with it, from 1."""
    at: float
    """When it was complete, seconds since the epoch."""
    loss: float
    """Of all micro-batches together."""
    documents: list[str]
    """Digests of what it was trained on."""
    width: int
    """Tokens of its batches, with padding."""


@dataclass(frozen=True)
class Score:
    """An evaluation on what is held out."""

    step: int
    at: float
    """When it was known."""
    loss: float
    """Nats for each token."""


@dataclass(frozen=True)
class Resumed:
    """What a kill cost."""

    lost: int
    """Documents that the model never learned from."""
    repeated: int
    again: int
    """Steps that were computed again, since the last state that was saved."""
    first: float
    """Seconds from the kill to the end of the first step after it."""
    seconds: float
    """From the kill to the end of the first step that had not been taken before."""

    def __str__(self) -> str:
        data = f"{self.lost} documents lost, {self.repeated} repeated, {self.again} steps computed again"
        return f"{data}, {self.first:.1f} s to the next step, {self.seconds:.1f} s to the next new one"


class Record:
    """Writes lines. Each is in the file before the next step begins, for a rank that is killed writes no more."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._documents: list[str] = []
        self._width, self._loss = 0, 0.0

    def saw(self, documents: Sequence[str], width: int, loss: float) -> None:
        """A micro-batch was learned from."""
        self._documents += documents
        self._width += width
        self._loss += loss

    def stepped(self, step: int) -> None:
        """The optimizer has taken its step."""
        self._write(step=step, at=time(), loss=self._loss, documents=self._documents, width=self._width)
        self._documents, self._width, self._loss = [], 0, 0.0

    def scored(self, step: int, loss: float) -> None:
        """The held-out documents were evaluated."""
        self._write(kind="score", step=step, at=time(), loss=loss)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._file.write(json.dumps(fields) + "\n")


def read(path: Path) -> tuple[list[Step], list[Score]]:
    """What was written so far; a line that is being written is left out."""
    text = path.read_text() if path.exists() else ""
    steps, scores = [], []
    for line in text[: text.rfind("\n") + 1].splitlines():
        fields = json.loads(line)
        if fields.pop("kind", "") == "score":
            scores.append(Score(**fields))
        else:
            steps.append(Step(**fields))
    return steps, scores
