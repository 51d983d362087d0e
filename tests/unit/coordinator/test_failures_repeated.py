"""Failures that repeat: which was the first, whether it is the same again, and when the next group starts."""

from dataclasses import replace
from typing import Any

import pytest

from tandem.processes.exitcode import ExitCode
from tandem.wire.protocol import FINISHING, SCRIPT, STARTING, Failure, RankReport
from tandem_coordinator.group_state import Close, FailJob, Hung, Open
from tandem_coordinator.progress import Reports
from tests.support.worlds.membership_job import RULES, Job, formed

KEY = {"error": "KeyError: 'image'", "where": "train.py:5, in <module>", "traceback": "Traceback …"}
PEER = {"error": "RuntimeError: [gloo] closed by peer", "consequence": True}


def group(nodes: tuple[str, str] = ("", ""), **rules: Any) -> Job:
    job = Job(target=2, rules=replace(RULES, **{"max_restarts": 10, "completes_on_exit": True, "minimum": 2, **rules}))
    job.nodes = {f"worker-{number}": node for number, node in enumerate(nodes) if node}
    job.forms("worker-0", "worker-1")
    return job


def _fails(job: Job, replica: str, ago: float = 0.0, rank: int = 0, code: int = 1, **what: Any) -> None:
    failure = Failure(rank=rank, code=code, seconds_ago=ago, **what)
    job.runs(replica, job.state.number, reason="WorkerFailed", failure=failure)
    job.joins(replica, generation=job.state.number, reason="WorkerFailed", failure=failure)


def _forms_again(job: Job, number: int) -> float:
    """How long that takes."""
    began = job.now
    while not job.state.open and job.now < began + 120.0:
        job.passes(0.1)
    assert job.state.number == number
    return job.now - began


def _end(job: Job) -> FailJob:
    (fail,) = (action for action in job.actions if isinstance(action, FailJob))
    return fail


@pytest.fixture
def job() -> Job:
    return group()


def test_the_same_error_before_any_progress_ends_the_job_the_second_time(job: Job) -> None:
    _fails(job, "worker-1", rank=1, **KEY)
    assert _forms_again(job, 2) < 1.0
    _fails(job, "worker-1", rank=1, **KEY)
    job.passes(1.0)
    fail = _end(job)
    assert fail.cause.reason == "RepeatedFailure"
    assert fail.cause.detail.startswith("rank 1 (worker-1) failed: KeyError: 'image' (train.py:5, in <module>); twice")
    assert (fail.replica, fail.report.failure.traceback) == ("worker-1", "Traceback …")


def test_a_replica_that_fails_alone_is_left_out_and_the_same_error_of_another_one_ends_the_job() -> None:
    job = group(minimum=1, nodes=("node-0", "node-1"))
    for number in (2, 3):
        _fails(job, "worker-1", rank=1, **KEY)
        _forms_again(job, number)
    _fails(job, "worker-1", rank=1, **KEY)
    assert [one.replica for one in job.state.exclusions] == ["worker-1"]
    _forms_again(job, 4)
    assert not job.failed()
    _fails(job, "worker-0", **KEY)
    job.passes(1.0)
    assert _end(job).cause.reason == "RepeatedFailure"
    assert _end(job).replica == "worker-0"


def test_on_a_node_that_is_not_its_own_or_not_known_it_is_the_code() -> None:
    for nodes in (("", ""), ("node-0", "node-0")):
        job = group(minimum=1, nodes=nodes)
        for _ in range(2):
            _fails(job, "worker-1", rank=1, **KEY)
            job.passes(0.5)
        assert _end(job).cause.reason == "RepeatedFailure"


def test_the_same_error_of_all_replicas_is_not_one_replicas() -> None:
    job = group(minimum=1, nodes=("node-0", "node-1"))
    for _ in range(2):
        _fails(job, "worker-1", ago=0.1, **KEY)
        _fails(job, "worker-0", **KEY)
        job.passes(0.5)
    assert _end(job).cause.reason == "RepeatedFailure"
    assert not job.state.exclusions


def test_it_is_the_one_that_failed_first_and_not_the_one_that_is_heard_first(job: Job) -> None:
    for number in (1, 2):
        assert job.state.number == number
        _fails(job, "worker-0", rank=0, error="ValueError: late", where="a.py:1")
        _fails(job, "worker-1", ago=0.5, rank=1, **KEY)
        job.passes(0.5)
    assert _end(job).replica == "worker-1"
    assert "KeyError" in job.state.end.detail


