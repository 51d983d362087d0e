"""`tandem debug` and `tandem shell` beside a run of this machine: what its ranks do is told, and training goes on."""

import json
import os
import pty
import select
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from tandem_launcher.local.guardian import MARK
from tests.support import manifests
from tests.support.local_run import LocalRun
from tests.support.processes import TANDEM, environment, tandem
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)
SCRIPT = """
import os, threading, time
from pathlib import Path
rank, here = int(os.environ["RANK"]), Path(__file__).parent
def sleeps_here():
    time.sleep(0.05)
def waits_elsewhere():
    time.sleep(0.05)
def beside():
    threading.Event().wait()
threading.Thread(target=beside, daemon=True).start()
turn = 0
while not (here / "stop").exists():
    turn += 1
    (here / f"turn-{rank}.new").write_text(str(turn))
    (here / f"turn-{rank}.new").replace(here / f"turn-{rank}")
    sleeps_here() if rank == 1 else waits_elsewhere()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    folder = tmp_path_factory.mktemp("a folder of my own")
    (folder / "train.py").write_text(SCRIPT)
    whole = manifests.manifest(
        "sleepy",
        trainer={"command": ["python", str(folder / "train.py")]},
        workers={"replicas": 2},
        evaluators={"replicas": 0},
    )
    (folder / "job.yaml").write_text(yaml.safe_dump(whole))
    variables = {"XDG_STATE_HOME": str(folder / "state")}
    with LocalRun(folder, manifest=folder / "job.yaml", cwd=folder, variables=variables, warm=False) as started:
        until(lambda: (folder / "turn-0").exists() and (folder / "turn-1").exists(), "both ranks are at work")
        yield started


def turn(run: LocalRun, rank: int) -> int:
    return int((run.path.parent / f"turn-{rank}").read_text())


def typed(run: LocalRun, text: str, *words: str, shell: str = "/bin/sh") -> tuple[int, str]:
    """`tandem shell` on a terminal, in which a text is typed: its exit code and all that it has shown."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir("/usr")
        state = str(run.path.parent / "state")
        os.execve(TANDEM, [TANDEM, "shell", *words], environment({"SHELL": shell, "XDG_STATE_HOME": state}))
    shown, sent, deadline = b"", False, time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 0.2)[0]:
            continue
        try:
            piece = os.read(terminal, 65536)
        except OSError:
            break
        shown += piece
        if not sent and b"leaves it" in shown:
            os.write(terminal, text.encode())
            sent = True
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


def test_each_rank_is_one_line_with_what_its_main_thread_is_in(run: LocalRun) -> None:
    def asleep() -> list[str] | None:
        head, *lines = run.called("debug", "sleepy").stdout.splitlines()
        assert head.split() == ["RANK", "STEP", "WORKER", "PHASE", "MAIN", "THREAD"]
        # Between two naps they write a file, and are in pathlib.
        return lines if all("train.py:" in line for line in lines) else None

    lines = until(asleep, "both ranks in their script")
    assert [line.split()[:4] for line in lines] == [["0", "–", "worker-0", "script"], ["1", "–", "worker-1", "script"]]


def test_the_stacks_of_all_threads_of_a_rank_are_told_and_training_goes_on(run: LocalRun) -> None:
    file = f'  File "{run.path.parent / "train.py"}", line '

    def asleep() -> str | None:
        told = run.called("debug", "sleepy", "1")
        assert told.returncode == 0, told.stderr
        return told.stdout if "in sleeps_here" in told.stdout else None

    before = psutil.pids()
    # Between two naps it writes a file.
    text = str(until(asleep, "rank 1 in its function"))
    assert "waits_elsewhere" not in text
    assert text.startswith("rank 1 · worker-1 · process ")
    main, *others = text.split("\n\n")[1:]
    assert main.startswith("main thread (")
    assert main.rstrip().splitlines()[-1].startswith(file), "the innermost call is the last"
    assert main.rstrip().endswith("in sleeps_here")
    assert any(f"{file}" in other and "in beside" in other for other in others)
    turns = [turn(run, rank) for rank in (0, 1)]
    until(lambda: all(turn(run, rank) > turns[rank] + 20 for rank in (0, 1)), "both ranks go on")
    snapshot = until(run.status, "the status")
    assert (snapshot.status.generation, snapshot.status.restarts or 0) == (1, 0)
    left = [process for process in psutil.process_iter() if "tandem_trainer.inspection" in " ".join(_command(process))]
    assert [process for process in left if process.pid not in before] == []


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() if str(process.environ().get("TANDEM_RUN_DIR", "")) else []
    except psutil.Error:
        return []


