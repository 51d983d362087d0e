"""What a run waits for, what it says of that, and what wakes it."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from tandem.processes.supervision import Child
from tandem.wire.status import MemberView, Snapshot, Status
from tandem_launcher.local.local_run import ProgressAtStop, Requests, describe_stop, describe_wait
from tandem_launcher.terminal import display
from tests.support.waiting import until

WORKER = Child(name="worker-0", role="agent").started(0.0)
EVALUATOR = Child(name="evaluator-0-0", role="evaluator").started(0.0)
COORDINATOR = Child(name="coordinator", role="coordinator").started(0.0)
MEMBER = MemberView(replica="worker-0", address="127.0.0.1", state="running", silent_seconds=0.0)


@pytest.mark.parametrize(
    ("children", "saved", "words"),
    [
        ([WORKER, EVALUATOR], 200, "saving, at step 250; Ctrl-C again leaves at once"),
        ([WORKER, EVALUATOR], 251, "saved checkpoint 251; 1 worker leaving"),
        ([EVALUATOR, COORDINATOR], 251, "giving up the work of 1 evaluator; Ctrl-C again leaves at once"),
        ([COORDINATOR], 251, "leaving"),
    ],
)
def test_after_ctrl_c_it_says_what_it_waits_for(children: list[Child], saved: int, words: str) -> None:
    assert describe_stop(children, ProgressAtStop(saved=200, step=250), saved, requests=1) == words


def test_after_another_it_waits_for_nothing() -> None:
    assert describe_stop([WORKER], ProgressAtStop(saved=None, step=None), None, requests=2) == "leaving at once"


def test_before_anything_is_known_it_just_saves() -> None:
    assert describe_stop([WORKER], ProgressAtStop(saved=None, step=None), None, requests=1) == (
        "saving; Ctrl-C again leaves at once"
    )


def test_a_script_that_runs_is_not_waited_for() -> None:
    snapshot = Snapshot(job="mine", time=0.0, status=Status(phase="Running"), members=[MEMBER])
    assert describe_wait([WORKER], snapshot, done=False) == ""


def test_a_group_that_has_not_begun_loads_its_data() -> None:
    snapshot = Snapshot(job="mine", time=0.0, status=Status(phase="Starting"), members=[MEMBER])
    assert describe_wait([replace(WORKER)], snapshot, done=False).startswith("starting: loading the data")


def test_what_a_script_begins_with_is_its_own_business() -> None:
    snapshot = Snapshot(job="mine", time=0.0, status=Status(phase="Starting"), members=[MEMBER])
    assert describe_wait([WORKER], snapshot, done=False, own_command=True) == "starting the script"


def test_a_script_that_is_stopped_saves_on_its_own() -> None:
    asked = ProgressAtStop(saved=None, step=None)
    assert describe_stop([WORKER], asked, None, requests=1, silent=True) == (
        "ending the script: 1 worker leaving; Ctrl-C again leaves at once"
    )


def test_an_end_and_a_request_are_looked_at_at_once() -> None:
    requests = Requests()
    with requests.caught():
        with subprocess.Popen([sys.executable, "-c", ""]):
            requests.wait(1e6)
        assert requests.count == 0
        os.kill(os.getpid(), signal.SIGTERM)
        requests.wait(1e6)
        assert requests.count == 1


def test_who_asked_less_often_asks_at_once_when_there_is_news(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    class Client:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def status(self) -> Snapshot:
            asked.append(display.time.monotonic())
            return Snapshot(job="mine", time=0.0, status=Status(phase="Running"))

        def close(self) -> None:
            pass

    monkeypatch.setattr(display, "CoordinatorClient", Client)
    monkeypatch.setattr(display, "POLL_SECONDS", 1e6)
    monkeypatch.setattr(display, "CALM_POLL_SECONDS", 1e6)
    watch = display.Watch("127.0.0.1:1", "token")
    until(lambda: asked, "the first question")
    watch.calm(True)
    watch.calm(False)
    until(lambda: len(asked) == 2, "another one, at once")
    watch.close()
    assert len(asked) == 2
