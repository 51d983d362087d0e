"""The end of a job, as real processes: ranks end one after the other, agents leave, scripts end before they should."""

import json
import re
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tandem.processes.exitcode import ExitCode
from tandem.rundir.layout import FinishedMember
from tests.support.elastic import Elastic
from tests.support.processes import alive
from tests.support.waiting import SECONDS, until

pytestmark = pytest.mark.timeout(240)
NAMES = ("worker-0", "worker-1", "worker-2")
GONE_SECONDS = 20.0
"""Time for an agent to find that no coordinator answers, on a busy machine; one that waited for it would take 300 s."""
ONE_BY_ONE = """
import os, time
from pathlib import Path

folder, rank = Path(os.environ["TANDEM_RUN_DIR"]), os.environ["RANK"]
with open(folder / f"begins-{rank}", "a") as file:
    file.write("x")
while not (folder / f"ends-{rank}").exists():
    time.sleep(0.02)
"""
SESSION = """
import os, sys
import torch, torch.distributed as dist
from tandem_trainer.session import Session

with Session(seed=1) as session:
    model = session.distribute(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.keep(model, optimizer)
    for batch in session.batches(torch.rand(40, 4), 8, epochs=4):
        batch.mean(model(batch.data).squeeze(1) ** 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        if batch.step == 12 and session.rank == 0:
            LEAVES
dist.destroy_process_group()
"""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Elastic]:
    """Three agents, each with a rank that ends when it is told to."""
    script = tmp_path / "one_by_one.py"
    script.write_text(ONE_BY_ONE)
    with Elastic(tmp_path, replicas=3, trainer={"command": ["python", str(script)]}).start(*NAMES) as elastic:
        until(lambda: all(begun(elastic)), "three ranks")
        yield elastic


def begun(group: Elastic) -> list[int]:
    """How often each rank has begun."""
    files = [group.rundir.path / f"begins-{rank}" for rank in range(3)]
    return [len(file.read_text()) if file.exists() else 0 for file in files]


def rank_ends(group: Elastic, rank: int, finished: int) -> None:
    """Its agent says so; `finished` is how many have then."""
    (group.rundir.path / f"ends-{rank}").touch()
    until(lambda: (seen := group.snapshot()) is not None and seen.finished == finished, f"the end of rank {rank}")


def is_complete(group: Elastic) -> None:
    for name in NAMES:
        assert group.agents[name].wait(SECONDS) == ExitCode.DONE, group.output(name)
        assert "Traceback" not in group.output(name)
    until(lambda: group.rundir.done() is not None, "DONE")
    assert begun(group) == [1, 1, 1], "nobody began again"


def test_agents_leave_when_their_ranks_have_ended_and_the_one_with_the_store_when_all_have(group: Elastic) -> None:
    rank_ends(group, 0, finished=1)
    rank_ends(group, 1, finished=2)
    assert group.agents["worker-1"].wait(SECONDS) == ExitCode.DONE
    assert group.agents["worker-0"].poll() is None, "rank 2 may use its store"
    (group.rundir.path / "ends-2").touch()
    is_complete(group)


def test_a_coordinator_that_is_gone_while_ranks_end_finds_all_that_have_ended(group: Elastic) -> None:
    rank_ends(group, 1, finished=1)
    # It has been told that this is on the disk.
    assert group.agents["worker-1"].wait(SECONDS) == ExitCode.DONE
    group.kill_coordinator()
    for rank in (0, 2):
        (group.rundir.path / f"ends-{rank}").touch()
    until(lambda: "event=coordinator-unreachable" in group.output("worker-2"), "an agent that tries to say so")
    group.start_coordinator()
    is_complete(group)


def test_agents_whose_ranks_have_ended_do_not_wait_for_a_coordinator_that_is_gone(group: Elastic) -> None:
    """They leave what it has to know in the run directory; the one with the store stays while a rank may use it."""
    group.kill_coordinator()
    (group.rundir.path / "ends-0").touch()
    (group.rundir.path / "ends-1").touch()
    began = time.monotonic()
    assert group.agents["worker-1"].wait(SECONDS) == ExitCode.DONE, group.output("worker-1")
    assert time.monotonic() - began < GONE_SECONDS
    assert group.agents["worker-0"].poll() is None, "rank 2 may use its store"
    assert group.agents["worker-2"].poll() is None
    (group.rundir.path / "ends-2").touch()
    began = time.monotonic()
    for name in ("worker-2", "worker-0"):
        assert group.agents[name].wait(SECONDS) == ExitCode.DONE, group.output(name)
    assert time.monotonic() - began < GONE_SECONDS
    assert group.rundir.done() is None
    group.start_coordinator()
    is_complete(group)


