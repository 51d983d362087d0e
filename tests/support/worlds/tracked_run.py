"""A run directory that a test fills as ranks and evaluators would, for whoever follows it from outside."""

from pathlib import Path
from typing import Any

from tandem.rundir.checkpoint import WEIGHTS
from tandem.rundir.durable import replace_json
from tandem.wire.status import CheckpointRef
from tests.support import checkpoints, manifests
from tests.support.lines import Lines

BEGAN = 1_000_000.0
"""When the run began, seconds since the epoch. A step takes a second."""


class TrackedRun:
    def __init__(self, path: Path, **spec: Any) -> None:
        self.rundir = manifests.run_directory(path, manifests.job(**{"tracking": {"mlflow": {}}, **spec}))
        self.job = self.rundir.read_job()

    def begin(self, generation: int, resumed: CheckpointRef | None = None, at: float = 0.0, **start: Any) -> None:
        """A generation of a task begins, so many seconds after the run did."""
        checkpoints.begin(self.rundir, generation, resumed, started_at=BEGAN + at)
        self.log(generation, {"kind": "start", "step": resumed.step if resumed else 0, "time": BEGAN + at})

    def log(self, generation: int, *records: dict[str, Any]) -> None:
        """Lines of its training log."""
        lines = Lines(self.rundir.training_log(generation))
        lines.append(*records)
        lines.close()

    def steps(self, generation: int, first: int, last: int, at: float = 0.0) -> None:
        """Steps, each with a loss that says which generation took it."""
        self.log(
            generation,
            *(
                {"kind": "step", "step": step, "loss": generation + step / 1e6, "lr": 0.1, "time": BEGAN + at + step}
                for step in range(first, last + 1)
            ),
        )

    def save(self, generation: int, step: int, accuracy: float | None = None) -> CheckpointRef:
        """A checkpoint, evaluated if it has a score."""
        made = checkpoints.commit(self.rundir, step, generation, created_at=BEGAN, files={WEIGHTS: b"weights"})
        self.log(generation, {"kind": "checkpoint", "name": made.name, "step": step, "time": BEGAN + step})
        if accuracy is not None:
            result = {"metrics": {"loss": 0.5, "accuracy": accuracy}, "finishedAt": BEGAN + step + 5}
            (self.rundir.evaluations / made.name).mkdir(exist_ok=True)
            replace_json(self.rundir.evaluations / made.name / f"g{generation:06d}.json", result)
        return made
