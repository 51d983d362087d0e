"""Warm ranks: forked, and yet for torchrun, for signals and for the script itself as if Python had started them."""

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

import tandem_trainer
from tandem.processes.launch import CODE, RUN_DIR
from tandem.rundir.code import store_pack
from tandem_cli.packing import packed
from tandem_trainer.agent.warm.stub import ADDRESS, LENGTH
from tandem_trainer.failure import read
from tandem_trainer.pulse import PulseView
from tests.support import SCRIPTS, manifests
from tests.support.processes import alive
from tests.support.waiting import until
from tests.support.warm import warm_command, warm_environment

SCRIPT = """
import json, os, signal, sys, threading, time
import torch
facts = {
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "main": sys.modules["__main__"].__file__,
    "folder": os.getcwd(), "rank": os.environ["RANK"], "level": os.environ.get("LEVEL"), "pid": os.getpid(),
    "threads": torch.get_num_threads(), "sum": float(torch.ones(1000, 1000).sum()),
}
print("said on stdout", flush=True)
print("said on stderr", file=sys.stderr)
what = sys.argv[1]
if what == "term":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
with open(os.path.join(os.environ["OUT"], "facts-" + os.environ["RANK"] + ".json.new"), "w") as file:
    json.dump(facts, file)
os.rename(file.name, file.name[:-4])
if what == "raise":
    raise RuntimeError("the data is not there")
if what == "exit":
    sys.exit(int(sys.argv[2]))
if what in ("wait", "term"):
    time.sleep(600)
if what == "starts":
    import subprocess
    beside = [subprocess.Popen(["sleep", "600"], start_new_session=own).pid for own in (False, True)]
    print("started", *beside, flush=True)
    time.sleep(600)
"""


SESSION = """
import os, sys
import torch
from torch.utils.data import TensorDataset
from tandem_trainer.session import Session

session = Session(os.environ["OUT"] + "/run")
model = session.distribute(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.keep(model, optimizer)
for batch in session.batches(TensorDataset(torch.ones(64, 2)), 8, epochs=1000):
    batch.mean(model(batch.data[0])[:, 0]).backward()
    optimizer.step()
    if sys.argv[1:]:
        sys.exit(int(sys.argv[1]))
"""
"""A loop outside of any `with` block, left early where a number is given."""


