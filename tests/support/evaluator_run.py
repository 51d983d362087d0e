"""A run directory with real checkpoints, and real evaluator processes on it."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from tandem.processes.launch import environment, evaluator_command
from tandem.rundir.checkpoint import WEIGHTS
from tandem.rundir.durable import read_json_or_none
from tandem.wire.status import CheckpointRef
from tandem_trainer import models
from tests.support import checkpoints, manifests
from tests.support.lines import read_lines
from tests.support.manifests import images
from tests.support.warm import warm_command, warm_environment

DEADLINE = 120.0


class Run:
    """A run that a trainer might have written."""

    def __init__(self, path: Path, data: Mapping[str, Any], evaluators: Mapping[str, Any], **config: Any) -> None:
        self.job = manifests.job(
            "run",
            trainer=images({"data": dict(data)} | config),
            evaluators=dict(evaluators),
        )
        self.rundir = manifests.run_directory(path, self.job)
        self.generation(1)

    def generation(self, number: int, resumed_from: CheckpointRef | None = None) -> None:
        checkpoints.begin(self.rundir, number, resumed_from)

    def weights(self, seed: int, channels: int = 1, image_size: int = 28) -> dict[str, Tensor]:
        """A state_dict of the job's model with fresh weights."""
        torch.manual_seed(seed)
        return models.build(self.job.spec.trainer.images.model, channels, image_size, 10).state_dict()

    def checkpoint(self, step: int, weights: Mapping[str, Tensor], generation: int = 1) -> CheckpointRef:
        """Commit a checkpoint the way the trainer does."""
        content = safetensors.torch.save({key: value.contiguous() for key, value in weights.items()})
        return checkpoints.commit(self.rundir, step, generation, files={WEIGHTS: content})

    @contextmanager
    def evaluator(self, replica: str = "evaluator-0", index: int = 0) -> Iterator["subprocess.Popen[str]"]:
        """Start an evaluator process; it is gone when the block is left."""
        variables = environment(self.job, self.rundir.path, replica)
        process = subprocess.Popen(
            warm_command(*evaluator_command(index)[1:]),
            env=os.environ | {"OMP_NUM_THREADS": "1"} | variables | warm_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def merged(self, reference: CheckpointRef) -> Any:
        return read_json_or_none(self.rundir.evaluations / reference.name / f"g{reference.generation:06d}.json")

    def skipped(self, reference: CheckpointRef) -> bool:
        return (self.rundir.evaluations / reference.name / f"g{reference.generation:06d}.skipped.json").exists()

    def shard(self, reference: CheckpointRef, shard: int, shards: int) -> Any:
        name = f"g{reference.generation:06d}.shard-{shard}-of-{shards}.json"
        return read_json_or_none(self.rundir.evaluations / reference.name / name)

    def claims(self, holder: str) -> list[Path]:
        """Claims that a process holds."""
        found = []
        for path in self.rundir.leases.glob("evaluate-*.json"):
            content = read_json_or_none(path)
            if isinstance(content, dict) and content.get("holder") == holder:
                found.append(path)
        return found

    def log(self, name: str, kind: str) -> list[dict[str, Any]]:
        """Lines of one kind in an evaluator's log."""
        lines, _ = read_lines(self.rundir.log / f"evaluator-{name}.jsonl")
        return [line for line in lines if line["kind"] == kind]


def ends(process: "subprocess.Popen[str]", seconds: float = DEADLINE) -> tuple[int, str]:
    """Wait for a process to leave by itself: its exit code and what it printed."""
    output, _ = process.communicate(timeout=seconds)
    return process.returncode, output
