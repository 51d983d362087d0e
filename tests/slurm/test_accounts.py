"""What a job is told whose account does not exist, is spent, or has reached a limit: a real slurmdbd enforces it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm.machine import Slurm
from tests.support.slurm.packages import NoSlurm
from tests.support.slurm.run import DIGITS, SlurmRun
from tests.support.waiting import until

pytestmark = [pytest.mark.full("cli"), pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster whose user has three accounts: one with hours left, one without, and one that takes no jobs."""
    try:
        cluster = Slurm(tmp_path_factory.mktemp("slurm") / "cluster", accounts=("good", "spent", "full", "closed"))
    except NoSlurm as error:
        pytest.skip(str(error))
    with cluster:
        cluster.account("modify", "account", "spent", "set", "GrpTRESMins=cpu=0")
        cluster.account("modify", "user", "root", "where", "account=full", "set", "MaxSubmitJobs=0")
        yield cluster


@pytest.fixture
def run(slurm: Slurm, tmp_path: Path) -> Iterator[SlurmRun]:
    found = SlurmRun(slurm, tmp_path)
    yield found
    slurm.clear()


@pytest.mark.parametrize(
    ("account", "told"),
    [
        ("unknown", "the account of the profile is not valid in this partition, or has expired"),
        ("full", "a limit of your account"),
    ],
)
def test_a_job_that_its_account_does_not_allow_is_refused_in_a_sentence(run: SlurmRun, account: str, told: str) -> None:
    run.profile("main", account=account)
    done = run.tandem("submit", "--slurm", DIGITS)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert told in done.stderr
    assert not run.queue()


def test_a_job_whose_account_is_spent_says_so_while_it_waits(run: SlurmRun) -> None:
    run.profile("main", account="spent")
    run.submit()

    def told() -> bool:
        return "its account has no hours left" in run.tandem("status", "digits").stdout

    until(told, "the reason", pause=1.0, otherwise=lambda: run.tandem("status", "digits").stdout)


def test_a_job_whose_account_is_taken_away_while_it_waits_says_that_it_never_starts(run: SlurmRun) -> None:
    run.profile("main", account="closed")
    run.slurm.ask("sbatch", "--account=good", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    until(lambda: " R " in run.queue(), "a job on all nodes", otherwise=run.queue)
    run.submit()
    run.slurm.account("delete", "account", "closed")

    def told() -> bool:
        return "its account is not valid or has expired" in run.tandem("status", "digits").stdout

    until(told, "the reason", pause=1.0, otherwise=lambda: run.tandem("status", "digits").stdout)
