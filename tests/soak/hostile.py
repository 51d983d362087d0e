"""Hostile objects into an operator, each measured: `make soak-operator`, or

    python -m tests.soak.hostile [--objects 10000] [--seed 1]

Real pods, jobs, claims, secrets and the like, coordinators' answers, and files of run directories, each with something
changed by chance, some as large as the API server lets them be (tests/support/hostile.py). After each, a healthy job of
another namespace must still be looked after. An object (its parsing, taking it in, a look at its job) may keep the
event loop for 100 ms of its thread's processor time, whatever else the machine does, and cost 10 MB. What would cost
more to parse is told from its bytes (tandem_operator.bounded), and only its metadata are taken in. A look at a run
directory is a coordinator's, on a thread of its own: it may cost more, of the job whose files these are.

Half of the objects are measured in time, half in memory, which makes everything slower. Exit code 1 where a bound is
broken or something raises; then its seed is told.
"""

import argparse
import asyncio
import json
import logging
import resource
import sys
import tempfile
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tandem.wire.protocol import MAX_BRIEF_BYTES
from tandem.wire.status import GenerationView, Members, Snapshot, Status
from tandem_coordinator.run_watcher import RunDirectory
from tandem_operator import bounded, coordinators
from tandem_operator.bounded import MAX_COST, UNREAD, cost
from tests.support.hostile import Operator, mutated, real_objects
from tests.support.worlds.small_run import SmallRun

MAX_SECONDS = 0.1
MAX_BYTES = 10_000_000
LOOK = "parse a run directory"
MAX_THREAD_SECONDS = 0.5
"""Of a look at a run directory, on a thread of its own and in steps: parsing, and the digest of a manifest."""
MAX_LOOK_BYTES = 64_000_000
"""Of the same."""
PROGRESS = 500
RENEWED = 200
"""After so many objects the operator begins anew; until then it keeps what it has taken in."""
VIEW = GenerationView(generation=1, world_size=2, members=["a", "b"], opened_at=1.0, reason="Started")
ANSWER = Snapshot(
    job="j",
    time=1.0,
    status=Status(phase="Running", workers=Members(desired=2, ready=2), generation=1, world_size=2),
    generations=[VIEW] * 5,
)


@dataclass
class Worst:
    """The worst figures of one thing that is done, and which objects they are of."""

    seconds: float = 0.0
    slowest: str = ""
    bytes: int = 0
    largest: str = ""


@dataclass
class Soak:
    """What is measured, and what went wrong."""

    in_memory: bool = False
    """Measures memory, and not time."""
    worst: dict[str, Worst] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def measuring(self, what: str, which: str) -> Iterator[None]:
        """One thing that is done with one object."""
        worst = self.worst.setdefault(what, Worst())
        if self.in_memory:
            tracemalloc.start()
        began = time.thread_time()
        try:
            yield
        except Exception:
            self.violations.append(f"{which}: {what} raised\n{traceback.format_exc()[-1500:]}")
        seconds = time.thread_time() - began
        if self.in_memory:
            used = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            if used > worst.bytes:
                worst.bytes, worst.largest = used, which
            if used > (MAX_LOOK_BYTES if what == LOOK else MAX_BYTES):
                self.violations.append(f"{which}: {what} cost {used / 1e6:.1f} MB")
            return
        if seconds > worst.seconds:
            worst.seconds, worst.slowest = seconds, which
        if seconds > (MAX_THREAD_SECONDS if what == LOOK else MAX_SECONDS):
            self.violations.append(f"{which}: {what} took {1e3 * seconds:.0f} ms")

    def table(self) -> str:
        """The worst figures."""
        lines = [f"{'':24} {'slowest':>10}  {'of':44} {'most':>10}  of"]
        for what, worst in self.worst.items():
            times, sizes = f"{1e3 * worst.seconds:.1f} ms", f"{worst.bytes / 1e6:.2f} MB"
            lines.append(f"{what:24} {times:>10}  {worst.slowest:44} {sizes:>10}  {worst.largest}")
        return "\n".join(lines)


async def _objects(soak: Soak, operator: Operator, real: list[tuple[Any, Any]], chance: Random, which: str) -> None:
    kind, whole = chance.choice(real)
    which, text = f"{kind.name} {which}", mutated(whole, chance)
    soak.counts[kind.name] += 1
    body: Any = None
    with soak.measuring("parse an object", which):
        body = None if (unread := cost(text) > MAX_COST) else json.loads(text)
    if unread:
        soak.counts["unread"] += 1
        body = _metadata_of(json.loads(text))
        if cost(json.dumps(body).encode()) > MAX_COST:
            return
    with soak.measuring("take it in", which):
        operator.take(kind, chance.choice(("ADDED", "MODIFIED", "DELETED")), body)
    with soak.measuring("look at its job", which):
        await operator.process(kind, body)


