"""What went wrong, in the same words on the screen, in `tandem status`, and as one line for programs."""

import re

from tandem.wire import metrics
from tandem.wire.status import (
    CORRUPTIONS,
    Corruption,
    Status,
    Troubles,
    joined,
    persistent_trouble,
    trouble_messages,
    with_cause,
)
from tests.support import ROOT

FULL = "[Errno 28] No space left on device"
FAILING = Troubles(saves_failed=24, saves_failed_in_a_row=24, save_message=FULL, lines_lost=1_275)


def test_the_gravest_comes_first_and_what_is_past_does_not_last() -> None:
    past = Troubles(saves_failed=2, rewinds=3, batches_left_out=180, evaluations_skipped=18, lines_lost=1)
    assert [(one.level, one.text) for one in trouble_messages(past)] == [
        ("warning", "2 saves have failed"),
        ("error", "1 log line has been lost: the disk refused them"),
        ("warning", "the loss became useless: training went back 3 times and left out 180 batches"),
        ("info", "18 checkpoints have been skipped by evaluators"),
    ]
    assert persistent_trouble(past) is None
    assert persistent_trouble(None) is None
    now = persistent_trouble(FAILING)
    assert (now.reason, now.text) == ("SavesFail", f"the disk is full: the last 24 saves have failed: {FULL}")


def test_the_cause_comes_first_where_it_is_a_full_disk_as_lines_are_cut_at_their_end() -> None:
    assert with_cause("it failed", "[Errno 122] Disk quota exceeded") == (
        "the disk is full: it failed: [Errno 122] Disk quota exceeded"
    )
    assert with_cause("it failed", "[Errno 5] Input/output error") == "it failed: [Errno 5] Input/output error"
    assert with_cause("it failed", "") == "it failed"


def test_a_status_holds_them_and_an_older_reader_passes_over_them() -> None:
    assert Status.read(Status(troubles=FAILING).dump()).troubles == FAILING
    assert "troubles" not in Status().dump()


def test_wrong_numbers_are_errors_one_of_each_kind_with_the_newest_message() -> None:
    found = [
        Corruption(reason="ScoresDiffer", message="evaluator-1-0 did"),
        Corruption(reason="RanksDiffer", message="rank 1 did"),
        Corruption(reason="RanksDiffer", count=2, message="rank 7 did"),
        Corruption(reason="OfANewerVersion", message="what?"),
    ]
    assert [
        (one.reason, one.level, one.text, one.lasts) for one in trouble_messages(Troubles(corruptions=joined(found)))
    ] == [
        ("RanksDiffer", "error", "rank 7 did (3 times)", False),
        ("ScoresDiffer", "error", "evaluator-1-0 did", False),
    ]


def test_the_glossary_names_each_kind_of_trouble_and_metrics_that_there_are() -> None:
    page = (ROOT / "docs/numbers.md").read_text()
    every = Troubles(
        saves_failed_in_a_row=1,
        evaluations_failed=1,
        lines_lost=1,
        rewinds=1,
        micro_batches_halved=1,
        corruptions=[Corruption(reason=reason, message="so") for reason in CORRUPTIONS],
        weights_unchanged=1,
        samples_message="of 90, 60 are empty",
        exclusion_message="worker-1 is left out",
        worse_than_base=3,
        upload_message="it is away",
        evaluations_skipped=1,
    )
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [one.reason for one in trouble_messages(every)]
    assert set(re.findall(r"`(tandem_\w+)", page)) <= {metric.name for metric in metrics.ALL}
