"""What SLURM says, in words; and one process of a step."""

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import UserError
from tandem_cli.local.known import list_runs
from tandem_cli.local.run_view import job_summary
from tandem_cli.slurm import execution, submission
from tandem_launcher.slurm import jobs, preparation, scheduler, script
from tandem_launcher.slurm.jobs import NodeAllocation, Submission
from tandem_launcher.slurm.process_factory import SlurmStep
from tandem_launcher.slurm.profile import Profile
from tandem_launcher.slurm.scheduler import QueuedJob, SlurmError
from tandem_launcher.slurm.step import PING
from tests.support import manifests
from tests.support.waiting import until

FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            f"sbatch: error: invalid partition specified: g\n{FAILED}Invalid partition name",
            "there is no such partition",
        ),
        (f"{FAILED}Invalid account or account/partition combination specified", "the account of the profile is not"),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", "SLURM does not answer"),
        (
            f"{FAILED}Requested node configuration is not available",
            "no nodes of this partition satisfy the job's request",
        ),
        (f"{FAILED}Requested time limit is invalid (missing or exceeds some limit)", "the time limit is longer than"),
        (
            f"sbatch: error: AssocMaxSubmitJobLimit\n{FAILED}Job violates accounting/QOS policy",
            "a limit of your account",
        ),
        (
            f"sbatch: error: QOSMaxNodePerJobLimit\n{FAILED}Job violates accounting/QOS policy",
            "the job requests more than your account or quality of service allows one job",
        ),
        ("Slurmctld(primary) at login is DOWN", "SLURM does not answer"),
        (f"{FAILED}Invalid generic resource (gres) specification", "the nodes have no such GPUs"),
        (f"{FAILED}I/O error writing script/environment to file", "the controller cannot store the job"),
        ("sbatch: error: Something new", "sbatch: Something new"),
    ],
)
def test_what_slurm_refuses_is_said_in_a_sentence(said: str, told: str) -> None:
    error = str(scheduler.error_from("sbatch", said))
    assert error.startswith(told)
    assert "\n" not in error


def test_a_machine_without_slurm_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="sbatch was not found; submit from a login node"):
        scheduler.submit(tmp_path / "script", [], {})


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Resources", "all suitable nodes are busy (Resources)"),
        ("ReqNodeNotAvail, UnavailableNodes:n0", "nodes that it needs are down, drained or reserved"),
        ("AssocGrpGRES", "a limit of its account or quality of service is reached (AssocGrpGRES)"),
        ("AssocGrpCPURunMinutesLimit", "a limit of its account or quality of service is reached"),
        ("QOSMaxGRESPerUser", "a limit of its account or quality of service is reached"),
        ("SomethingNew", "SomethingNew"),
    ],
)
def test_why_a_job_waits_is_said_in_words(reason: str, words: str) -> None:
    waiting = QueuedJob("7", "PENDING", reason, "gpu", "", "N/A")
    assert scheduler.wait_reason(waiting).startswith(words)
    expected = QueuedJob("7", "PENDING", reason, "gpu", "", "2030-01-01T10:00:00")
    assert (
        scheduler.wait_reason(expected)
        == f"{scheduler.wait_reason(waiting)}; SLURM expects it to start at 2030-01-01 10:00:00"
    )


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("AssocGrpCPUMinutesLimit", "its account has no hours left, so it starts only if more are granted"),
        ("QOSGrpGRESMinutes", "its account has no hours left, so it starts only if more are granted"),
        ("AssocMaxWallDurationPerJobLimit", "it requests more than its account or quality of service allows one job"),
        ("InvalidAccount", "its account is not valid or has expired, so it never starts"),
    ],
)
def test_a_job_that_cannot_start_has_no_time_at_which_it_does(reason: str, words: str) -> None:
    said = scheduler.wait_reason(QueuedJob("7", "PENDING", reason, "gpu", "", "2030-01-01T10:00:00"))
    assert said.startswith(words)
    assert said.endswith(f"({reason})")


def test_a_run_directory_names_its_jobs(tmp_path: Path) -> None:
    assert jobs.submission_of(tmp_path) is None
    assert not jobs.is_alive(tmp_path)
    assert jobs.describe_state(tmp_path) == ("", "")
    jobs.record_submission(tmp_path, Submission("12", "13"))
    assert jobs.submission_of(tmp_path) == Submission("12", "13")