def _metadata_of(body: Any) -> Any:
    """What a list of metadata alone has of an object."""
    return {"metadata": body.get("metadata"), UNREAD: "too much"}


async def _answers(soak: Soak, operator: Operator, real: list[tuple[Any, Any]], chance: Random, which: str) -> None:
    which, text = f"answer {which}", mutated(ANSWER.dump(), chance, most=MAX_BRIEF_BYTES)
    soak.counts["answer"] += 1
    with soak.measuring("read an answer", which), suppress(coordinators.UnreadableAnswer):
        operator.api.snapshot = coordinators.parse_snapshot(text)
    with soak.measuring("look at its job", which):
        await operator.process(*real[0])


def _files(soak: Soak, run: SmallRun, real: dict[Path, bytes], chance: Random, which: str) -> None:
    path = chance.choice(sorted(real))
    soak.counts["file"] += 1
    try:
        value = json.loads(real[path])
    except ValueError:
        value = [json.loads(line) for line in real[path].splitlines()]
    path.write_bytes(mutated(value, chance) + b"\n")
    which = f"{path.name} {which}"
    try:
        with soak.measuring(LOOK, which), suppress(ValueError):
            # The record of a generation that is damaged is told, and a person has to look.
            RunDirectory(run.rundir, run.rundir.read_job().spec.evaluation).poll(time.time())
    finally:
        path.write_bytes(real[path])


def _run(folder: Path) -> tuple[SmallRun, dict[Path, bytes]]:
    """A run directory, and its files that the coordinator reads."""
    run = SmallRun(folder / "run")
    run.begin(1)
    final = run.save(50, accuracy=0.9)
    run.rundir.mark_done(final)
    run.rundir.mark_failed("Diverged", "the loss stayed useless", 1)
    log = {"kind": "rate", "time": 1.0, "step": 50, "steps": 50, "samples": 10, "stepSeconds": 0.1, "phases": {}}
    usage = {"kind": "usage", "time": 1.0, "cpuSeconds": 1.0, "checkpoint": final.name}
    (run.rundir.log / "train-g000001.jsonl").write_text(json.dumps(log) + "\n")
    (run.rundir.log / "evaluator-a.jsonl").write_text(json.dumps(usage) + "\n")
    skipped = {".safetensors"}
    found = {path: path.read_bytes() for path in run.rundir.path.rglob("*") if path.is_file()}
    return run, {
        path: data for path, data in found.items() if path.suffix not in skipped and path != run.rundir.job_file
    }


async def _soak(objects: int, seed: int, real: list[tuple[Any, Any]], folder: Path, say: Callable[[str], None]) -> Soak:
    soak, operator = Soak(), Operator()
    run, files = _run(folder)
    for number in range(objects):
        chance = Random(f"{seed} {number}")
        soak.in_memory = number % 2 == 1
        if number % RENEWED == 0:
            operator = Operator()
            for kind, body in real:
                operator.take(kind, "ADDED", body)
        which, kind = f"({seed} {number})", chance.random()
        if kind < 0.7:
            await _objects(soak, operator, real, chance, which)
        elif kind < 0.9:
            await _answers(soak, operator, real, chance, which)
        else:
            _files(soak, run, files, chance, which)
        try:
            await operator.goes_on()
        except Exception:
            soak.violations.append(f"{which}: the healthy job is not looked after\n{traceback.format_exc()[-1500:]}")
        if (number + 1) % PROGRESS == 0:
            slowest = max((one.seconds, what) for what, one in soak.worst.items())
            largest = max((one.bytes, what) for what, one in soak.worst.items())
            say(
                f"{number + 1:6} of {objects}: slowest {1e3 * slowest[0]:.0f} ms ({slowest[1]}), "
                f"most {largest[0] / 1e6:.1f} MB ({largest[1]}), {len(soak.violations)} violations"
            )
    return soak


def main() -> int:
    """Soak; exit code 1 on a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.hostile", description="Hostile objects.")
    parser.add_argument("--objects", type=int, default=10_000, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="what they follow from")
    options = parser.parse_args()
    logging.getLogger("tandem.operator").setLevel(logging.CRITICAL)
    real = real_objects()
    bounded.prepare()
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tandem-soak-") as folder:
        soak = asyncio.run(
            _soak(options.objects, options.seed, real, Path(folder), lambda text: print(text, flush=True))
        )
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    counts = ", ".join(f"{count} {what}" for what, count in sorted(soak.counts.items()) if count)
    print(f"{counts}; {time.monotonic() - began:.0f} s; the process grew by {grown:.0f} MiB at most")
    print(soak.table())
    for violation in soak.violations[:20]:
        print(f"violation: {violation}")
    print(f"{len(soak.violations)} violations")
    return 1 if soak.violations else 0


if __name__ == "__main__":
    sys.exit(main())
