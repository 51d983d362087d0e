"""How a generation whose loss became useless says so."""

import math

import pytest

from tandem.processes.exitcode import ExitCode
from tandem.rundir.lineage import Rewind
from tandem_trainer.loss_spikes import decision


@pytest.mark.parametrize(
    ("loss", "earlier", "words"),
    [
        (math.nan, 0, "the loss became NaN at step 40, and the run is too short to leave data out."),
        (
            math.inf,
            1,
            "the loss became infinite at step 40, and to go back and leave data out once has not helped.",
        ),
        (
            9.75,
            3,
            "the loss became 9.75, worse than untrained, at step 40, and to go back and leave data out 3 times has",
        ),
        (None, 1, "the loss became worse than untrained at step 40, and to go back"),
    ],
)
def test_the_end_says_what_the_loss_was_and_what_was_tried(loss: float | None, earlier: int, words: str) -> None:
    code, why = decision(None, 40, loss, earlier)
    assert code == ExitCode.DIVERGED
    assert words in why


def test_going_back_says_from_where_it_goes_on() -> None:
    rewind = Rewind(number=1, generation=1, bad_step=40, loss=None, resume_before=31, skip_from=30, skip_to=50)
    code, why = decision(rewind, 40, math.nan, 0)
    assert code == ExitCode.REWOUND
    assert "NaN at step 40; going back to before step 31 and leaving out 20 batches." in why


def test_what_helps_is_said_once() -> None:
    rewind = Rewind(number=2, generation=2, bad_step=40, loss=None, resume_before=31, skip_from=30, skip_to=50)
    assert "a lower learning rate" in decision(rewind, 40, math.nan, 0)[1]
    assert decision(rewind, 40, math.nan, 1)[1].endswith("leaving out 20 batches")
