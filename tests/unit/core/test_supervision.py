"""Which child is started, stopped or given up on when."""

from dataclasses import replace

import pytest

from tandem.processes.exitcode import ExitCode
from tandem.processes.supervision import (
    ENDING_SECONDS,
    HEALTHY_SECONDS,
    LEAVING_SECONDS,
    MAX_DELAY_SECONDS,
    MAX_FAILURES,
    RESULT_SECONDS,
    SAVING_SECONDS,
    Action,
    Child,
    FailRun,
    Finish,
    KillChild,
    RunFacts,
    StartChild,
    TerminateChild,
    decide,
    describe_exit,
    is_given_up,
    restart_delay,
)

COORDINATOR = Child(name="coordinator", role="coordinator")
WORKERS = (Child(name="worker-0", role="agent"), Child(name="worker-1", role="agent"))
EVALUATOR = Child(name="evaluator-0-0", role="evaluator")
TRAINING = RunFacts(reachable=True)
DONE = RunFacts(reachable=True, done=True, done_since=100.0)


def running(child: Child, since: float = 0.0) -> Child:
    return child.started(since)


def over(child: Child, code: int, at: float = 100.0, lived: float = 60.0) -> Child:
    return child.started(at - lived).ended(code, at)


ALL_RUNNING = tuple(running(child) for child in (COORDINATOR, *WORKERS, EVALUATOR))


def with_one(changed: Child, children: tuple[Child, ...] = ALL_RUNNING) -> list[Child]:
    return [changed if child.name == changed.name else child for child in children]


def names(actions: list[Action], kind: type[StartChild] | type[TerminateChild] | type[KillChild]) -> list[str]:
    return [action.name for action in actions if isinstance(action, kind)]


class TestStarting:
    def test_agents_wait_for_the_coordinators_address_and_nobody_else_does(self) -> None:
        actions = decide([COORDINATOR, *WORKERS, EVALUATOR], RunFacts(), now=0.0)
        assert actions == [StartChild("coordinator"), StartChild("evaluator-0-0")]

    def test_agents_start_once_it_is_known(self) -> None:
        children = [running(COORDINATOR), *WORKERS, running(EVALUATOR)]
        assert decide(children, TRAINING, now=1.0) == [StartChild("worker-0"), StartChild("worker-1")]

    def test_nothing_is_done_while_all_run(self) -> None:
        assert decide(ALL_RUNNING, TRAINING, now=1.0) == []


class TestAnUnexpectedEnd:
    @pytest.mark.parametrize("child", [COORDINATOR, WORKERS[1], EVALUATOR], ids=lambda child: child.name)
    @pytest.mark.parametrize("code", [1, 75, -9])
    def test_after_a_healthy_life_is_made_good_at_once(self, child: Child, code: int) -> None:
        assert decide(with_one(over(child, code)), TRAINING, now=100.0) == [StartChild(child.name)]

    def test_soon_after_the_start_waits_longer_each_time(self) -> None:
        child = WORKERS[0]
        pauses = []
        for _ in range(MAX_FAILURES - 1):
            child = child.started(100.0).ended(1, 101.0)
            pauses.append(restart_delay(child.failures))
            assert decide(with_one(child), TRAINING, now=101.0 + pauses[-1]) == [StartChild(child.name)]
            if pauses[-1]:
                assert decide(with_one(child), TRAINING, now=101.0 + pauses[-1] - 0.01) == []
        assert pauses == sorted(pauses)
        assert pauses[0] == 0
        assert pauses[-1] > pauses[1] > 0

    def test_a_healthy_life_restores_the_record(self) -> None:
        child = replace(WORKERS[0], failures=MAX_FAILURES - 1)
        assert child.started(0.0).ended(1, HEALTHY_SECONDS).failures == 1

    def test_pauses_have_a_bound(self) -> None:
        assert restart_delay(1000) == MAX_DELAY_SECONDS

    @pytest.mark.parametrize("child", [COORDINATOR, WORKERS[1]], ids=lambda child: child.name)
    def test_too_often_fails_the_run_and_says_whose_it_was(self, child: Child) -> None:
        broken = replace(over(child, 1), failures=MAX_FAILURES)
        (action,) = decide(with_one(broken), TRAINING, now=1000.0)
        assert isinstance(action, FailRun)
        assert action.child == child.name
        assert action.code == ExitCode.FAILED
        assert "with exit code 1" in action.message

    def test_of_an_evaluator_too_often_leaves_training_alone(self) -> None:
        broken = replace(over(EVALUATOR, 1), failures=MAX_FAILURES)
        assert decide(with_one(broken), TRAINING, now=1000.0) == []

    @pytest.mark.parametrize("child", [COORDINATOR, WORKERS[1]], ids=lambda child: child.name)
    def test_for_a_configuration_error_is_never_retried(self, child: Child) -> None:
        (action,) = decide(with_one(over(child, ExitCode.CONFIGURATION)), TRAINING, now=1000.0)
        assert isinstance(action, FailRun)
        assert action.code == ExitCode.CONFIGURATION

    def test_of_an_evaluator_for_a_configuration_error_is_not_retried_either(self) -> None:
        assert decide(with_one(over(EVALUATOR, ExitCode.CONFIGURATION)), TRAINING, now=1000.0) == []


