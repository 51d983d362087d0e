"""What `tandem debug` and `tandem shell` tell of ranks and pods, and which right they name where it is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tandem.errors import UserError
from tandem.wire.stacks import Attachment, Frame, Inspection, RankStacks, ThreadStack
from tandem_cli.commands.debug import debug, format_stacks, how_to_attach
from tandem_cli.kubernetes.execution import INSPECT, executable, holder
from tandem_cli.kubernetes.job_view import parse_pods
from tandem_cli.kubernetes.kubectl import error_from
from tandem_cli.view import PodView
from tandem_launcher.local import processes
from tandem_launcher.local.processes import check_owner
from tests.support import fake_kubectl as fakes
from tests.support.fake_kubectl import FakeKubectl


def rank(**more: object) -> RankStacks:
    return RankStacks.model_validate(
        {"rank": 1, "replica": "worker-1", "pid": 40, "step": 1240, "phase": "train", **more}
    )


def thread(number: int, *functions: str) -> ThreadStack:
    frames = [Frame(file="/data/train.py", line=line, function=name) for line, name in enumerate(functions, 3)]
    return ThreadStack(number=number, name="loader", state="S (sleeping)", waits_in="futex_wait", frames=frames)


def test_stacks_are_told_as_python_prints_them_and_threads_without_python_are_counted() -> None:
    one = rank(silent_seconds=0.25, threads=[thread(40, "main", "step"), thread(41), thread(42, "load")])
    assert format_stacks(one).splitlines() == [
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
    lines = format_stacks(rank(trouble="its process is stopped", threads=[thread(40)])).splitlines()
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


def workers(count: int) -> tuple[PodView, ...]:
    return parse_pods([fakes.pod("worker", index, name=f"digits-worker-{index}") for index in range(count)])


def test_the_worker_of_a_rank_follows_from_the_order_that_another_worker_knows() -> None:
    found = Inspection(ranks=[rank(), rank()], members=["digits-worker-2", "digits-worker-0"])
    assert [getattr(holder(workers(3), found, number), "name", None) for number in range(5)] == [
        *("worker-2", "worker-2", "worker-0", "worker-0"),
        None,
    ]
    assert holder(workers(3), Inspection(members=["digits-worker-0"]), 0) is None


def test_only_pods_whose_container_runs_can_be_entered() -> None:
    waiting = fakes.pod("worker", 1, {"waiting": {"reason": "ContainerCreating"}})
    assert [pod.name for pod in executable(parse_pods([fakes.pod("worker", 0), waiting]))] == ["worker-0"]


def test_the_right_that_is_missing_is_named() -> None:
    said = (
        'Error from server (Forbidden): pods "digits-worker-0-abcde" is forbidden: User "jane" cannot create resource '
        '"pods/exec" in API group "" in the namespace "team"'
    )
    assert "The missing right is `create` on `pods/exec` in the job's namespace" in str(error_from(said))


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


def attachment(**more: object) -> dict[str, object]:
    return {"rank": 1, "replica": "the pod", "pid": 40, "port": 4711, "folder": "/data/code", **more}


def test_how_to_attach_is_a_configuration_that_an_editor_reads() -> None:
    lines = how_to_attach(Attachment.model_validate(attachment(replica="worker-1")), "digits").splitlines()
    assert lines[0] == "rank 1 · worker-1 · process 40 listens for a debugger on 127.0.0.1:4711"
    assert json.loads("".join(lines[lines.index("  {") : lines.index("  }") + 1])) == {
        "name": "digits, rank 1",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": "127.0.0.1", "port": 4711},
        "pathMappings": [{"localRoot": "${workspaceFolder}", "remoteRoot": "/data/code"}],
        "justMyCode": False,
    }


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
    """A job with two workers; rank 1 is that of worker-0."""
    fake = FakeKubectl(tmp_path)
    monkeypatch.setenv("PATH", fake.path)
    monkeypatch.chdir(tmp_path)
    fake.answers("get", "distributedtrainingjobs.tandem.dev", "digits", says=fakes.job(phase="Running"))
    fake.answers("get", "pods", says=fakes.items(*(fakes.pod("worker", index) for index in (0, 1))))
    for index, number in enumerate((1, 0)):
        one = {"rank": number, "replica": "the pod", "pid": 40, "threads": []}
        fake.answers("exec", f"digits-worker-{index}-abcde", says={"ranks": [one], "members": []})
    return fake


def test_on_a_cluster_a_debugger_is_asked_for_in_the_pod_of_the_rank_and_its_port_is_forwarded(
    cluster: FakeKubectl, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.answers("exec", "--attach", says=f"a line of the image's own\n{json.dumps(attachment())}\n")
    cluster.answers("port-forward", says="Forwarding from 127.0.0.1:4711 -> 4711\n", code=1)
    with pytest.raises(typer.Exit) as ended:
        debug("digits", 1, attach=True, namespace="team")
    assert ended.value.exit_code == 1, "kubectl's own: the pod is gone"
    said = capfd.readouterr()
    assert "rank 1 · worker-0 · process 40 listens for a debugger on 127.0.0.1:4711" in said.out
    assert "local port 4711 is forwarded to worker-0; Ctrl-C closes it" in said.err
    asked, forwarded = (one.words for one in cluster.asked[-2:])
    assert asked[asked.index("--") + 1 :] == [*INSPECT, "--rank=1", "--attach"]
    assert {"digits-worker-0-abcde", "--container=worker"} <= set(asked)
    assert forwarded[-4:] == ["port-forward", "--address=127.0.0.1", "pod/digits-worker-0-abcde", "4711:4711"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            {"says": attachment(port=None, trouble="debugpy is not installed")},
            r"rank 1 \(worker-0\): debugpy is not in",
        ),
        (
            {"complains": "inspection: error: unrecognized arguments: --attach"},
            "without `tandem debug --attach`, or no Tandem",
        ),
    ],
)
def test_a_rank_that_no_debugger_can_attach_to_is_told_with_the_reason(
    cluster: FakeKubectl, answer: dict[str, object], words: str
) -> None:
    cluster.answers("exec", "--attach", **answer)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=words):
        debug("digits", 1, attach=True, namespace="team")


def test_a_debugger_needs_the_number_of_a_rank() -> None:
    with pytest.raises(UserError, match="--attach needs the number of a rank: tandem debug digits 0 --attach"):
        debug("digits", attach=True, namespace="team")
