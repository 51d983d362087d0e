"""Whatever order several evaluators act in, and wherever some of them die, nothing is lost and nothing is counted
twice.

The processes are real `Evaluator`s on a real run directory. Only three things are simulated: the clock of the leases,
the computation (a pure function of weights and shard), and the scheduler, which is Hypothesis: it chooses who takes
the next step, with a view of the directory as old as it likes, and in which step a process dies."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.job.resource import Evaluators
from tandem.rundir import lease
from tandem.rundir.checkpoint import WEIGHTS
from tandem.rundir.durable import read_json
from tandem.rundir.evaluations import merged_name
from tandem.rundir.layout import RunDir
from tandem.wire.status import CheckpointRef
from tandem_evaluator.choice import Evaluate, Finished, Merge, Policy, Skip, Wait, choose
from tandem_evaluator.claim import Claim
from tandem_evaluator.evaluation import Tally, TaskScoring
from tandem_evaluator.loop import Evaluator
from tandem_evaluator.publication import best
from tandem_evaluator.result import MergedResult
from tests.support import checkpoints
from tests.support.clock import Clock

SAMPLES, CLASSES = 7, 3


class Died(BaseException):
    """SIGKILL, as far as the directory can tell."""


class Computation:
    """Stands for the model: which samples are right depends on the checkpoint alone, and on the sample."""

    total, classes = SAMPLES, CLASSES
    held_out = 0
    images, names = torch.zeros(SAMPLES, 1, 8, 8), tuple(map(str, range(CLASSES)))

    def run(self, weights: dict[str, Tensor], shard: int, shards: int, going_on: Callable[[], bool]) -> Tally | None:
        step = int(weights["step"].item())
        confusion = [[0] * CLASSES for _ in range(CLASSES)]
        for sample in range(shard, SAMPLES, shards):
            confusion[sample % CLASSES][(sample * step // 10) % CLASSES] += 1
        return Tally(len(range(shard, SAMPLES, shards)), step / (1 + shard), None, confusion)


class Process:
    """An evaluator whose steps the test takes one by one."""

    def __init__(self, rundir: RunDir, evaluators: Evaluators, name: str) -> None:
        self.subject = Evaluator(rundir, evaluators, name, TaskScoring(Computation()), mock.Mock())  # type: ignore[arg-type]
        self.name, self.policy, self.shards = name, evaluators.policy, evaluators.processes
        self.action: object = None
        self.claim: tuple[CheckpointRef, int, Claim] | None = None
        self.dies_before: str | None = None
        for name_of in ("publish", "merge", "update_best"):
            self._mortal(name_of)

    def _mortal(self, method: str) -> None:
        publication = self.subject._publication
        original = getattr(publication, method)

        def step(*arguments: Any) -> Any:
            if self.dies_before == method:
                raise Died
            return original(*arguments)

        setattr(publication, method, step)

    def look(self) -> None:
        """See and choose; what is chosen is acted on later."""
        if self.claim is None:
            self.action = choose(self.subject.survey(), self.policy, self.shards)

    def act(self) -> None:
        """Take what was chosen, however long ago."""
        action, self.action = self.action, None
        match action:
            case Evaluate(reference, shards):
                for shard in shards:
                    if (held := self.subject.claim(reference, shard)) is not None:
                        self.claim = (reference, shard, held)
                        return
            case Merge(reference):
                self.subject.merge(reference)
            case Skip(references):
                self.subject.skip(references)

    def work(self) -> None:
        """Do what is claimed."""
        if self.claim is not None:
            reference, shard, held = self.claim
            self.subject.evaluate(reference, shard)
            held.release()
            self.claim = None

    def die(self) -> None:
        """Leave the claim as it is, and its renewal undone."""
        if self.claim is not None:
            self.claim[2]._released.set()
            self.claim[2]._thread.join()


class World:
    """A run directory, its trainer, and so many evaluator processes."""

    def __init__(self, path: Path, policy: Policy, processes: int, clock: Clock) -> None:
        self.rundir, self.clock = RunDir(path), clock
        self.rundir.create()
        checkpoints.begin(self.rundir, 1)
        self.evaluators = Evaluators(processes_per_replica=processes, policy=policy)
        self.started = 0
        self.newest_step = 0
        self.dead: set[str] = set()
        self.committed: list[CheckpointRef] = []
        self.deleted: set[CheckpointRef] = set()
        self.final: CheckpointRef | None = None
        self.seen: dict[Path, bytes] = {}
        self.processes = [self.start() for _ in range(processes)]

    def start(self) -> Process:
        self.started += 1
        return Process(self.rundir, self.evaluators, f"evaluator-{self.started}")

    def commit(self) -> None:
        if self.final is not None:
            return
        self.newest_step += 10
        weights = safetensors.torch.save({"step": torch.tensor([self.newest_step])})
        self.committed.append(checkpoints.commit(self.rundir, self.newest_step, files={WEIGHTS: weights}))

    def delete(self) -> None:
        """Retention takes the oldest checkpoint, unless it is the newest or somebody holds a lease on it."""
        for reference in self.committed[:-1]:
            held = any(lease.is_held(path) for path in self.rundir.leases.glob(f"*-{reference.name}-*"))
            if reference not in self.deleted and not held:
                self.rundir.set_aside(reference.name, ".deleted")
                self.deleted.add(reference)
                return

    def spoil(self) -> None:
        """The newest checkpoint turns out broken, so that an older one is the newest, maybe one that was skipped."""
        if self.final is None and len(self.committed) > 1 and self.committed[-2] not in self.deleted:
            self.rundir.set_aside(self.committed.pop().name)

    def end(self) -> None:
        if self.final is None and self.committed:
            self.final = self.committed[-1]
            self.rundir.mark_done(self.final)

    def step(self, index: int, what: str) -> None:
        process = self.processes[index]
        if what.startswith("die"):
            process.dies_before = what.partition(" before ")[2] or None
            try:
                if process.dies_before:
                    process.look()
                    process.act()
                    process.work()
            except Died:
                pass
            process.die()
            self.dead.add(process.name)
            self.processes[index] = self.start()
        else:
            getattr(process, what)()
        self.remember()

    def remember(self) -> None:
        """Published files never change."""
        for path in self.rundir.evaluations.glob("*/*.json"):
            content = path.read_bytes()
            assert self.seen.setdefault(path, content) == content, f"{path.name} was replaced"

    def drain(self) -> None:
        """Let all act in turn until each has finished; the clock goes on when all of them wait."""
        self.end()
        for _ in range(500):
            actions: list[object] = []
            for process in self.processes:
                process.work()
                actions.append(process.subject.step())
            self.remember()
            if all(isinstance(action, Finished) for action in actions):
                return
            if all(isinstance(action, Wait | Finished) for action in actions):
                self.clock.now += lease.LEASE_LENGTH_SECONDS + 1
        raise AssertionError("the evaluators never finish")

    def merged(self, reference: CheckpointRef) -> MergedResult | None:
        path = self.rundir.evaluations / reference.name / merged_name(reference)
        return MergedResult.parse(read_json(path)) if path.exists() else None


STEPS = ["look", "look", "act", "act", "work", "work", "die", "die before publish", "die before merge",
         "die before update_best"]  # fmt: skip
MOVES = st.one_of(
    st.tuples(st.integers(0, 2), st.sampled_from(STEPS)),
    st.tuples(st.integers(0, 2), st.sampled_from(STEPS)),
    st.sampled_from(["commit", "commit", "delete", "spoil", "pass time", "end"]),
)


@contextmanager
def world(policy: Policy, processes: int) -> Iterator[World]:
    clock = Clock(1_000_000.0)
    with (
        tempfile.TemporaryDirectory() as path,
        mock.patch.object(lease, "server_time", clock),
        mock.patch("os.fsync"),
        mock.patch("tandem_evaluator.loop.log_event"),
    ):
        subject = World(Path(path) / "run", policy, processes, clock)
        yield subject
        for process in subject.processes:
            process.die()


@pytest.mark.parametrize("policy", ["Latest", "Every"])
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(processes=st.integers(1, 3), moves=st.lists(MOVES, min_size=10, max_size=50))
@example(processes=1, moves=["commit", (0, "look"), (0, "act"), "spoil"])  # what was skipped becomes the final one
def test_any_interleaving_ends_with_all_that_is_due_evaluated_once(
    policy: Policy, processes: int, moves: list[Any]
) -> None:
    with world(policy, processes) as subject:
        subject.commit()
        for move in moves:
            if move == "pass time":
                subject.clock.now += lease.LEASE_LENGTH_SECONDS + 1
            elif isinstance(move, str):
                getattr(subject, move)()
            else:
                subject.step(move[0] % processes, move[1])
        subject.drain()

        assert subject.final is not None
        assert subject.merged(subject.final) is not None, "the final checkpoint is always evaluated"
        for reference in subject.committed:
            merged = subject.merged(reference)
            if merged is not None:
                alone = [[0] * CLASSES for _ in range(CLASSES)]
                for sample in range(SAMPLES):
                    alone[sample % CLASSES][(sample * reference.step // 10) % CLASSES] += 1
                assert merged.confusion == alone, "each sample is counted once"
                assert merged.metrics.loss is not None
                expected = sum(reference.step / (1 + shard) for shard in range(processes)) / SAMPLES
                assert merged.metrics.loss == pytest.approx(expected)
            elif reference not in subject.deleted:
                assert policy == "Latest", "under Every all that are there are evaluated"
                note = f"g{reference.generation:06d}.skipped.json"
                assert (subject.rundir.evaluations / reference.name / note).exists(), "what is passed over is recorded"
        paths = subject.rundir.evaluations.glob("*/g??????.json")
        results = [MergedResult.parse(read_json(path)) for path in paths]
        assert read_json(subject.rundir.best_file) == best(results, {1: None}, "accuracy", "Maximize")
        living = {f"evaluator-{number}" for number in range(1, subject.started + 1)} - subject.dead
        holders = {read_json(path)["holder"] for path in subject.rundir.leases.iterdir()}
        assert not holders & living, "who leaves gives back its claims"
