"""Before a save the ranks send each other what each of them writes of tensors that they hold together."""

from pathlib import Path

import pytest

from tests.support.ranks import make_rundir, run

pytestmark = pytest.mark.timeout(120)


def test_each_rank_stages_its_bytes_of_tensors_that_are_split_in_any_way(tmp_path: Path) -> None:
    run(make_rundir(tmp_path / "run", {}), 4, "-m", "tests.support.exchanged")