class TestAnAgentThatEndsWell:
    def test_before_the_marker_is_waited_for(self) -> None:
        ended = over(WORKERS[0], 0, at=100.0)
        assert decide(with_one(ended), TRAINING, now=100.0 + RESULT_SECONDS) == []

    def test_without_any_marker_is_an_error_not_a_loop(self) -> None:
        (action,) = decide(with_one(over(WORKERS[0], 0, at=100.0)), TRAINING, now=100.1 + RESULT_SECONDS)
        assert isinstance(action, FailRun)
        assert action.child == "worker-0"

    def test_an_agent_of_a_script_that_ended_well_is_started_again_once_its_group_cannot_complete(self) -> None:
        children = with_one(over(running(WORKERS[0]), 0))
        later = 100.0 + RESULT_SECONDS + 1.0
        own = replace(TRAINING, own_command=True)
        assert decide(children, own, later) == []
        again = replace(own, begins_again=True)
        assert decide(children, again, 100.0 + RESULT_SECONDS) == [], "the coordinator may not have said yet"
        assert decide(children, again, later) == [StartChild("worker-0")]

    def test_of_an_own_script_is_all_there_is_to_know(self) -> None:
        own = replace(TRAINING, own_command=True)
        one = [running(COORDINATOR), over(WORKERS[0], 0), running(WORKERS[1])]
        assert decide(one, own, now=1000.0) == []
        both = [running(COORDINATOR), over(WORKERS[0], 0), over(WORKERS[1], 0)]
        assert decide(both, own, now=1000.0) == [TerminateChild("coordinator")]
        assert decide([over(child, 0) for child in both], own, now=1000.0) == [Finish()]


class TestWhenTrainingIsComplete:
    def test_agents_are_left_to_go_by_themselves(self) -> None:
        assert decide(ALL_RUNNING, DONE, now=100.0 + ENDING_SECONDS) == []

    def test_agents_that_stay_are_asked_then_killed(self) -> None:
        late = 100.1 + ENDING_SECONDS
        assert names(decide(ALL_RUNNING, DONE, now=late), TerminateChild) == ["worker-0", "worker-1"]
        asked = with_one(ALL_RUNNING[1].asked(late))
        assert names(decide(asked, DONE, now=late + SAVING_SECONDS + 0.1), KillChild) == ["worker-0"]

    def test_an_agent_that_ends_badly_is_not_started_again(self) -> None:
        assert decide(with_one(over(WORKERS[0], 1)), DONE, now=101.0) == []

    @pytest.mark.parametrize("child", [COORDINATOR, EVALUATOR], ids=lambda child: child.name)
    def test_whoever_dies_while_evaluators_drain_is_started_again(self, child: Child) -> None:
        assert decide(with_one(over(child, -9)), DONE, now=101.0) == [StartChild(child.name)]

    def test_the_coordinator_stays_until_evaluators_are_through(self) -> None:
        gone = [running(COORDINATOR), *(over(worker, 0) for worker in WORKERS)]
        assert decide([*gone, running(EVALUATOR)], DONE, now=1000.0) == []
        assert decide([*gone, over(EVALUATOR, 0)], DONE, now=1000.0) == [TerminateChild("coordinator")]

    def test_an_evaluator_that_was_given_up_is_not_waited_for(self) -> None:
        gone = [running(COORDINATOR), *(over(worker, 0) for worker in WORKERS)]
        broken = replace(over(EVALUATOR, 1), failures=MAX_FAILURES)
        assert is_given_up(broken)
        assert decide([*gone, broken], DONE, now=1000.0) == [TerminateChild("coordinator")]

    def test_the_end_is_when_nothing_runs(self) -> None:
        assert decide([over(child, 0) for child in ALL_RUNNING], DONE, now=1000.0) == [Finish()]

    def test_evaluators_alone_start_when_nothing_else_is_left(self) -> None:
        assert decide([COORDINATOR, EVALUATOR], DONE, now=0.0) == [
            StartChild("evaluator-0-0"),
            StartChild("coordinator"),
        ]


