"""Facts that several readers take from training logs: metrics, tracking, the report and the summary of a run.

After a restart, steps after the checkpoint are repeated, so several generations log the same step. By the rule of
`tandem.rundir.lineage`, of a generation the steps up to the one its successor on the lineage resumed from count. A
reader must also make sense of a directory whose generation records are lost, so `counted_until` is an equivalent form
that needs only the step each generation started from: a step counts if no later generation started at or before it.
(They are equivalent because each generation resumes from a checkpoint that counted at its start; a test compares the
two over random histories.)
"""

import math
from collections.abc import Mapping
from pathlib import Path

from tandem.rundir.log import LogReader
from tandem.rundir.records import TRAINING, Start, Step

FIRST_BYTES = 2**16
"""Bytes read from the start of a log, where its first record is."""


def first_start(path: Path) -> Start | None:
    """The record with which a generation starts; None if the log does not begin with one.

    Raises:
        OSError: the log cannot be read.
    """
    begin = LogReader(path, TRAINING, skip=Step, bite=FIRST_BYTES).read() or ()
    return next((record for record in begin if isinstance(record, Start)), None)


def counted_until(start_steps: Mapping[int, float]) -> dict[int, float]:
    """The last step of each generation that counts, from the step that each started after (0: the beginning). Infinite
    for the newest."""
    limits: dict[int, float] = {}
    lowest = math.inf
    for generation in sorted(start_steps, reverse=True):
        limits[generation] = lowest
        lowest = min(lowest, start_steps[generation])
    return limits