def test_the_processes_of_a_run_are_found_by_the_names_of_steps_and_elements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {
        ("squeue", "--steps"): "worker-0|n0\nworker-1|n1\nbatch|n0\n",
        ("squeue", "--noheader"): "0|14|n2\n1|15|n3\n",
        ("scontrol", "--oneliner"): "JobId=12 NodeList=n[0-1] BatchHost=n0 NumNodes=2\n",
    }
    monkeypatch.setattr(scheduler, "run", lambda *words, **_: answers[words[:2]])
    jobs.record_submission(tmp_path, Submission("12", "13", ("apptainer", "python")))
    found = execution.allocations(tmp_path)
    assert found["worker-1"] == NodeAllocation("12", "n1")
    assert found["evaluator-1"] == NodeAllocation("15", "n3")
    assert found["coordinator"] == NodeAllocation("12", "n0")
    assert jobs.own_submission(tmp_path).python == ("apptainer", "python")


def test_what_another_user_s_run_names_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.record_submission(tmp_path, Submission("12"))
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(UserError, match=r"is a run of the user .*, who alone may look into its processes"):
        execution.inspect(tmp_path, None)


def test_a_run_is_waited_for_while_it_is_in_the_queue_or_once_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[QueuedJob] = []
    monkeypatch.setattr(scheduler, "queue", lambda ids: waiting)
    run_dir = manifests.run_directory(tmp_path, manifests.job())
    jobs.record_submission(tmp_path, Submission("12"))
    with pytest.raises(UserError, match="is not complete and not in SLURM's queue, so nothing can wait for it"):
        jobs.awaited(tmp_path)
    run_dir.done_file.write_text("{}")
    assert jobs.awaited(tmp_path) == ""
    waiting.append(QueuedJob("12", "COMPLETING", "None", "gpu", "n0", "N/A"))
    jobs.forget(tmp_path)
    assert jobs.awaited(tmp_path) == "12"


def test_what_cannot_be_recorded_is_taken_out_of_the_queue_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cancelled: list[str] = []

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(scheduler, "submit", lambda *_: "12")
    monkeypatch.setattr(scheduler, "cancel", cancelled.append)
    monkeypatch.setattr(submission, "record_submission", full)
    with pytest.raises(UserError, match="no space left at run"):
        submission.submit(Path("run"), manifests.job(), Profile())
    assert cancelled == ["12"]