LEAVING = [replace(TRAINING, requests=1), replace(TRAINING, failed=True)]


@pytest.mark.parametrize("facts", LEAVING, ids=["Ctrl-C", "failed"])
class TestLeaving:
    def test_asks_agents_who_save_and_evaluators_who_give_up_what_they_are_at(self, facts: RunFacts) -> None:
        asked = decide(ALL_RUNNING, facts, now=10.0)
        assert asked == [TerminateChild("worker-0"), TerminateChild("worker-1"), TerminateChild("evaluator-0-0")]

    def test_asks_nobody_twice(self, facts: RunFacts) -> None:
        asked = [child if child.role == "coordinator" else child.asked(10.0) for child in ALL_RUNNING]
        assert decide(asked, facts, now=10.0 + LEAVING_SECONDS) == []

    def test_gives_evaluators_little_time_and_agents_that_of_a_save(self, facts: RunFacts) -> None:
        asked = [child if child.role == "coordinator" else child.asked(10.0) for child in ALL_RUNNING]
        assert decide(asked, facts, now=10.1 + LEAVING_SECONDS) == [KillChild("evaluator-0-0")]
        assert names(decide(asked, facts, now=10.1 + SAVING_SECONDS), KillChild)[:2] == ["worker-0", "worker-1"]

    def test_gives_agents_longer_whose_saves_take_longer(self, facts: RunFacts) -> None:
        slow = [replace(child, saving_seconds=300.0) for child in ALL_RUNNING]
        asked = [child if child.role == "coordinator" else child.asked(10.0) for child in slow]
        assert names(decide(asked, facts, now=10.1 + SAVING_SECONDS), KillChild) == ["evaluator-0-0"]
        assert names(decide(asked, facts, now=10.1 + 300), KillChild)[:2] == ["worker-0", "worker-1"]

    def test_the_coordinator_goes_last(self, facts: RunFacts) -> None:
        gone = [over(worker, 1) for worker in WORKERS]
        rest = [running(COORDINATOR), *gone, running(EVALUATOR)]
        assert decide(rest, facts, now=100.0) == [TerminateChild("evaluator-0-0")]
        rest = [running(COORDINATOR), *gone, over(EVALUATOR, 75)]
        assert decide(rest, facts, now=100.0) == [TerminateChild("coordinator")]
        rest = [running(COORDINATOR).asked(100.0), *gone, over(EVALUATOR, 75)]
        assert decide(rest, facts, now=100.1 + LEAVING_SECONDS) == [KillChild("coordinator")]

    def test_starts_nothing_again(self, facts: RunFacts) -> None:
        assert decide([over(child, -9) for child in ALL_RUNNING], facts, now=1000.0) == [Finish()]


class TestASecondCtrlC:
    def test_kills_everything_at_once(self) -> None:
        facts = replace(TRAINING, requests=2)
        assert decide(ALL_RUNNING, facts, now=10.0) == [KillChild(child.name) for child in ALL_RUNNING]

    def test_ends_when_all_are_dead(self) -> None:
        facts = replace(TRAINING, requests=2)
        assert decide([over(child, -9) for child in ALL_RUNNING], facts, now=10.0) == [Finish()]


def test_endings_are_told_in_words() -> None:
    assert describe_exit(-9) == "killed by signal 9"
    assert describe_exit(78) == "with exit code 78"
