"""`tandem submit`, `status`, `retry`, `logs` and `events` as a user calls them, with a kubectl that a test answers."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem_cli.kubernetes.references import KEYS
from tandem_cli.main import BROKEN_PIPE
from tests.support import ROOT, manifests
from tests.support import fake_kubectl as fakes
from tests.support.bad_manifests import REFUSED
from tests.support.fake_kubectl import FakeKubectl
from tests.support.processes import TANDEM, environment, tandem

FULL = pytest.mark.full("cli")
JOBS = "distributedtrainingjobs.tandem.dev"
DIGITS = "examples/digits.yaml"
COMMANDS = ["status", *(pytest.param(name, marks=FULL) for name in ("logs", "events"))]
RUNNING: dict[str, Any] = {"phase": "Running", "workers": {"desired": 2, "ready": 2, "summary": "2/2"}}
NOT_FOUND = f'Error from server (NotFound): {JOBS} "%s" not found'


@pytest.fixture
def fake(tmp_path: Path) -> FakeKubectl:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return FakeKubectl(tmp_path)


def called(fake: FakeKubectl, *words: str) -> subprocess.CompletedProcess[str]:
    """One call of the command line beside that kubectl, in a folder without runs of this machine."""
    return tandem(*words, cwd=fake.folder, variables={"PATH": fake.path})


@contextmanager
def started(fake: FakeKubectl, *words: str) -> Iterator["subprocess.Popen[str]"]:
    """A command that goes on until something happens, in a session of its own."""
    process = subprocess.Popen(
        [TANDEM, *words],
        cwd=fake.folder,
        env=environment({"PATH": fake.path}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def cluster(fake: FakeKubectl, *pods: dict[str, Any], **status: Any) -> None:
    """A cluster with one job, digits."""
    whole = fakes.job(**(status or RUNNING))
    fake.answers("get", JOBS, complains=NOT_FOUND % "that")
    fake.answers("get", JOBS, "-o", "json", says=fakes.items(whole))
    fake.answers("get", JOBS, "digitz", complains=NOT_FOUND % "digitz")
    fake.answers("get", JOBS, "digits", says=whole)
    fake.answers("get", "pods", says=fakes.items(*pods))
    told = fakes.event("DistributedTrainingJob", "digits", "Started", "generation 1 with 2 workers")
    fake.answers("get", "events", says=fakes.items(told))


# --- submit


def test_a_manifest_with_mistakes_is_told_as_by_validate_and_nothing_is_sent(fake: FakeKubectl, tmp_path: Path) -> None:
    bad = str(tmp_path / "bad.yaml")
    Path(bad).write_bytes(REFUSED[0].text)
    result = called(fake, "submit", DIGITS, bad)
    assert result.returncode == 2
    assert result.stderr == called(fake, "validate", bad).stderr
    assert fake.asked == []


def test_a_new_job_is_applied_as_it_was_written_and_what_to_type_next_is_told(fake: FakeKubectl) -> None:
    fake.answers("get", JOBS, "--ignore-not-found")
    fake.answers("apply", says=fakes.job())
    result = called(fake, "submit", DIGITS, "--set", "spec.workers.replicas=3", "-n", "team", "--context", "prod")
    assert (result.returncode, result.stderr) == (0, "")
    first, *rest = result.stdout.splitlines()
    assert first.startswith("created in namespace team: digits: image-classification")
    assert [line.strip() for line in rest] == [
        "tandem status digits -n team --context prod --watch",
        "tandem logs digits -n team --context prod --follow",
    ]
    apply = fake.asked[-1]
    assert {"--server-side", "--field-manager=tandem", "--namespace=team", "--context=prod"} <= set(apply.words)
    sent = json.loads(apply.given)
    assert sent["spec"]["workers"] == {"replicas": 3}
    assert "elasticity" not in sent["spec"], "defaults are the cluster's"


def test_what_validate_warns_of_submit_warns_of_too(fake: FakeKubectl, tmp_path: Path) -> None:
    template = {"spec": {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "two-gpus"}]}}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(manifests.manifest("digits", workers={"template": template})))
    fake.answers("get", JOBS, "--ignore-not-found")
    fake.answers("apply", says=fakes.job())
    result = called(fake, "submit", str(file))
    assert (result.returncode, len(result.stderr.splitlines())) == (0, 1)
    assert result.stderr.startswith("warning: spec.workers.template.spec.resourceClaims: ")
    assert "apply" in fake.asked[-1].words


def test_a_dry_run_changes_nothing_and_says_so(fake: FakeKubectl) -> None:
    fake.answers("get", JOBS, "--ignore-not-found")
    fake.answers("apply", "--dry-run=server", says=fakes.job())
    result = called(fake, "submit", DIGITS, "--dry-run")
    assert (result.returncode, result.stdout.startswith("would be created in namespace team")) == (0, True)
    assert "tandem status" not in result.stdout


REFERS = """
apiVersion: tandem.dev/v1alpha1
kind: DistributedTrainingJob
metadata: {name: digits, namespace: team}
spec:
  trainer:
    command: [train.py]
    env:
      - {name: A, valueFrom: {secretKeyRef: {name: hub, key: token}}}
      - {name: B, valueFrom: {configMapKeyRef: {name: settings, key: b}}}
      - {name: C, valueFrom: {secretKeyRef: {name: perhaps, key: c, optional: true}}}
  checkpoint: {storage: {claimName: data}}
  runPolicy: {queueName: gpus, priorityClassName: urgent}
