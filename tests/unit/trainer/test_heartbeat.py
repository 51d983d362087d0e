"""The agent's conversation with its coordinator, where answers and wishes cross."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from tandem.processes.exitcode import ExitCode
from tandem.rundir.layout import FinishedMember, RunDir
from tandem.wire.coordinator_client import CoordinatorClient, CoordinatorRefused, RequestCancelled, Unreachable
from tandem.wire.protocol import Answer, Member, Membership, Sync
from tandem_trainer.agent import finished as finished_module
from tandem_trainer.agent import heartbeat
from tandem_trainer.agent.heartbeat import Heartbeat, RanksEnded
from tandem_trainer.agent.local_ranks import LocalRanks
from tandem_trainer.pulse import Pulse
from tests.support.waiting import SECONDS, until


class Coordinator:
    """Answers as it is told, and holds what a running agent says until it may be answered."""

    connected = has_answered = True

    def __init__(self) -> None:
        self.number = 0
        self.held, self.may_answer = threading.Event(), threading.Event()
        self.refuses = self.leaves_out = False

    def sync(self, message: Sync, until: object = None) -> Answer:
        if self.refuses:
            raise CoordinatorRefused(400, "no")
        if self.leaves_out:
            return Answer(order="end", why="it fails again and again", left_out=True)
        if message.state == "running":
            self.held.set()
            assert self.may_answer.wait(SECONDS)
            return Answer(order="rejoin", why="worker-1 failed") if message.generation == 1 else Answer(order="run")
        if message.state == "leaving":
            return Answer(order="end")
        self.number += 1
        return Answer(order="run", membership=Membership(generation=self.number, members=[message.member], reason="a"))

    def close(self) -> None:
        pass


agents: list[tuple[Heartbeat, Coordinator]] = []


@pytest.fixture(autouse=True)
def _end_threads() -> Iterator[None]:
    """End the thread of each agent: it would meet the clock that a later test plays."""
    yield
    for speaker, coordinator in agents:
        coordinator.refuses = False
        coordinator.may_answer.set()
        if speaker.is_alive():
            speaker.leave()
            speaker.join(SECONDS)
        assert not speaker.is_alive()
    agents.clear()


def agent(tmp_path: Path, coordinator: Coordinator) -> Heartbeat:
    speaker = Heartbeat(cast(CoordinatorClient, coordinator), RunDir(tmp_path), "worker-0", "127.0.0.1", 1, "node-0")
    agents.append((speaker, coordinator))
    return speaker


def test_what_is_said_of_the_last_generation_does_not_close_the_next(tmp_path: Path) -> None:
    coordinator = Coordinator()
    speaker = agent(tmp_path, coordinator)
    speaker.start()
    first = speaker.enter(4000, "Started")
    assert first is not None
    assert coordinator.held.wait(SECONDS)
    again: list[Membership | None] = []
    torchrun = threading.Thread(target=lambda: again.append(speaker.enter(4001, "WorkerFailed")))
    torchrun.start()
    while speaker._state.state != "joining":
        pass
    coordinator.may_answer.set()
    torchrun.join(SECONDS)
    assert [membership.generation for membership in again if membership] == [2]
    assert not speaker.closed
    speaker.leave()


def test_who_is_refused_tries_again_before_it_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "REFUSAL_RETRY_SECONDS", 0.5)
    coordinator = Coordinator()
    coordinator.refuses = True
    speaker = agent(tmp_path, coordinator)
    speaker.start()
    threading.Timer(0.2, lambda: setattr(coordinator, "refuses", False)).start()
    assert speaker.enter(4000, "Started") is not None, "another coordinator has taken its place"
    coordinator.may_answer.set()
    coordinator.refuses = True
    with pytest.raises(CoordinatorRefused):
        speaker.enter(4000, "MembershipChanged")


def test_who_is_left_out_ends_with_a_code_of_its_own(tmp_path: Path) -> None:
    coordinator = Coordinator()
    coordinator.leaves_out = True
    speaker = agent(tmp_path, coordinator)
    speaker.start()
    with pytest.raises(SystemExit) as ended:
        speaker.enter(4000, "Started")
    assert ended.value.code == ExitCode.LEFT_OUT


def test_it_says_on_which_node_it_is(tmp_path: Path) -> None:
    sync = agent(tmp_path, Coordinator())._sync("joining")
    assert sync.node == "node-0"
    assert sync.member == Member(
        replica="worker-0", incarnation=sync.incarnation, address="127.0.0.1", port=1, processes=1
    )


class Answering(Coordinator):
    """Answers a running agent at once, as it is told to."""

    def __init__(self, **answer: object) -> None:
        super().__init__()
        self.answer = Answer.model_validate({"order": "run", **answer})
        self.messages: list[Sync] = []
        self.is_away = False

    def sync(self, message: Sync, until: object = None) -> Answer:
        if message.state == "joining":
            return super().sync(message)
        self.messages.append(message)
        self.has_answered = not self.is_away
        if self.is_away:
            raise Unreachable("it restarts")
        return Answer(order="end") if message.state == "leaving" else self.answer


def finished(tmp_path: Path, coordinator: Coordinator) -> Heartbeat:
    """An agent that runs a generation; its ranks have ended with exit code 0."""
    speaker = agent(tmp_path, coordinator)
    speaker.start()
    assert speaker.enter(4000, "Started") is not None
    return speaker


def never() -> bool:
    return False


def test_who_has_finished_stays_until_the_job_is_complete(tmp_path: Path) -> None:
    coordinator = Answering(finished=True)
    speaker = finished(tmp_path, coordinator)
    torchrun = threading.Thread(target=speaker.finish, args=(never,), daemon=True)
    torchrun.start()
    until(lambda: any(message.finished for message in coordinator.messages), "the word that it has finished")
    assert torchrun.is_alive(), "others may use its store"
    RunDir(tmp_path).mark_done(None)
    coordinator.answer = Answer(order="end", why="complete")
    torchrun.join(SECONDS)
    assert not torchrun.is_alive()
    speaker.leave()
    assert (coordinator.messages[-1].state, coordinator.messages[-1].finished) == ("leaving", True)


def test_who_has_finished_goes_when_nobody_uses_its_store(tmp_path: Path) -> None:
    """As far as the agents have announced that in the store: an older coordinator does not say."""
    coordinator = Answering()
    speaker = finished(tmp_path, coordinator)
    looks = iter([False, False, True])
    speaker.finish(lambda: next(looks))
    speaker.leave()
    assert (coordinator.messages[-1].state, coordinator.messages[-1].finished) == ("leaving", True)


def test_who_has_finished_goes_when_no_coordinator_takes_note_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "ACKNOWLEDGE_SECONDS", 0.5)
    coordinator = Answering()
    coordinator.is_away = True
    speaker = finished(tmp_path, coordinator)
    speaker.finish(never)
    speaker.leave()
    until(lambda: not speaker.is_alive(), "the end of its tries")


@pytest.mark.parametrize("ended", [False, True])
def test_who_has_finished_leaves_its_word_in_the_run_directory_where_no_coordinator_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    monkeypatch.setattr(finished_module, "UNANSWERED_SECONDS", 0.2)
    coordinator, rundir = Answering(), RunDir(tmp_path)
    coordinator.is_away = True
    if ended:
        rundir.mark_done(None)
    speaker = finished(tmp_path, coordinator)
    speaker.finish(lambda: True)

    def leave() -> None:
        for _ in range(2):
            # torchrun's way out, and the exit function.
            speaker.leave()

    torchrun = threading.Thread(target=leave, daemon=True)
    torchrun.start()
    torchrun.join(SECONDS)
    waits = torchrun.is_alive()
    # An agent that waits, which it should not, ends with this test.
    coordinator.is_away = False
    assert not waits
    until(lambda: not speaker.is_alive(), "the end of its tries")
    assert rundir.finished_members() == (set() if ended else {(1, "worker-0", speaker.incarnation)})


@pytest.mark.parametrize("silent", [False, True])
def test_who_has_finished_waits_for_the_coordinator_where_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """A disk that fails, and one that does not answer."""
    monkeypatch.setattr(finished_module, "UNANSWERED_SECONDS", 0.1)
    hangs = threading.Event()

    def record(*_: object) -> None:
        if silent:
            hangs.wait(SECONDS)
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(RunDir, "record_finished", record)
    coordinator = Answering()
    coordinator.is_away = True
    speaker = finished(tmp_path, coordinator)
    speaker.finish(lambda: True)
    torchrun = threading.Thread(target=speaker.leave, daemon=True)
    torchrun.start()
    torchrun.join(1.0)
    assert torchrun.is_alive()
    coordinator.is_away = False
    torchrun.join(SECONDS)
    hangs.set()
    assert (coordinator.messages[-1].state, coordinator.messages[-1].finished) == ("leaving", True)


@pytest.mark.parametrize("error", [None, OSError(116, "Stale file handle")])
def test_who_has_finished_goes_as_soon_as_a_slow_or_failing_disk_has_its_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    monkeypatch.setattr(finished_module, "UNANSWERED_SECONDS", 0.1)
    monkeypatch.setattr(finished_module, "WRITE_RETRY_SECONDS", 0.5)
    write, attempts, may_write = RunDir.record_finished, [], threading.Event()

    def record(rundir: RunDir, member: FinishedMember) -> None:
        attempts.append(member)
        if error is None:
            may_write.wait(SECONDS)
        elif len(attempts) == 1:
            raise error
        write(rundir, member)

    monkeypatch.setattr(RunDir, "record_finished", record)
    coordinator = Answering()
    coordinator.is_away = True
    speaker = finished(tmp_path, coordinator)
    speaker.finish(lambda: True)
    # Longer than until the next attempt.
    threading.Timer(1.0, may_write.set).start()
    speaker.leave()
    assert len(attempts) == (1 if error is None else 2)
    assert RunDir(tmp_path).finished_members() == set(attempts)


@pytest.mark.parametrize("code", [ExitCode.PEER_LOST, ExitCode.FAILED])
def test_who_has_finished_does_not_end_well_where_the_run_directory_shows_another_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: ExitCode
) -> None:
    """The others have begun again, or the job has failed."""
    monkeypatch.setattr(finished_module, "UNANSWERED_SECONDS", 0.1)
    coordinator, rundir = Answering(), RunDir(tmp_path)
    coordinator.is_away = True
    speaker = finished(tmp_path, coordinator)
    speaker.finish(lambda: True)
    if code == ExitCode.FAILED:
        rundir.mark_failed("WorkerFailed", "it failed", int(code))
    else:
        monkeypatch.setattr(RunDir, "newest_generation", lambda rundir: 2)
    with pytest.raises(SystemExit) as ended:
        speaker.leave()
    assert ended.value.code == code
    speaker.leave()
    until(lambda: not speaker.is_alive(), "the end of its tries")
    assert not rundir.finished_members()


def test_who_has_finished_begins_again_with_the_others(tmp_path: Path) -> None:
    """torchrun would end with 0, and a replica that has ended so is not started again at once."""
    coordinator = Answering(order="rejoin", why="worker-1 failed")
    speaker = finished(tmp_path, coordinator)
    with pytest.raises(SystemExit) as ended:
        speaker.finish(never)
    assert ended.value.code == ExitCode.PEER_LOST
    speaker.leave()
    assert coordinator.messages[-1].state == "leaving"
    assert not coordinator.messages[-1].finished


def test_who_has_finished_and_is_asked_to_end_has_nothing_to_save(tmp_path: Path) -> None:
    coordinator = Answering(finished=True)
    speaker = finished(tmp_path, coordinator)
    torchrun = threading.Thread(target=speaker.finish, args=(never,), daemon=True)
    torchrun.start()
    until(lambda: any(message.finished for message in coordinator.messages), "the word that it has finished")
    speaker._on_signal(signal.SIGTERM, None)
    os.write(speaker._signals_write, bytes([signal.SIGTERM]))
    torchrun.join(SECONDS)
    assert not torchrun.is_alive()
    speaker.leave()
    assert not any(message.leaving for message in coordinator.messages), "the others would save, or begin again"
    assert (coordinator.messages[-1].state, coordinator.messages[-1].finished) == ("leaving", True)


def test_the_last_message_is_sent_again_where_an_event_has_cancelled_it(tmp_path: Path) -> None:
    class Cancelled(Answering):
        """Loses the first last message: the agent is woken while it waits for the answer."""

        def __init__(self) -> None:
            super().__init__()
            self.last: list[Sync] = []

        def sync(self, message: Sync, until: object = None) -> Answer:
            if message.state == "leaving":
                self.last.append(message)
                if len(self.last) == 1:
                    raise RequestCancelled
            return super().sync(message, until)

    coordinator = Cancelled()
    speaker = agent(tmp_path, coordinator)
    speaker.start()
    assert speaker.enter(4000, "Started") is not None
    speaker.finish(lambda: True)
    speaker.leave()
    assert [message.finished for message in coordinator.last] == [True, True]


def test_the_last_word_of_who_has_finished_waits_for_a_coordinator_that_restarts_and_what_that_reads(
    tmp_path: Path,
) -> None:
    coordinator = Answering()
    speaker = finished(tmp_path, coordinator)
    speaker.finish(lambda: True)
    coordinator.is_away = True
    torchrun = threading.Thread(target=speaker.leave, daemon=True)
    torchrun.start()
    until(lambda: sum(message.membership is not None for message in coordinator.messages) > 2, "tries")
    coordinator.is_away = False
    torchrun.join(SECONDS)
    assert not torchrun.is_alive()
    *_, before, last = coordinator.messages
    assert (before.state, before.generation) == ("running", 1), "the first message takes only what every version reads"
    assert before.membership is not None
    assert (last.state, last.finished) == ("leaving", True)


class Patient(Coordinator):
    """Holds what a running agent says until that has something else to say."""

    def sync(self, message: Sync, until: Callable[[socket.socket, float], bool] | None = None) -> Answer:  # type: ignore[override]
        if message.state != "running" or until is None:
            return super().sync(message)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert not until(ours, SECONDS)
        raise RequestCancelled


RANK = """
import sys
from tandem_trainer.pulse import Pulse
Pulse.open_for_rank(phase="script").beat(step=1)
sys.stdin.read()
"""


@pytest.mark.parametrize("ends", ["rank", "agent"])
def test_torchrun_rests_while_its_ranks_run_and_nobody_has_to_go(tmp_path: Path, ends: str) -> None:
    speaker = agent(tmp_path, Patient())
    speaker.start()
    assert speaker.enter(4000, "Started") is not None
    ranks = LocalRanks(1, 1)
    speaker.watch(ranks)
    # It returns at once: of a rank that has not begun, nothing is heard.
    speaker.wait_for_event(1e6)
    variables = os.environ | {"TANDEM_PULSE": str(ranks.folder), "RANK": "0", "LOCAL_RANK": "0"}
    with subprocess.Popen([sys.executable, "-c", RANK], env=variables, stdin=subprocess.PIPE) as rank:
        until(lambda: ranks.all_running, "a rank that runs")
        torchrun = threading.Thread(target=speaker.wait_for_event, args=(1e6,), daemon=True)
        torchrun.start()
        speaker.wait_for_event(0.1)
        assert torchrun.is_alive()
        if ends == "rank":
            rank.kill()
        else:
            # What the kernel's signal leaves in the wake-up descriptor.
            speaker._on_signal(signal.SIGTERM, None)
            os.write(speaker._signals_write, bytes([signal.SIGTERM]))
        torchrun.join(SECONDS)
        assert not torchrun.is_alive()
        rank.kill()
    speaker.leave()


@pytest.mark.parametrize(("recorded", "ends"), [(ExitCode.FAILED, False), (ExitCode.CONFIGURATION, True)])
def test_a_rank_says_that_trying_again_is_of_no_use_by_what_it_announces_and_records(
    tmp_path: Path, recorded: ExitCode, ends: bool
) -> None:
    speaker, ranks = agent(tmp_path, Coordinator()), LocalRanks(1, 1)
    RunDir(tmp_path).mark_failed("Why", "because", recorded)
    speaker.watch(ranks)
    ranks.record_exit_codes({0: ExitCode.CONFIGURATION})
    assert speaker.join_reason() == "WorkerFailed"
    assert speaker._end is None, "a script has chosen this number"
    Pulse(ranks.folder / "rank-0", 0, 1).last_word(ExitCode.CONFIGURATION)
    assert speaker.join_reason() == "WorkerFailed"
    assert (speaker._end is not None and speaker._end.code == ExitCode.CONFIGURATION) == ends
    speaker.leave()


def test_an_agent_that_ends_in_error_says_what_its_generation_fails_by(tmp_path: Path) -> None:
    said: list[Sync] = []

    class Listens(Coordinator):
        def sync(self, message: Sync, until: object = None) -> Answer:
            said.append(message)
            return super().sync(message, until)

    coordinator = Listens()
    coordinator.number = 1  # its answer to a running agent is "run"
    coordinator.may_answer.set()
    speaker = agent(tmp_path, coordinator)
    speaker.start()
    assert speaker.enter(4000, "Started") is not None
    speaker.watch(LocalRanks(2, 1, first_rank=3))
    speaker.leave(FileNotFoundError(2, "No such file or directory", "pyhton"))
    last = said[-1]
    assert (last.state, last.generation) == ("leaving", 2)
    assert (last.failure.rank, last.failure.code, last.failure.passing) == (3, 1, False)
    assert last.failure.error == "FileNotFoundError: [Errno 2] No such file or directory: 'pyhton'"


@pytest.mark.parametrize("code", [-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGHUP])
def test_ranks_that_get_the_signal_of_their_agent_first_have_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """On a node that shuts down, all processes get SIGTERM, in any order."""
    monkeypatch.setattr(heartbeat, "SIGNAL_SECONDS", SECONDS)
    coordinator = Answering()
    speaker = finished(tmp_path, coordinator)
    ranks = LocalRanks(1, 1)
    speaker.watch(ranks)
    torchrun = threading.Thread(target=speaker.ended, args=({0: code},))
    torchrun.start()
    speaker._on_signal(signal.SIGTERM, None)
    with speaker._changed:
        speaker._changed.notify_all()
    torchrun.join(SECONDS)
    assert not torchrun.is_alive()
    assert ranks.failure() is None
    speaker.leave(SignalException("asked to end by SIGTERM", signal.SIGTERM))
    assert [message for message in coordinator.messages if message.failure or message.reason] == []
    assert coordinator.messages[-1].state == "leaving"


@pytest.mark.parametrize(("code", "seconds"), [(-signal.SIGTERM, 0.01), (-signal.SIGKILL, SECONDS), (1, SECONDS)])
def test_ranks_that_end_alone_have_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, seconds: float
) -> None:
    monkeypatch.setattr(heartbeat, "SIGNAL_SECONDS", seconds)
    speaker = finished(tmp_path, Answering())
    speaker.watch(LocalRanks(1, 1))
    torchrun = threading.Thread(target=speaker.ended, args=({0: code},), daemon=True)
    torchrun.start()
    torchrun.join(SECONDS / 2)
    assert not torchrun.is_alive(), "only the signals that an agent may get wait for that"
    assert speaker.join_reason() == "WorkerFailed"


PARKS = """
import sys
from tandem_trainer.pulse import PREPARED, Pulse
pulse = Pulse.open_for_rank()
sys.stdin.readline()
pulse.set_regroup_state(PREPARED)
sys.stdin.read()
"""


class Noting(Patient):
    """Notes what agents say that join."""

    def __init__(self) -> None:
        super().__init__()
        self.joining: list[Sync] = []
        self.has_no_place = False

    def sync(self, message: Sync, until: Callable[[socket.socket, float], bool] | None = None) -> Answer:  # type: ignore[override]
        if message.state == "joining":
            self.joining.append(message)
            if message.standby == "preparing" or self.has_no_place:
                time.sleep(0.01)
                return Answer(order="wait")
        return super().sync(message, until)


@contextmanager
def prepares(
    tmp_path: Path, coordinator: Coordinator, reason: str, code: str
) -> Iterator[tuple[Heartbeat, LocalRanks, "subprocess.Popen[str]"]]:
    """An agent that is about to join, whose rank runs this code."""
    speaker, ranks = agent(tmp_path, coordinator), LocalRanks(0, 1)
    speaker.start()
    speaker.prepare(ranks, reason)
    variables = os.environ | {"TANDEM_PULSE": str(ranks.folder), "RANK": "0", "LOCAL_RANK": "0"}
    with subprocess.Popen([sys.executable, "-c", code], env=variables, stdin=subprocess.PIPE, text=True) as rank:
        yield speaker, ranks, rank
        rank.kill()
    speaker.leave()


def test_an_agent_joins_when_its_ranks_are_prepared(tmp_path: Path) -> None:
    coordinator = Noting()
    with prepares(tmp_path, coordinator, "WorkerFailed", PARKS) as (speaker, ranks, rank):
        assert rank.stdin is not None
        until(lambda: ranks.all_running, "a rank that runs")
        until(lambda: bool(coordinator.joining), "a message")
        assert {(message.standby, message.reason) for message in coordinator.joining} == {("preparing", "WorkerFailed")}
        torchrun = threading.Thread(target=speaker.wait_for_event, args=(1e6,), daemon=True)
        torchrun.start()
        speaker.wait_for_event(0.2)
        assert torchrun.is_alive()
        assert speaker.is_preparing
        assert not speaker.are_prepared
        rank.stdin.write("\n")
        rank.stdin.flush()
        torchrun.join(SECONDS)
        assert not torchrun.is_alive()
        assert speaker.are_prepared
        assert speaker.join_reason() == "WorkerFailed"
        assert speaker.release_ranks() is ranks
        membership = speaker.enter(4000, "WorkerFailed", ranks, regroups=True)
        assert membership is not None
        assert coordinator.joining[-1].standby == "new"
        assert not speaker.is_preparing
        speaker.watch(ranks)


def test_a_rank_that_ends_while_it_waits_for_a_place_gets_none(tmp_path: Path) -> None:
    coordinator = Noting()
    coordinator.has_no_place = True
    with prepares(tmp_path, coordinator, "Started", PARKS) as (speaker, ranks, rank):
        rank.stdin.write("\n")
        rank.stdin.flush()
        until(lambda: speaker.are_prepared, "a rank that is prepared")
        assert speaker.release_ranks() is ranks
        threading.Timer(0.3, rank.kill).start()
        with pytest.raises(RanksEnded):
            speaker.enter(4000, "Started", ranks)
        assert speaker.closed, "torchrun starts it again"
        assert speaker.join_reason() == "WorkerFailed"
        ranks.close()


@pytest.mark.parametrize("why", ["it takes too long", "a signal", "the end of the job"])
def test_ranks_that_cannot_become_ready_are_ended(tmp_path: Path, why: str) -> None:
    waits = "import sys; from tandem_trainer.pulse import Pulse, Watchdog; Watchdog(Pulse.open_for_rank()).start()"
    with prepares(tmp_path, Noting(), "Started", f"{waits}; sys.stdin.read()") as (speaker, ranks, rank):
        until(lambda: ranks.all_running, "a rank that runs")
        speaker.end_preparation(1000.0)
        assert rank.poll() is None
        if why == "a signal":
            speaker._on_signal(signal.SIGTERM, None)
        elif why == "the end of the job":
            RunDir(tmp_path).mark_done(None)
            with speaker._changed:
                speaker._end_job("complete", False)
        speaker.end_preparation(0.0 if why == "it takes too long" else 1000.0)
        assert rank.wait(SECONDS) == ExitCode.SUPERSEDED


@pytest.mark.parametrize("fails_first", [True, False])
def test_a_rank_that_failed_before_its_generation_was_closed_is_the_reason(tmp_path: Path, fails_first: bool) -> None:
    """Its peers may lose their connection to it, and say so, before its process has ended."""
    speaker, ranks = agent(tmp_path, Coordinator()), LocalRanks(1, 1)
    speaker.watch(ranks)
    steps: list[Callable[[], None]] = [lambda: ranks.record_exit_codes({0: 1}), speaker._close_generation]
    with speaker._changed:
        for happens in steps if fails_first else reversed(steps):
            happens()
            time.sleep(0.01)
    assert speaker.join_reason() == ("WorkerFailed" if fails_first else "MembershipChanged")
    speaker.leave()
