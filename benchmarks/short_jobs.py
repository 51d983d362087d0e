"""Thousands of short jobs, and whether each of them ends: `python -m benchmarks.short_jobs [--jobs 2000] [--beside 2]`.

A job has a coordinator and agents, all real processes, which are forked from one that has imported what they import:
2,000 jobs would spend an hour of two cores on that. Its ranks work for up to a second each, so they end in every
order. Ranks are shells that sleep (`--ranks played`), or a script with a session that trains on two ranks (`--ranks
real`). In one job of `--lose-every` the coordinator is killed at some moment of the job and starts again a second
later; the agents may be gone by then.

A generation whose members have not all joined it when the coordinator is lost cannot be continued, and begins again:
only then may a script run twice. An agent that has to begin again ends with a code after which it is started again, as
Tandem does.

For each job, the time from the end of its last rank, or from the return of its coordinator if that is later, to the end
of its last agent and to `DONE` is measured. The goal: every job is complete, its script ran once, and both times are at
most SECONDS.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen, TimeoutExpired

from benchmarks.goals import Outcome, Verdict, exit_code
from tandem.processes.exitcode import ExitCode
from tests.support.elastic import Elastic
from tests.support.zygote import Forked

SECONDS = 5.0
GIVE_UP_SECONDS = 120.0
"""Time after which a job counts as one that never ends, in seconds."""
BACK_SECONDS = 1.0
"""Time until a killed coordinator starts again, in seconds."""
PLAYED = """
started=$TANDEM_RUN_DIR/begun-$RANK
echo begun >> "$started"
sleep {seconds}
date +%s.%N > "$TANDEM_RUN_DIR/ended-$RANK"
"""
REAL = """
import os, sys, time
from pathlib import Path
import torch
from tandem_trainer.session import Session

folder, rank = Path(os.environ["TANDEM_RUN_DIR"]), os.environ["RANK"]
with open(folder / f"begun-{rank}", "a") as file:
    print("begun", file=file)
