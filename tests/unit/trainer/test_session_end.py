"""How a script ends, and what its run is then: docs/reference/how-a-run-ends.md, played line by line, here and in the
tests that PLAYED names."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tandem.rundir.layout import RunDir, stopped_early
from tandem.wire.status import early_end_summary
from tandem_trainer.batch import Batch
from tandem_trainer.session import Session
from tests.support import ROOT

PAGE = ROOT / "docs" / "reference" / "how-a-run-ends.md"
SAME = "test_killed_and_resumed_it_ends_with_the_weights_of_the_undisturbed_run"
PLAYED = {
    "**complete**: all steps": (
        "unit/trainer/test_session_end",
        "test_a_run_is_complete_when_all_steps_are_taken_and_else_says_why_it_stopped",
    ),
    "**stopped early**: on purpose": (
        "integration/test_end",
        "test_what_one_rank_says_stops_all_of_them_after_the_same_step_and_the_job_is_told_so",
    ),
    "**failed**": (
        "integration/test_crashes",
        "test_wherever_a_mistake_stands_two_failures_find_it_and_the_users_traceback_comes_first_and_once",
    ),
    "takes all steps, runs the code": (
        "unit/trainer/test_session_end",
        "test_a_script_may_exit_with_0_when_its_loop_has_ended",
    ),
    'calls `session.stop("the': (
        "unit/trainer/test_session_end",
        "test_a_reason_ends_the_loop_by_itself_and_is_one_line",
    ),
    "leaves the loop with `break`": (
        "unit/trainer/test_session_end",
        "test_a_stream_that_is_left_is_complete_unless_a_reason_is_given",
    ),
    "calls `sys.exit(0)` in the loop, in a `with` block": (
        "integration/test_end",
        "test_a_session_that_ends_with_zero_before_its_steps_are_taken_is_not_complete",
    ),
    "calls `sys.exit(0)` in the loop, without a `with`": (
        "unit/trainer/test_session_end",
        "test_a_script_without_a_with_block_that_exits_in_its_loop_has_left_it",
    ),
    "calls `os._exit(0)` in the loop": (
        "unit/trainer/test_local_ranks",
        "test_a_session_is_complete_when_it_says_so_and_not_because_its_process_ended_with_zero",
    ),
    "calls `os._exit(0)` after the loop": (
        "unit/trainer/test_local_ranks",
        "test_a_session_whose_last_checkpoint_is_there_may_end_in_any_way",
    ),
    "raises an error, or ends with another code": (
        "integration/test_after_the_loop",
        "test_code_after_the_loop_that_fails_is_tried_again_without_a_step",
    ),
    "`epochs`, `maxSteps`, `max_steps`": ("integration/test_adapter_of_transformers", SAME),
    "`EarlyStoppingCallback` of Trainer or TRL": ("integration/test_adapter_of_transformers", SAME),
    "`EarlyStopping` of Lightning": ("integration/test_adapter_of_lightning", SAME),
    "`Trainer(max_time=…)` of Lightning": (
        "integration/test_adapter_of_lightning",
        "test_what_elastic_cannot_keep_is_refused_by_name_before_anything_is_written",
    ),
    "a limit of time in your own loop or with accelerate": (
        "integration/test_adapter_of_accelerate",
        "test_a_limit_of_time_stops_it_early",
    ),
    "`runPolicy.activeDeadlineSeconds`": (
        "unit/operator/test_reconcile_end",
        "test_a_deadline_counts_from_the_coordinators_first_answer",
    ),
    "the time limit of a SLURM job": (
        "integration/test_session",
        "test_asked_to_leave_it_saves_and_the_code_after_the_loop_waits_for_the_end",
    ),
}
"""File and name of the test of each line of the page's tables, by how the line begins."""

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


def test_a_script_may_exit_with_0_when_its_loop_has_ended(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="0"), Session(tmp_path) as session:
        train(session, lambda session: "")
        sys.exit(0)
    assert ended(tmp_path) == COMPLETE


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


def test_each_line_of_the_page_is_played_by_a_test() -> None:
    cells = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    lines = [cell for cell in cells if cell not in ("end", "the script", "what")]
    played = [next((begin for begin in PLAYED if line.startswith(begin)), line) for line in lines]
    assert sorted(played) == sorted(PLAYED)
    for file, test in PLAYED.values():
        assert f"\ndef {test}(" in (ROOT / "tests" / f"{file}.py").read_text()
