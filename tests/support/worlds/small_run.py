"""Run directories with real, small checkpoints, made in a moment: what `tandem checkpoints` is tried on."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from tandem.rundir.checkpoint import FILE, WEIGHTS, DataPosition
from tandem.rundir.durable import replace_json
from tandem.rundir.lease import Lease, acquire
from tandem.wire.status import CheckpointRef
from tandem_trainer.checkpoint.file_names import FULL_WEIGHTS, OPTIMIZER
from tests.support import checkpoints, manifests
from tests.support.manifests import images


class SmallRun:
    """A run directory that a test fills."""

    def __init__(self, path: Path, evaluators: Mapping[str, Any] | None = None, **policy: int) -> None:
        self.parents: dict[int, str | None] = {}
        job = manifests.job(
            "small",
            trainer=images({"data": {"name": "digits"}}),
            evaluators=dict(evaluators or {}),
            checkpoint={"keepLast": 2, **policy},
        )
        self.rundir = manifests.run_directory(path, job)

    def begin(self, generation: int, parent: CheckpointRef | None = None) -> None:
        self.parents[generation] = parent.name if parent else None
        checkpoints.begin(self.rundir, generation, parent, world_size=2)

    def save(
        self,
        step: int,
        generation: int = 1,
        weights: Mapping[str, Tensor] | None = None,
        accuracy: float | None = None,
        full: Mapping[str, Tensor] | None = None,
    ) -> CheckpointRef:
        """A committed checkpoint, evaluated if it has a score.

        Args:
            full: the weights in full precision, where those for evaluators are rounded.
        """
        values = weights if weights is not None else {"layer.weight": torch.full((4, 3), float(step))}
        files = {WEIGHTS: save(dict(values)), OPTIMIZER: save({"layer.weight/exp_avg": torch.ones(4, 3)})}
        reference = checkpoints.commit(
            self.rundir,
            step,
            generation,
            files=files | ({} if full is None else {FULL_WEIGHTS: save(dict(full))}),
            parent=self.parents.get(generation),
            created_at=time.time() - 60,
            world_size=2,
            mesh={"data": 2},
            data=DataPosition(seed=0, epoch=step // 100, cursor=step % 100),
            versions={"tandem": "0.1.0"},
        )
        if accuracy is not None:
            self.evaluate(reference, accuracy)
        return reference

    def evaluate(self, reference: CheckpointRef, accuracy: float, loss: float | None = 0.5, **more: Any) -> None:
        """A merged result."""
        folder = self.rundir.evaluations / reference.name
        folder.mkdir(exist_ok=True)
        metrics = {"loss": loss, "accuracy": accuracy, "macroF1": accuracy}
        result = {"metrics": metrics, "samples": 20, "confusion": [[9, 1], [1, 9]], **more}
        replace_json(folder / f"g{reference.generation:06d}.json", result)

    def read(self, name: str, verb: str = "evaluate") -> Lease:
        """A lease on a checkpoint."""
        held = acquire(self.rundir.leases / f"{verb}-{name}-g000001-shard-0-of-1.json", "somebody")
        assert held is not None
        return held

    def damage(self, name: str, path: str = WEIGHTS, at: int = -1) -> None:
        """Flip a bit of a file."""
        file = self.rundir.checkpoint(name) / path
        content = bytearray(file.read_bytes())
        content[at] ^= 1
        file.write_bytes(content)

    def forget(self, name: str, hours: float = 2.0) -> Path:
        """A temporary folder that was left behind so long ago."""
        folder = self.rundir.checkpoints / name
        folder.mkdir()
        (folder / WEIGHTS).write_bytes(bytes(1000))
        then = time.time() - 3600 * hours
        os.utime(folder, (then, then))
        return folder

    def names(self) -> list[str]:
        return sorted(path.name for path in self.rundir.checkpoints.iterdir())


def messy(path: Path) -> SmallRun:
    """A run of which everything has happened to some checkpoint."""
    run = SmallRun(path, keepEvery=300)
    run.begin(1)
    run.save(100, accuracy=0.6)
    run.save(200, accuracy=0.9)
    run.rundir.set_aside(run.save(150).name, why="weights.safetensors does not match its checksum at byte 0")
    parent = run.save(300, accuracy=0.8)
    run.save(450)
    run.begin(2, parent)
    run.save(400, generation=2, accuracy=0.85)
    run.save(500, generation=2)
    run.rundir.set_aside(run.save(600, generation=1).name, ".stale", "superseded by generation 2")
    run.save(600, generation=2)
    run.save(700, generation=2)
    (run.rundir.checkpoint("step-000000700") / FILE).write_text("{}")
    run.forget(".tmp-step-000000800-g000002-000009")
    run.forget(".tmp-step-000000900-g000002-000010", hours=0.0)
    return run