with Session(seed=1) as session:
    model = session.distribute(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.keep(model, optimizer)
    for batch in session.batches(torch.rand(40, 4), 8, epochs=2):
        batch.mean(model(batch.data).squeeze(1) ** 2).backward()
        optimizer.step()
        optimizer.zero_grad()
time.sleep({seconds})
(folder / f"ended-{rank}").write_text(str(time.time()))
"""


@dataclass(frozen=True)
class Ended:
    """End of one job."""

    number: int
    agents_seconds: float
    """Time to the end of the last agent, in seconds; infinite if one did not end."""
    done_seconds: float
    """Time to `DONE`, in seconds; infinite if there is none."""
    lost: bool
    """Whether the coordinator was killed."""
    problem: str
    """Further problem, in a sentence; empty if there is none."""


class ShortJob(Elastic):
    """Job whose coordinator is forked like its agents."""

    def _spawn(self, name: str, command: list[str]) -> Popen[bytes] | Forked:
        if name != "coordinator":
            return super()._spawn(name, command)
        with (self.path / f"{name}.txt").open("ab") as output:
            arguments = command[command.index("tandem_coordinator") + 1 :]
            return Forked("tandem_coordinator", arguments, self._environment(name), output)


def play(number: int, folder: Path, ranks: str, replicas: int, lose: bool, seed: int) -> Ended:
    """Run one job to its end."""
    chance = random.Random(f"{seed} {number}")
    folder.mkdir()
    script = folder / ("short.sh" if ranks == "played" else "short.py")
    # The session's own barrier ends before each rank sleeps for a time of its own.
    waits = " ".join(f"{chance.random():.3f}" for _ in range(replicas))
    if ranks == "played":
        script.write_text(PLAYED.replace("{seconds}", f'$(set -- {waits}; shift "$RANK"; echo "$1")'))
        command = ["sh", str(script)]
    else:
        script.write_text(REAL.replace("{seconds}", f'float("{waits}".split()[int(rank)])'))
        command = ["python", str(script)]
    names = [f"worker-{index}" for index in range(replicas)]
    job = ShortJob(folder, replicas=replicas, trainer={"command": command}, checkpoint={"everySteps": 5})
    back_at, had_joined = 0.0, True
    with job.start(*names):
        if lose:
            time.sleep(chance.uniform(0.2, 2.5))
            job.kill_coordinator()
            had_joined = all("event=joined" in job.output(name) for name in names)
            time.sleep(BACK_SECONDS)
            job.start_coordinator()
            back_at = time.time()
        deadline = time.monotonic() + GIVE_UP_SECONDS
        codes = []
        for name in names:
            try:
                while (code := job.agents[name].wait(max(0.1, deadline - time.monotonic()))) == ExitCode.PEER_LOST:
                    job.start_agent(name)
                codes.append(code)
            except TimeoutExpired:
                codes.append(-1)
        agents_ended = time.time()
        while (done := job.rundir.done()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        ends = [float(path.read_text()) for path in job.rundir.path.glob("ended-*")]
        starts = [len(path.read_text().splitlines()) for path in job.rundir.path.glob("begun-*")]
        coordinator = job.output("coordinator")[-500:]
        output = "" if codes == [ExitCode.DONE] * replicas else job.output(names[0])[-500:]
    last = max(back_at, *ends) if ends else agents_ended
    problems = [
        f"agents ended with {codes}: {output}" if output else "",
        f"{len(ends)} of {replicas} ranks ended" if len(ends) != replicas else "",
        f"ranks started {starts} times" if had_joined and starts != [1] * replicas else "",
        "" if done else f"no DONE: {job.rundir.failed() or coordinator}",
    ]
    shutil.rmtree(folder)
    return Ended(
        number,
        max(0.0, agents_ended - last) if -1 not in codes else float("inf"),
        max(0.0, float(done["at"]) - last) if done else float("inf"),
        lose,
        "; ".join(filter(None, problems)),
    )


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many cores busy."""
    loads = [Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for load in loads:
            load.kill()
            load.wait()


def table(rows: Sequence[Ended]) -> str:
    """Format the times of the jobs."""
    lines = [
        f"{'seconds after the work':24} {'jobs':>6} {'agents: median':>16} {'99 %':>7} {'last':>7} {'DONE: last':>12}"
    ]
    for name, lost in (("undisturbed", False), ("lost their coordinator", True)):
        values = sorted(row.agents_seconds for row in rows if row.lost == lost)
        if values:
            done = max(row.done_seconds for row in rows if row.lost == lost)
            middle, late = values[len(values) // 2], values[min(len(values) - 1, len(values) * 99 // 100)]
            lines.append(f"{name:24} {len(values):6} {middle:16.2f} {late:7.2f} {values[-1]:7.2f} {done:12.2f}")
    return "\n".join(lines)


def judge(rows: Sequence[Ended]) -> list[Verdict]:
    """Judge the goals."""
    wrong = [row for row in rows if row.problem]
    late = [row for row in rows if max(row.agents_seconds, row.done_seconds) > SECONDS]
    return [
        Verdict(
            Outcome.MISSED if wrong else Outcome.MET,
            "every job is complete, and its script ran once, unless its group was incomplete without a coordinator",
            "; ".join(f"job {row.number}: {row.problem}" for row in wrong[:3]) or f"{len(rows)} jobs",
        ),
        Verdict(
            Outcome.MISSED if late else Outcome.MET,
            f"no job ends later than its work plus {SECONDS:g} s",
            f"{len(late)} of {len(rows)} later" + "".join(f", job {row.number}" for row in late[:5]),
        ),
    ]


def main() -> int:
    """Run the jobs and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.short_jobs")
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--ranks", choices=("played", "real"), default="played")
    parser.add_argument("--replicas", type=int, default=3, help="agents of a job (default: 3)")
    parser.add_argument(
        "--at-once", type=int, default=os.cpu_count() or 1, help="jobs at a time (default: one for each core)"
    )
    parser.add_argument("--beside", type=int, default=0, help="processes that keep a core busy each")
    parser.add_argument("--lose-every", type=int, default=10, help="one job of so many loses its coordinator; 0: none")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    rows: list[Ended] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as root, busy(options.beside), ThreadPoolExecutor(options.at_once) as pool:

        def play_numbered(number: int) -> Ended:
            lose = bool(options.lose_every) and number % options.lose_every == 0
            return play(number, Path(root) / str(number), options.ranks, options.replicas, lose, options.seed)

        for row in pool.map(play_numbered, range(options.jobs)):
            rows.append(row)
            if row.problem:
                print(f"job {row.number}: {row.problem}", flush=True)
            elif len(rows) % 100 == 0:
                print(f"{len(rows)} jobs in {time.monotonic() - started:.0f} s", flush=True)
    print(f"\n{options.jobs} jobs of {options.replicas} agents with {options.ranks} ranks, {options.at_once} at a time")
    print(f"beside {options.beside} busy processes, in {time.monotonic() - started:.0f} s\n\n{table(rows)}\n")
    verdicts = judge(rows)
    print(*verdicts, sep="\n")
    return exit_code(verdicts)


if __name__ == "__main__":
    sys.exit(main())
