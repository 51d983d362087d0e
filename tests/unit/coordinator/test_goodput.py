"""Where a job's time goes."""

from tandem_coordinator.goodput import ENDED, SILENT, STEPPING, Goodput


def test_each_moment_belongs_to_what_the_job_was_about() -> None:
    goodput = Goodput(0.0)
    for now, activity in [(3.0, "rendezvous"), (4.0, "restore"), (6.5, STEPPING)]:
        goodput.update(now, activity, {})
    assert goodput.seconds == {
        **dict.fromkeys(("data", "compute", "checkpoint"), 0.0),
        **{"idle": 3.0, "rendezvous": 1.0, "restore": 2.5},
    }


def test_what_steps_took_is_what_their_rank_wrote_down() -> None:
    goodput = Goodput(0.0)
    goodput.update(0.0, STEPPING, {})
    goodput.update(10.0, STEPPING, {"data": 1.0, "compute": 8.0, "checkpoint": 0.5})
    assert goodput.seconds["idle"] == 0.0, "the last half second is not written down yet"
    goodput.update(10.5, "rendezvous", {"data": 1.1, "compute": 8.9, "checkpoint": 0.5})
    spent = goodput.seconds
    assert (spent["data"], spent["compute"], spent["checkpoint"], spent["idle"]) == (1.1, 8.9, 0.5, 0.0)
    assert sum(spent.values()) == 10.5


def test_a_group_that_hung_was_idle() -> None:
    goodput = Goodput(0.0)
    goodput.update(0.0, STEPPING, {})
    goodput.update(310.0, "rendezvous", {"compute": 10.0})
    assert goodput.seconds["idle"] == 300.0


def test_what_is_written_down_late_is_counted_once() -> None:
    goodput = Goodput(0.0)
    goodput.update(0.0, STEPPING, {})
    goodput.update(10.0, "rendezvous", {"compute": 9.5})
    goodput.update(11.0, STEPPING, {"compute": 10.0})
    goodput.update(21.0, "rendezvous", {"compute": 19.25})
    assert goodput.seconds["compute"] == 19.25
    assert goodput.seconds["idle"] == 0.75, "half a second too early, so half a second less now"
    assert sum(goodput.seconds.values()) == 21.0


def test_a_script_that_says_nothing_and_a_job_that_is_over_cost_no_time_that_is_told() -> None:
    goodput = Goodput(0.0)
    goodput.update(0.0, SILENT, {})
    goodput.update(100.0, ENDED, {})
    goodput.update(200.0, ENDED, {})
    assert sum(goodput.seconds.values()) == 0.0
