"""How many steps an epoch has under `limit_train_batches`."""

from math import ceil

import pytest

from tandem_trainer.adapters.lightning import steps_per_epoch

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("limit", [0.05, 0.3, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("accumulated", [1, 3, 4])
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("samples", [40, 100, 101])
def test_a_part_is_one_of_the_loaders_batches_as_lightning_counts_them(
    samples: int, processes: int, accumulated: int, limit: float
) -> None:
    each = 4
    length = ceil(ceil(samples / processes) / each)
    expected = ceil(int(length * limit) / accumulated)
    assert steps_per_epoch(samples, each * accumulated * processes, False, limit, accumulated) == expected


def test_eight_of_ten_batches_with_four_in_a_step_are_two_steps() -> None:
    assert steps_per_epoch(10, 4, False, 0.8, 4) == 2
    assert steps_per_epoch(10, 4, True, 0.8, 4) == 2
    assert steps_per_epoch(11, 4, True, 1.0, 4) == 2, "the last step is left out"


@pytest.mark.parametrize(("limit", "steps"), [(1, 1), (8, 2), (9, 3), (100, 3)])
def test_a_number_is_one_of_batches(limit: int, steps: int) -> None:
    assert steps_per_epoch(10, 4, False, limit, 4) == steps