"""


def test_a_check_names_what_the_cluster_lacks_and_passes_over_what_may_not_be_read(
    fake: FakeKubectl, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(REFERS)
    fake.answers("get", "--ignore-not-found")
    fake.answers("get", "secrets", "name", says="secret/hub\n")
    fake.answers("get", "secrets", KEYS, says="password\n")
    fake.answers("get", "configmaps", complains="Error from server (Forbidden): configmaps is forbidden")
    fake.answers("get", "localqueues.kueue.x-k8s.io", complains='error: the server doesn\'t have a resource type "x"')
    result = called(fake, "submit", str(tmp_path / "job.yaml"), "--check")
    assert (result.returncode, result.stdout) == (2, "")
    assert re.findall(r"job.yaml:(\d+):\d+: error: (.*)", result.stderr) == [
        ("9", "the Secret hub has no key token; the job's pods would wait for it"),
        ("12", "there is no claim data in namespace team; the job's pods would wait for it"),
        ("13", "there is no priority class urgent; the job's pods would wait for it"),
    ]
    assert not [one for one in fake.asked if "apply" in one.words or "perhaps" in one.words]


def test_a_check_that_finds_nothing_is_a_dry_run(fake: FakeKubectl) -> None:
    fake.answers("get", JOBS, "--ignore-not-found")
    fake.answers("apply", "--dry-run=server", says=fakes.job())
    result = called(fake, "submit", DIGITS, "--check")
    assert (result.returncode, result.stdout.startswith("would be created in namespace team")) == (0, True)


@pytest.mark.parametrize(("replicas", "verb"), [(2, "unchanged"), (5, "changed")])
def test_a_job_that_is_there_is_told_apart(fake: FakeKubectl, replicas: int, verb: str) -> None:
    fake.answers("get", JOBS, "--ignore-not-found", says=fakes.job() | {"spec": {"workers": {"replicas": 2}}})
    fake.answers("apply", says=fakes.job() | {"spec": {"workers": {"replicas": replicas}}})
    assert called(fake, "submit", DIGITS).stdout.startswith(f"{verb} in namespace team")


def test_fields_that_others_have_changed_are_not_overwritten_unless_asked_for(fake: FakeKubectl) -> None:
    fake.answers("get", JOBS, "--ignore-not-found", says=fakes.job())
    conflict = 'error: Apply failed with 1 conflict: conflict with "kubectl": .spec.workers.replicas'
    fake.answers("apply", complains=conflict)
    fake.answers("apply", "--force-conflicts", says=fakes.job())
    refused = called(fake, "submit", DIGITS)
    assert refused.returncode == 2
    assert ".spec.workers.replicas" in refused.stderr
    assert "--force" in refused.stderr
    assert called(fake, "submit", DIGITS, "--force").returncode == 0


def test_a_cluster_without_tandem_is_told_to_get_it(fake: FakeKubectl) -> None:
    fake.answers("get", JOBS, complains='error: the server doesn\'t have a resource type "distributedtrainingjobs"')
    result = called(fake, "submit", DIGITS)
    assert result.returncode == 2
    assert "install the chart" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("submit", DIGITS),
        *(pytest.param(one, marks=FULL) for one in (("status", "-A"), ("logs", "digits"), ("events", "digits"))),
    ],
)
def test_a_machine_without_kubectl_is_told_so(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    result = subprocess.run(
        [TANDEM, *words],
        cwd=tmp_path,
        env=environment({"PATH": str(tmp_path)}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert "kubectl was not found" in result.stderr


# --- status


def test_all_jobs_are_a_table(fake: FakeKubectl) -> None:
    cluster(fake)
    result = called(fake, "status")
    assert (result.returncode, result.stderr) == (0, "")
    head, row = result.stdout.splitlines()
    assert head.startswith("NAME")
    assert row.split()[:3] == ["digits", "Running", "2/2"]


def test_one_job_is_told_whole(fake: FakeKubectl) -> None:
    cluster(fake, fakes.pod("worker", 0))
    result = called(fake, "status", "digits")
    assert (result.returncode, result.stderr) == (0, "")
    for words in ("digits  Running", "worker-0", "node-1", "generation 1 with 2 workers"):
        assert words in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_a_job_that_is_not_there_is_told_with_the_nearest(fake: FakeKubectl, command: str) -> None:
    cluster(fake)
    result = called(fake, command, "digitz")
    assert result.returncode == 2
    assert result.stderr == "error: there is no job digitz in team; did you mean digits?\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_is_no_name_of_a_job(fake: FakeKubectl, command: str) -> None:
    result = called(fake, command, "there-are-no/runs/digits")
    assert result.returncode == 2
    assert "runs/digits does not exist" in result.stderr
    assert "lower-case" in called(fake, command, "digits,x=y").stderr
    assert fake.asked == []


def test_json_is_for_programs(fake: FakeKubectl) -> None:
    cluster(fake, fakes.pod("worker", 0))
    one = json.loads(called(fake, "status", "digits", "-o", "json").stdout)
    assert one["status"]["phase"] == "Running"
    assert one["pods"][0]["name"] == "worker-0"
    assert one["events"][0]["text"] == "generation 1 with 2 workers"
    assert [job["name"] for job in json.loads(called(fake, "status", "-o", "json").stdout)] == ["digits"]


@pytest.mark.parametrize(("phase", "code"), [("Succeeded", 0), ("Failed", 1)])
def test_watching_ends_with_the_job_and_says_how_it_went(fake: FakeKubectl, phase: str, code: int) -> None:
    cluster(fake, phase=phase)
    result = called(fake, "status", "digits", "--watch")
    assert result.returncode == code
    assert f"digits  {phase}" in result.stdout


def test_without_a_terminal_watching_prints_lines(fake: FakeKubectl) -> None:
    cluster(fake, phase="Failed", message="no such data")
    first = called(fake, "status", "digits", "--watch").stdout.splitlines()[0]
    assert first.endswith('phase=Failed waiting="no such data"')


def test_watching_waits_for_a_cluster_that_is_away_and_says_so(fake: FakeKubectl) -> None:
    cluster(fake, phase="Running", progress={"step": 12, "totalSteps": 100}, loss=0.5)
    with started(fake, "status", "digits", "--watch") as process:
        assert "phase=Running step=12 totalSteps=100 loss=0.5" in process.stdout.readline()
        fake.answers("get", JOBS, "digits", complains="Unable to connect to the server: i/o timeout")
        assert "trying again: kubectl: Unable to connect to the server" in process.stdout.readline()
        cluster(fake, phase="Succeeded", progress={"step": 100, "totalSteps": 100})
        rest, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "phase=Succeeded step=100" in rest


@pytest.mark.parametrize("words", [("digits", "-A"), ("--watch",), ("digits", "--watch", "-o", "json")])
def test_what_does_not_go_together_is_refused(fake: FakeKubectl, words: tuple[str, ...]) -> None:
    result = called(fake, "status", *words)
    assert result.returncode == 2
    assert "error: " in result.stderr
    assert fake.asked == []


# --- logs and events


def test_logs_of_all_pods_have_their_names_before_them(fake: FakeKubectl) -> None:
    cluster(fake, fakes.pod("coordinator"), fakes.pod("worker", 0))
    fake.answers("logs", "digits-coordinator-abcde", says="2026-11-21T12:00:02Z second\n")
    fake.answers("logs", "digits-worker-0-abcde", says="2026-11-21T12:00:01Z \x1b[31mfirst\x1b[0m\x07\n")
    result = called(fake, "logs", "digits")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == ["worker-0    │ first�", "coordinator │ second"]
    assert called(fake, "logs", "digits", "--role", "worker").stdout.splitlines() == ["worker-0    │ first�"]


def test_following_ends_with_the_job(fake: FakeKubectl) -> None:
    ended = {"terminated": {"exitCode": 0, "finishedAt": "2026-11-21T12:00:50Z"}}
    cluster(fake, fakes.pod("worker", 0, ended), phase="Succeeded")
    fake.answers("logs", says="2026-11-21T12:00:01Z all\n")
    result = called(fake, "logs", "digits", "--follow")
    assert (result.returncode, result.stdout.splitlines()) == (0, ["worker-0    │ all"])


def test_ctrl_c_leaves_quietly_and_leaves_no_kubectl(fake: FakeKubectl) -> None:
    cluster(fake, fakes.pod("worker", 0))
    fake.answers("logs", says="2026-11-21T12:00:01Z one\n")
    fake.answers("logs", "--follow", says="2026-11-21T12:00:02Z two\n", stays=True)
    with started(fake, "logs", "digits", "--follow") as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["worker-0    │ one\n", "worker-0    │ two\n"]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (130, "")
        # Whoever is left of its session would still be there.
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)


@pytest.mark.parametrize(
    "words", [("logs", "digits"), *(pytest.param((one, "digits"), marks=FULL) for one in ("status", "events"))]
)
def test_a_reader_that_leaves_early_is_no_error(fake: FakeKubectl, words: tuple[str, ...]) -> None:
    cluster(fake, fakes.pod("worker", 0))
    fake.answers("logs", says="2026-11-21T12:00:01Z one\n" * 10_000)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = subprocess.run(
            [TANDEM, *words],
            cwd=fake.folder,
            env=environment({"PATH": fake.path}),
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    finally:
        os.close(writing)
    assert (result.returncode, result.stderr) == (BROKEN_PIPE, b"")


def test_events_are_sentences_with_a_count(fake: FakeKubectl) -> None:
    cluster(fake)
    told = fakes.event("Pod", "digits-worker-0-abcde", "BackOff", "Back-off restarting", type="Warning", count=12)
    other = fakes.event("Pod", "somebody-elses", "Started", "not ours")
    fake.answers("get", "events", says=fakes.items(told, other))
    result = called(fake, "events", "digits")
    (line,) = result.stdout.splitlines()
    assert "!  worker-0  Back-off restarting (BackOff, 12 times since" in line
    (record,) = json.loads(called(fake, "events", "digits", "-o", "json").stdout)
    assert (record["who"], record["count"]) == ("worker-0", 12)


def test_events_that_come_are_told_until_the_job_ends(fake: FakeKubectl) -> None:
    cluster(fake)
    with started(fake, "events", "digits", "--watch") as process:
        assert "generation 1 with 2 workers" in process.stdout.readline()
        first = fakes.event("DistributedTrainingJob", "digits", "Started", "generation 1 with 2 workers")
        then = fakes.event("DistributedTrainingJob", "digits", "Succeeded", "it is over")
        fake.answers("get", "events", says=fakes.items(first, then))
        fake.answers("get", JOBS, "digits", says=fakes.job(phase="Succeeded"))
        rest, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "it is over" in rest
        assert "generation 1" not in rest


def test_on_a_terminal_watching_draws_a_picture_and_ctrl_c_leaves_it(fake: FakeKubectl) -> None:
    cluster(fake, fakes.pod("worker", 0))
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [TANDEM, "status", "digits", "--watch"],
        cwd=fake.folder,
        env=environment({"PATH": fake.path, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    try:
        os.close(theirs)
        seen, deadline = b"", time.monotonic() + 30
        while b"Ctrl-C leaves; the job continues" not in seen:
            assert select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0], seen
            seen += os.read(ours, 4096)
        assert b"worker-0" in seen
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # what a terminal says whose other side is closed
            while select.select([ours], [], [], 30)[0] and os.read(ours, 4096):
                pass
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait(30)
        os.close(ours)


def test_retry_asks_for_another_try_of_a_job_that_has_failed(fake: FakeKubectl) -> None:
    cluster(fake, phase="Failed")
    fake.answers("annotate")
    done = called(fake, "retry", "digits", "-n", "team")
    assert (done.returncode, done.stdout.strip()) == (
        0,
        "retrying digits; see: tandem status digits --watch -n team",
    )
    words = fake.asked[-1].words
    assert words[-5:-2] == ["annotate", JOBS, "digits"]
    assert words[-2].startswith("tandem.dev/retry-at=20")
    assert words[-1] == "--overwrite"


def test_retry_leaves_a_job_alone_that_has_not_failed(fake: FakeKubectl) -> None:
    cluster(fake)
    done = called(fake, "retry", "digits")
    assert done.returncode == 2
    assert "digits is Running; only a Failed job can be retried" in done.stderr
    assert not [one for one in fake.asked if "annotate" in one.words]


# --- debug, shell


def answer(rank: int, *functions: str, members: tuple[str, ...] = ()) -> dict[str, Any]:
    """What the inspection in a worker's pod says."""
    frames = [{"file": "/data/train.py", "line": line, "function": name} for line, name in enumerate(functions, 3)]
    thread = {"number": 40, "name": "tandem-rank", "state": "S (sleeping)", "frames": frames}
    one = {"rank": rank, "replica": "the pod", "pid": 40, "step": 100, "phase": "train", "threads": [thread]}
    return {"ranks": [one], "members": list(members)}


