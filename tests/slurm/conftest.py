"""What tests on SLURM share: one cluster of three nodes for all of a pytest worker."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm.machine import Slurm
from tests.support.slurm.packages import NoSlurm
from tests.support.slurm.run import SlurmRun


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A real SLURM; its packages are downloaded the first time."""
    yield from started(tmp_path_factory.mktemp("slurm"))


def started(folder: Path, has_accounts: bool = False) -> Iterator[Slurm]:
    """A cluster in a folder, for a fixture. Where there is no SLURM, its tests are skipped."""
    try:
        cluster = Slurm(folder / "cluster", has_accounts)
    except NoSlurm as error:
        pytest.skip(str(error))
    with cluster:
        yield cluster


@pytest.fixture
def run(slurm: Slurm, tmp_path: Path) -> Iterator[SlurmRun]:
    """A run to be; at the end nothing of it is in the queue."""
    found = SlurmRun(slurm, tmp_path)
    yield found
    slurm.clear()
