"""The merged evaluations of a run, read once each."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.model import finite
from tandem.rundir.durable import listed, read_json_or_none
from tandem.rundir.evaluations import last_word
from tandem.rundir.layout import RunDir, step_of
from tandem.rundir.ranking import held_out
from tandem.status import CheckpointRef

MOST_FOLDERS = 1000
"""The newest; what was evaluated before is left to `tandem report`."""
SETTLED_SECONDS = 2.0
"""A folder that has not changed for so long is not looked into again until it does."""


Key = tuple[str, int]
"""A checkpoint's name and its generation: after a restart a name may come back."""


@dataclass(frozen=True)
class ShownResult:
    """What evaluators made of one checkpoint."""

    checkpoint: CheckpointRef
    metrics: dict[str, float]
    """Finite ones alone; empty if it was passed over."""
    validation: dict[str, float]
    """Those on the validation data; empty where none is held out."""
    finished_at: float | None
    skipped: bool = False


class Results:
    """All results that are there, by checkpoint. For one thread."""

    def __init__(self, rundir: RunDir) -> None:
        self._rundir = rundir
        self._settled: dict[str, int] = {}
        self.found: dict[Key, ShownResult] = {}

    def look(self, now: float) -> None:
        """Read what is new.

        Raises:
            OSError: the folder cannot be read.
        """
        folders = [path for path in listed(self._rundir.evaluations) if step_of(path.name) is not None]
        for folder in folders[-MOST_FOLDERS:]:
            try:
                changed = folder.stat().st_mtime_ns
            except FileNotFoundError:
                continue
            if self._settled.get(folder.name) == changed:
                continue
            for result in self._of(folder):
                key = result.checkpoint.name, result.checkpoint.generation
                if not result.skipped or key not in self.found:
                    self.found[key] = result
            if now - changed / 1e9 > SETTLED_SECONDS:
                self._settled[folder.name] = changed
        while len(self.found) > MOST_FOLDERS:
            oldest = min(self.found)
            del self.found[oldest]
            self._settled.pop(oldest[0], None)

    def _of(self, folder: Path) -> Iterator[ShownResult]:
        step = step_of(folder.name)
        assert step is not None
        for word in filter(None, map(last_word, listed(folder))):
            reference = CheckpointRef(name=folder.name, step=step, generation=word.generation)
            content = read_json_or_none(word.path)
            content = content if isinstance(content, dict) else {}
            if word.is_note:
                yield ShownResult(reference, {}, {}, finite(content.get("at")), skipped=True)
            elif metrics := _metrics(content.get("metrics")):
                yield ShownResult(reference, metrics, held_out(content), finite(content.get("finishedAt")))


def _metrics(value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        return {}
    numbers = {str(name): finite(entry) for name, entry in value.items()}
    return {name: number for name, number in numbers.items() if number is not None}
