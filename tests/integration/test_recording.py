"""`make run`, a kill, Ctrl-C and resume on a terminal: no frame has lines of an older one, or numbers at odds."""

from pathlib import Path

import pytest

from tests.support.recording import SIZES, frame_faults, record

pytestmark = pytest.mark.timeout(1200)
FRAME = [
    "  digits  training                          1 min 23 s",
    "  step 407 of 2,760 · epoch 17.7",
    "",
    "  workers     2/2",
    "  checkpoint  step 400",
    "  evaluated   step 400 · accuracy 98.33 % · up to date",
]


@pytest.mark.full("core", "cli", "trainer", "evaluator", "coordinator")
@pytest.mark.parametrize(("columns", "lines"), SIZES)
def test_every_frame_of_a_run_is_one_picture(columns: int, lines: int, tmp_path: Path) -> None:
    kept = record(columns, lines, tmp_path)
    assert kept.faults == [], "\n".join(kept.frames)


@pytest.mark.parametrize(
    ("frame", "fault"),
    [
        ([FRAME[0], *FRAME], "2 titles"),
        ([*FRAME, FRAME[4]], "a row twice"),
        (FRAME[1:], "parts of a picture without its title"),
        ([*FRAME[:3], "  checkpoint  step 500"], "step 407 is behind checkpoint 500"),
        ([*FRAME[:3], "  evaluated   step 400 · accuracy 98.3…"], "a value is cut"),
        ([FRAME[0] + " " * 80 + "x"], "wider than the terminal"),
    ],
)
def test_what_is_wrong_with_a_frame_is_seen(frame: list[str], fault: str) -> None:
    assert frame_faults(FRAME, 80) == []
    assert any(fault in one for one in frame_faults(frame, 80)), frame_faults(frame, 80)
