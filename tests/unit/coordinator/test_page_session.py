"""Who may look at a job's page."""

import pytest

from tandem_coordinator.page.routes import INVITATION_SECONDS, MAX_INVITATIONS, SESSION_SECONDS, Sessions, is_direct
from tests.support.clock import Clock

TOKEN = "the-secret-of-this-job"


@pytest.fixture
def clock() -> Clock:
    return Clock(1_780_000_000.0)


@pytest.fixture
def sessions(clock: Clock) -> Sessions:
    return Sessions(TOKEN, clock)


class TestAnInvitation:
    def test_opens_the_page_once(self, sessions: Sessions) -> None:
        word = sessions.invite()
        assert sessions.is_valid(sessions.accept(word))
        assert sessions.accept(word) is None

    def test_is_good_for_minutes(self, sessions: Sessions, clock: Clock) -> None:
        word, other = sessions.invite(), sessions.invite()
        clock.now += INVITATION_SECONDS - 1
        assert sessions.accept(word) is not None
        clock.now += 2
        assert sessions.accept(other) is None

    def test_is_no_other_word_and_not_the_token(self, sessions: Sessions) -> None:
        sessions.invite()
        assert [sessions.accept(word) for word in ("", "x", TOKEN, "é" * 500)] == [None] * 4

    def test_that_is_not_used_does_not_take_memory_for_ever(self, sessions: Sessions) -> None:
        words = [sessions.invite() for _ in range(MAX_INVITATIONS + 1)]
        assert sessions.accept(words[0]) is None
        assert sessions.accept(words[1]) is not None


class TestACookie:
    def test_is_known_to_a_coordinator_that_has_restarted(self, sessions: Sessions, clock: Clock) -> None:
        value = sessions.accept(sessions.invite())
        assert Sessions(TOKEN, clock).is_valid(value)
        assert Sessions(TOKEN, clock).cookie == sessions.cookie

    def test_of_another_job_is_unknown_and_has_another_name(self, sessions: Sessions, clock: Clock) -> None:
        other = Sessions("another-secret", clock)
        assert not sessions.is_valid(other.accept(other.invite()))
        assert sessions.cookie != other.cookie

    def test_is_sent_with_a_path_alone_that_nobody_else_can_guess(self, sessions: Sessions, clock: Clock) -> None:
        """Browsers send it to each port of the machine, and there may be the page of somebody else's job."""
        assert sessions.path != Sessions("another-secret", clock).path
        assert len(sessions.path) >= len("/page//") + 32
        assert Sessions(TOKEN, clock).path == sessions.path

    def test_is_good_for_a_day(self, sessions: Sessions, clock: Clock) -> None:
        value = sessions.accept(sessions.invite())
        clock.now += SESSION_SECONDS - 1
        assert sessions.is_valid(value)
        clock.now += 2
        assert not sessions.is_valid(value)

    def test_that_was_changed_is_not_known(self, sessions: Sessions) -> None:
        value = sessions.accept(sessions.invite())
        until, nonce, signature = value.split(".")
        changed = [
            f"{int(until) + 1}.{nonce}.{signature}",
            f"{until}.{nonce}.{signature[:-1]}",
            f"{until}.x.{signature}",
        ]
        changed += ["", ".", "..", "x", value + "x", value * 5, f"{until}.{nonce}.é"]
        assert not any(sessions.is_valid(entry) for entry in (*changed, None))

    def test_says_nothing_of_the_token(self, sessions: Sessions) -> None:
        assert TOKEN not in sessions.accept(sessions.invite()) + sessions.cookie


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:7070",
        "localhost:7070",
        "localhost",
        "[::1]:7070",
        "10.0.0.7:80",
        "LOCALHOST:1",
        "a.localhost:7",
    ],
)
def test_an_address_is_this_machine_or_at_least_no_name(host: str) -> None:
    assert is_direct(host)


@pytest.mark.parametrize(
    "host", ["", "evil.example:7070", "127.0.0.1.evil.example:7070", "localhost.evil.example", "2130706433x", ":7070"]
)
def test_a_name_may_have_been_pointed_here_by_anybody(host: str) -> None:
    assert not is_direct(host)
