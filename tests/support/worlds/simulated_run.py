"""Run directories as `tandem run` leaves them, made in a moment: the files of docs/architecture.md, written by a small
simulation of trainers, coordinator and evaluators instead of by real ones.
"""

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tandem.job.resource import DistributedTrainingJob
from tandem.rundir.checkpoint import FileEntry, Manifest
from tandem.rundir.durable import replace_json
from tandem.rundir.layout import RunDir, checkpoint_name
from tandem.wire.measures import is_restart
from tandem.wire.status import CheckpointRef
from tests.support import checkpoints, manifests
from tests.support.lines import Lines
from tests.support.manifests import images

T0 = 1_780_000_000.0
"""When every simulated run starts."""
KEEP_LAST = 3


@dataclass
class Script:
    """What is to happen in a run."""

    name: str = "digits"
    steps: int = 900
    workers: int = 2
    evaluators: int = 2
    every: int = 50
    step_seconds: float = 0.04
    evaluation_seconds: float = 1.2
    kills: dict[int, str] = field(default_factory=dict)
    """Step after which the group breaks, and why."""
    sizes: dict[int, int] = field(default_factory=dict)
    """World size from the nth generation (0-based) on."""
    nan_steps: frozenset[int] = frozenset()
    end: str = "done"
    """done, failed, or open: neither marker."""
    stop_after: int | None = None
    """Nothing is written after that step: all was killed."""
    holds_out: bool = False
    """Whether there is validation data, on which scores fall while they rise on the test data."""
    gpus: bool = False
    classes: int = 10


def job(script: Script) -> DistributedTrainingJob:
    """The job that such a run is of."""
    return manifests.job(
        script.name,
        trainer=images({"data": {"name": "digits"}, "epochs": 40}),
        workers={"replicas": script.workers},
        evaluators={"processesPerReplica": max(1, script.evaluators)},
        checkpoint={"everySteps": script.every, "keepLast": KEEP_LAST},
    )


