"""The logs of many pods in one stream: in the order of time, over restarts, replaced pods and broken connections."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import UserError
from tandem_cli.kubernetes import following
from tandem_cli.kubernetes.following import (
    Follower,
    merged_lines,
    parse_line,
    parse_timestamp,
    select_pods,
    validate_selection,
)
from tandem_cli.kubernetes.job_view import parse_pods
from tandem_cli.kubernetes.kubectl import ClusterError, Kubectl
from tandem_cli.log_lines import MAX_LINE_BYTES, Line, LogSelection, printable_line
from tandem_cli.view import PodView
from tests.support import fake_kubectl as fakes
from tests.support.fake_kubectl import FakeKubectl

SECONDS = 30.0
"""A thing that has not come by then does not come."""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
    found = FakeKubectl(tmp_path)
    monkeypatch.setenv("PATH", found.path)
    monkeypatch.setattr(following, "POLL_SECONDS", 0.1)
    return found


def at(second: int, text: str, nanoseconds: int = 0) -> str:
    return f"2026-11-21T12:00:{second:02d}.{nanoseconds:09d}Z {text}\n"


def read(
    fake: FakeKubectl, *items: dict[str, Any], tail: int | None = None
) -> tuple[list[str], list[str], dict[str, int]]:
    told: list[str] = []
    seen: dict[str, int] = {}
    lines = [
        f"{one.process}: {one.text}" for one in merged_lines(Kubectl(), parse_pods(items), tail, seen, told.append)
    ]
    return lines, told, seen


# --- lines


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("1970-01-01T00:00:01Z", 1_000_000_000),
        ("1970-01-01T00:00:01.5Z", 1_500_000_000),
        ("1970-01-01T00:00:01.000000007Z", 1_000_000_007),
        ("1970-01-01T01:00:01.000000007+01:00", 1_000_000_007),
        ("yesterday", None),
        ("2026-13-45T99:00:00Z", None),
    ],
)
def test_times_are_exact_to_the_nanosecond(text: str, nanoseconds: int | None) -> None:
    assert parse_timestamp(text) == nanoseconds


def test_a_line_without_a_time_comes_after_the_one_before() -> None:
    assert parse_line(b"unable to retrieve container logs", "worker-0", 7) == Line(
        7, "worker-0", "unable to retrieve container logs"
    )


@pytest.mark.parametrize(
    ("raw", "seen"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;owned\x07text", "text"),
        ("\x1b[2J\x1b[Hgone", "gone"),
        ("10%\r50%\r100%\r", "100%"),
        ("a\tb", "a       b"),
        ("bell \x07 and escape \x1b", "bell � and escape �"),
        ("\u202eright to left", "�right to left"),
        ("", ""),
    ],
)
def test_what_a_pod_prints_cannot_steer_the_terminal(raw: str, seen: str) -> None:
    assert printable_line(raw) == seen


# --- what is there


def test_lines_of_all_pods_come_in_the_order_of_time(fake: FakeKubectl) -> None:
    fake.answers("logs", "digits-worker-0-abcde", says=at(1, "a") + at(3, "c") + at(5, "e", 2))
    fake.answers("logs", "digits-worker-1-abcde", says=at(2, "b") + at(4, "d") + at(5, "f", 3))
    lines, told, seen = read(fake, fakes.pod("worker", 0), fakes.pod("worker", 1))
    assert lines == [
        "worker-0: a",
        "worker-1: b",
        "worker-0: c",
        "worker-1: d",
        "worker-0: e",
        "worker-1: f",
    ]
    assert told == []
    assert seen["uid-of-digits-worker-1-abcde"] == parse_timestamp("2026-11-21T12:00:05.000000003Z")


def test_the_container_before_comes_first_where_one_was_started_again(fake: FakeKubectl) -> None:
    fake.answers("logs", says=at(9, "again"))
    fake.answers("logs", "--previous", says=at(1, "before"))
    lines, _, _ = read(fake, fakes.pod("coordinator", restarts=1))
    assert lines == ["coordinator: before", "coordinator: again"]


def test_a_container_that_waits_to_be_started_again_is_read_once(fake: FakeKubectl) -> None:
    item = fakes.pod("coordinator", state={"waiting": {"reason": "CrashLoopBackOff"}}, restarts=2)
    item["status"]["containerStatuses"][0]["lastState"] = DONE
    fake.answers("logs", says=at(1, "why it crashed"))
    lines, _, _ = read(fake, item)
    assert lines == ["coordinator: why it crashed"]


def test_that_the_container_before_has_left_no_log_is_no_trouble(fake: FakeKubectl) -> None:
    fake.answers("logs", says=at(9, "again"))
    fake.answers("logs", "--previous", complains="Error from server (BadRequest): previous terminated container gone")
    lines, told, _ = read(fake, fakes.pod("coordinator", restarts=1))
    assert (lines, told) == (["coordinator: again"], [])


def test_the_last_lines_alone_are_asked_of_kubectl(fake: FakeKubectl) -> None:
    fake.answers("logs", says=at(9, "last"))
    read(fake, fakes.pod("worker", 0), tail=3)
    assert "--tail=3" in fake.asked[0].words
    assert "--container=worker" in fake.asked[0].words


def test_a_log_that_cannot_be_read_is_told_and_does_not_hide_the_others(fake: FakeKubectl) -> None:
    fake.answers("logs", "digits-worker-0-abcde", complains="Error from server: no route to host")
    fake.answers("logs", "digits-worker-1-abcde", says=at(2, "b"))
    lines, told, _ = read(fake, fakes.pod("worker", 0), fakes.pod("worker", 1))
    assert lines == ["worker-1: b"]
    assert len(told) == 1
    assert told[0].startswith("worker-0: kubectl: ")


def test_that_none_can_be_read_is_an_error(fake: FakeKubectl) -> None:
    fake.answers("logs", complains='Error from server (Forbidden): User "me" cannot get resource "pods/log"')
    with pytest.raises(ClusterError, match="cannot get resource"):
        read(fake, fakes.pod("worker", 0), fakes.pod("worker", 1))


def test_a_node_that_is_silent_does_not_hold_up_the_rest(fake: FakeKubectl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following.ContainerLog.__init__, "__defaults__", (1.0,))
    fake.answers("logs", "digits-worker-0-abcde", stays=True)
    fake.answers("logs", "digits-worker-1-abcde", says=at(2, "b"))
    lines, told, _ = read(fake, fakes.pod("worker", 0), fakes.pod("worker", 1))
    assert lines == ["worker-1: b"]
    assert "did not arrive" in told[0]


def test_a_line_without_an_end_is_cut(fake: FakeKubectl) -> None:
    fake.answers("logs", says=at(1, "x" * (3 * MAX_LINE_BYTES)) + at(2, "next"))
    lines, _, _ = read(fake, fakes.pod("worker", 0))
    assert len(lines[0]) < MAX_LINE_BYTES + 100
    assert lines[1] == "worker-0: next"


# --- which


def test_pods_are_chosen_by_role_or_by_name() -> None:
    there = parse_pods([fakes.pod("coordinator"), fakes.pod("worker", 0), fakes.pod("worker", 1)])
    assert [pod.name for pod in select_pods(there, LogSelection("worker"))] == ["worker-0", "worker-1"]
    assert [pod.name for pod in select_pods(there, LogSelection(names=("worker-1",)))] == ["worker-1"]
    assert [pod.name for pod in select_pods(there, LogSelection(names=("digits-worker-1-abcde",)))] == ["worker-1"]


def test_a_name_that_none_has_is_told_with_the_nearest() -> None:
    there = parse_pods([fakes.pod("coordinator"), fakes.pod("worker", 0)])
    with pytest.raises(UserError, match="digits has no pod worker-9; did you mean worker-0"):
        validate_selection(there, LogSelection(names=("worker-9",)), "digits")


def test_more_pods_than_can_be_read_are_refused_with_what_to_do() -> None:
    there = parse_pods([fakes.pod("worker", index) for index in range(following.MAX_PODS + 1)])
    with pytest.raises(UserError, match="Select some with --role"):
        validate_selection(there, LogSelection(), "digits")


# --- what comes


class Followed:
    """A follower in a thread, and what came of it."""

    def __init__(self, seen: dict[str, int]) -> None:
        self.lines: list[str] = []
        self.told: list[str] = []
        self.follower = Follower(Kubectl(), "digits", LogSelection(), seen, self.told.append)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        for one in self.follower.lines():
            self.lines.append(f"{one.process}: {one.text}")

    def comes_to(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < deadline, f"{what}: {self.lines} {self.told}"
            time.sleep(0.02)

    def ends(self) -> None:
        self.thread.join(SECONDS)
        assert not self.thread.is_alive(), f"it goes on: {self.lines} {self.told}"


@pytest.fixture
def follow() -> Iterator[Callable[..., Followed]]:
    all_of_them: list[Followed] = []

    def start(seen: dict[str, int] | None = None) -> Followed:
        all_of_them.append(Followed(seen or {}))
        return all_of_them[-1]

    yield start
    for one in all_of_them:
        one.follower.close()


def phase(fake: FakeKubectl, name: str) -> None:
    fake.answers("get", "distributedtrainingjobs.tandem.dev", says=fakes.job(phase=name))


def there(fake: FakeKubectl, *items: dict[str, Any]) -> tuple[PodView, ...]:
    fake.answers("get", "pods", says=fakes.items(*items))
    return parse_pods(items)


DONE = {"terminated": {"exitCode": 0, "finishedAt": "2026-11-21T12:00:50Z"}}


def test_it_ends_with_the_job_when_all_has_been_read(fake: FakeKubectl, follow: Callable[..., Followed]) -> None:
    phase(fake, "Running")
    there(fake, fakes.pod("worker", 0))
    fake.answers("logs", says=at(1, "one"), stays=True)
    followed = follow()
    followed.comes_to(lambda: "worker-0: one" in followed.lines, "the first line")
    there(fake, fakes.pod("worker", 0, DONE))
    fake.answers("logs", says=at(1, "one") + at(2, "the end"))
    for reader in list(followed.follower._readers.values()):
        reader.stop()  # as the kubelet ends a stream when its container ends
    phase(fake, "Succeeded")
    followed.ends()
    assert followed.lines == ["worker-0: one", "worker-0: the end"]


def test_a_job_that_has_ended_is_followed_until_its_pods_have(
    fake: FakeKubectl, follow: Callable[..., Followed]
) -> None:
    phase(fake, "Succeeded")
    there(fake, fakes.pod("evaluator", 0))
    fake.answers("logs", says=at(1, "one"))
    followed = follow()
    followed.comes_to(lambda: followed.lines == ["evaluator-0: one"], "the first line")
    fake.answers("logs", says=at(1, "one") + at(2, "the end"))
    there(fake, fakes.pod("evaluator", 0, DONE))
    followed.ends()
    assert followed.lines == ["evaluator-0: one", "evaluator-0: the end"]


def test_a_broken_connection_loses_nothing_and_repeats_nothing(
    fake: FakeKubectl, follow: Callable[..., Followed]
) -> None:
    phase(fake, "Running")
    there(fake, fakes.pod("worker", 0))
    fake.answers("logs", says=at(1, "one") + at(1, "two", 5))
    followed = follow()
    followed.comes_to(lambda: len(followed.lines) == 2, "two lines")
    # The API server goes by whole seconds: what was shown in this one comes again.
    fake.answers("logs", "--since-time=2026-11-21T12:00:01Z", says=at(1, "one") + at(1, "two", 5) + at(1, "three", 6))
    followed.comes_to(lambda: len(followed.lines) == 3, "the third line")
    assert followed.lines == ["worker-0: one", "worker-0: two", "worker-0: three"]


def test_it_goes_on_from_what_was_shown_before(fake: FakeKubectl, follow: Callable[..., Followed]) -> None:
    phase(fake, "Running")
    (pod,) = there(fake, fakes.pod("worker", 0))
    fake.answers("logs", says=at(1, "shown") + at(2, "new"), stays=True)
    shown_until = parse_timestamp("2026-11-21T12:00:01Z")
    assert shown_until is not None
    followed = follow({pod.uid: shown_until})
    followed.comes_to(lambda: bool(followed.lines), "a line")
    assert followed.lines == ["worker-0: new"]


def test_a_pod_that_takes_anothers_place_is_followed_and_told(
    fake: FakeKubectl, follow: Callable[..., Followed]
) -> None:
    phase(fake, "Running")
    there(fake, fakes.pod("worker", 0, name="digits-worker-0-old"))
    fake.answers("logs", "digits-worker-0-old", says=at(1, "old"), stays=True)
    fake.answers("logs", "digits-worker-0-new", says=at(2, "new"), stays=True)
    followed = follow()
    followed.comes_to(lambda: followed.lines == ["worker-0: old"], "the first pod")
    there(fake, fakes.pod("worker", 0, name="digits-worker-0-new"))
    followed.comes_to(lambda: followed.lines == ["worker-0: old", "worker-0: new"], "its replacement")
    assert followed.told == ["worker-0 is now digits-worker-0-new on node-1"]
    followed.comes_to(lambda: len(followed.follower._readers) == 1, "nobody reads the pod that is gone")


def test_a_pod_beside_the_one_that_leaves_is_told_once(fake: FakeKubectl, follow: Callable[..., Followed]) -> None:
    phase(fake, "Running")
    fake.answers("logs", says=at(1, "one"), stays=True)
    leaving = fakes.pod("worker", 0, name="old", metadata={"deletionTimestamp": "2026-11-21T12:09:00Z"})
    there(fake, leaving, fakes.pod("worker", 0, name="new"))
    followed = follow()
    followed.comes_to(lambda: bool(followed.told), "a word about it")
    looks = len(fake.asked)
    followed.comes_to(lambda: len(fake.asked) > looks + 6, "some more looks")
    assert followed.told == ["worker-0 is now new on node-1"]


def test_a_container_that_is_started_again_in_place_is_followed(
    fake: FakeKubectl, follow: Callable[..., Followed]
) -> None:
    phase(fake, "Running")
    there(fake, fakes.pod("coordinator", state=DONE))
    fake.answers("logs", says=at(1, "first"))
    followed = follow()
    followed.comes_to(lambda: followed.lines == ["coordinator: first"], "the first")
    there(fake, fakes.pod("coordinator", restarts=1))
    fake.answers("logs", says=at(5, "second"), stays=True)
    followed.comes_to(lambda: followed.lines[1:] == ["coordinator: second"], "the second")


def test_a_log_that_was_read_to_its_end_is_not_asked_for_again(
    fake: FakeKubectl, follow: Callable[..., Followed]
) -> None:
    phase(fake, "Running")
    there(fake, fakes.pod("worker", 0, DONE))
    fake.answers("logs", says=at(1, "all"))
    followed = follow()

    def looks() -> int:
        return sum("pods" in call.words for call in fake.asked)

    followed.comes_to(lambda: followed.lines == ["worker-0: all"], "the line")
    before = looks()
    followed.comes_to(lambda: looks() > before + 3, "some more looks")
    assert sum("logs" in call.words for call in fake.asked) == 1


def test_a_cluster_that_is_away_for_a_while_is_waited_for(fake: FakeKubectl, follow: Callable[..., Followed]) -> None:
    fake.answers("get", complains="Unable to connect to the server: i/o timeout")
    followed = follow()
    followed.comes_to(lambda: bool(followed.told), "a word about it")
    there(fake, fakes.pod("worker", 0))
    phase(fake, "Running")
    fake.answers("logs", says=at(1, "back"), stays=True)
    followed.comes_to(lambda: followed.lines == ["worker-0: back"], "the line")
    assert followed.told == ["kubectl: Unable to connect to the server: i/o timeout; trying again"]


def test_it_ends_when_the_job_is_deleted(fake: FakeKubectl, follow: Callable[..., Followed]) -> None:
    gone = 'Error from server (NotFound): distributedtrainingjobs.tandem.dev "digits" not found'
    fake.answers("get", "distributedtrainingjobs.tandem.dev", "digits", complains=gone)
    fake.answers("get", "distributedtrainingjobs.tandem.dev", says=fakes.items())
    fake.answers("get", "distributedtrainingjobs.tandem.dev", "digits", complains=gone)
    followed = follow()
    followed.ends()
    assert followed.told == ["digits was deleted"]