def test_a_peer_whose_connection_broke_is_innocent_whoever_is_heard_first(job: Job) -> None:
    _fails(job, "worker-0", ago=1.0, **PEER)
    _fails(job, "worker-1", rank=1, **KEY)
    job.passes(0.5)
    assert job.state.failures == 1
    assert job.state.cause.reason == "WorkerFailed"
    assert job.state.cause.culprit == "worker-1"
    assert "KeyError" in job.state.cause.detail


def test_a_wrong_argument_counts(job: Job) -> None:
    for _ in range(2):
        _fails(job, "worker-0", code=2)
        job.passes(0.5)
    assert _end(job).cause.detail.startswith("rank 0 (worker-0) ended with exit code 2; twice")


@pytest.mark.parametrize(
    "second",
    [
        {"error": "KeyError: 'label'", "where": KEY["where"]},
        {"error": KEY["error"], "where": "train.py:9, in <module>"},
        {**KEY, "passing": True},
        {"code": -9},
        {"code": 137},
    ],
)
def test_what_is_not_the_same_is_tried_again(job: Job, second: dict[str, Any]) -> None:
    _fails(job, "worker-1", **KEY)
    _forms_again(job, 2)
    _fails(job, "worker-1", **second)
    _forms_again(job, 3)
    assert not job.failed()


@pytest.mark.parametrize(("signal", "ends"), [(11, True), (6, True), (7, True), (9, False), (15, False), (1, False)])
def test_a_signal_that_a_script_brings_on_itself_is_its_own_fault(job: Job, signal: int, ends: bool) -> None:
    for _ in range(2):
        _fails(job, "worker-1", rank=1, code=-signal)
        job.passes(0.5)
    assert (job.state.failing is not None or job.state.end is not None) == ends
    if ends:
        assert f"rank 1 (worker-1) was killed by signal {signal} (SIG" in _end(job).cause.detail


def test_a_failure_in_mid_training_is_tried_again_at_once_and_the_same_one_later_each_time(job: Job) -> None:
    took = []
    for number in range(2, 8):
        job.training = True
        job.passes(0.2)
        job.training = False
        what = KEY if number > 4 else {**KEY, "error": f"KeyError: {number}"}
        _fails(job, f"worker-{number % 2}", **what)
        took.append(round(_forms_again(job, number)))
    assert took == [0, 0, 0, 0, 0, 1]
    assert not job.failed()


def test_steps_of_which_the_coordinator_hears_with_the_failure_count(job: Job) -> None:
    for number in (2, 3, 4):
        failure = Failure(rank=0, code=-9)
        ranks = [RankReport(rank=0, step=number)]
        replica = f"worker-{number % 2}"
        job.runs(replica, job.state.number, reason="WorkerFailed", failure=failure, ranks=ranks)
        job.joins(replica, generation=job.state.number, reason="WorkerFailed", failure=failure)
        assert _forms_again(job, number) < 1.0


def test_a_script_that_says_nothing_is_killed_again_and_again_and_is_back_at_once() -> None:
    job = group(max_restarts=20)
    for number in range(2, 8):
        job.passes(1.5)
        _fails(job, f"worker-{number % 2}", code=-9)
        assert _forms_again(job, number) < 1.0


def test_a_script_that_says_nothing_has_progressed_when_it_has_saved_or_run_for_long(job: Job) -> None:
    for number, checkpoint in ((2, 1), (3, 2)):
        job.passes(1.0)
        job.checkpoint = checkpoint
        job.passes(0.2)
        _fails(job, "worker-1", **KEY)
        _forms_again(job, number)
    job.passes(301.0)
    _fails(job, "worker-0", **KEY)
    _forms_again(job, 4)
    assert not job.failed()


def test_a_script_that_gets_further_by_checkpoints_of_its_own_is_tried_again_until_it_does_not(job: Job) -> None:
    for number in (2, 3, 4, 5):
        job.script_checkpoint = (number, "out/ckpt.pt")
        _fails(job, "worker-1", **KEY)
        assert _forms_again(job, number) < 1.0
    _fails(job, "worker-1", **KEY)
    _forms_again(job, 6)
    assert not job.failed()
    _fails(job, "worker-1", **KEY)
    job.passes(0.5)
    assert _end(job).cause.detail.endswith("; twice, before Tandem heard of a step or saw a checkpoint")