@pytest.fixture
def refusing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A login node whose sbatch refuses whatever the file `refused` names; the folder in which one works there."""
    tools = {
        "sbatch": f"""for script; do :; done
            if grep -q "$(basename "$script")" refused; then echo "{FAILED}Invalid partition name" >&2; exit 1; fi
            echo 12""",
        "scontrol": 'echo "Slurmctld(primary) at login is UP"',
        "squeue": "",
        "scancel": 'echo "$1" >>cancelled',
    }
    (tmp_path / "bin").mkdir()
    for name, does in tools.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in script.PLACEMENT_OPTIONS:
        monkeypatch.delenv(f"SBATCH_{name.upper()}", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


RUN = Path("runs/mine")


@pytest.mark.parametrize("refused", ["train.sh", "evaluate.sh"])
def test_a_run_that_was_refused_says_why_until_it_is_submitted(refusing: Path, refused: str) -> None:
    (refusing / "refused").write_text(refused)
    profile = Profile.model_validate({"partition": "away", "account": "lab", "evaluators": {"partition": "cpus"}})
    job = manifests.job("mine")
    preparation.prepare(RUN, job, False, "")
    with pytest.raises(SlurmError) as caught:
        submission.submit(RUN, job, profile)
    partition = "away" if refused == "train.sh" else "cpus"
    assert str(caught.value).endswith(f"; {refused} requests partition {partition}, account lab")
    assert list_runs() == [RUN], "tandem ls shows it"
    told = job_summary(RUN).status
    assert told.phase == "Suspended"
    assert told.message == f"it was not submitted: {caught.value}; the same `tandem submit --slurm` tries again"
    (refusing / "refused").write_text("nothing")
    submission.submit(RUN, job, profile)
    assert (job_summary(RUN).status.message or "").startswith("job 12 ended")


def test_the_partition_and_the_account_of_the_environment_are_those_that_sbatch_takes() -> None:
    text = "#!/bin/bash\n#SBATCH --account=lab\n#SBATCH --partition=gpu\n#SBATCH --qos low\n#SBATCH --account=other\n"
    assert script.describe_placement(text, {}) == "partition gpu, account other, quality of service low"
    assert script.describe_placement(text, {"SBATCH_PARTITION": "cpu", "SBATCH_QOS": ""}).startswith(
        "partition cpu, account"
    )
    assert script.describe_placement("#!/bin/bash\n# --partition=gpu\n", {}) == ""


def step(tmp_path: Path, *command: str, **settings: Any) -> SlurmStep:
    words = [sys.executable, "-m", "tandem_launcher.slurm.step", "", "worker-0", "45", *command]
    return SlurmStep("worker-0", words, {}, tmp_path / "worker-0.txt", **settings)


def test_a_step_asks_its_process_to_leave_when_its_input_ends_and_says_how_it_ended(tmp_path: Path) -> None:
    leaves = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); print('up', flush=True)"
    one = step(tmp_path, sys.executable, "-c", f"{leaves}\ntime.sleep(60)")
    one.start()
    until(lambda: b"up" in one.log.read_bytes(), "the process")
    assert one.outcome() is None
    one.ask()
    assert until(lambda: one.ended(), "its end") == 75
    assert one.outcome() == 75


def test_a_step_that_slurm_signals_does_not_signal_its_process_again(tmp_path: Path) -> None:
    counts = "import signal, sys, time; n = []; signal.signal(signal.SIGTERM, lambda *_: n.append(1))"
    waits = "print('up', flush=True)\nwhile not n: time.sleep(0.01)\ntime.sleep(1)\nsys.exit(10 + len(n))"
    words = [
        sys.executable,
        "-m",
        "tandem_launcher.slurm.step",
        "",
        "worker-0",
        "45",
        sys.executable,
        "-c",
        f"{counts}\n{waits}",
    ]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    assert process.stdout is not None
    until(lambda: b"up" in process.stdout.readline(), "the process")
    # As slurmstepd does: all processes at once.
    os.killpg(process.pid, signal.SIGTERM)
    process.stdin.close()
    assert process.wait(30) == 11
    process.stdout.close()


def test_a_step_that_was_never_started_has_no_outcome_and_a_killed_process_has_its_signal(tmp_path: Path) -> None:
    lost = SlurmStep("worker-0", ["false"], {}, tmp_path / "lost.txt", "n0")
    lost.start()
    assert until(lambda: lost.ended(), "its end") == 1
    assert lost.outcome() is None
    killed = step(tmp_path, sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    killed.start()
    until(lambda: killed.ended(), "its end")
    assert killed.outcome() == -9
    # A new life has no outcome yet.
    killed.start()
    killed.close()


def test_a_step_that_prints_without_end_is_no_refusal_and_keeps_its_outcome(tmp_path: Path) -> None:
    prints = "print('x' * 80 + '\\n' * 3, end='')\nfor n in range(9**5): print(n)\nexit(7)"
    one = step(tmp_path, sys.executable, "-c", prints, max_log_bytes=2**16)
    one.start()
    limits = []
    while one.ended() is None:
        limits.append(one.limit_log())
    assert one.preamble() is None
    assert one.outcome() == 7
    limits.append(one.limit_log())
    assert limits.count(True) == 1
    # The next copy may have begun.
    one._new_parts()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 9**5 * 6


@pytest.mark.parametrize("size", [100, 2**13])
def test_a_life_that_srun_refused_has_no_outcome_of_the_life_before(tmp_path: Path, size: int) -> None:
    one = step(tmp_path, sys.executable, "-c", f"print('x' * {size})", max_log_bytes=2**12)
    one.start()
    until(lambda: one.ended() is not None, "its end")
    one.limit_log()
    assert one.outcome() == 0
    one.command = [sys.executable, "-c", "print('srun: ' + 'busy ' * 1_000, flush=True); exit(1)"]
    one.start()
    until(lambda: one.ended() is not None, "its end")
    one.limit_log()
    assert one.outcome() is None
    assert (one.preamble() or "").startswith("srun: busy")


def test_a_command_that_is_not_there_has_the_outcome_that_a_shell_gives_it(tmp_path: Path) -> None:
    """Else it would count as lost with its node, and be tried for ever."""
    one = step(tmp_path, str(tmp_path / "aptainer"), "exec")
    one.start()
    assert until(lambda: one.ended(), "its end") == 127
    assert one.outcome() == 127


def test_what_slurm_says_in_other_letters_than_utf_8_is_no_error(tmp_path: Path) -> None:
    said = tmp_path / "scontrol"
    said.write_bytes(b"#!/bin/sh\nprintf 'Reason=M\\374ll'\n")
    said.chmod(0o755)
    assert scheduler.run(str(said)) == "Reason=M\ufffdll"


HASTY = """
import sys
from tandem_launcher.slurm import step
step.CHECK_SECONDS, step.SILENT_SECONDS = 0.1, 1.0
sys.exit(step.main())
"""
"""A step of job 7 that soon takes its head for lost."""


def started_with(tmp_path: Path, state: str, *command: str) -> subprocess.Popen[bytes]:
    """A step where SLURM has taken the first node, and with it the head, from job 7."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f'*"show job 7") echo "JobId=7 JobState={state} ReqNodeList=(null) NodeList=n[1-2] BatchHost=n0" ;;\n'
        '"show hostnames n[1-2]") echo "n1\nn2" ;;\n'
        f'"requeue 7") rm {tmp_path}/refuses 2>/dev/null && exit 1; echo 7 >>{tmp_path}/requeued ;;\n'
        "esac\n"
    )
    scontrol.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = [sys.executable, "-c", HASTY, "7", "worker-1", "45", *command]
    return subprocess.Popen(words, bufsize=0, stdin=subprocess.PIPE, env=variables, start_new_session=True)


