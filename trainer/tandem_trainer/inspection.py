"""What the ranks of a run on this machine, or in this pod, are doing now, without stopping them.

    python -m tandem_trainer.inspection [--run-dir FOLDER] [--rank N [--attach]]

Prints a `tandem.stacks.Inspection` as JSON: without `--rank` all ranks with the stack of their main threads, with it
all threads of that rank. `tandem debug` runs it, on a cluster through `kubectl exec` in the pod of a worker.

With `--attach` it asks the rank to let a debugger attach (tandem_trainer.debugger), and prints a
`tandem.stacks.Attachment`.

A rank holds its pulse and the file for its stacks open; their names are gone. Both are found through /proc, where the
kernel lets the same user open them again. So this needs neither the agent, which may be stuck itself, nor a network,
nor the job. Rejected: a request to the coordinator, which passes it on with the next heartbeat: a second path for the
same stacks, which says nothing where the agent is what hangs.

A rank without the handler, such as a program that is not Python, is named and left alone: the signal would end it.
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

from tandem.launch import REPLICA, RUN_DIR
from tandem.protocol import SCRIPT
from tandem.rundir.layout import RunDir
from tandem.stacks import Attachment, Frame, Inspection, RankStacks, ThreadStack
from tandem_trainer.debugger import folder_of
from tandem_trainer.pulse import Beat, debugger_slot, pulse_file, read_beat
from tandem_trainer.stacks import Stacks, Subject, answers, is_stopped, read_stacks

PROCESSES = Path("/proc")
RANK = "RANK"
"""The variable in which torchrun tells a process its rank."""

_FRAME = re.compile(r'  File "(.*)", line ([0-9]+|\?\?\?) in (.*)')


@dataclass(frozen=True)
class RankProcess:
    """A rank that beats."""

    beat: Beat
    pulse: Path
    """Its pulse file."""
    replica: str
    subject: Subject


def inspect(run_dir: Path, rank: int | None = None) -> Inspection:
    """The ranks of a run that are processes of this machine or pod, ascending.

    Args:
        rank: of this one all threads are asked, and of the others none; None: of all ranks the main thread.
    """
    found, silent = _ranks(run_dir)
    try:
        asked = [one for one in found if rank is None or one.beat.rank == rank]
        stacks = read_stacks([one.subject for one in asked], only_main=rank is None)
        told = {one.beat.rank: threads for one, threads in zip(asked, stacks, strict=True)}
        ranks = [_seen(one, told.get(one.beat.rank)) for one in found]
    finally:
        for one in found:
            one.subject.close()
    known = {one.rank for one in ranks}
    ranks += [one for one in silent if one.rank not in known]
    return Inspection(
        ranks=sorted(ranks, key=lambda one: one.rank),
        members=_members(run_dir, max((one.generation for one in ranks), default=0)),
    )


def attach(run_dir: Path, rank: int) -> Attachment | None:
    """Have a rank let a debugger attach; None if there is no such rank here."""
    found, silent = _ranks(run_dir)
    try:
        for one in found:
            if one.beat.rank == rank:
                return _attached(one)
    finally:
        for one in found:
            one.subject.close()
    return next(
        (
            Attachment(rank=one.rank, replica=one.replica, pid=one.pid, trouble=one.trouble)
            for one in silent
            if one.rank == rank
        ),
        None,
    )


def _attached(one: RankProcess) -> Attachment:
    pid = one.beat.pid
    told = Attachment(rank=one.beat.rank, replica=one.replica, pid=pid, folder=folder_of(pid))
    if is_stopped(pid):
        return told.model_copy(update={"trouble": _why(pid)})
    try:
        answer = debugger_slot(one.pulse).ask()
    except (OSError, ValueError) as error:
        return told.model_copy(update={"trouble": f"it cannot be asked: {error}"})
    return told.model_copy(update={"port": answer} if isinstance(answer, int) else {"trouble": answer})


def frames(text: str) -> list[Frame]:
    """The calls of a thread in what it has written, the innermost last."""
    found = [match for line in text.splitlines() if (match := _FRAME.fullmatch(line))]
    return [
        Frame(file=match[1], line=int(match[2]) if match[2].isdecimal() else 0, function=match[3])
        for match in reversed(found)
    ]


def _ranks(run_dir: Path) -> tuple[list[RankProcess], list[RankStacks]]:
    """Ranks that beat, of each the newest generation; and processes that were started as a rank and do not."""
    where = os.path.realpath(run_dir)
    found: dict[int, RankProcess] = {}
    silent: dict[int, RankStacks] = {}
    for pid in sorted(int(entry.name) for entry in PROCESSES.iterdir() if entry.name.isdecimal()):
        # Another user's process, or one that is gone by now.
        with suppress(OSError):
            variables = _variables(pid)
            if RUN_DIR not in variables or os.path.realpath(variables[RUN_DIR]) != where:
                continue
            for one in _beating(pid, variables.get(REPLICA, "")):
                before = found.get(one.beat.rank)
                if before is not None and before.beat.generation >= one.beat.generation:
                    one.subject.close()
                    continue
                if before is not None:
                    before.subject.close()
                found[one.beat.rank] = one
            if (number := variables.get(RANK, "")).isdecimal():
                silent.setdefault(
                    int(number),
                    RankStacks(
                        rank=int(number),
                        replica=variables.get(REPLICA, ""),
                        pid=pid,
                        trouble="it has not said anything: it is starting, or it is a program that Tandem cannot ask",
                    ),
                )
    return list(found.values()), list(silent.values())


def _beating(pid: int, replica: str) -> Iterator[RankProcess]:
    """The rank that a process is, if it is one: its children and its agent hold the same files under other numbers."""
    open_files: dict[str, dict[str, Path]] = {}
    for descriptor in (PROCESSES / str(pid) / "fd").iterdir():
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
            # Opened by way of the process, so it is this process that the descriptor above stands for.
            answer = os.open(files[".stacks"], os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            os.close(pidfd)
            raise
        yield RankProcess(beat, files[""], replica, Subject(beat.rank, pid, pidfd, answer, beat.phase))


def _seen(one: RankProcess, stacks: Stacks | None) -> RankStacks:
    beat = one.beat
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
        replica=one.replica,
        pid=beat.pid,
        generation=beat.generation,
        step=None if beat.phase == SCRIPT else beat.step,
        phase=beat.phase,
        silent_seconds=max(0.0, round(time.monotonic() - beat.at, 3)),
        trouble="" if stacks is None or any(thread.frames for thread in threads) else _why(beat.pid),
        threads=threads,
    )


def _why(pid: int) -> str:
    """Why a rank has not answered."""
    if is_stopped(pid):
        return f"its process is stopped, and answers only after `kill -CONT {pid}`"
    if not (PROCESSES / str(pid)).exists():
        return "it has just ended"
    if not answers(pid):
        return "it is just starting, and cannot be asked yet"
    return "it did not answer in time: it is stuck in the kernel, or blocks the signal"


def _members(run_dir: Path, generation: int) -> list[str]:
    """The workers of a generation in rank order, where its first rank has recorded them."""
    with suppress(OSError, ValueError):
        for record in reversed(RunDir(run_dir).generation_records()):
            if record.generation == generation:
                return record.members
    return []


def _variables(pid: int) -> dict[str, str]:
    """What a process was started with."""
    content = (PROCESSES / str(pid) / "environ").read_bytes()
    pairs = (entry.partition(b"=") for entry in content.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def main(words: Sequence[str] | None = None) -> None:
    """Print what the ranks do."""
    parser = argparse.ArgumentParser(prog="python -m tandem_trainer.inspection")
    parser.add_argument("--run-dir", type=Path, default=os.environ.get(RUN_DIR))
    parser.add_argument("--rank", type=int, default=None)
    parser.add_argument("--attach", action="store_true")
    given = parser.parse_args(words)
    if given.run_dir is None:
        parser.error(f"give --run-dir, or set {RUN_DIR}")
    if given.attach:
        if given.rank is None:
            parser.error("--attach needs --rank")
        if (found := attach(given.run_dir, given.rank)) is None:
            parser.exit(1, f"rank {given.rank} has just ended\n")
        sys.stdout.write(found.model_dump_json() + "\n")
        return
    sys.stdout.write(inspect(given.run_dir, given.rank).model_dump_json() + "\n")


if __name__ == "__main__":
    main()