def test_before_a_script_is_given_up_its_folder_is_looked_at_once_more(job: Job) -> None:
    job.script_checkpoint_polled = job.now
    _fails(job, "worker-1", **KEY)
    _forms_again(job, 2)
    _fails(job, "worker-1", **KEY)
    job.passes(2.0)
    assert not job.failed()
    job.script_checkpoint, job.script_checkpoint_polled = (7, "out/ckpt.pt"), job.now
    assert _forms_again(job, 3) < 1.0
    _fails(job, "worker-1", **KEY)
    _forms_again(job, 4)
    _fails(job, "worker-1", **KEY)
    job.passes(4.0)
    assert not job.failed()
    job.passes(2.0)
    assert _end(job).cause.reason == "RepeatedFailure", "a disk that does not answer holds nothing up for long"


def test_the_next_start_is_later_each_time_and_that_is_said() -> None:
    job = group(max_restarts=20)
    took = []
    for number in range(2, 11):
        _fails(job, f"worker-{number % 2}", code=-9)
        took.append(round(_forms_again(job, number)))
    assert took == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert "no progress was made, so the next start is in 16 s" in job.said()
    job.training = True
    job.passes(0.2)
    job.training = False
    _fails(job, "worker-0", code=-9)
    assert _forms_again(job, 11) < 1.0


def test_training_that_diverged_goes_back_without_a_failure(job: Job) -> None:
    why = "training diverged: the loss became NaN at step 2; going back to before step 1 and leaving out 9 batches"
    failure = Failure(rank=0, code=ExitCode.REWOUND, error=why)
    for replica in ("worker-0", "worker-1"):
        job.runs(replica, 1, reason="MembershipChanged", failure=failure)
        job.joins(replica, generation=1, reason="MembershipChanged", failure=failure)
    job.passes(0.5)
    assert job.state.number == 2
    assert job.state.failures == 0
    assert job.state.latest.reason == "Rewound"
    assert job.state.cause.detail == why
    opened = [action.detail for action in job.actions if isinstance(action, Open)]
    assert opened[-1] == "training diverged: the loss became NaN at step 2"


@pytest.mark.parametrize("peer_first", [True, False])
def test_a_micro_batch_that_is_halved_is_no_failure(peer_first: bool) -> None:
    job = group(max_restarts=0)
    why = "8 samples in one forward pass did not fit into memory; the next generation takes 4 at the most"
    halved = Failure(rank=1, code=ExitCode.OUT_OF_MEMORY, error=why)
    peer = Failure(rank=0, code=ExitCode.PEER_LOST, consequence=True)
    said = [("worker-0", peer), ("worker-1", halved)]
    for replica, failure in said if peer_first else reversed(said):
        job.runs(replica, 1, reason="MembershipChanged", failure=failure)
        job.joins(replica, generation=1, reason="MembershipChanged", failure=failure)
    job.passes(0.5)
    assert (job.state.number, job.state.failures) == (2, 0)
    assert job.state.latest.reason == "OutOfMemory"
    assert job.state.cause.detail == f"rank 1 (worker-1): {why}"


@pytest.mark.parametrize("code", [ExitCode.OUT_OF_MEMORY, ExitCode.REWOUND, ExitCode.PREEMPTED])
def test_a_script_that_ends_with_a_number_of_ours_has_failed_also_after_an_error(job: Job, code: ExitCode) -> None:
    _fails(job, "worker-1", rank=1, code=code, announced=False, error="KeyError: 'image'")
    assert _forms_again(job, 2) < 1.0
    assert job.state.failures == 1
    assert job.state.latest.reason == "WorkerFailed"


def test_an_agent_that_does_not_say_who_chose_the_number_is_judged_by_the_words(job: Job) -> None:
    _fails(job, "worker-1", rank=1, code=ExitCode.OUT_OF_MEMORY)
    assert _forms_again(job, 2) < 1.0
    assert job.state.failures == 1


