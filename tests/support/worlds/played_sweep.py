"""A cluster on which the trials of a sweep are played: each look at it is 50 steps of every run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tandem.errors import UserError
from tandem.wire.status import Condition, Score, Status
from tandem_cli.platforms import PlatformError

Rule = Callable[[int, int], float]
"""The score of a trial at a step."""


@dataclass
class PlayedRun:
    """A run that takes 50 steps and scores one checkpoint at each look."""

    name: str
    steps: int
    score: Rule
    workers: int
    phase: str = "Running"
    message: str | None = None
    reason: str = ""
    step: int = 0
    stops: int = 0
    folder: None = None

    @property
    def number(self) -> int:
        return int(self.name.rsplit("-", 1)[1])

    def advance(self) -> None:
        if self.phase == "Running":
            self.step += 50
            if self.step >= self.steps:
                self.phase = "Succeeded"

    def status(self) -> Status:
        return Status(
            phase=self.phase,  # type: ignore[arg-type]
            message=self.message,
            conditions=[Condition(type="Failed", status="True", reason=self.reason)] if self.reason else [],
            latest_evaluation=self._score() if self.step else None,
        )

    def poll(self) -> Status | None:
        return self.status() if self.phase in ("Succeeded", "Failed") else None

    def stop(self, now: bool = False) -> str:
        if self.phase != "Running":
            raise UserError(f"{self.name} is not running")
        self.stops += 1
        self.phase = "Suspended"
        return "stopped"

    def resume(self) -> str:
        assert self.phase == "Suspended"
        self.phase = "Running"
        return "resumed"

    def scale(self, replicas: int) -> str:
        self.workers = replicas
        return "scaled"

    def _score(self) -> Score:
        return Score(
            name=f"step-{self.step:09d}", step=self.step, metric="accuracy", value=self.score(self.number, self.step)
        )


@dataclass
class PlayedClient:
    """A cluster on which every submission is counted."""

    score: Rule = lambda number, step: 0.5
    steps: int = 400
    fails: Callable[[int], str] = lambda number: ""
    is_on_kubernetes: bool = True
    scales: bool = True
    runs: dict[str, PlayedRun] = field(default_factory=dict)
    submissions: list[str] = field(default_factory=list)
    busiest: int = 0
    silent: int = 0
    """Number of submissions that nobody answers."""

    def submit(self, data: Any, *, overrides: Any = (), code: Any = None, run_dir: Any = None) -> PlayedRun:
        name = data["metadata"]["name"]
        if self.silent:
            self.silent -= 1
            raise PlatformError("no answer")
        assert name not in self.runs, "a trial is submitted once"
        self.submissions.append(name)
        workers = dict(overrides).get("workers.replicas", data["spec"]["workers"]["replicas"])
        run = self.runs[name] = PlayedRun(name, self.steps, self.score, workers)
        if message := self.fails(run.number):
            run.phase, run.message, run.reason = "Failed", message, message.partition(":")[0]
        self.busiest = max(self.busiest, sum(one.workers for one in self.runs.values() if one.phase == "Running"))
        return run

    def statuses(self, selector: str) -> dict[str, Status]:
        assert selector == "tandem.dev/sweep=s"
        if self.silent:
            raise PlatformError("no answer")
        return {name: run.status() for name, run in self.runs.items()}

    def run(self, name: str) -> PlayedRun:
        if name not in self.runs:
            raise UserError(f"no job {name}")
        return self.runs[name]

    def advance(self) -> None:
        for run in self.runs.values():
            run.advance()