class Simulation:
    def __init__(self, path: Path, script: Script) -> None:
        self.script, self.rundir = script, RunDir(path)
        self.random = random.Random(0)
        self.now = T0 + 1.0
        self.saved: list[tuple[CheckpointRef, float]] = []
        self.stretches: list[tuple[float, float, int, int]] = []
        self.coordinator: list[dict[str, Any]] = []
        self.steps_at: list[tuple[float, int]] = []

    def write(self) -> Path:
        script = self.script
        self.rundir.create()
        self.rundir.write_job(job(script))
        resumed: CheckpointRef | None = None
        step, number, reason = 0, 0, "Started"
        kills = dict(sorted(script.kills.items()))
        last = script.stop_after or script.steps
        while step < last:
            number += 1
            size = next(
                (script.sizes[n] for n in sorted(script.sizes, reverse=True) if n <= number - 1), script.workers
            )
            kill_at = next(iter(kills), None)
            until = min(last, kill_at if kill_at is not None else last)
            self._generation(number, size, reason, resumed, until, killed=kill_at is not None and kill_at <= last)
            step = until
            if kill_at is not None and kill_at <= last:
                reason = kills.pop(kill_at)
                resumed = self.saved[-1][0] if self.saved else None
                step = resumed.step if resumed else 0
                self.now += 0.9
        finished = self._evaluate()
        self._coordinate(max(finished, self.now))
        reasons = [line["reason"] for line in self.coordinator if line["kind"] == "generation"]
        beside = {"owner": "local", "restarts": sum(map(is_restart, reasons[1:]))}
        replace_json(self.rundir.beside_coordinator_file, beside, durable=False)
        if script.stop_after is None and script.end == "done":
            self.rundir.mark_done(self.saved[-1][0])
            replace_json(self.rundir.done_file, {"final": self.saved[-1][0].dump(), "at": self.now})
        elif script.stop_after is None and script.end == "failed":
            self.rundir.mark_failed("RestartBudgetSpent", "11 failures of training processes", 1)
        return self.rundir.path

    def _generation(
        self, number: int, size: int, reason: str, resumed: CheckpointRef | None, until: int, killed: bool
    ) -> None:
        script, rundir = self.script, self.rundir
        members = [f"worker-{index}" for index in range(size)]
        opened = self.now
        opening = line("generation", opened, generation=number, worldSize=size, members=members, reason=reason)
        self.coordinator.append({**opening, "detail": f"{reason} of worker-1" if number > 1 else ""})
        checkpoints.begin(rundir, number, resumed, world_size=size, members=members, started_at=opened)
        begin, self.now = resumed.step if resumed else 0, opened + 1.4
        lines = [line("start", self.now, step=begin, totalSteps=script.steps, worldSize=size)]
        lines[0]["resumedFrom"] = resumed.dump() if resumed else None
        phases, rate_from, rate_step = {"data": 0.0, "compute": 0.0, "checkpoint": 0.0}, self.now, begin
        for step in range(begin + 1, until + 1):
            took = script.step_seconds * script.workers / size * self.random.uniform(0.9, 1.15)
            self.now += took
            phases["data"] += 0.04 * took
            phases["compute"] += 0.95 * took
            loss = math.nan if step in script.nan_steps else loss_at(step, script.steps, self.random)
            self.steps_at.append((self.now, step))
            norm = {"gradientNorm": 0.2 + 3 * math.exp(-3 * step / script.steps)} if step % 5 == 0 else {}
            taken = line("step", self.now, step=step, loss=loss, samples=64, lr=1e-3 * min(1.0, step / 100), **norm)
            lines.append({**taken, "ids": f"{self.random.getrandbits(64):016x}"})
            if step % script.every == 0 or step == script.steps:
                stall = self.random.uniform(0.002, 0.006)
                phases["checkpoint"] += stall
                self.now += stall
                name = checkpoint_name(step)
                commit = self.random.uniform(0.03, 0.08)
                saved = line("checkpoint", self.now + commit, name=name, step=step, stallSeconds=stall)
                lines.append({**saved, "commitSeconds": commit, "bytes": 14_412_316})
                self.saved.append((CheckpointRef(name=name, step=step, generation=number), self.now + commit))
            if step % 20 == 0 or step == until:
                rate = (step - rate_step) * 64 / (self.now - rate_from)
                told = line("rate", self.now, step=step, epoch=step / 23, throughput=rate)
                lines.append({**told, "stepSeconds": script.step_seconds, "phases": dict(phases)})
                phases = dict.fromkeys(phases, 0.0)
                rate_from, rate_step = self.now, step
        if not killed and script.stop_after is None:
            lines.append(line("end", self.now, step=until, why="complete"))
        self._log(f"train-g{number:06d}", lines)
        self.stretches.append((opened + 1.4, self.now, size, number))
        if killed:
            closed = line("closed", self.now + 0.05, generation=number, reason="WorkerFailed")
            self.coordinator.append({**closed, "detail": "rank 1 of worker-1 ended with signal 9"})

    def _evaluate(self) -> float:
        """Each evaluator does its shard of every checkpoint it gets to; the first one decides what is skipped."""
        script = self.script
        if not script.evaluators:
            return self.now
        taken, skipped, free = [], [], T0 + 3.0
        queue = list(self.saved)
        while queue:
            free = max(free, queue[0][1] + 0.15)
            waiting = [entry for entry in queue if entry[1] <= free]
            skipped += [(entry, free) for entry in waiting[:-1]]
            taken.append((waiting[-1], free))
            queue = queue[len(waiting) :]
            free += script.evaluation_seconds * 1.1
        finished = free
        logs: list[list[dict[str, Any]]] = [[] for _ in range(script.evaluators)]
        for (reference, _), begin in taken:
            ends = []
            for shard, log in enumerate(logs):
                seconds = script.evaluation_seconds * self.random.uniform(0.8, 1.08)
                ends.append(begin + seconds)
                of = {"checkpoint": reference.name, "step": reference.step, "generation": reference.generation}
                log.append(line("evaluated", begin + seconds, **of, shard=shard, seconds=seconds))
            self._result(reference, begin, max(ends))
        for (reference, _), at in skipped:
            logs[0].append(line("skipped", at, checkpoint=reference.name, step=reference.step))
            self._evaluation(reference, ".skipped", {"why": "a newer checkpoint was there", "at": at})
        for index, log in enumerate(logs):
            self._usage(index, log, finished)
        self._keep()
        return finished

    def _usage(self, index: int, log: list[dict[str, Any]], finished: float) -> None:
        busy = [(line["time"] - line["seconds"], line["time"], line) for line in log if line["kind"] == "evaluated"]
        used, now, lines = 0.8, T0 + 2.0, list(log)
        while now < finished:
            at_work = next((line for begin, end, line in busy if begin <= now < end), None)
            sign = line("usage", now, cpuSeconds=used, state="evaluating" if at_work else "idle")
            lines.append({**sign, "checkpoint": at_work["checkpoint"] if at_work else None})
            then = now + 1.0
            overlap = sum(max(0.0, min(end, then) - max(begin, now)) for begin, end, _ in busy)
            used += 0.97 * overlap + 0.004
            now = then
        self._log(f"evaluator-evaluator-0-{index}", [*lines, line("end", finished + 0.1)])

    def _result(self, reference: CheckpointRef, begin: float, end: float) -> None:
        classes = self.script.classes
        right = 0.985 - 0.5 * math.exp(-4.5 * reference.step / self.script.steps)
        generator = np.random.default_rng(reference.step)
        confusion = np.zeros((classes, classes), np.int64)
        for label in range(classes):
            row = np.full(classes, (1 - right) / max(1, classes - 1))
            row[label] = right
            confusion[label] = generator.multinomial(36, row / row.sum())
        hits = np.diag(confusion)
        f1 = 2 * hits / np.maximum(1, confusion.sum(0) + confusion.sum(1))
        accuracy = float(hits.sum() / confusion.sum())
        held_out = {"loss": 0.5, "accuracy": 0.9 - 0.4 * reference.step / self.script.steps, "macroF1": 0.5}
        result = {
            **{"checkpoint": reference.name, "step": reference.step, "generation": reference.generation},
            **{"samples": int(confusion.sum()), "perClassF1": f1.tolist(), "confusion": confusion.tolist()},
            "metrics": {"loss": 3 * (1 - accuracy), "accuracy": accuracy, "macroF1": float(f1.mean())},
            **({"validation": {"samples": 100, "metrics": held_out}} if self.script.holds_out else {}),
            **{"startedAt": begin, "finishedAt": end},
        }
        self._evaluation(reference, "", result)

    def _evaluation(self, reference: CheckpointRef, what: str, content: Mapping[str, Any]) -> None:
        folder = self.rundir.evaluations / reference.name
        folder.mkdir(exist_ok=True)
        replace_json(folder / f"g{reference.generation:06d}{what}.json", content, durable=False)

    def _log(self, name: str, lines: list[dict[str, Any]]) -> None:
        log = Lines(self.rundir.log / f"{name}.jsonl")
        log.append(*sorted(lines, key=lambda line: line["time"]))
        log.close()

    def _keep(self) -> None:
        for reference, at in self.saved[-KEEP_LAST:]:
            folder = self.rundir.checkpoint(reference.name)
            folder.mkdir(exist_ok=True)
            manifest = Manifest(
                name=reference.name,
                step=reference.step,
                generation=reference.generation,
                created_at=at,
                world_size=2,
                files=[FileEntry(path="weights.safetensors", size=14_412_316, xxh3=["0" * 32])],
            )
            replace_json(folder / "manifest.json", manifest.sealed(), durable=False)

    def _coordinate(self, until: float) -> None:
        lines, now, index, step = list(self.coordinator), T0, 0, 0
        while now < until:
            while index < len(self.steps_at) and self.steps_at[index][0] <= now:
                step = self.steps_at[index][1]
                index += 1
            running = next((s for s in self.stretches if s[0] <= now <= s[1]), None)
            size, number = (running[2], running[3]) if running else (0, 0)
            cpu = {str(rank): round(self.random.uniform(0.94, 1.0), 3) for rank in range(size)}
            gpus = cpu if self.script.gpus else ()
            sample = {
                **line("sample", now, generation=number, worldSize=size, workers=size, step=step),
                **{"loss": 0.5 if running else None, "trainerCpu": cpu},
                "throughput": 64 / self.script.step_seconds * size / self.script.workers if running else None,
                "gpu": {rank: self.random.uniform(0.9, 1) for rank in gpus},
                "busySeconds": {rank: self.random.uniform(0.010, 0.012) * (1 + int(rank)) for rank in cpu},
                "gpuMemory": {rank: int(6e9 + 1e8 * int(rank) + now % 7 * 1e7) for rank in gpus},
                "evaluatorCpu": {},
            }
            lines.append(sample)
            now += 1.0
        lines.append(line("event", T0 + 0.2, level="info", text="2 of 2 replicas are there"))
        self._log("coordinator", lines)