NCCL = {
    "error": "DistBackendError: NCCL error: invalid usage: Duplicate GPU detected: ranks 0 and 1",
    "where": "train.py:9, in <module>",
    "consequence": True,
    "passing": True,
    "code": ExitCode.PEER_LOST,
    "announced": True,
}


def test_the_same_broken_collective_on_all_ranks_is_the_cause_and_ends_the_job_the_second_time(job: Job) -> None:
    _fails(job, "worker-1", rank=1, ago=0.1, **NCCL)
    _fails(job, "worker-0", ago=0.3, **NCCL)
    _forms_again(job, 2)
    assert job.state.latest.reason == "WorkerFailed"
    job.runs("worker-0", 2)
    _fails(job, "worker-1", rank=1, ago=0.1, **NCCL)
    _fails(job, "worker-0", ago=0.3, **NCCL)
    job.passes(1.0)
    fail = _end(job)
    assert fail.cause.reason == "RepeatedFailure"
    assert fail.cause.detail.startswith("rank 0 (worker-0) failed: DistBackendError: NCCL error: invalid usage: Dupli")


@pytest.mark.parametrize(
    "other", [{"error": "RuntimeError: [gloo] closed by peer 2"}, {"where": "train.py:11, in step"}, {"error": ""}]
)
def test_broken_collectives_that_differ_tell_of_a_peer_or_a_network_and_are_tried_again(
    job: Job, other: dict[str, str]
) -> None:
    for number in (2, 3, 4):
        _fails(job, "worker-1", rank=1, **NCCL)
        _fails(job, "worker-0", **{**NCCL, **other})
        _forms_again(job, number)
        assert job.state.latest.reason == "PeerLost"
        job.runs("worker-0", number)
    assert not job.failed()


MISSING = {"error": "FileNotFoundError: [Errno 2] No such file or directory: 'pyhton'"}


def _cannot_start(job: Job, replica: str) -> None:
    """Its agent was in the group, found no program to start, and says so as it ends."""
    job.say(replica, "leaving", generation=job.state.number, failure=Failure(rank=0, code=1, **MISSING))  # type: ignore[arg-type]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_program_that_cannot_be_started_ends_the_job_the_second_time(replicas: int) -> None:
    job = Job(target=replicas, rules=replace(RULES, max_restarts=10, completes_on_exit=True))
    for generation in (1, 2):
        # Their pods are new ones, with names of their own.
        names = [f"worker-{index}-{generation}" for index in range(replicas)]
        job.forms(*names)
        for name in names:
            _cannot_start(job, name)
    job.joins("worker-0-3")
    job.passes(10.0)
    fail = _end(job)
    assert fail.cause.reason == "RepeatedFailure"
    assert fail.cause.detail.startswith(f"rank 0 (worker-0-2) failed: {MISSING['error']}; twice")


def test_an_agent_that_ends_in_error_takes_a_failure_off_the_budget_and_one_that_leaves_does_not() -> None:
    job = group(minimum=1)
    _cannot_start(job, "worker-1")
    assert (job.closings(), job.state.failures) == (["WorkerFailed"], 1)
    job = group(minimum=1)
    job.say("worker-1", "leaving", generation=1)
    assert (job.closings(), job.state.failures) == (["MemberLeft"], 0)


# A mistake is found after two failures, wherever it stands

FIRST_BATCH = {
    # A generator that is left by an error says that the code after the loop follows.
    "session, transformers, accelerate, lightning": RankReport(rank=0, step=0, phase=FINISHING, finishing=True),
    "task": RankReport(rank=0, step=0, phase=STARTING),
    "after a pause": RankReport(rank=0, step=0, phase="download", pauses=True),
    "script": RankReport(rank=0, step=0, phase=SCRIPT, script=True),
}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("report", FIRST_BATCH.values(), ids=FIRST_BATCH)
def test_a_mistake_in_the_first_batch_ends_the_job_the_second_time(report: RankReport, replicas: int) -> None:
    names = [f"worker-{number}" for number in range(replicas)]
    job = Job(target=replicas, rules=replace(RULES, max_restarts=10, completes_on_exit=True, minimum=replicas))
    job.forms(*names)
    for _ in range(2):
        assert not job.failed()
        reports = Reports()
        reports.begin(job.state.number)
        reports.record(names[-1], job.state.number, [report], job.now)
        job.training = reports.stepped
        failure = Failure(rank=0, code=1, step=0, **KEY)
        job.runs(names[-1], job.state.number, reason="WorkerFailed", failure=failure, ranks=[report])
        job.joins(names[-1], generation=job.state.number, reason="WorkerFailed", failure=failure)
        job.passes(0.5)
    assert _end(job).cause.reason == "RepeatedFailure"
    words = "KeyError: 'image' (train.py:5, in <module>); twice, before Tandem heard of a step or saw a checkpoint"
    assert _end(job).cause.detail.endswith(words)


