"""How a script ends, and what its run is then: the table of docs/reference/how-a-run-ends.md, played line by line."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tandem.rundir.layout import RunDir, stopped_early
from tandem_trainer.batch import Batch
from tandem_trainer.elastic_run import early_end_summary
from tandem_trainer.session import Session

STEPS, LEAVES_AT = 10, 4
Leave = Callable[[Session], str]
COMPLETE, NOTHING = "complete", "nothing is said"


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """Rows, of which nobody knows how many there are."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(torch.ones(8 * STEPS, 4))


def train(session: Session, leave: Leave, data: object = None) -> str:
    """A script's loop, which does `leave` in the middle."""
    model = session.distribute(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.keep(model, optimizer)
    for batch in session.batches(torch.ones(8 * STEPS, 4) if data is None else data, 8):
        take(batch, model, optimizer)
        if batch.step + 1 == LEAVES_AT:
            match leave(session):
                case "break":
                    break
                case "return":
                    return "returned"
    return "went on"


def take(batch: Batch, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    batch.mean(model(batch.data).squeeze(1) ** 2).backward()
    optimizer.step()
    optimizer.zero_grad()


def exits(session: Session) -> str:
    sys.exit(0)


def stops(session: Session) -> str:
    session.stop("the loss\nhas not fallen")
    return ""


def stops_and_breaks(session: Session) -> str:
    session.stop("24 hours are over")
    return "break"


def ended(folder: Path) -> str:
    """What DONE says."""
    done = RunDir(folder).done()
    return NOTHING if done is None else stopped_early(done) or COMPLETE


ENDS = [
    pytest.param(lambda session: "", COMPLETE, id="all-steps"),
    pytest.param(lambda session: "break", "stopped early after step 4 of 10: the script left its loop", id="break"),
    pytest.param(lambda session: "return", "stopped early after step 4 of 10: the script left its loop", id="return"),
    pytest.param(stops_and_breaks, "stopped early after step 4 of 10: 24 hours are over", id="stop-and-break"),
    pytest.param(exits, NOTHING, id="sys.exit(0)"),
]


@pytest.mark.parametrize(("leave", "expected"), ENDS)
def test_a_run_is_complete_when_all_steps_are_taken_and_else_says_why_it_stopped(
    tmp_path: Path, leave: Leave, expected: str
) -> None:
    ends = pytest.raises(SystemExit) if leave is exits else contextlib.nullcontext()
    with ends, Session(tmp_path, checkpoint={"everySteps": 3}) as session:
        train(session, leave)
    assert ended(tmp_path) == expected
    if "4 of 10" in expected:
        assert RunDir(tmp_path).committed()[0].step == LEAVES_AT, "the last step is saved"


def test_a_reason_ends_the_loop_by_itself_and_is_one_line(tmp_path: Path) -> None:
    with Session(tmp_path) as session:
        assert train(session, stops) == "went on", "what follows the loop runs"
    assert ended(tmp_path) == "stopped early after step 4 of 10: the loss has not fallen"
    assert (RunDir(tmp_path).done() or {})["plannedSteps"] == STEPS


def test_a_script_without_a_with_block_that_exits_in_its_loop_has_left_it(tmp_path: Path) -> None:
    session = Session(tmp_path)
    with pytest.raises(SystemExit):
        train(session, exits)
    # What Python does at its end.
    session._end_of_script()
    assert ended(tmp_path) == "stopped early after step 4 of 10: the script left its loop"


def test_a_stream_that_is_left_is_complete_unless_a_reason_is_given(tmp_path: Path) -> None:
    for folder, leave in (("plain", lambda session: "break"), ("reason", stops_and_breaks)):
        with Session(tmp_path / folder) as session:
            train(session, leave, Stream())
    assert ended(tmp_path / "plain") == COMPLETE
    assert ended(tmp_path / "reason") == "stopped early after step 4: 24 hours are over"


def test_the_reason_of_a_loop_that_was_left_survives_a_failure_of_what_follows_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), Session(tmp_path) as session:
        train(session, stops_and_breaks)
        session.leave_loop()
        raise OSError("the upload failed")
    assert ended(tmp_path) == NOTHING
    with Session(tmp_path) as session:
        assert train(session, lambda session: "") == "went on"
        assert session.step == LEAVES_AT, "no step is taken anew"
    assert ended(tmp_path) == "stopped early after step 4 of 10: 24 hours are over"


def test_a_reason_is_asked_for_and_belongs_into_the_loop(tmp_path: Path) -> None:
    with Session(tmp_path) as session:
        with pytest.raises(RuntimeError, match="in the loop"):
            session.stop("too early")

        def asks_nothing(session: Session) -> str:
            with pytest.raises(ValueError, match="takes a reason"):
                session.stop(" ")
            return ""

        train(session, asks_nothing)
    assert ended(tmp_path) == COMPLETE


def test_who_takes_all_steps_has_not_stopped_early() -> None:
    assert early_end_summary(10, 10, "the loss has not fallen") == ""
    assert early_end_summary(10, None, "") == ""
    assert early_end_summary(1_200, 3_000, "") == "stopped early after step 1,200 of 3,000: the script left its loop"
