"""What `tandem debug` and `tandem shell` tell of ranks and pods, and which right they name where it is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.errors import UserError
from tandem.stacks import Frame, Inspection, RankStacks, ThreadStack
from tandem_cli.commands.debug import told
from tandem_cli.kubernetes.execution import executable, holder
from tandem_cli.kubernetes.job_view import Pod, pods
from tandem_cli.kubernetes.kubectl import complaint
from tandem_cli.local import processes
from tandem_cli.local.processes import check_owner
from tests.support import fake_kubectl as fakes


def rank(**more: object) -> RankStacks:
    return RankStacks.model_validate(
        {"rank": 1, "replica": "worker-1", "pid": 40, "step": 1240, "phase": "train", **more}
    )


def thread(number: int, *functions: str) -> ThreadStack:
    frames = [Frame(file="/data/train.py", line=line, function=name) for line, name in enumerate(functions, 3)]
    return ThreadStack(number=number, name="loader", state="S (sleeping)", waits_in="futex_wait", frames=frames)


def test_stacks_are_told_as_python_prints_them_and_threads_without_python_are_counted() -> None:
    one = rank(silent_seconds=0.25, threads=[thread(40, "main", "step"), thread(41), thread(42, "load")])
    assert told(one).splitlines() == [
        "rank 1 · worker-1 · process 40 · step 1,240 · train, 0.2 s ago",
        "",
        "main thread (40), sleeping, in the kernel's futex_wait",
        '  File "/data/train.py", line 3, in main',
        '  File "/data/train.py", line 4, in step',
        "",
        "thread loader (42), sleeping, in the kernel's futex_wait",
        '  File "/data/train.py", line 3, in load',
        "",
        "1 thread without Python code",
    ]


def test_a_rank_that_has_not_answered_is_told_with_the_reason_and_what_the_kernel_knows() -> None:
    lines = told(rank(trouble="its process is stopped", threads=[thread(40)])).splitlines()
    assert lines[2:] == [
        "no stacks: its process is stopped",
        "",
        "main thread (40), sleeping, in the kernel's futex_wait",
    ]


def test_an_answer_of_a_newer_version_is_read() -> None:
    text = json.dumps(
        {"ranks": [{"rank": 0, "pid": 4, "colour": "red", "threads": [{"number": 4, "x": 1}]}], "more": {}}
    )
    assert Inspection.read_json(text).ranks[0].threads[0].number == 4


def workers(count: int) -> tuple[Pod, ...]:
    return pods([fakes.pod("worker", index, name=f"digits-worker-{index}") for index in range(count)])


def test_the_worker_of_a_rank_follows_from_the_order_that_another_worker_knows() -> None:
    found = Inspection(ranks=[rank(), rank()], members=["digits-worker-2", "digits-worker-0"])
    assert [getattr(holder(workers(3), found, number), "name", None) for number in range(5)] == [
        *("worker-2", "worker-2", "worker-0", "worker-0"),
        None,
    ]
    assert holder(workers(3), Inspection(members=["digits-worker-0"]), 0) is None


def test_only_pods_whose_container_runs_can_be_entered() -> None:
    waiting = fakes.pod("worker", 1, {"waiting": {"reason": "ContainerCreating"}})
    assert [pod.name for pod in executable(pods([fakes.pod("worker", 0), waiting]))] == ["worker-0"]


def test_the_right_that_is_missing_is_named() -> None:
    said = (
        'Error from server (Forbidden): pods "digits-worker-0-abcde" is forbidden: User "jane" cannot create resource '
        '"pods/exec" in API group "" in the namespace "team"'
    )
    assert "The missing right is `create` on `pods/exec` in the job's namespace" in str(complaint(said))


def test_a_run_of_another_user_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        (tmp_path / "local.lock").write_text(json.dumps({"pid": child.pid, "mark": "m"}))
        check_owner(tmp_path)
        monkeypatch.setattr(processes.os, "geteuid", lambda: os.getuid() + 4242)
        with pytest.raises(UserError, match=r"is a run of the user \w+; only .*root may look into its processes"):
            check_owner(tmp_path)
    finally:
        child.kill()
        child.wait()
