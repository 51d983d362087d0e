"""Times that the coordinator logs for traces: of a failure, and of the moments at which members were ready."""

import pytest

from tandem.wire.protocol import Failure, RankReport
from tandem_coordinator.failures import failure_time, first_failed_at
from tandem_coordinator.forming import times_ready
from tandem_coordinator.group_state import Close, Disconnected, Event, Open
from tandem_coordinator.hang import HangWatch
from tandem_coordinator.membership import step
from tests.support.worlds.membership_job import Job


class Timed(Job):
    """A job that notes the times as the coordinator does."""

    def tell(self, event: Event) -> None:
        before = self.state
        after, actions = step(before, event, self.now)
        for action in actions:
            if isinstance(action, Close):
                self.failed_at = failure_time(action.cause, before, after)
            elif isinstance(action, Open):
                self.formed_with = (*times_ready(before, action.membership), first_failed_at(before))
        super().tell(event)


def running() -> tuple[Timed, int]:
    job = Timed()
    number = job.forms("worker-0", "worker-1")
    assert job.formed_with[0] is None, "nobody had to stop"
    for replica in ("worker-0", "worker-1"):
        job.runs(replica, number)
    return job, number


def test_the_failure_of_a_rank_is_as_old_as_its_agent_says() -> None:
    job, number = running()
    job.now += 10.0
    failure = Failure(rank=1, code=-9, seconds_ago=0.75)
    job.runs("worker-1", number, reason="WorkerFailed", failure=failure)
    assert job.failed_at == job.now - 0.75


def test_a_failure_that_is_reported_after_the_end_is_known_when_the_next_generation_is_formed() -> None:
    job, number = running()
    job.now += 10.0
    job.runs("worker-1", number, reason="WorkerFailed")
    assert job.failed_at is None
    closed_at = job.now
    job.now += 1.0
    job.joins("worker-0", generation=number, reason="MembershipChanged")
    job.now += 1.0
    job.joins("worker-1", generation=number, reason="WorkerFailed", failure=Failure(rank=1, code=-9, seconds_ago=2.5))
    job.passes(1.0)
    assert job.state.number == number + 1
    assert job.formed_with == pytest.approx((closed_at + 2.0, closed_at + 2.0, closed_at - 0.5))


def test_a_lost_member_failed_with_its_last_sign_or_when_its_connection_broke() -> None:
    job, _ = running()
    silent_since = job.now
    job.falls_silent("worker-1")
    job.passes(5.0)
    assert job.failed_at == pytest.approx(silent_since)

    job, _ = running()
    job.passes(0.5)
    job.falls_silent("worker-1")
    incarnation = job.state.agents["worker-1"].member.incarnation
    broken_at = job.now
    job.tell(Disconnected("worker-1", incarnation))
    job.passes(5.0)
    assert job.failed_at == broken_at


def test_a_planned_change_has_no_failure() -> None:
    job, number = running()
    job.can_save = job.survive = True
    job.training = True
    job.tick()
    job.runs("worker-1", number, leaving=True)
    job.passes(3.0)
    assert job.state.cause.reason == "Preempted"
    assert job.failed_at is None


def test_a_hang_failed_with_the_last_progress_of_any_rank() -> None:
    watch = HangWatch(10.0, 10.0, 1.0)
    watch.begin(1)
    assert watch.progressed_at() is None
    for now in range(100, 120):
        watch.record("worker-0", 1, [RankReport(rank=0, step=min(now, 105))], float(now))
    assert 104.0 <= (watch.progressed_at() or 0.0) <= 105.0, "it came between two reports"
