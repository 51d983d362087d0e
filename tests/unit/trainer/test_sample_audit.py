"""What the logs of a run say of its samples."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.rundir.checkpoint import DataPosition
from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogWriter
from tandem.rundir.records import Step
from tandem_trainer.data.feeding import Reading
from tandem_trainer.data.order import Batches, Order, digest
from tandem_trainer.data.sampling import Listing
from tandem_trainer.data.shard_order import ShardOrder
from tandem_trainer.sample_audit import audit
from tests.support import manifests
from tests.support.checkpoints import begin, commit

ORDER = Order(samples=60, global_batch_size=20, seed=7)
STEPS = 6


def logged(folder: Path, taken: Order, position: DataPosition | None, steps: Sequence[int] = range(STEPS)) -> RunDir:
    """A run that has logged the samples of an order, and has a checkpoint with a position."""
    rundir = manifests.run_directory(folder / "run", manifests.job("digits"))
    begin(rundir, 1)
    batches = Batches(taken)
    log = LogWriter(rundir.training_log(1))
    for step in steps:
        log.append(Step(time=time.time(), step=step + 1, ids=digest(batches.ids(step))))
    log.close()
    commit(rundir, STEPS, 1, data=position)
    return rundir


@pytest.mark.parametrize("first", [0, 40])
def test_each_sample_of_a_slice_was_taken_once(tmp_path: Path, first: int) -> None:
    order = Order(60, 20, seed=7, first=first)
    result = audit(logged(tmp_path, order, order.position(STEPS)))
    assert (result.problems, result.unknown, result.epochs, result.samples) == ([], "", 2, 60)


def test_steps_that_all_took_other_samples_are_a_problem(tmp_path: Path) -> None:
    other = Order(60, 20, seed=8)
    result = audit(logged(tmp_path, other, ORDER.position(STEPS)))
    assert result.problems == ["steps that took other samples than the seed gives them: 1, 2, 3, 4, 5 and 1 more"]
    assert result.unknown == ""


def test_steps_that_are_missing_or_logged_twice_are_a_problem(tmp_path: Path) -> None:
    result = audit(logged(tmp_path, ORDER, ORDER.position(STEPS), [0, 2, 3, 3, 4, 5]))
    assert result.problems == ["steps that are not logged: 2", "steps that are logged more than once: 4"]


def test_an_order_of_the_scripts_own_is_not_compared(tmp_path: Path) -> None:
    listing = Listing(lambda seed, epoch: torch.arange(60), 60, 20, 2, None, seed=7)
    list(listing.feed(range(60), None, 0, lambda step: False, Reading(0, 1, seed=7)))
    result = audit(logged(tmp_path, Order(60, 20, seed=8), listing.position(0)))
    assert (result.problems, result.epochs) == ([], 0)
    assert "a function of the script's own" in result.unknown


def test_a_checkpoint_of_an_earlier_version_does_not_say_what_determines_the_order(tmp_path: Path) -> None:
    older = ORDER.position(STEPS).model_copy(update={"first": None})
    (tmp_path / "same").mkdir()
    assert audit(logged(tmp_path / "same", ORDER, older)).epochs == 2
    (tmp_path / "other").mkdir()
    result = audit(logged(tmp_path / "other", Order(60, 20, seed=8), older))
    assert result.problems == []
    assert "an earlier version" in result.unknown


def test_samples_in_shards_are_not_compared(tmp_path: Path) -> None:
    order = Order(60, 20, seed=7, shards=ShardOrder(np.array([30, 30]), 1, "abc"))
    result = audit(logged(tmp_path, order, order.position(STEPS)))
    assert (result.problems, result.samples) == ([], 60)
    assert "it reads shards" in result.unknown
