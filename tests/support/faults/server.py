"""Forks checkpoint writers that a fault is played on: `python -m tests.support.faults.server CHUNK BLOCK`.

Each writer is the product's own `tandem_trainer.checkpoint.writer.serve` in a process of its own, with small chunks and
little patience. A process that has not loaded torch forks in a millisecond, so a thousand faults take seconds. A
request and its answer are one line of JSON each:

    {"writers": [Writer, …], "turns": [0, 1, 1, …] or null, "seconds": 20}
    [Report, …]

Without `turns` the writers run one after the other. With them they run at once, but of all of them only one takes a
step at a time: whose number is next in `turns`, and when that is at its end or names one that has ended, the first that
lives. So an interleaving is a value, and can be played again.
"""

import ctypes
import fcntl
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.rundir import checkpoint, lineage
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import GenerationRecord
from tandem_trainer.checkpoint import writer
from tests.support.faults.points import Fault, Points
from tests.support.faults.power import CASES, Disk, lose

READ_ONLY, REMOUNT = 0x1, 0x20
MAX_REPORT_BYTES = 2**20


@dataclass
class Child:
    """A writer that was forked."""

    pid: int
    report: int
    """Pipe that it reports into; no file, because the size of its files may be limited."""
    ready: int
    """It writes a byte here before each step, where it takes turns."""
    go: int
    """And waits for one here."""


def main() -> None:
    """Answer requests until standard input ends."""
    checkpoint.CHUNK_BYTES = writer.CHUNK_BYTES = int(sys.argv[1])
    writer.BLOCK = int(sys.argv[2])
    # The steps of the story are ten apart, and retention is to be about what the story tells.
    lineage.SPIKE_SPAN_STEPS = lineage.MARGIN = 0
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(play(request["writers"], request["turns"], request["seconds"])), flush=True)


def play(writers: list[dict[str, Any]], turns: list[int] | None, seconds: float) -> list[dict[str, Any]]:
    """Run writers and report what each did."""
    reports = []
    if turns is None:
        for one in writers:
            child = fork(one, gated=False, seconds=seconds)
            reports.append(ended(child))
        return reports
    children = [fork(one, gated=True, seconds=seconds) for one in writers]
    take_turns(children, turns)
    return [ended(child) for child in children]


def take_turns(children: list[Child], turns: list[int]) -> None:
    """Let one child at a time take a step, until all have ended."""
    waiting = [waits(child) for child in children]
    order = iter(turns)
    while any(waiting):
        number = next(order, -1)
        if number < 0 or not waiting[number]:
            number = waiting.index(True)
        os.write(children[number].go, b".")
        waiting[number] = waits(children[number])


def waits(child: Child) -> bool:
    """Wait until a child stands before its next step; False if it has ended."""
    return os.read(child.ready, 1) == b"."


def ended(child: Child) -> dict[str, Any]:
    _, status = os.waitpid(child.pid, 0)
    with os.fdopen(child.report, "rb") as pipe:
        lines = pipe.read().splitlines()
    os.close(child.ready)
    os.close(child.go)
    report: dict[str, Any] = {"points": [], "answers": [], "error": "", "remounted": False}
    for line in lines:
        for key, value in json.loads(line).items():
            if isinstance(report[key], list):
                report[key].append(value)
            else:
                report[key] = value
    return report | {"code": os.waitstatus_to_exitcode(status)}


def fork(one: dict[str, Any], gated: bool, seconds: float) -> Child:
    """Start a writer; it is killed by its own alarm if it takes longer than so many seconds."""
    read_report, report = os.pipe()
    fcntl.fcntl(report, fcntl.F_SETPIPE_SZ, MAX_REPORT_BYTES)
    ready, tell_ready = os.pipe()
    await_go, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            for descriptor in (read_report, ready, go):
                os.close(descriptor)
            code = run(one, report, (tell_ready, await_go) if gated else None)
        except BaseException:
            os.write(report, json.dumps({"error": traceback.format_exc()}).encode() + b"\n")
        finally:
            os._exit(code)
    for descriptor in (report, tell_ready, await_go):
        os.close(descriptor)
    return Child(pid, read_report, ready, go)


def run(one: dict[str, Any], report: int, gate: tuple[int, int] | None) -> int:
    """The life of a writer. Returns the exit code."""
    write = os.write

    def say(**facts: object) -> None:
        write(report, json.dumps(facts).encode() + b"\n")

    def tell(kind: str, place: str) -> None:
        say(points=[kind, place])
        if gate is not None:
            write(gate[0], b".")
            os.read(gate[1], 1)

    def remount() -> bool:
        worked = ctypes.CDLL(None).mount(None, one["mount"].encode(), None, READ_ONLY | REMOUNT, None) == 0
        if worked:
            say(remounted=True)
        return worked

    for name, value in one.get("knobs", {}).items():
        assert hasattr(writer, name), name
        setattr(writer, name, value)
    if one.get("clock"):
        real = time.time
        time.time = lambda: real() + one["clock"]
    if one.get("limit"):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (one["limit"], one["limit"]))
    root = Path(one["root"])
    fault = None
    if one.get("fault"):
        fault = Fault(**one["fault"] | {"refused": frozenset(one["fault"]["refused"])})
    disk = Disk(root) if fault is not None and fault.kind in CASES else None
    points = Points(root, fault, tell, disk.cut if disk else lambda kind: lose(root / "checkpoints"), remount)
    if disk:
        disk.install(points.paused)
    points.install()
    sys.stdout = Answers(lambda line: points.paused(lambda: say(answers=json.loads(line))))
    if one.get("record"):
        points.watch(True)
        if not RunDir(root).record_generation(GenerationRecord.parse(one["record"])):
            raise AssertionError("the generation exists")
        points.watch(False)
    for job in one["saves"]:
        sys.stdin = Requests(json.dumps(job["request"]), points)
        memory = os.open(job["memory"], os.O_RDONLY)
        writer.serve(root, memory)
        points.watch(False)
    return 0


class Requests(io.TextIOBase):
    """Standard input of a writer: one request, and then its rank is gone. Points count from the request on."""

    def __init__(self, line: str, points: Points) -> None:
        self._line, self._points = line, points
        self._read, end = os.pipe()
        os.close(end)

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        self._points.watch(True)
        yield self._line
        self._points.watch(False)

    def fileno(self) -> int:
        return self._read


class Answers(io.TextIOBase):
    """Standard output of a writer."""

    def __init__(self, heard: Any) -> None:
        self._heard = heard

    def write(self, text: str) -> int:
        if text.strip():
            self._heard(text)
        return len(text)


if __name__ == "__main__":
    main()