def test_what_members_record_counts_for_a_coordinator_that_they_cannot_reach(
    group: Elastic,
) -> None:
    recorded = json.loads(group.rundir.coordinator_file.read_text())["membership"]
    for member in recorded["members"]:
        assert group.rundir.done() is None
        group.rundir.record_finished(FinishedMember(recorded["generation"], member["replica"], member["incarnation"]))
    until(group.rundir.done, "that all have finished")


def test_a_coordinator_that_comes_back_while_ranks_work_finds_who_has_left(group: Elastic) -> None:
    group.kill_coordinator()
    (group.rundir.path / "ends-1").touch()
    assert group.agents["worker-1"].wait(SECONDS) == ExitCode.DONE, group.output("worker-1")
    group.start_coordinator()
    until(lambda: "but for worker-1, which finished" in group.output("coordinator"), "the same generation")
    for rank in (0, 2):
        (group.rundir.path / f"ends-{rank}").touch()
    is_complete(group)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_who_has_finished_may_go_at_any_time(group: Elastic, how: signal.Signals) -> None:
    rank_ends(group, 0, finished=1)
    agent = group.agents["worker-0"]
    agent.send_signal(how)
    assert agent.wait(SECONDS) == (ExitCode.DONE if how == signal.SIGTERM else -how)
    del group.agents["worker-0"]
    for rank in (2, 1):
        (group.rundir.path / f"ends-{rank}").touch()
    for name in ("worker-1", "worker-2"):
        assert group.agents[name].wait(SECONDS) == ExitCode.DONE
    until(lambda: group.rundir.done() is not None, "DONE")
    assert begun(group) == [1, 1, 1]


def session(
    tmp_path: Path, leaves: str, warm: bool = True, place: tuple[str, str] = ("", ""), restarts: int = 1
) -> Elastic:
    script = tmp_path / "session.py"
    script.write_text(SESSION.replace("LEAVES", leaves).replace(*place))
    elasticity = {"warmStart": warm, "maxRestarts": restarts}
    spec = {"trainer": {"command": ["python", str(script)]}, "checkpoint": {"everySteps": 5}, "elasticity": elasticity}
    return Elastic(tmp_path, **spec).start("worker-0", "worker-1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("leaves", "warm"),
    [("sys.exit(0)", True), pytest.param("sys.exit(0)", False, marks=pytest.mark.full("core", "trainer"))],
)
def test_a_session_that_ends_with_zero_before_its_steps_are_taken_is_not_complete(
    tmp_path: Path, leaves: str, warm: bool
) -> None:
    with session(tmp_path, leaves, warm) as group:
        failed = until(group.rundir.failed, "the end of the job")
        assert "ended with exit code 0 after step 12 of 20, before its session had ended" in failed["message"]
        assert group.rundir.done() is None


def test_a_mistake_in_the_first_batch_is_found_after_two_failures_and_told_once_each(tmp_path: Path) -> None:
    place = "if batch.step == 12 and session.rank == 0:"
    with session(tmp_path, "batch.labels", place=(place, "if batch.step == 0:"), restarts=10) as group:
        failed = until(group.rundir.failed, "the end of the job")
        assert failed["reason"] == "RepeatedFailure"
        error = "AttributeError: 'Batch' object has no attribute 'labels'"
        assert error in failed["message"]
        assert failed["traceback"].strip().endswith(error)
        assert group.rundir.newest_generation() == 2
        lines = group.output("coordinator").splitlines()
        first, *again, second, end = [re.sub(r"^.* level=[A-Z]+ ", "", line) for line in lines if error in line]
        assert first.startswith("generation 1 is over: ")
        assert second.startswith("generation 2 is over: ")
        assert end.endswith("; twice, before Tandem heard of a step or saw a checkpoint")
        assert len(again) <= 1
        # The first failure may be heard of after another one has closed the generation, and is news then.
        assert all(line.partition("because ")[2] != first.partition("is over: ")[2] for line in again)