def of_three_workers(fake: FakeKubectl, members: tuple[str, ...] = ()) -> None:
    """Three workers whose ranks are in another order than their names."""
    cluster(fake, *(fakes.pod("worker", index) for index in range(3)))
    for index, rank in enumerate((2, 0, 1)):
        said = answer(rank, "main", f"step_of_{rank}", members=members)
        fake.answers("exec", f"digits-worker-{index}-abcde", says=f"a line of the image's own\n{json.dumps(said)}\n")


def executed(fake: FakeKubectl) -> list[str]:
    return [next(word for word in one.words if word.startswith("digits-")) for one in fake.asked if "exec" in one.words]


def test_the_stacks_of_a_rank_are_asked_for_in_the_pod_of_its_worker(fake: FakeKubectl) -> None:
    members = tuple(f"digits-worker-{index}-abcde" for index in (1, 2, 0))
    of_three_workers(fake, members)
    told = called(fake, "debug", "digits", "2", "-n", "team")
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.startswith("rank 2 · worker-0 · process 40 · step 100 · train\n\nmain thread (40), sleeping\n")
    assert told.stdout.endswith('  File "/data/train.py", line 4, in step_of_2\n')
    assert executed(fake) == ["digits-worker-2-abcde", "digits-worker-0-abcde"], "no other worker is asked"
    command = fake.asked[-1].words
    assert command[command.index("--") + 1 :] == ["python", "-P", "-m", "tandem_trainer.inspection", "--rank=2"]
    assert {"--container=worker", "--namespace=team"} <= set(command)


