"""What became of the goals of `make bench-scale`."""

import pytest

from benchmarks.goals import Outcome
from benchmarks.scale import judge

MET, MISSED = Outcome.MET, Outcome.MISSED


@pytest.mark.parametrize(
    ("agents", "first", "cores", "outcomes"),
    [
        (1000, 0.2, 0.2, [MET, MET]),
        (1000, 2.1, 0.2, [MISSED, MET]),
        (500, 0.2, 0.6, [MET, MISSED]),
        (10_000, 6.7, 0.66, []),
    ],
)
def test_a_thousand_agents_are_formed_in_two_seconds_and_take_half_a_core(
    agents: int, first: float, cores: float, outcomes: list[Outcome]
) -> None:
    verdicts = judge({"agents": agents, "first": first, "cores": cores})
    assert [verdict.outcome for verdict in verdicts] == outcomes
