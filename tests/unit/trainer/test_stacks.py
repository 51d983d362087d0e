"""The stacks of a process that hangs, whatever its threads do meanwhile."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem_trainer.stacks import SIGNAL, Subject, collect, is_stopped, read_stacks
from tests.support.waiting import until

HANGS = """
import os, sys, threading, time
from tandem_trainer.stacks import answer_with_stacks
answer_with_stacks(int(sys.argv[1]))
def restless():
    while True:
        threading.Event().wait(0.00001)
def spins():
    while True:
        pass  # the mistake
for _ in range(3):
    threading.Thread(target=restless, name="restless", daemon=True).start()
print("ready", flush=True)
{"waits": lambda: time.sleep(600), "spins": spins}[sys.argv[2]]()
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "answers", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def start(file: int) -> Iterator[Any]:
    """Starts a Python that says when it is ready."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", *arguments]
        started.append(subprocess.Popen(command, pass_fds=[file], stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def stacks_of(process: "subprocess.Popen[str]", file: int, folder: Path) -> str:
    subject = Subject(3, process.pid, os.pidfd_open(process.pid), os.dup(file), "train after step 7")
    collect([subject], folder)
    subject.close()
    return (folder / "rank-3.txt").read_text()


@pytest.mark.parametrize("how", ["waits", "spins"])
def test_every_thread_is_written_down_and_none_harmed_again_and_again(
    how: str, file: int, start: Any, tmp_path: Path
) -> None:
    process = start(HANGS, str(file), how)
    for number in range(20):
        if number % 2:
            os.kill(process.pid, signal.SIGSTOP)
            while not is_stopped(process.pid):
                time.sleep(0.001)
        text = stacks_of(process, file, tmp_path)
        assert text.startswith(f"rank 3, process {process.pid}, train after step 7\n")
        assert ("T (stopped)" in text) == bool(number % 2)
        assert f"Thread {process.pid} (" in text
        assert " in <module>\n" in text, "the main thread, to its bottom"
        assert text.count("stack (most recent call first)") >= 3
        # A thread that is caught while it calls or returns shows what it can.
        assert text.count("in restless\n") >= 1
        assert process.poll() is None


def test_threads_that_were_asked_before_and_are_late_do_not_spoil_the_answer_of_another(
    file: int, start: Any, tmp_path: Path
) -> None:
    """As on a machine so busy that an earlier call gave them up."""
    process = start(HANGS, str(file), "waits")
    for _ in range(40):
        os.kill(process.pid, signal.SIGSTOP)
        while not is_stopped(process.pid):
            time.sleep(0.001)
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            if int(task.name) != process.pid:
                assert ctypes.CDLL(None).tgkill(process.pid, int(task.name), int(SIGNAL)) == 0
        assert " in <module>\n" in stacks_of(process, file, tmp_path), "the main thread, to its bottom"


def test_a_process_that_cannot_answer_is_described_all_the_same(file: int, start: Any, tmp_path: Path) -> None:
    process = start(
        "import signal, time; signal.pthread_sigmask(0, {signal.SIGRTMIN + 7}); print('ready', flush=True)\n"
        "time.sleep(600)"
    )
    # It may not have come to sleep yet, and the state is the first thing that is read.
    deadline = time.monotonic() + 60
    while psutil.Process(process.pid).status() != psutil.STATUS_SLEEPING:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    text = stacks_of(process, file, tmp_path)
    assert "No answer within" in text
    assert f"{process.pid:<10} S (sleeping)" in text


def test_a_process_that_has_ended_harms_nobody(file: int, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], text=True)
    pidfd = os.pidfd_open(process.pid)
    process.wait()
    subject = Subject(3, process.pid, pidfd, os.dup(file), "starting after step 0")
    collect([subject], tmp_path)
    subject.close()
    assert "No answer" in (tmp_path / "rank-3.txt").read_text()


def test_a_process_without_the_handler_is_not_ended_by_the_question(file: int, start: Any, tmp_path: Path) -> None:
    process = start("import time; print('ready', flush=True); time.sleep(600)")
    assert "No answer" in stacks_of(process, file, tmp_path)
    assert process.poll() is None


def test_two_who_ask_at_once_take_turns(file: int, start: Any, tmp_path: Path) -> None:
    process = start(HANGS, str(file), "waits")

    def ask(number: int) -> str:
        # A descriptor of its own, as another process has.
        subject = Subject(3, process.pid, os.pidfd_open(process.pid), os.open(tmp_path / "answers", os.O_RDWR), "")
        (stacks,) = read_stacks([subject])
        subject.close()
        return stacks[next(iter(stacks))]

    until(lambda: "<lambda>" in ask(0), "the process waits")
    with ThreadPoolExecutor(4) as askers:
        main_threads = list(askers.map(ask, range(16)))
    whole = [text for text in main_threads if text.count("most recent call first") == 1 and "<lambda>" in text]
    assert whole == main_threads
