"""A generation that starts from the state of ranks that live: whose state, who receives it, and what the log lacks."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tandem.job.resource import CheckpointSpec
from tandem.rundir import records
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import Continuation, GenerationRecord
from tandem.rundir.log import LogWriter
from tandem.wire.status import CheckpointRef
from tandem_trainer.checkpoint.restoring import compare
from tandem_trainer.checkpoint.train_state import TrainState
from tandem_trainer.continuation import LiveState, StateSource, TakenStep, find_source, hand_over
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.process_group import Group
from tandem_trainer.save_interval import SaveInterval
from tests.support.threads import on_ranks


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    """A run whose second generation has logged six steps."""
    made = RunDir(tmp_path)
    made.create()
    opens(made, 2)
    log = LogWriter(made.training_log(2))
    log.append(records.Start(time=1.0, step=0), *(records.Step(time=1.0, step=step, loss=0.5) for step in range(1, 7)))
    log.close()
    return made


def opens(rundir: RunDir, generation: int, continues: Continuation | None = None) -> None:
    record = GenerationRecord(generation=generation, continues=continues, world_size=2, started_at=0.0)
    assert rundir.record_generation(record)


def live(step: int, settled: int = 6, generation: int = 2, **changes: Any) -> LiveState:
    """A rank that has taken so many steps, and knows the loss of some."""
    losses = {number: number / 10 for number in range(1, settled + 1)}
    taken = [
        TakenStep(number, time.time(), torch.arange(number, number + 4), 0.1, losses.get(number))
        for number in range(1, step + 1)
    ]
    state = LiveState(
        generation=generation,
        entered=frozenset(),
        step=step,
        loss_spikes={"latest": [float(settled)]},
        samples={step - 1: f"samples-{step - 1}", step: f"samples-{step}"},
        recent_steps=taken,
        saved_at=0.0,
        interval=SaveInterval(CheckpointSpec()),
    )
    return replace(state, **changes)


def source_of(rundir: RunDir, *states: LiveState | None) -> StateSource | None:
    """What all ranks agree on."""
    found = on_ranks(len(states), lambda group: find_source(rundir, group, states[group.rank]))
    for each in found:
        if isinstance(each, Exception):
            raise each
    first = found[0]
    assert all(
        each is None if first is None else replace(each, missing=()) == replace(first, missing=()) for each in found
    )
    return first


def test_the_rank_that_is_ahead_is_the_source_and_the_others_receive(rundir: RunDir) -> None:
    found = source_of(rundir, None, live(8), live(9))
    assert (found.rank, found.step, list(found.receivers)) == (2, 9, [0, 1])
    assert found.continuation == Continuation(generation=2, step=6)
    assert [(step.step, step.loss) for step in found.missing] == [(7, None), (8, None), (9, None)]


def test_of_equals_the_one_that_knows_most_losses_is_the_source_and_all_losses_are_logged(rundir: RunDir) -> None:
    found = source_of(rundir, live(9, settled=7), live(9, settled=8))
    assert (found.rank, list(found.receivers), found.loss_spikes) == (1, [], {"latest": [8.0]})
    assert [(step.step, step.loss) for step in found.missing] == [(7, 0.7), (8, 0.8), (9, None)]


def test_without_a_live_state_it_starts_from_a_checkpoint(rundir: RunDir) -> None:
    assert source_of(rundir, None, None) is None


def test_a_state_does_not_count_once_another_group_has_started(rundir: RunDir) -> None:
    opens(rundir, 3)
    assert source_of(rundir, live(9), live(9)) is None


@pytest.mark.parametrize("was_member", [True, False])
def test_a_generation_that_was_over_before_its_first_step_is_continued_by_who_was_in_it(
    rundir: RunDir, was_member: bool
) -> None:
    opens(rundir, 3, Continuation(generation=2, step=6))
    entered = frozenset({3, 4} if was_member else {4})
    found = source_of(rundir, live(9, entered=entered), None)
    assert (found and found.continuation) == (Continuation(generation=3, step=6) if was_member else None)


def test_ranks_of_which_some_had_begun_the_generation_that_broke_go_on_together(rundir: RunDir) -> None:
    opens(rundir, 3, Continuation(generation=2, step=6))
    has_begun = live(9, generation=3, samples={9: ""})
    found = source_of(rundir, live(9, entered=frozenset({3, 4})), has_begun)
    assert (found.step, list(found.receivers)) == (9, [])


def test_a_checkpoint_counts_though_the_lines_before_it_are_lost(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = CheckpointRef(name="step-000000008", step=8, generation=2)
    monkeypatch.setattr(RunDir, "committed", lambda rundir: [SimpleNamespace(reference=reference)])
    found = source_of(rundir, live(9), live(9))
    assert (found.checkpoint, found.continuation) == (reference, Continuation(generation=2, step=8))


def test_the_last_step_is_found_before_a_long_tail_of_other_lines(rundir: RunDir) -> None:
    log = LogWriter(rundir.training_log(2))
    for _ in range(2):
        log.append(*(records.NotSaved(time=1.0, step=6, why="x" * 1000) for _ in range(50)))
    log.close()
    found = source_of(rundir, live(9), None)
    assert (found and found.logged) == 6


def test_ranks_that_took_other_samples_are_refused(rundir: RunDir) -> None:
    other = live(9, samples={8: "other", 9: "other"})
    with pytest.raises(ConfigurationError, match="rank 2 took other samples up to step 8"):
        source_of(rundir, live(8), live(9), other)


class Learner:
    """A model with a buffer, an average and moments, after some steps."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
        self.average = AveragedModel(self.model, multi_avg_fn=None)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.schedule = {"steps": steps}
        self.state = TrainState(self.model, self.optimizer, self.average, {"schedule": self.schedule})
        for step in range(steps):
            torch.manual_seed(step)
            self.model(torch.randn(8, 3)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.average.update_parameters(self.model)


def test_who_is_behind_or_new_holds_the_state_of_the_source_to_the_bit(rundir: RunDir) -> None:
    steps = (0, 7, 8)
    learners = [Learner(count) for count in steps]
    states = [live(count) if count else None for count in steps]

    def start(group: Group) -> None:
        source = find_source(rundir, group, states[group.rank])
        assert source is not None
        hand_over(group, source, learners[group.rank].state)
        compare(group, learners[group.rank].state.replicated())

    assert on_ranks(len(steps), start) == [None] * len(steps)
    expected = Learner(8)
    for learner in learners:
        torch.testing.assert_close(learner.model.state_dict(), expected.model.state_dict(), rtol=0, atol=0)
        torch.testing.assert_close(learner.average.state_dict(), expected.average.state_dict(), rtol=0, atol=0)
        torch.testing.assert_close(learner.optimizer.state_dict(), expected.optimizer.state_dict(), rtol=0, atol=0)
        assert learner.schedule == {"steps": 8}
