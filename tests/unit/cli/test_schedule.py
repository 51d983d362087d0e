"""The bubble of a pipeline's recorded steps, beside theory, and its picture."""

from typing import Any
from xml.etree import ElementTree

import pytest

from tandem_cli.bench.schedule import Kind, RecordedPass, RecordedSchedule, bubble, draw_schedule, replayed, title
from tandem_cli.report.raster import painted, standalone

Order = list[tuple[Kind, int, int]]
"""Kind, stage and micro-batch of the passes of a rank."""


def passes(*orders: Order) -> list[RecordedPass]:
    """In this order on each rank; when they begin says no more than that."""
    return [
        RecordedPass(rank=rank, stage=stage, micro_batch=number, kind=kind, begin=float(place), end=place + 0.5)
        for rank, order in enumerate(orders)
        for place, (kind, stage, number) in enumerate(order)
    ]


def by_kind(one: RecordedPass) -> float:
    return 2.0 if one.kind == "backward" else 1.0


def gpipe(ranks: int, micro_batches: int) -> list[RecordedPass]:
    numbers = range(micro_batches)
    kinds: tuple[Kind, Kind] = ("forward", "backward")
    return passes(*([(kind, stage, number) for kind in kinds for number in numbers] for stage in range(ranks)))


def one_forward_one_backward(ranks: int, micro_batches: int) -> list[RecordedPass]:
    orders: list[Order] = []
    for stage in range(ranks):
        ahead = min(ranks - stage, micro_batches)
        order: Order = [("forward", stage, number) for number in range(ahead)]
        for number in range(micro_batches):
            order.append(("backward", stage, number))
            if number + ahead < micro_batches:
                order.append(("forward", stage, number + ahead))
        orders.append(order)
    return passes(*orders)


@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 16), (3, 1), (1, 5)])
def test_theory_is_that_of_the_textbook(schedule: Any, ranks: int, micro_batches: int) -> None:
    found = replayed(schedule(ranks, micro_batches), by_kind)
    assert len(found) == 2 * ranks * micro_batches
    assert bubble(found, ranks) == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))


def test_gradients_of_weights_fill_the_time_that_others_wait_in() -> None:
    # Two ranks, two micro-batches: rank 0 computes its gradients of weights while rank 1 works on the next one.
    first: Order = [("forward", 0, 0), ("forward", 0, 1), ("input", 0, 0), ("weight", 0, 0)]
    first += [("input", 0, 1), ("weight", 0, 1)]
    second: Order = [("forward", 1, 0), ("input", 1, 0), ("forward", 1, 1), ("input", 1, 1)]
    second += [("weight", 1, 0), ("weight", 1, 1)]
    found = replayed(passes(first, second), lambda one: 1.0)
    assert max(one.end for one in found) == 7.0
    assert bubble(found, 2) == pytest.approx(2 / 14)


def test_passes_that_wait_for_each_other_are_no_schedule() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        replayed(passes([("backward", 0, 0), ("forward", 0, 0)]), lambda one: 1.0)


def recorded(wait: float) -> RecordedSchedule:
    """GPipe on two ranks, of which the second begins later than it could."""
    steps = []
    for late in (0.0, wait, wait):
        found = replayed(gpipe(2, 4), by_kind)
        shift = {0: 0.0, 1: late}
        steps.append([one.model_copy(update={"begin": one.begin + shift[one.rank], "end": one.end + shift[one.rank]})
                      for one in found])  # fmt: skip
    return RecordedSchedule(schedule="gpipe", ranks=2, stages=2, micro_batches=4, steps=steps)


def test_what_is_measured_is_the_median_over_the_steps() -> None:
    assert recorded(0.0).measured == pytest.approx(recorded(0.0).predicted) == pytest.approx(1 / 5)
    late = recorded(3.0)
    assert late.predicted == pytest.approx(1 / 5)
    assert late.measured == pytest.approx(1 - 24 / (2 * 16.0))
    assert late.unsent == pytest.approx(1 / 5), "the passes themselves took no longer"
    assert late.words == ("gpipe, 2 ranks, 4 micro-batches: bubble 25 %, in theory 20 %; 20 % if sending took no time")
    assert bubble(late.typical, 2) == late.measured


def test_theory_has_the_times_of_each_stage() -> None:
    """With zero bubble the first stage computes all its gradients in the pass for those of weights."""
    first: Order = [("forward", 0, 0), ("input", 0, 0), ("weight", 0, 0)]
    second: Order = [("forward", 1, 0), ("input", 1, 0), ("weight", 1, 0)]
    costs = {("input", 0): 0.0, ("weight", 0): 2.0}
    step = replayed(passes(first, second), lambda one: costs.get((one.kind, one.stage), 1.0))
    schedule = RecordedSchedule(schedule="zeroBubble", ranks=2, stages=2, micro_batches=1, steps=[step])
    # Rank 0 waits for two passes, and rank 1 for one at the beginning and one at the end: 4 of 10.
    assert schedule.predicted == schedule.measured == pytest.approx(4 / 10)


def test_passes_that_take_unequally_long_are_told_from_sending() -> None:
    even = replayed(gpipe(2, 4), by_kind)
    slow = replayed(gpipe(2, 4), lambda one: by_kind(one) * (2.0 if one.micro_batch == 2 and one.stage else 1.0))
    schedule = RecordedSchedule(schedule="gpipe", ranks=2, stages=2, micro_batches=4, steps=[even, slow, slow])
    assert schedule.unsent == schedule.measured > schedule.predicted


def test_the_picture_has_a_row_for_each_rank_and_a_box_for_each_pass() -> None:
    schedule = recorded(1.0)
    svg = draw_schedule(schedule)
    texts = [one.text for one in ElementTree.fromstring(svg).iter("text")]
    assert {"rank 0", "rank 1", "forward pass", "backward pass", "waiting"} <= {*texts}
    assert [text for text in texts if text in "0123"].count("3") >= 4
    assert painted(standalone(svg, title(schedule))).startswith(b"\x89PNG")


def test_a_file_of_a_later_version_is_read() -> None:
    data = recorded(0.0).dump() | {"device": "cpu"}
    assert data["steps"][0][0]["pass"] == "forward"
    assert RecordedSchedule.read(data).measured == pytest.approx(1 / 5)