def test_programs_get_it_as_json(run: LocalRun) -> None:
    one = json.loads(run.called("debug", "sleepy", "0", "-o", "json").stdout)
    assert (one["rank"], one["replica"], one["phase"]) == (0, "worker-0", "script")
    assert any(frame["file"].endswith("train.py") for frame in one["threads"][0]["frames"])


def test_a_rank_that_is_not_there_is_told_with_those_that_are(run: LocalRun) -> None:
    told = run.called("debug", "sleepy", "7")
    assert (told.returncode, told.stderr) == (2, "error: sleepy has no rank 7; there are the ranks 0, 1\n")


def test_a_shell_has_the_variables_of_the_first_rank_of_a_worker_and_its_folder(run: LocalRun) -> None:
    told = 'echo "<$RANK $WORLD_SIZE $TANDEM_REPLICA $MASTER_ADDR$' + MARK + '$TANDEM_PULSE>"; pwd; exit 7\n'
    code, shown = typed(run, told, "sleepy", "worker-1")
    assert code == 7
    assert "a shell with the variables of worker-1 (rank 1), in " in shown
    assert "<1 2 worker-1 >" in shown
    assert f"\n{run.path.parent}\r" in shown


def test_only_processes_that_have_the_token_give_it_to_a_shell(run: LocalRun) -> None:
    token = json.loads((run.path / "endpoint.json").read_text())["token"]
    _, shown = typed(run, "exit\n", "sleepy", "coordinator")
    assert token not in shown


def test_a_process_that_is_not_there_is_told_with_those_that_are(run: LocalRun) -> None:
    code, shown = typed(run, "exit\n", "sleepy", "worker-9")
    assert code == 2
    assert "has no process worker-9; it has: coordinator, worker-0, worker-1" in shown.replace("\r\n", "")


def test_a_shell_needs_a_terminal(run: LocalRun) -> None:
    told = run.called("shell", "sleepy")
    assert told.returncode == 2
    assert "tandem shell needs a terminal" in told.stderr


def test_processes_are_completed_after_the_run(run: LocalRun) -> None:
    typed_ = "tandem shell sleepy wor"
    shell = {"COMP_WORDS": typed_, "COMP_CWORD": "3", "_TYPER_COMPLETE_ARGS": typed_}
    state = {"XDG_STATE_HOME": str(run.path.parent / "state")}
    answer = tandem(cwd=Path("/usr"), variables={"_TANDEM_COMPLETE": "complete_bash", **shell, **state})
    assert answer.stdout.split() == ["worker-0", "worker-1"]


def test_of_a_run_that_is_over_there_are_no_stacks_and_the_shell_is_in_its_folder(run: LocalRun) -> None:
    (run.path.parent / "stop").touch()
    assert run.ends() == 0, run.output
    assert run.leavings() == {}
    told = run.called("debug", "sleepy", "1")
    assert told.returncode == 2
    assert "is not running, so there are no stacks" in told.stderr
    code, shown = typed(run, 'echo "<$TANDEM_RUN_DIR>"; exit\n', "sleepy")
    assert code == 0
    assert "is not running: this is a shell in its run directory" in shown.replace("\r\n", "")
    assert f"<{run.path}>" in shown