def test_a_script_that_destroys_its_process_groups_is_complete(tmp_path: Path) -> None:
    with session(tmp_path, "pass") as group:
        for name in ("worker-0", "worker-1"):
            assert group.agents[name].wait(SECONDS) == ExitCode.DONE, group.output(name)
            assert "Traceback" not in group.output(name)
        done = group.rundir.done()
        assert done["final"]["step"] == 20
        assert "stoppedEarly" not in done
        assert group.rundir.newest_generation() == 1


def test_what_one_rank_says_stops_all_of_them_after_the_same_step_and_the_job_is_told_so(tmp_path: Path) -> None:
    with session(tmp_path, 'session.stop("enough")') as group:
        for name in ("worker-0", "worker-1"):
            assert group.agents[name].wait(SECONDS) == ExitCode.DONE, group.output(name)
        done = group.rundir.done()
        assert done["final"]["step"] == 15, "they agree when they save"
        assert done["stoppedEarly"] == "stopped early after step 15 of 20: enough"
        assert group.rundir.newest_generation() == 1, "nobody began again"
        seen = until(lambda: (found := group.snapshot()) and found.status.message and found, "the coordinator's word")
        assert (seen.reason, seen.status.message) == ("StoppedEarly", done["stoppedEarly"])


STARTS = """
import os, signal, subprocess
from pathlib import Path

note = Path(os.environ["TANDEM_RUN_DIR"]) / "beside"
if not note.exists():
    note.write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.full("trainer")
@pytest.mark.parametrize("warm", [True, False])
def test_what_a_killed_rank_has_started_ends_with_it(tmp_path: Path, warm: bool) -> None:
    script = tmp_path / "starts.py"
    script.write_text(STARTS)
    trainer = {"command": ["python", str(script)]}
    with Elastic(tmp_path, replicas=1, trainer=trainer, elasticity={"warmStart": warm}).start("worker-0") as group:
        assert group.agents["worker-0"].wait(SECONDS) == ExitCode.DONE, group.output("worker-0")
        assert not alive(int((group.rundir.path / "beside").read_text()))


SHORT = """
import os, random, time
from pathlib import Path

time.sleep(random.random())
(Path(os.environ["TANDEM_RUN_DIR"]) / f"ended-{os.environ['RANK']}").write_text(str(time.time()))
"""
SHORT_JOBS, AT_ONCE = 200, 6


@pytest.mark.full("coordinator", "trainer")
@pytest.mark.timeout(1200)
def test_short_jobs_all_end_however_many_there_are(tmp_path: Path) -> None:
    """Six at a time on few cores. How long their agents stay is printed, and is no reason to fail."""
    script = tmp_path / "short.py"
    script.write_text(SHORT)

    def late(number: int) -> float:
        """Seconds from the end of the last rank to that of the last agent."""
        folder = tmp_path / str(number)
        folder.mkdir()
        with Elastic(folder, replicas=3, trainer={"command": ["python", str(script)]}).start(*NAMES) as job:
            codes = [job.agents[name].wait(120) for name in NAMES]
            now = time.time()
            assert codes == [ExitCode.DONE] * 3, "\n".join(job.output(name) for name in NAMES)
            until(lambda: job.rundir.done() is not None, "DONE")
            ends = [float(path.read_text()) for path in job.rundir.path.glob("ended-*")]
            assert len(ends) == 3
        shutil.rmtree(folder)
        return now - max(ends)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = sorted(pool.map(late, range(SHORT_JOBS)))
    print(f"{SHORT_JOBS} jobs left {found[len(found) // 2]:.2f} s after their work, the last {found[-1]:.2f} s")


def test_a_node_that_shuts_down_costs_no_restart(tmp_path: Path) -> None:
    """All its processes get SIGTERM, the ranks before their agent."""
    script = tmp_path / "obeys.sh"
    waits = "while kill -0 $PPID; do sleep 0.1; done"
    script.write_text(f'trap "exit 143" TERM\ntouch "$TANDEM_RUN_DIR/begun-$RANK"\n{waits}\n')
    with Elastic(tmp_path, trainer={"command": ["sh", str(script)]}).start("worker-0", "worker-1") as group:
        until(lambda: len(list(group.rundir.path.glob("begun-*"))) == 2, "two ranks")
        agent = group.agents["worker-1"]
        for process in psutil.Process(agent.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(SECONDS) == ExitCode.PREEMPTED, group.output("worker-1")
        until(lambda: "generation 2 with 1 replica" in group.output("coordinator"), "the others")
        assert "restart budget" not in group.output("coordinator")