def test_where_nobody_knows_the_order_all_workers_are_asked(fake: FakeKubectl) -> None:
    of_three_workers(fake)
    assert "in step_of_2" in called(fake, "debug", "digits", "2").stdout
    assert len(executed(fake)) == 3
    told = called(fake, "debug", "digits", "9")
    assert (told.returncode, told.stderr) == (2, "error: digits has no rank 9; there are the ranks 0 to 2\n")


def test_without_a_rank_each_worker_is_asked_and_one_that_does_not_answer_is_told(fake: FakeKubectl) -> None:
    of_three_workers(fake)
    fake.answers("exec", "digits-worker-1-abcde", complains="error: unable to upgrade connection: container not found")
    told = called(fake, "debug", "digits")
    assert [line.split()[:3] for line in told.stdout.splitlines()[1:]] == [
        ["1", "100", "worker-2"],
        ["2", "100", "worker-0"],
    ]
    assert told.stderr == "warning: kubectl: unable to upgrade connection: container not found\n"


def test_an_image_without_the_inspection_is_told(fake: FakeKubectl) -> None:
    cluster(fake, fakes.pod("worker", 0))
    said = "/usr/bin/python: No module named tandem_trainer.inspection\ncommand terminated with exit code 1"
    fake.answers("exec", complains=said)
    told = called(fake, "debug", "digits", "0")
    assert told.returncode == 2
    assert told.stderr.startswith("error: worker-0 cannot be inspected: the image of the job's workers has a version")


