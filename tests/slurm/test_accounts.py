"""Accounts on a real slurmdbd: what they do not allow, in sentences, and what they remember. Nothing trains here."""

from collections.abc import Iterator

import pytest

from tandem_launcher.slurm.scheduler import SlurmError
from tests.support.slurm.machine import Slurm, started
from tests.support.slurm.run import DIGITS, SlurmRun
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(120)
NOT_VALID = "the account of the profile is not valid in this partition, or has expired"
LIMITS = {
    "lab": "",
    "left": "",
    "full": "GrpSubmitJobs=0",
    "spent": "GrpTRESMins=cpu=0",
    "small": "MaxTRESPerJob=node=1",
}
"""Accounts, and how each is limited."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster with these accounts. The user has been in `left`, and is not any more."""
    for cluster in started(tmp_path_factory.mktemp("slurm"), has_accounts=True):
        assert cluster.accounting is not None
        change = cluster.accounting.change
        for name, limit in LIMITS.items():
            change("add", "account", name, *([limit] if limit else []))
        change("add", "user", "root", f"account={','.join(LIMITS)}", "DefaultAccount=lab")
        change("add", "qos", "strict", "MaxTRESPerJob=node=1", "Flags=DenyOnLimit")
        change("modify", "user", "root", "set", "qos+=strict")
        change("delete", "user", "root", "account=left")
        yield cluster


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"account": "nobodys"}, NOT_VALID),
        ({"account": "left"}, NOT_VALID),
        ({"account": "full"}, "a limit of your account or quality of service is reached"),
        ({"qos": "nobodys"}, "there is no such quality of service for this account and partition"),
        ({"qos": "strict"}, "the job requests more than your account or quality of service allows one job"),
    ],
    ids=lambda value: "-".join(next(iter(value.items()))) if isinstance(value, dict) else "",
)
def test_what_an_account_does_not_allow_is_said_and_leaves_no_job(
    run: SlurmRun, fields: dict[str, str], told: str
) -> None:
    run.profile("beside", **fields)
    done = run.tandem("submit", "--slurm", DIGITS, "--profile", "beside")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {told}")
    assert len(done.stderr.splitlines()) == 1
    assert not run.queue()


def test_a_job_that_is_larger_than_its_account_allows_never_starts(run: SlurmRun) -> None:
    run.profile("beside", account="small")
    run.submit("--profile", "beside")
    tells(run, "allows one job, so it never starts (AssocMaxNodePerJobLimit)\n")


def test_a_job_whose_account_is_spent_says_so_and_how_it_ended_is_known_from_the_accounting(run: SlurmRun) -> None:
    run.profile("beside", account="spent")
    job = run.submit("--profile", "beside")
    tells(run, "its account has no hours left, so it starts only if more are granted (AssocGrpCPUMinutesLimit)\n")
    assert run.tandem("stop", "runs/digits").returncode == 0
    run.slurm.forget()
    with pytest.raises(SlurmError, match="Invalid job id"):
        run.slurm.ask("scontrol", "show", "job", job)
    tells(run, f"job {job} ended (CANCELLED); the same `tandem submit --slurm` starts over")
    assert f"job {job} ended (CANCELLED)" in run.tandem("ls").stdout


def tells(run: SlurmRun, words: str) -> None:
    """Wait until the status says that."""
    until(
        lambda: words in run.tandem("status", "runs/digits").stdout,
        words,
        pause=0.5,
        seconds=20,
        otherwise=lambda: run.tandem("status", "runs/digits").stdout,
    )