@pytest.mark.parametrize("who", [("worker-0", "worker-0"), ("worker-0", "worker-1")], ids=["one", "alternately"])
@pytest.mark.parametrize("saved", [False, True])
def test_a_mistake_in_the_loop_ends_the_job_when_it_comes_at_the_same_step(
    job: Job, who: tuple[str, str], saved: bool
) -> None:
    for replica in who:
        assert not job.failed()
        _trains(job, saved)
        _fails(job, replica, step=50, **KEY)
        job.passes(0.5)
    assert _end(job).cause.reason == "RepeatedFailure"
    assert _end(job).cause.detail.endswith("; twice, without a further step in between")


@pytest.mark.parametrize("second", [{"step": 51}, {"step": 50, "error": "KeyError: 'other'"}, {"step": 50, "code": -9}])
def test_a_failure_at_a_further_step_or_another_one_is_tried_again(job: Job, second: dict[str, Any]) -> None:
    _trains(job)
    _fails(job, "worker-0", step=50, **KEY)
    _forms_again(job, 2)
    _trains(job)
    _fails(job, "worker-0", **{**KEY, **second})
    _forms_again(job, 3)
    assert not job.failed()


def test_a_failure_in_the_first_batch_of_a_group_that_goes_on_is_no_further(job: Job) -> None:
    _trains(job, saved=True)
    _fails(job, "worker-0", step=50, **KEY)
    _forms_again(job, 2)
    _fails(job, "worker-1", step=0, **KEY)
    job.passes(0.5)
    assert _end(job).cause.reason == "RepeatedFailure"


def test_a_script_that_saves_in_its_own_way_may_count_its_steps_from_each_start(job: Job) -> None:
    for number in (2, 3, 4):
        _trains(job)
        job.script_checkpoint = (number, "out/ckpt.pt")
        _fails(job, "worker-0", step=50, **KEY)
        _forms_again(job, number)
    assert not job.failed()


def _trains(job: Job, saved: bool = False) -> None:
    job.training = True
    job.passes(0.2)
    if saved:
        job.checkpoint = (job.checkpoint or 0) + 1
        job.passes(0.2)
    job.training = False


def test_the_same_broken_collective_on_all_ranks_of_one_replica_is_the_cause() -> None:
    job = formed(1, rules=replace(RULES, max_restarts=10, completes_on_exit=True))
    for _ in range(2):
        assert not job.failed()
        _fails(job, "worker-0", **NCCL)
        job.passes(0.5)
    assert _end(job).cause.detail.startswith("rank 0 (worker-0) failed: DistBackendError: NCCL error")


def test_a_rank_that_was_killed_is_the_cause_also_where_that_is_known_late() -> None:
    job = formed(1, rules=replace(RULES, max_restarts=10, completes_on_exit=True))
    for number in (2, 3, 4):
        peer, killed = Failure(rank=0, **NCCL), Failure(rank=1, code=-9, seconds_ago=0.1)
        job.runs("worker-0", job.state.number, reason="WorkerFailed", failure=peer)
        job.joins("worker-0", generation=job.state.number, reason="WorkerFailed", failure=killed)
        _forms_again(job, number)
    assert not job.failed()
    assert "rank 1 (worker-0) was killed by signal 9 (SIGKILL)" in job.state.cause.detail


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (143, "was killed by signal 15 (SIGTERM)"),
        (137, "was killed by signal 9 (SIGKILL)"),
        (139, "was killed by signal 11 (SIGSEGV)"),
        (255, "ended with exit code 255"),
    ],
)
def test_an_exit_code_of_a_signal_is_that_signal(job: Job, code: int, words: str) -> None:
    for _ in range(2):
        _fails(job, "worker-1", rank=1, code=code)
        job.passes(0.5)
    assert words in job.state.cause.detail
    assert all(words in action.cause.detail for action in job.actions if isinstance(action, Close)), "one name"
    assert job.failed() == (code in (139, 255)), "a signal from outside may not come again"