EXEC_FORBIDDEN = (
    'Error from server (Forbidden): pods "digits-worker-0-abcde" is forbidden: User "jane" cannot create resource '
    '"pods/exec" in API group "" in the namespace "team"'
)


def test_who_may_not_execute_is_told_which_right_is_missing(fake: FakeKubectl) -> None:
    cluster(fake, fakes.pod("worker", 0))
    fake.answers("exec", complains=EXEC_FORBIDDEN)
    for code, said in (
        (called(fake, "debug", "digits", "0").returncode, called(fake, "debug", "digits", "0").stderr),
        on_a_terminal(fake, "shell", "digits"),
    ):
        assert code == 2
        assert "The missing right is `create` on `pods/exec`" in " ".join(said.split())


@pytest.mark.parametrize("words", [("debug", "digits", "0"), pytest.param(("debug", "digits"), marks=FULL)])
def test_a_job_that_is_over_has_no_stacks(fake: FakeKubectl, words: tuple[str, ...]) -> None:
    cluster(fake, phase="Succeeded")
    told = called(fake, *words)
    assert (told.returncode, told.stderr) == (2, "error: digits has ended (Succeeded), so it has no stacks\n")


def on_a_terminal(fake: FakeKubectl, *words: str) -> tuple[int, str]:
    """A call on a terminal: its exit code and what it has shown."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(fake.folder)
        os.execve(TANDEM, [TANDEM, *words], environment({"PATH": fake.path}))
    shown = b""
    with suppress(OSError):
        while piece := os.read(terminal, 65536):
            shown += piece
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


@pytest.mark.parametrize("who", [(), ("worker-1",), pytest.param(("coordinator",), marks=FULL)])
def test_a_shell_is_opened_in_the_pod_and_its_exit_code_is_the_commands(
    fake: FakeKubectl, who: tuple[str, ...]
) -> None:
    cluster(fake, fakes.pod("coordinator"), *(fakes.pod("worker", index) for index in range(2)))
    fake.answers("exec", says="inside\n", complains="command terminated with exit code 3", code=3)
    code, shown = on_a_terminal(fake, "shell", "digits", *who, "-n", "team")
    assert (code, shown.strip()) == (3, "inside")
    words = fake.asked[-1].words
    pod = {(): "digits-worker-0-abcde", ("worker-1",): "digits-worker-1-abcde"}.get(who, "digits-coordinator-abcde")
    role = "coordinator" if who == ("coordinator",) else "worker"
    assert words[:6] == ["--namespace=team", "exec", "-it", pod, f"--container={role}", "--"]
    assert words[6:8] == ["sh", "-c"]
    assert words[8].startswith('cd "$TANDEM_RUN_DIR"')


def test_a_shell_that_cannot_be_opened_says_why(fake: FakeKubectl) -> None:
    waits = fakes.pod("worker", 0, {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}})
    cluster(fake, waits)
    code, shown = on_a_terminal(fake, "shell", "digits")
    assert code == 2
    assert "worker-0 of digits is not running: ImagePullBackOff: no such image" in " ".join(shown.split())
    assert "did you mean worker-0?" in " ".join(on_a_terminal(fake, "shell", "digits", "workr-0")[1].split())
    cluster(fake, phase="Failed")
    code, shown = on_a_terminal(fake, "shell", "digits")
    assert code == 2
    assert "digits has ended (Failed), so it has no pods any more" in " ".join(shown.split())
    assert "exec" not in {word for one in fake.asked for word in one.words}
