"""The processes of one replica's pre-flight, from the agent's side: start, output, end."""

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

from tandem.code import without_folder
from tandem.launch import module_command
from tandem.protocol import Membership, Pair, PreflightReport
from tandem_trainer.preflight import LIMIT_SECONDS, ProcessPlace

log = logging.getLogger("tandem.agent")

POLL_SECONDS = 0.05
SUMS: tuple[Literal["wrong", "failed", "right"], ...] = ("wrong", "failed", "right")
"""What may come of the sum, the worst first."""
LAST_WORDS = 300
"""So many characters of what a process that failed printed last."""


@dataclass
class _Process:
    rank: int
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    found: list[dict[str, Any]] = field(default_factory=list)
    _rest: bytes = b""

    def read(self) -> None:
        """Take in what it has said since."""
        assert self.process.stdout is not None
        while data := self.process.stdout.read(2**16):
            *lines, self._rest = (self._rest + data).split(b"\n")
            self.found += [json.loads(line) for line in lines]

    def of(self, key: str) -> list[Any]:
        """All values that it has said of this."""
        return [found[key] for found in self.found if key in found]

    def complaint(self) -> str | None:
        """What it did wrong by itself, None if nothing."""
        if wrong := self.of("wrong"):
            return f"{wrong[0]} (rank {self.rank})"
        if not (code := self.process.poll()):
            return None
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        self.errors.seek(0)
        printed = self.errors.read().decode(errors="replace").strip().splitlines()
        said = f": {printed[-1][-LAST_WORDS:]}" if printed else ""
        return f"lost the process of rank {self.rank}, which ended {how} during its {self._at()}{said}"

    def delay(self) -> str:
        """What is said of one that does not end."""
        return f"was not done after {LIMIT_SECONDS:.0f} s, with rank {self.rank} still at its {self._at()}"

    def _at(self) -> str:
        stages = self.of("at")
        return stages[-1] if stages else "start"


def run(membership: Membership, index: int, goes_on: Callable[[], bool]) -> PreflightReport | None:
    """Do the pre-flight of one replica; returns what it found, None if it is not wanted any more.

    Args:
        membership: the generation.
        index: of this replica in it.
        goes_on: asked again and again whether to go on.
    """
    began = time.monotonic()
    with _started(membership, index) as processes:
        while True:
            if not goes_on():
                return None
            # Before it is read, so that nothing is missed of one that has ended.
            ended = [one.process.poll() is not None for one in processes]
            for one in processes:
                one.read()
            complaint = next((said for one in processes if (said := one.complaint()) is not None), "")
            if not complaint and not all(ended) and time.monotonic() - began > LIMIT_SECONDS:
                complaint = next(one.delay() for one in processes if one.process.poll() is None)
            if complaint or all(ended):
                break
            time.sleep(POLL_SECONDS)
        report = _report(membership, processes, complaint)
    log.info(
        "event=preflight generation=%d seconds=%.1f product_ms=%s pairs=%d reached=%d sum=%s wrong=%r",
        membership.generation,
        time.monotonic() - began,
        None if report.product_seconds is None else f"{1000 * report.product_seconds:.3g}",
        len(report.pairs),
        sum(pair.bytes_per_second is not None for pair in report.pairs),
        report.all_reduce,
        report.wrong,
    )
    return report


def unreached(membership: Membership) -> PreflightReport:
    """What is told by a member that does not reach the store of the first one."""
    return PreflightReport(generation=membership.generation, pairs=[Pair(replica=membership.members[0].replica)])


def _report(membership: Membership, processes: list[_Process], complaint: str) -> PreflightReport:
    names = [member.replica for member in membership.members]
    pairs = [
        Pair(replica=names[found["pair"]], bytes_per_second=found["bytesPerSecond"])
        for found in processes[0].found
        if "pair" in found
    ]
    sums = [said for one in processes for said in one.of("allReduce")]
    seconds = [said for one in processes for said in one.of("productSeconds")]
    return PreflightReport(
        generation=membership.generation,
        wrong=complaint,
        product_seconds=max(seconds, default=None),
        pairs=pairs,
        all_reduce=next((said for said in SUMS if said in sums), None),
    )


@contextmanager
def _started(membership: Membership, index: int) -> Iterator[list[_Process]]:
    """The processes, until the block is left; then none of them is there any more."""
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
                module_command("tandem_trainer.preflight", place.encoded()),
                env={**without_folder(os.environ), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                # What is typed at the terminal is for the agent, which ends them.
                start_new_session=True,
            )
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            processes.append(_Process(place.rank, process, errors))
        yield processes
    finally:
        for one in processes:
            one.process.kill()
        for one in processes:
            one.process.wait()
            if one.process.stdout is not None:
                one.process.stdout.close()
            one.errors.close()
