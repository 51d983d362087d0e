"""What tests on SLURM share: one cluster of three nodes for all of a pytest worker."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm.machine import Slurm, started
from tests.support.slurm.run import SlurmRun


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A real SLURM; its packages are downloaded the first time."""
    yield from started(tmp_path_factory.mktemp("slurm"))


@pytest.fixture
def run(slurm: Slurm, tmp_path: Path) -> Iterator[SlurmRun]:
    """A run to be; at the end nothing of it is in the queue."""
    found = SlurmRun(slurm, tmp_path)
    yield found
    slurm.clear()