def test_a_script_that_ends_with_zero_on_one_rank_while_another_one_works_is_told_so(job: Job) -> None:
    incarnation = job.beats["worker-1"].incarnation
    for number in (1, 2):
        assert not job.failed()
        job.say("worker-1", "leaving", generation=number, finished=True, incarnation=incarnation)
        _fails(job, "worker-0", **NCCL)
        incarnation = f"again-{number}"
        job.joins("worker-1", incarnation=incarnation)
        job.passes(1.0)
    assert _end(job).cause.reason == "RepeatedFailure"
    assert _end(job).cause.detail.startswith(
        "rank 1 (worker-1) failed: it ended with exit code 0 while other ranks still worked; twice"
    )


def test_it_is_the_script_also_where_the_agent_that_ended_is_back_later() -> None:
    """An agent whose ranks have ended with 0 leaves, and the others go on without it until another one is there."""
    job = group(minimum=1)
    for again in (False, True):
        incarnation = job.beats["worker-1"].incarnation
        job.say("worker-1", "leaving", generation=job.state.number, finished=True, incarnation=incarnation)
        _fails(job, "worker-0", **NCCL)
        job.passes(1.0)
        if not again:
            assert not job.failed()
            job.joins("worker-1", incarnation="again")
            job.passes(60.0)
            assert job.members() == ["worker-0", "worker-1"]
    assert _end(job).cause.detail.startswith(
        "rank 1 (worker-1) failed: it ended with exit code 0 while other ranks still worked; twice"
    )


def test_the_third_hang_at_the_same_step_ends_the_job_and_says_what_helps(job: Job) -> None:
    for number in (2, 3):
        job.tell(Hung(job.state.number, "no rank has made a step for 300 s", step=70))
        job.joins("worker-0", generation=number - 1)
        job.joins("worker-1", generation=number - 1)
        _forms_again(job, number)
    assert not job.failed()
    job.tell(Hung(job.state.number, "no rank has made a step for 300 s", step=70))
    assert _end(job).cause.reason == "Hung"
    assert "300 s; 3 times at this step." in _end(job).cause.detail
    assert "tandem.pausing" in _end(job).cause.detail
    assert "elasticity.hangSeconds" in _end(job).cause.detail


@pytest.mark.parametrize("saved", [None, 40])
def test_what_was_got_over_is_another_failure_when_it_comes_again(job: Job, saved: int | None) -> None:
    """A network that is bad at three starts in a month, with 90,000 steps in between, is no mistake."""
    for number in (2, 3, 4):
        job.tell(Hung(job.state.number, "no rank has made a step for 300 s", step=0))
        job.joins("worker-0", generation=number - 1)
        job.joins("worker-1", generation=number - 1)
        if job.failed():
            break
        _forms_again(job, number)
        job.saved_step = saved
        _trains(job, saved=True)
    assert job.failed() == (saved is None)


@pytest.mark.parametrize("saved", [50, 90_000])
def test_a_mistake_that_came_again_after_further_steps_were_saved_is_tried_again(job: Job, saved: int) -> None:
    _trains(job)
    _fails(job, "worker-0", step=50, **KEY)
    _forms_again(job, 2)
    job.saved_step = saved
    _trains(job, saved=True)
    job.say("worker-1", "leaving", generation=2)
    job.joins("worker-1", incarnation="again")
    job.joins("worker-0", generation=2)
    _forms_again(job, 3)
    _fails(job, "worker-0", step=0, **KEY)
    job.passes(0.5)
    assert job.failed() == (saved == 50)


def test_hangs_at_other_steps_use_up_the_budget(job: Job) -> None:
    for number, step in ((2, 70), (3, 70), (4, 90), (5, 90), (6, 70)):
        job.tell(Hung(job.state.number, "no rank has made a step for 300 s", step=step))
        job.joins("worker-0", generation=number - 1)
        job.joins("worker-1", generation=number - 1)
        _forms_again(job, number)
    assert not job.failed()
    assert job.state.failures == 5
