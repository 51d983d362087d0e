"""What an evaluator prints."""

import re

import pytest

from tandem_evaluator.evaluator_log import log_event


def test_a_line_says_when_it_was_printed_as_those_of_the_other_processes_do(capsys: pytest.CaptureFixture[str]) -> None:
    log_event("merged", checkpoint="step-000000040", step=40, loss=0.25)
    said = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} level=INFO event=merged checkpoint=step-000000040 step=40 loss=0.25\n"
    assert re.fullmatch(said, capsys.readouterr().out)