def line(kind: str, time: float, **facts: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time, **facts}


def loss_at(step: int, steps: int, noise: random.Random) -> float:
    """A loss curve that looks like one."""
    return (0.04 + 2.3 * math.exp(-7 * step / steps)) * noise.lognormvariate(0, 0.35)


def make_run(path: Path, **script: Any) -> Path:
    """A run directory at `path` after what `Script` says."""
    return Simulation(path, Script(**script)).write()


def add_base(path: Path, metrics: Mapping[str, float], texts: Mapping[str, str] | None = None) -> None:
    """Evaluate the base model of a run.

    Args:
        texts: what it writes, by prompt; checkpoints write the same with their step in front of it.
    """

    def completions(before: str) -> list[dict[str, Any]]:
        told = enumerate((texts or {}).items())
        return [{"number": number, "prompt": prompt, "text": before + text} for number, (prompt, text) in told]

    folder = path / "evaluations/base"
    folder.mkdir()
    replace_json(folder / "g000000.json", {"metrics": dict(metrics), "completions": completions("")}, durable=False)
    for file in (path / "evaluations").glob("step-*/g??????.json"):
        result = json.loads(file.read_text())
        replace_json(file, {**result, "completions": completions(f"{result['step']}: ")}, durable=False)


def add_histograms(path: Path, histograms: Mapping[str, Any]) -> None:
    """Put histograms into each result of a run, as a program reports them."""
    for file in (path / "evaluations").glob("step-*/g??????.json"):
        replace_json(file, {**json.loads(file.read_text()), "histograms": histograms}, durable=False)