class Agent:
    """torchrun without a coordinator, but with warm ranks."""

    def __init__(
        self,
        folder: Path,
        *command: str,
        ranks: int = 1,
        warm: bool = True,
        preload: str = "",
        restarts: int = 0,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        (folder / "script.py").write_text(SCRIPT)
        options = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--monitor-interval=0.05"]
        ours = [*(["--warm"] if warm else []), *([f"--preload={preload}"] if preload else [])]
        start = [sys.executable, "-P", "-m", "tandem_trainer.agent", *ours, *options, "--"]
        with (folder / "stdout").open("w") as said, (folder / "stderr").open("w") as complained:
            self.process = subprocess.Popen(
                [*start, *command],
                cwd=folder,
                env={**os.environ, "OUT": str(folder), "LEVEL": "7", "OMP_NUM_THREADS": "1", **(variables or {})},
                stdout=said,
                stderr=complained,
                start_new_session=True,
            )

    def facts(self, rank: int = 0) -> dict[str, Any]:
        path = self.folder / f"facts-{rank}.json"
        until(lambda: path.exists() or self.process.poll() is not None, "the script's start")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def descendant(self, name: str) -> psutil.Process:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(process for process in children if process.name() == name)

    def stub(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        return next(process for process in children if "stub.py" in " ".join(process.cmdline()))

    @property
    def errors(self) -> str:
        return (self.folder / "stderr").read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    started: list[Agent] = []
    yield started
    for agent in started:
        agent.close()


@pytest.fixture
def start(tmp_path: Path, agents: list[Agent]) -> Any:
    def begin(*command: str, **options: Any) -> Agent:
        agents.append(Agent(tmp_path, *command, **options))
        return agents[-1]

    return begin


def gone(pid: int) -> bool:
    return not alive(pid)


@pytest.mark.full("trainer")
def test_a_script_sees_the_world_as_if_python_had_started_it(start: Any, tmp_path: Path) -> None:
    agent = start("script.py", "exit", "0", ranks=2)
    assert agent.process.wait(120) == 0, agent.errors
    facts = agent.facts(1)
    assert facts["argv"] == ["script.py", "exit", "0"]
    assert facts["path"] == str(tmp_path)
    script = str(tmp_path / "script.py")
    assert (facts["name"], facts["file"], facts["main"]) == ("__main__", script, script)
    assert (facts["folder"], facts["rank"], facts["level"], facts["threads"]) == (str(tmp_path), "1", "7", 1)
    assert facts["sum"] == 1_000_000
    assert (tmp_path / "stdout").read_text().count("said on stdout") == 2
    assert agent.errors.count("said on stderr") == 2
    assert "leaked" not in agent.errors
    assert "Warning" not in agent.errors


@pytest.mark.full("trainer")
def test_the_heap_of_a_rank_keeps_what_a_step_frees(start: Any, tmp_path: Path) -> None:
    agent = start(str(SCRIPTS / "page_faults.py"), "nobody", *["1"] * 60)
    assert agent.process.wait(120) == 0, agent.errors
    pages = int((tmp_path / "stdout").read_text())
    assert pages < 200, "of 76,800 that glibc would ask for by itself; seen: none to 3"


@pytest.mark.full("trainer")
def test_a_module_runs_too(start: Any, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys\nprint('module with', sys.argv[1:])\n")
    agent = start("-m", "package", "--lr", "1")
    assert agent.process.wait(120) == 0, agent.errors
    assert "module with ['--lr', '1']" in (tmp_path / "stdout").read_text()


@pytest.mark.full("trainer")
def test_an_error_is_shown_as_the_script_alone_would_have(start: Any) -> None:
    agent = start("script.py", "raise")
    assert agent.process.wait(120) == 1
    trace = agent.errors[agent.errors.index("Traceback") :].split("RuntimeError")[0]
    assert "script.py" in trace
    assert "agent.py" not in trace
    assert "forkserver" not in trace


@pytest.mark.full("trainer")
def test_torchrun_sees_the_exit_code(start: Any) -> None:
    agent = start("script.py", "exit", "76")
    assert agent.process.wait(120) == 1
    assert "exitcode  : 76" in agent.errors


ENDS = """
import atexit, pathlib, sys, threading, time

class Unfinished:
    def __del__(self):
        pathlib.Path("taken-apart").touch()

atexit.register(lambda: print("exit function", flush=True))
threading.Thread(target=lambda: (time.sleep(0.2), print("thread", flush=True))).start()
keep = Unfinished()
sys.modules["keep"] = keep
print("buffered", end="")
sys.exit("the words of a script that gives up")
"""


def test_a_rank_ends_as_python_does_but_does_not_take_itself_apart(start: Any, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    agent = start("ends.py")
    assert agent.process.wait(120) == 1
    assert "exitcode  : 1 " in agent.errors
    assert "the words of a script that gives up" in agent.errors
    said = (tmp_path / "stdout").read_text()
    assert [said.count(word) for word in ("buffered", "thread", "exit function")] == [1, 1, 1]
    assert said.index("thread") < said.index("exit function")
    assert not (tmp_path / "taken-apart").exists()


WRITES = """
import gzip, io, os, sys
from pathlib import Path

folder = Path(os.environ["OUT"])
plain = open(folder / "plain.txt", "w")
zipped = io.TextIOWrapper(gzip.open(folder / "zipped.txt.gz", "wb"))
raw = open(folder / "raw.bin", "wb")
kept = {"files": [plain, zipped, raw]}
for number in range(100):
    print("line", number, file=plain)
    print("line", number, file=zipped)
    raw.write(b"line\\n")
reads, full = os.pipe()
os.set_blocking(full, False)
try:
    while True:
        os.write(full, bytes(4096))
except BlockingIOError:
    os.set_blocking(full, True)
stuck = open(full, "wb")
stuck.write(b"nobody reads this")
"""


@pytest.mark.full("trainer")
def test_what_a_script_wrote_to_files_that_it_did_not_close_is_there(start: Any, tmp_path: Path) -> None:
    (tmp_path / "writes.py").write_text(WRITES)
    agent = start("writes.py")
    assert agent.process.wait(120) == 0, agent.errors
    lines = [f"line {number}" for number in range(100)]
    assert (tmp_path / "plain.txt").read_text().splitlines() == lines
    assert gzip.decompress((tmp_path / "zipped.txt.gz").read_bytes()).decode().splitlines() == lines
    assert (tmp_path / "raw.bin").read_bytes() == b"line\n" * 100


@pytest.mark.full("trainer")
def test_a_killed_rank_is_a_killed_process_for_torchrun(start: Any) -> None:
    agent = start("script.py", "wait")
    os.kill(agent.facts()["pid"], signal.SIGKILL)
    assert agent.process.wait(120) == 1
    assert "exitcode  : -9" in agent.errors


def test_sigterm_reaches_the_rank_and_its_answer_reaches_torchrun(start: Any) -> None:
    agent = start("script.py", "term")
    agent.facts()
    agent.stub().send_signal(signal.SIGTERM)
    assert agent.process.wait(120) == 1
    assert "exitcode  : 75" in agent.errors


def test_the_rank_of_a_killed_stub_is_killed_and_what_it_has_started(start: Any, tmp_path: Path) -> None:
    agent = start("script.py", "starts")
    pid = agent.facts()["pid"]
    said = until(lambda: "started" in (text := (tmp_path / "stdout").read_text()) and text, "two processes beside it")
    beside, detached = (int(word) for word in said.split("started")[1].split())
    agent.stub().kill()
    until(lambda: gone(pid) and gone(beside), "the end of both")
    assert not gone(detached), "what began a session of its own goes on, as the checkpoint writer does"
    os.kill(detached, signal.SIGKILL)
    assert agent.process.wait(120) == 1


@pytest.mark.full("trainer")
def test_nothing_outlives_a_killed_agent(start: Any) -> None:
    agent = start("script.py", "wait", ranks=2)
    agent.facts(0)
    agent.facts(1)
    everybody = psutil.Process(agent.process.pid).children(recursive=True)
    assert len(everybody) == 5, "a fork server, two stubs, two ranks"
    agent.process.kill()
    agent.process.wait()
    until(lambda: all(gone(process.pid) for process in everybody), "the end of all")


def test_while_the_code_is_on_its_way_the_fork_server_is_there_and_its_ranks_work_in_the_code(
    start: Any, tmp_path: Path
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "script.py").write_text(SCRIPT)
    with packed(code) as pack:
        trainer = {"command": ["python", "script.py"], "code": pack.digest}
        run_dir = manifests.run_directory(tmp_path / "run", manifests.job(trainer=trainer))
        agent = start("script.py", "exit", "0", variables={RUN_DIR: str(run_dir.path), CODE: pack.digest})
        children = psutil.Process(agent.process.pid).children
        until(lambda: any(one.name() == "tandem-spare" for one in children()), "a fork server without the code")
        store_pack(run_dir, pack.digest, pack.file)
        assert agent.process.wait(120) == 0, agent.errors
    facts = agent.facts()
    assert facts["folder"] == facts["path"]
    assert facts["folder"].endswith(f"tandem-code-{pack.digest.removeprefix('sha256:')[:32]}")


@pytest.mark.full("trainer")
def test_without_the_fork_server_ranks_start_the_ordinary_way(start: Any, tmp_path: Path) -> None:
    agent = start("script.py", "wait", ranks=1)
    agent.facts()
    server = agent.descendant("tandem-spare")
    server.kill()
    assert agent.process.wait(120) == 1
    # A stub whose server is gone starts Python itself.
    (tmp_path / "facts-0.json").unlink()
    stub = Path(tandem_trainer.__file__).parent / "agent" / "warm" / "stub.py"
    environment = os.environ | {"OUT": str(tmp_path), "RANK": "0", "TANDEM_FORK_SERVER": "nobody"}
    command = [sys.executable, "-I", "-S", str(stub), "script.py", "exit", "7"]
    assert subprocess.run(command, cwd=tmp_path, env=environment, check=False).returncode == 7
    assert agent.facts()["argv"] == ["script.py", "exit", "7"]


def test_where_an_import_has_started_a_thread_ranks_start_the_ordinary_way(tmp_path: Path) -> None:
    code = """
import os
from tandem_trainer.agent.warm import forkserver, stub
forkserver.fork_server(lambda: False)
os.wait()
os.execv(stub.sys.executable, [stub.sys.executable, "-I", "-S", stub.__file__, "rank.py"])
"""
    (tmp_path / "rank.py").write_text("raise SystemExit(7)")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7
    assert "ranks start without it" in done.stderr


KILLED = """
import json, os, subprocess, sys
from tandem_trainer.agent.warm import forkserver, stub
if forkserver.fork_server(lambda: True) is not None:
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), 9)
command = [sys.executable, "-I", "-S", stub.__file__, "rank.py"]
ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
assert forkserver.endings is not None
print(json.dumps([ended.returncode, int(ended.stdout), forkserver.endings.read(), forkserver.endings.read()]))
"""


def test_how_a_rank_has_ended_is_known_before_its_stub_ends(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    code, pid, once, again = json.loads(done.stdout)
    assert (code, once, again) == (-9, {str(pid): -9}, {})


def refused(connection: socket.socket) -> bool:
    """Whether the server hangs up without a word; what it has not read resets the connection."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_garbage_does_not_stop_the_fork_server(start: Any) -> None:
    agent = start("script.py", "wait")
    pid = agent.facts()["pid"]
    address = psutil.Process(agent.stub().pid).environ()[ADDRESS]
    garbage = [b"", b"{}", b"[]", b"not JSON", b'{"arguments": ["x"]}']
    for body in garbage:
        for files in ([], [0], [0, 1, 2]):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect("\0" + address)
                socket.send_fds(connection, [LENGTH.pack(len(body)) + body], files)
                connection.shutdown(socket.SHUT_WR)
                assert refused(connection)
    assert not gone(pid)
    assert agent.descendant("tandem-spare").is_running()
    assert agent.errors.count("a request was refused") == 3 * len(garbage)


IMPORTED = """
import os
from pathlib import Path
Path(os.environ["OUT"], f"{__name__}-{os.getpid()}").touch()
"""
STARTS_A_THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
FAILS_ONCE = """
import busy, heavy, sys
from pathlib import Path
if not Path("again").exists():
    Path("again").touch()
    sys.exit(1)
"""


def test_what_the_job_names_is_imported_once_for_all_ranks_and_starts(start: Any, tmp_path: Path) -> None:
    """A module that is not there, fails, or starts a thread is named; the others are imported all the same."""
    (tmp_path / "heavy.py").write_text(IMPORTED)
    (tmp_path / "busy.py").write_text(IMPORTED + STARTS_A_THREAD)
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "uses.py").write_text(FAILS_ONCE)
    agent = start("uses.py", ranks=1, preload="busy,absent,heavy,broken", restarts=1)
    assert agent.process.wait(120) == 0, agent.errors
    assert agent.errors.count("preload: ") == 3
    assert "preload: busy starts a thread" in agent.errors
    assert "preload: absent cannot be imported (ModuleNotFoundError" in agent.errors
    assert "preload: broken cannot be imported (ZeroDivisionError" in agent.errors
    # Tries that were given up have imported it, too; the ranks have not.
    ranks = {path.name.split("-")[1] for path in tmp_path.glob("busy-*")}
    assert len(ranks) == 3, "one try, two ranks"
    assert not ranks & {path.name.split("-")[1] for path in tmp_path.glob("heavy-*")}


@pytest.mark.full("trainer")
def test_code_on_the_command_line_starts_warm(start: Any, tmp_path: Path) -> None:
    agent = start(sys.executable, "-c", "import sys; print(sys.argv, 'torch' in sys.modules)", "--lr", "1")
    assert agent.process.wait(120) == 0, agent.errors
    assert "['-c', '--lr', '1'] True" in (tmp_path / "stdout").read_text()


def test_any_program_runs_without_warmth(start: Any, tmp_path: Path) -> None:
    assert start("sh", "-c", "echo rank $RANK").process.wait(120) == 0
    assert "rank 0" in (tmp_path / "stdout").read_text()


def test_nothing_heavy_is_imported_after_the_fork() -> None:
    """What the first steps of a rank import is imported by the fork server already, but for a few small modules."""
    code = """
import sys
from tandem_trainer.agent.torchrun import RANK_MODULES, AGENT_MODULES, preload
assert preload([*AGENT_MODULES, *RANK_MODULES])
before = set(sys.modules)
import torch
model = torch.nn.Linear(2, 2)
torch.optim.Adam(model.parameters(), fused=True).step()
model(torch.ones(1, 2)).sum().backward()
import tandem_trainer.__main__
from tandem_trainer.models import build
build("cnn", 1, 28, 10)
print(len({name for name in sys.modules if name.startswith("torch")} - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) <= 3, done.stdout


class TestWhatItsAgentHears:
    @pytest.fixture
    def view(self, tmp_path: Path) -> Iterator[PulseView]:
        made = PulseView(tmp_path, 0)
        yield made
        made.close()

    def ends(self, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
        own = {"TANDEM_PULSE": str(folder), "LOCAL_RANK": "0", "RANK": "0", "OUT": str(folder)}
        (folder / "script.py").write_text(SCRIPT)
        command, variables = warm_command(*words), os.environ | warm_environment() | own
        return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)

    def test_of_a_script_that_is_not_there_what_python_says(self, tmp_path: Path, view: PulseView) -> None:
        ended = self.ends(tmp_path, "missing.py")
        why = f"can't open file '{tmp_path / 'missing.py'}': [Errno 2] No such file or directory"
        assert (ended.returncode, ended.stderr) == (2, f"{sys.executable}: {why}\n")
        assert view.last_word() == 2
        _, failure = read(view.failure(), 1, 2, float("inf"))
        assert failure.error == f"FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path / 'missing.py'}'"
        assert (failure.where, failure.passing) == ("", False)

    def test_of_an_error_its_traceback_without_the_frames_that_led_to_it(self, tmp_path: Path, view: PulseView) -> None:
        ended = self.ends(tmp_path, "script.py", "raise")
        assert (ended.returncode, view.last_word()) == (1, 1)
        _, failure = read(view.failure(), 1, 1, float("inf"))
        assert failure.error == "RuntimeError: the data is not there"
        assert failure.where.endswith("script.py:18, in <module>")
        assert failure.traceback in ended.stderr
        assert failure.traceback.startswith("Traceback (most recent call last):\n  File")
        assert "agent.py" not in failure.traceback

    def test_of_an_exit_its_code(self, tmp_path: Path, view: PulseView) -> None:
        assert self.ends(tmp_path, "script.py", "exit", "3").returncode == 3
        assert (view.last_word(), view.failure()) == (3, None)

    def test_of_an_exit_with_a_number_of_ours_that_it_is_the_scripts(self, tmp_path: Path, view: PulseView) -> None:
        assert self.ends(tmp_path, "script.py", "exit", "75").returncode == 75
        assert (view.last_word(), view.announced()) == (75, None)

    def test_of_a_session_without_a_with_block_whether_75_is_its_own(self, tmp_path: Path, view: PulseView) -> None:
        (tmp_path / "session.py").write_text(SESSION)
        ended = self.ends(tmp_path, "session.py", "75")
        assert ended.returncode == 75, ended.stderr
        assert (view.last_word(), view.announced()) == (75, None)
        view.order("save-and-leave")
        ended = self.ends(tmp_path, "session.py")
        assert ended.returncode == 75, ended.stderr
        assert (view.last_word(), view.announced()) == (75, 75)
