"""How long a rank's own work takes, also when a forward pass does not come to its end."""

from typing import Any

import pytest
import torch

from tandem_trainer import meter
from tandem_trainer.meter import Stopwatch


class Clock:
    """Time that passes when a test says so, on the CPU and between the events of a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 50.0
        clock = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = clock.now

            def elapsed_time(self, later: Any) -> float:
                return 1000.0 * (later.at - self.at)

        monkeypatch.setattr(meter.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "Event", Event)


@pytest.fixture(params=["cpu", "cuda"])
def stopwatch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Stopwatch, Clock]:
    return Stopwatch(torch.device(request.param)), Clock(monkeypatch)


def test_forward_passes_add_up(stopwatch: tuple[Stopwatch, Clock]) -> None:
    watch, clock = stopwatch
    for _ in range(3):
        with watch:
            clock.now += 0.25
        clock.now += 5.0
    assert watch.take() == pytest.approx(0.75)
    assert watch.take() == 0.0


def test_a_forward_pass_that_raises_and_is_tried_again_counts_once(stopwatch: tuple[Stopwatch, Clock]) -> None:
    """As with the hooks of a session: torch calls the one after the pass only if there is a result."""
    watch, clock = stopwatch
    watch.__enter__()
    clock.now += 9.0  # out of memory
    with watch:
        clock.now += 0.25
    assert watch.take() == pytest.approx(0.25)
    watch.__enter__()
    assert watch.take() == 0.0
    watch.__exit__(None, None, None)


def test_a_pause_does_not_count(stopwatch: tuple[Stopwatch, Clock]) -> None:
    watch, clock = stopwatch
    with watch.pausing(), watch:
        clock.now += 60.0
    assert watch.take() == 0.0