def requeued(tmp_path: Path) -> list[str]:
    """Each job that was, each time."""
    said = tmp_path / "requeued"
    return said.read_text().split() if said.exists() else []


@pytest.mark.parametrize(("last", "jobs"), [(b"", ["7"]), (b"leave\n", [])])
def test_a_step_requeues_the_job_whose_head_is_lost_and_not_one_whose_head_has_said_leave(
    tmp_path: Path, last: bytes, jobs: list[str]
) -> None:
    process = started_with(tmp_path, "RUNNING", "sleep", "60")
    process.communicate(last, timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert requeued(tmp_path) == jobs


@pytest.mark.parametrize("command", [["sleep", "60"], ["false"]])
def test_a_head_that_falls_silent_is_lost_also_for_a_command_that_ends_by_itself(
    tmp_path: Path, command: list[str]
) -> None:
    # Its machine has lost its power: nothing closes the connection.
    process = started_with(tmp_path, "RUNNING", *command)
    until(lambda: process.poll() is not None, "its end")
    assert requeued(tmp_path) == ["7"]
    process.communicate()


def test_a_step_whose_head_is_there_ends_as_soon_as_that_says_so(tmp_path: Path) -> None:
    process = started_with(tmp_path, "RUNNING", "false")
    assert process.stdin is not None
    while process.poll() is None:
        with suppress(BrokenPipeError):
            process.stdin.write(PING)
        time.sleep(0.05)
    process.stdin.close()
    assert process.returncode == 1
    assert requeued(tmp_path) == []


def test_a_controller_that_refuses_is_asked_again(tmp_path: Path) -> None:
    (tmp_path / "refuses").touch()
    process = started_with(tmp_path, "RUNNING", "false")
    process.communicate(timeout=60)
    assert not (tmp_path / "refuses").exists()
    assert requeued(tmp_path) == ["7"]


def test_a_job_that_slurm_ends_is_not_requeued(tmp_path: Path) -> None:
    process = started_with(tmp_path, "COMPLETING", "false")
    process.communicate(timeout=60)
    assert process.returncode == 1
    assert requeued(tmp_path) == []


def test_a_signal_that_only_came_because_the_head_s_node_shuts_down_leaves_no_orphan(tmp_path: Path) -> None:
    process = started_with(tmp_path, "RUNNING", "sh", "-c", f"echo >{tmp_path}/up; sleep 60")
    until((tmp_path / "up").exists, "the command")
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert requeued(tmp_path) == ["7"]
