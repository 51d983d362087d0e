"""The processes of one replica's pre-flight, as the agent sees them: start, output, end."""

import json
import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any, Literal

from tandem.processes.launch import module_command
from tandem.rundir.code import environment_without_code
from tandem.wire.protocol import Membership, Pair, PreflightReport
from tandem_trainer.agent.preflight import LIMIT_SECONDS, ProcessPlace

log = logging.getLogger("tandem.agent")

POLL_SECONDS = 0.05
SUM_RESULTS: tuple[Literal["wrong", "failed", "right"], ...] = ("wrong", "failed", "right")
"""Possible results of the sum, the worst first."""
MAX_OUTPUT_LENGTH = 300
"""Maximum number of characters of a failed process's last line of output."""


@dataclass
class _Process:
    rank: int
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    results: list[dict[str, Any]] = field(default_factory=list)
    _partial_line: bytes = b""

    def read(self) -> None:
        """Read the lines that the process has printed since the last call."""
        assert self.process.stdout is not None
        while data := self.process.stdout.read(2**16):
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            self.results += [json.loads(line) for line in lines]

    def values(self, key: str) -> list[Any]:
        """Return all values that it has reported under a key."""
        return [result[key] for result in self.results if key in result]

    def problem(self) -> str | None:
        """Return what it did wrong, as a sentence; None if nothing."""
        if wrong := self.values("wrong"):
            return f"{wrong[0]} (rank {self.rank})"
        if not (code := self.process.poll()):
            return None
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        self.errors.seek(0)
        printed = self.errors.read().decode(errors="replace").strip().splitlines()
        output = f": {printed[-1][-MAX_OUTPUT_LENGTH:]}" if printed else ""
        return f"lost the process of rank {self.rank}, which ended {how} during its {self._current_check()}{output}"

    def timeout_problem(self) -> str:
        """Return the sentence about a process that does not end in time."""
        return f"was not done after {LIMIT_SECONDS:.0f} s, with rank {self.rank} still at its {self._current_check()}"

    def _current_check(self) -> str:
        stages = self.values("at")
        return stages[-1] if stages else "start"


def run(membership: Membership, index: int, goes_on: Callable[[], bool]) -> PreflightReport | None:
    """Run the pre-flight of one replica; returns its report, or None if it was cancelled.

    Args:
        membership: the generation.
        index: index of this replica in it.
        goes_on: called repeatedly; returns False to cancel.
    """
    started = time.monotonic()
    with _running(membership, index) as processes:
        while True:
            if not goes_on():
                return None
            # Poll before reading, so that the complete output of an ended process is read.
            ended = [process.process.poll() is not None for process in processes]
            for process in processes:
                process.read()
            problem = next((sentence for process in processes if (sentence := process.problem()) is not None), "")
            if not problem and not all(ended) and time.monotonic() - started > LIMIT_SECONDS:
                problem = next(process.timeout_problem() for process in processes if process.process.poll() is None)
            if problem or all(ended):
                break
            time.sleep(POLL_SECONDS)
        report = _report(membership, processes, problem)
    log.info(
        "event=preflight generation=%d seconds=%.1f product_ms=%s pairs=%d reached=%d sum=%s wrong=%r",
        membership.generation,
        time.monotonic() - started,
        None if report.product_seconds is None else f"{1000 * report.product_seconds:.3g}",
        len(report.pairs),
        sum(pair.bytes_per_second is not None for pair in report.pairs),
        report.all_reduce,
        report.wrong,
    )
    return report


def unreached(membership: Membership) -> PreflightReport:
    """Return the report of a member that cannot reach the store of the first one."""
    return PreflightReport(generation=membership.generation, pairs=[Pair(replica=membership.members[0].replica)])


def _report(membership: Membership, processes: list[_Process], problem: str) -> PreflightReport:
    names = [member.replica for member in membership.members]
    pairs = [
        Pair(replica=names[result["pair"]], bytes_per_second=result["bytesPerSecond"])
        for result in processes[0].results
        if "pair" in result
    ]
    sums = [value for process in processes for value in process.values("allReduce")]
    seconds = [value for process in processes for value in process.values("productSeconds")]
    return PreflightReport(
        generation=membership.generation,
        wrong=problem,
        product_seconds=max(seconds, default=None),
        pairs=pairs,
        all_reduce=next((result for result in SUM_RESULTS if result in sums), None),
    )


@contextmanager
def _running(membership: Membership, index: int) -> Iterator[list[_Process]]:
    """Start the processes; on exit all of them are killed."""
    first, own = membership.members[0], membership.members[index]
    before = sum(member.processes for member in membership.members[:index])
    processes: list[_Process] = []
    try:
        for local_rank in range(own.processes):
            place = ProcessPlace(
                replica=index,
                replicas=len(membership.members),
                rank=before + local_rank,
                world_size=membership.world_size,
                local_rank=local_rank,
                address=first.address,
                port=first.port,
                prefix=f"preflight/{membership.generation}",
                agent=os.getpid(),
            )
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
            process = subprocess.Popen(
                module_command("tandem_trainer.agent.preflight", place.encoded()),
                env={**environment_without_code(os.environ), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                # Signals of the terminal go to the agent, which ends the processes.
                start_new_session=True,
            )
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            processes.append(_Process(place.rank, process, errors))
        yield processes
    finally:
        for child in processes:
            child.process.kill()
        for child in processes:
            child.process.wait()
            if child.process.stdout is not None:
                child.process.stdout.close()
            child.errors.close()
