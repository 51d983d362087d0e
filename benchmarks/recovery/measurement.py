"""One shot: a fault is played, the recoveries are awaited, the log is read, a record is returned."""

import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import psutil

from benchmarks.recovery.analysis import (
    Line,
    Stretch,
    dropped_batches,
    longest_pause,
    lost_steps,
    overlaps,
    phases,
    repeated_steps,
    steady,
)
from benchmarks.recovery.faults import MAX_STALL, SUPERVISOR_SECONDS, Fault, Scene, Wait
from benchmarks.recovery.sides import Side
from benchmarks.recovery.surroundings import Network, end

LOOK_SECONDS = 0.1
"""Seconds between two reads of the log; times come from the log itself."""
START_SECONDS = 120.0
ORPHAN_SECONDS = 10.0
"""Time in which a process may end after its agent."""
BEFORE_SECONDS = 10.0
"""Length of the log before a fault that is evaluated."""

Record = dict[str, Any]


class Turn:
    """One side's job, and the faults played on it. `close` ends it and returns what remains of it.

    Args:
        limit: seconds for a recovery; longer is a failure.
    """

    def __init__(
        self, kind: type[Side], folder: Path, network: Network, limit: float, longest_stall: float = MAX_STALL
    ) -> None:
        self.side = kind(folder, network)
        self._limit, self._longest_stall = limit, longest_stall
        self._gave_up = 0
        self._down: dict[str, float] = {}

    def begin(self) -> None:
        """Start the job and wait until it trains.

        Raises:
            TimeoutError: the job does not train.
        """
        started = time.time()
        self.side.start()
        if self._wait(Wait("start", started, self.side.full), START_SECONDS) is None:
            raise TimeoutError(f"{self.side.name} does not start to train; see {self.side.folder}")

    def play(self, fault: Fault, random: Random, shot: int) -> Record:
        """Play a fault; returns its record."""
        self._settle(random)
        scene = Scene(self.side, random, shot, self._longest_stall)
        self._gave_up = 0
        started = time.time()
        stages = list(self._stages(fault.story(scene)))
        ended = time.time()
        lines = self.side.lines()
        after_fault = [overlap for overlap in overlaps(lines) if overlap.end > started]
        orphans = self._orphans()
        record: Record = {
            "side": self.side.name,
            "fault": fault.name,
            "at": round(started, 3),
            "stages": stages,
            "facts": scene.facts,
            "pauseSeconds": round(longest_pause(lines, started, ended), 3),
            "repeatedSteps": repeated_steps(lines, started),
            "lostSteps": lost_steps(lines, started),
            "droppedBatches": dropped_batches(lines, started),
            "overlaps": [asdict(overlap) | {"seconds": overlap.seconds} for overlap in after_fault],
            "split": any(overlap.older_saved for overlap in after_fault),
            "orphans": [" ".join(process.cmdline())[:120] for process in orphans],
            "gaveUp": self._gave_up,
            "whole": all(stage["seconds"] is not None for stage in stages),
        }
        self.side.remember()
        end(orphans)
        return record

    def close(self) -> list[str]:
        """End the job; returns what remains of it."""
        return self.side.close()

    def _stages(self, story: Iterator[Wait]) -> Iterator[Record]:
        for wait in story:
            stretch = self._wait(wait, self._limit)
            stage: Record = {"name": wait.name, "seconds": None, "phases": {}}
            if stretch is not None:
                stage["seconds"] = round(max(0.0, stretch.start - wait.since), 3)
                stage["phases"] = self._phases(wait, stretch)
            yield stage

    def _phases(self, wait: Wait, stretch: Stretch) -> dict[str, float]:
        if stretch.start < wait.since:
            return {}
        seconds_by_phase = phases(self.side.lines(), wait.since, stretch)
        inside = [(time_of, kind) for time_of, kind in self.side.marks() if wait.since <= time_of <= stretch.start]
        for kind, name in (("closed", "closed"), ("generation", "opened")):
            times = [time_of for time_of, mark in inside if mark == kind]
            if times:
                seconds_by_phase[name] = times[-1] - wait.since
        return {name: round(seconds, 3) for name, seconds in seconds_by_phase.items()}

    def _orphans(self) -> list[psutil.Process]:
        """Find processes without an agent that do not end by themselves: a writer may still be finishing its file."""
        deadline = time.monotonic() + ORPHAN_SECONDS
        while (orphans := self.side.orphans()) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        return orphans

    def _settle(self, random: Random) -> None:
        """Let the job train undisturbed for a moment, so that faults fall anywhere between two checkpoints."""
        started = time.time()
        if self._wait(Wait("settled", started, self.side.full, 1.0 + random.random()), START_SECONDS) is None:
            raise TimeoutError(f"{self.side.name} does not train on before the next fault; see {self.side.folder}")

    def _wait(self, wait: Wait, limit: float) -> Stretch | None:
        deadline = time.monotonic() + limit + wait.steady
        while time.monotonic() < deadline:
            self._supervise()
            recent = self._since(wait.since - BEFORE_SECONDS)
            if (stretch := steady(recent, wait.since, wait.world, wait.steady)) is not None:
                return stretch
            time.sleep(LOOK_SECONDS)
        return None

    def _since(self, time: float) -> list[Line]:
        return [line for line in self.side.lines() if line.time >= time]

    def _supervise(self) -> None:
        """Restart agents that have ended by themselves, as Kubernetes or systemd would, on every side."""
        now = time.monotonic()
        for replica in self.side.ended():
            if now - self._down.setdefault(replica, now) >= SUPERVISOR_SECONDS:
                del self._down[replica]
                self._gave_up += 1
                self.side.start_replica(replica)


def version() -> str:
    """The commit that was measured."""
    return subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
