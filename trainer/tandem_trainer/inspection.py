"""Shows what the ranks of a run on this machine, or in this pod, are doing now, without stopping them.

    python -m tandem_trainer.inspection [--run-dir FOLDER] [--rank N [--attach]]

Prints a `tandem.wire.stacks.Inspection` as JSON: without `--rank` all ranks with the stack of their main threads, with
it all threads of that rank. `tandem debug` runs it, on a cluster through `kubectl exec` in the pod of a worker.

With `--attach` it requests a debugger from the rank (tandem_trainer.debugger), and prints a
`tandem.wire.stacks.Attachment`.

A rank holds its pulse and the file for its stacks open; their names are gone. Both are found through /proc, where the
kernel lets the same user open them again. So this needs neither the agent, which may be stuck itself, nor a network,
nor the job. Rejected: a request to the coordinator, which passes it on with the next heartbeat: a second path for the
same stacks, which fails where the agent is what hangs.

A rank without the handler, such as a program that is not Python, is only listed: the signal would end it.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.processes.launch import REPLICA, RUN_DIR
from tandem.rundir.layout import RunDir
from tandem.wire.protocol import SCRIPT
from tandem.wire.stacks import Attachment, Frame, Inspection, RankStacks, ThreadStack
from tandem_trainer.debugger import working_directory
from tandem_trainer.pulse import Beat, debugger_slot, pulse_file, read_beat
from tandem_trainer.stacks import Stacks, Subject, answers, is_stopped, read_stacks

PROC = Path("/proc")
RANK_VARIABLE = "RANK"
"""Environment variable in which torchrun passes a process its rank."""

_FRAME = re.compile(r'  File "(.*)", line ([0-9]+|\?\?\?) in (.*)')


@dataclass(frozen=True)
class RankProcess:
    """A rank with a pulse."""

    beat: Beat
    pulse: Path
    """Pulse file of the rank."""
    replica: str
    subject: Subject


def inspect(run_dir: Path, rank: int | None = None) -> Inspection:
    """Inspect the ranks of a run that are processes of this machine or pod, in ascending order.

    Args:
        run_dir: run directory.
        rank: rank whose threads are all asked, and no other rank's; None: the main threads of all ranks are asked.
    """
    processes, silent = _ranks(run_dir)
    try:
        selected = [process for process in processes if rank is None or process.beat.rank == rank]
        stacks = read_stacks([process.subject for process in selected], only_main=rank is None)
        by_rank = {process.beat.rank: threads for process, threads in zip(selected, stacks, strict=True)}
        ranks = [_rank_stacks(process, by_rank.get(process.beat.rank)) for process in processes]
    finally:
        for process in processes:
            process.subject.close()
    # A stub or an agent's child may carry the rank's number, too; the process that beats counts.
    beating = {entry.rank for entry in ranks}
    ranks += [entry for entry in silent if entry.rank not in beating]
    return Inspection(
        ranks=sorted(ranks, key=lambda entry: entry.rank),
        members=_members(run_dir, max((entry.generation for entry in ranks), default=0)),
    )


def attach(run_dir: Path, rank: int) -> Attachment | None:
    """Request a debugger from a rank; None if there is no such rank here."""
    processes, silent = _ranks(run_dir)
    try:
        for process in processes:
            if process.beat.rank == rank:
                return _request_debugger(process)
    finally:
        for process in processes:
            process.subject.close()
    return next(
        (
            Attachment(rank=entry.rank, replica=entry.replica, pid=entry.pid, trouble=entry.trouble)
            for entry in silent
            if entry.rank == rank
        ),
        None,
    )


def _request_debugger(process: RankProcess) -> Attachment:
    pid = process.beat.pid
    attachment = Attachment(rank=process.beat.rank, replica=process.replica, pid=pid, folder=working_directory(pid))
    if is_stopped(pid):
        return attachment.model_copy(update={"trouble": _no_answer_reason(pid)})
    try:
        answer = debugger_slot(process.pulse).request()
    except (OSError, ValueError) as error:
        return attachment.model_copy(update={"trouble": f"it cannot be asked: {error}"})
    return attachment.model_copy(update={"port": answer} if isinstance(answer, int) else {"trouble": answer})


def frames(text: str) -> list[Frame]:
    """Parse the stack that a thread has written; the innermost call is last."""
    matches = [match for line in text.splitlines() if (match := _FRAME.fullmatch(line))]
    return [
        Frame(file=match[1], line=int(match[2]) if match[2].isdecimal() else 0, function=match[3])
        for match in reversed(matches)
    ]


def _ranks(run_dir: Path) -> tuple[list[RankProcess], list[RankStacks]]:
    """Find the ranks of a run: those that beat, each in its newest generation, and processes that were started as a
    rank and do not beat."""
    folder = os.path.realpath(run_dir)
    beating: dict[int, RankProcess] = {}
    silent: dict[int, RankStacks] = {}
    for pid in sorted(int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal()):
        # Another user's process, or one that is gone by now.
        with suppress(OSError):
            variables = _variables(pid)
            if RUN_DIR not in variables or os.path.realpath(variables[RUN_DIR]) != folder:
                continue
            for process in _rank_processes(pid, variables.get(REPLICA, "")):
                before = beating.get(process.beat.rank)
                if before is not None and before.beat.generation >= process.beat.generation:
                    process.subject.close()
                    continue
                if before is not None:
                    before.subject.close()
                beating[process.beat.rank] = process
            if (number := variables.get(RANK_VARIABLE, "")).isdecimal():
                silent.setdefault(
                    int(number),
                    RankStacks(
                        rank=int(number),
                        replica=variables.get(REPLICA, ""),
                        pid=pid,
                        trouble="it has not reported yet: it is starting, or it is a program Tandem cannot inspect",
                    ),
                )
    return list(beating.values()), list(silent.values())


def _rank_processes(pid: int, replica: str) -> Iterator[RankProcess]:
    """Yield the rank that a process is, if it is one: its children and its agent hold the same files under other
    numbers."""
    open_files: dict[str, dict[str, Path]] = {}
    for descriptor in (PROC / str(pid) / "fd").iterdir():
        with suppress(OSError):
            if (file := pulse_file(os.readlink(descriptor))) is not None:  # noqa: PTH115 - a path would be tidied
                open_files.setdefault(file[0], {})[file[1]] = descriptor
    for files in open_files.values():
        if not {"", ".stacks"} <= files.keys():
            continue
        beat = read_beat(files[""])
        if beat is None or beat.pid != pid:
            continue
        pidfd = os.pidfd_open(pid)
        try:
            # Opened through the process, so it is this process that the descriptor above stands for.
            stacks = os.open(files[".stacks"], os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            os.close(pidfd)
            raise
        yield RankProcess(beat, files[""], replica, Subject(beat.rank, pid, pidfd, stacks, beat.phase))


def _rank_stacks(process: RankProcess, stacks: Stacks | None) -> RankStacks:
    beat = process.beat
    threads = [
        ThreadStack(
            number=thread.number,
            name=thread.name,
            state=thread.state,
            waits_in=thread.waits_in,
            frames=frames(text),
        )
        for thread, text in (stacks or {}).items()
    ]
    return RankStacks(
        rank=beat.rank,
        replica=process.replica,
        pid=beat.pid,
        generation=beat.generation,
        step=None if beat.phase == SCRIPT else beat.step,
        phase=beat.phase,
        silent_seconds=max(0.0, round(time.monotonic() - beat.reported_at, 3)),
        trouble="" if stacks is None or any(thread.frames for thread in threads) else _no_answer_reason(beat.pid),
        threads=threads,
    )


def _no_answer_reason(pid: int) -> str:
    """Return the reason why a rank has not answered."""
    if is_stopped(pid):
        return f"its process is stopped, and answers only after `kill -CONT {pid}`"
    if not (PROC / str(pid)).exists():
        return "it has just ended"
    if not answers(pid):
        return "it is just starting, and cannot be asked yet"
    return "it did not answer in time: it is stuck in the kernel, or blocks the signal"


def _members(run_dir: Path, generation: int) -> list[str]:
    """Return the workers of a generation in rank order, where its first rank has recorded them."""
    with suppress(OSError, ValueError):
        for record in reversed(RunDir(run_dir).generation_records()):
            if record.generation == generation:
                return record.members
    return []


def _variables(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started."""
    content = (PROC / str(pid) / "environ").read_bytes()
    pairs = (entry.partition(b"=") for entry in content.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the inspection, or the attachment."""
    parser = argparse.ArgumentParser(prog="python -m tandem_trainer.inspection")
    parser.add_argument("--run-dir", type=Path, default=os.environ.get(RUN_DIR))
    parser.add_argument("--rank", type=int, default=None)
    parser.add_argument("--attach", action="store_true")
    args = parser.parse_args(argv)
    if args.run_dir is None:
        parser.error(f"give --run-dir, or set {RUN_DIR}")
    if args.attach:
        if args.rank is None:
            parser.error("--attach needs --rank")
        if (attachment := attach(args.run_dir, args.rank)) is None:
            parser.exit(1, f"rank {args.rank} has just ended\n")
        sys.stdout.write(attachment.model_dump_json() + "\n")
        return
    sys.stdout.write(inspect(args.run_dir, args.rank).model_dump_json() + "\n")


if __name__ == "__main__":
    main()
