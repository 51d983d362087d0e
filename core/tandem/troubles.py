"""What went wrong in a job and did not end it, in words: the same on the screen, in status, on pages and in Events."""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tandem.formatting import number, several
from tandem.status import Troubles

SAVES_FAIL, EVALUATION_FAILED, LINES_LOST, REWOUND, SKIPPED = (
    *("SavesFail", "EvaluationFailed", "LogLinesLost", "Rewound"),
    "EvaluationsSkipped",
)
"""The kinds of trouble, as reasons of conditions and Events."""
FULL = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))
"""What the system says of a disk, or of a user's part of it, that is full."""


@dataclass(frozen=True)
class Sentence:
    """One kind of trouble."""

    reason: str
    """One CamelCase word."""
    level: Literal["info", "warning", "error"]
    text: str
    """A sentence."""
    lasts: bool = False
    """Whether it is so now, and not only in the past."""


def told(troubles: Troubles | None) -> Iterator[Sentence]:
    """Each kind of trouble there was, the gravest first."""
    if troubles is None:
        return
    if row := troubles.saves_failed_in_a_row:
        saves = "the last save has failed" if row == 1 else f"the last {number(row)} saves have failed"
        yield Sentence(SAVES_FAIL, "error", explained(saves, troubles.save_message), lasts=True)
    elif troubles.saves_failed:
        yield Sentence(SAVES_FAIL, "warning", _have(troubles.saves_failed, "save", "failed"))
    if troubles.evaluations_failed:
        text = f"{several(troubles.evaluations_failed, 'checkpoint')} could not be evaluated"
        lasts = bool(troubles.evaluation_message)
        yield Sentence(EVALUATION_FAILED, "error", explained(text, troubles.evaluation_message), lasts)
    if troubles.lines_lost:
        yield Sentence(
            LINES_LOST, "error", _have(troubles.lines_lost, "log line", "been lost: the disk did not take them")
        )
    if troubles.rewinds:
        times = "once" if troubles.rewinds == 1 else f"{troubles.rewinds} times"
        left = several(troubles.batches_left_out, "batch", "batches")
        yield Sentence(REWOUND, "warning", f"the loss became useless: training went back {times} and left out {left}")
    if troubles.evaluations_skipped:
        yield Sentence(SKIPPED, "info", _have(troubles.evaluations_skipped, "checkpoint", "been skipped by evaluators"))


def lasting(troubles: Troubles | None) -> Sentence | None:
    """The gravest trouble that the job is in now."""
    return next((one for one in told(troubles) if one.lasts), None)


def explained(text: str, why: str) -> str:
    """What went wrong and its cause. A full disk comes first: lines are cut at their end, and it can be helped."""
    if not why:
        return text
    return ("the disk is full: " if any(words in why for words in FULL) else "") + f"{text}: {why}"


def _have(count: int, noun: str, what: str) -> str:
    return f"{several(count, noun)} {'has' if count == 1 else 'have'} {what}"
