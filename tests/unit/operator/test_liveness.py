"""Which coordinators are given up because they do not answer, and which are not."""

from typing import Any

import pytest

from tandem_operator.liveness import (
    DOUBT_SECONDS,
    GONE_SECONDS,
    MAX_IGNORED_SILENT,
    MIN_UNREACHED,
    SILENT_SECONDS,
    Liveness,
)

LATER = 100.0


def told() -> Liveness[str]:
    """What stands before the slash of a key is its namespace."""
    return Liveness(lambda key: key.partition("/")[0] if "/" in key else "")


def silent(liveness: Liveness[str], key: str = "job", uid: str = "pod", questions: int = 2) -> None:
    """It answers at time 0, and then no more."""
    liveness.note(key, uid, polled_at=0.0, answered=True)
    for question in range(questions):
        liveness.note(key, uid, polled_at=1.0 + question, answered=False)


def test_a_coordinator_that_does_not_answer_any_more_has_fallen_after_a_while() -> None:
    liveness = told()
    silent(liveness)
    assert liveness.unresponsive("job", 1.0 + SILENT_SECONDS - 0.1) is None
    assert liveness.unresponsive("job", 1.0 + SILENT_SECONDS) == "pod"


def test_one_that_answers_again_has_not_and_its_time_begins_anew() -> None:
    liveness = told()
    silent(liveness)
    liveness.note("job", "pod", polled_at=5.0, answered=True)
    assert liveness.unresponsive("job", LATER) is None
    for asked in (50.0, 51.0):
        liveness.note("job", "pod", polled_at=asked, answered=False)
    assert liveness.unresponsive("job", 50.0 + SILENT_SECONDS - 0.1) is None
    assert liveness.unresponsive("job", 50.0 + SILENT_SECONDS) == "pod"


def test_one_that_has_never_answered_is_not_given_up() -> None:
    liveness = told()
    for asked in (1.0, 2.0, 3.0):
        liveness.note("job", "pod", polled_at=asked, answered=False)
    assert liveness.unresponsive("job", LATER) is None


def test_a_new_pod_does_not_inherit_the_silence_of_the_old_one() -> None:
    liveness = told()
    silent(liveness)
    liveness.note("job", "another", polled_at=3.0, answered=False)
    liveness.note("job", "another", polled_at=4.0, answered=False)
    assert liveness.unresponsive("job", LATER) is None


def test_one_long_question_is_not_enough_because_we_may_have_been_stopped_meanwhile() -> None:
    liveness = told()
    silent(liveness, questions=1)
    assert liveness.unresponsive("job", LATER) is None


def test_where_most_are_silent_it_is_we_who_do_not_hear() -> None:
    liveness = told()
    for number in range(MAX_IGNORED_SILENT):
        silent(liveness, key=f"job-{number}")
    assert liveness.unresponsive("job-0", LATER) == "pod", "so few may share one node"
    silent(liveness, key="one more")
    assert liveness.unresponsive("job-0", LATER) is None
    for number in range(MAX_IGNORED_SILENT + 1):
        liveness.note(f"healthy-{number}", "pod", polled_at=0.0, answered=True)
    assert liveness.unresponsive("job-0", LATER) == "pod"


def test_one_is_in_doubt_from_its_first_silence_until_it_is_clear_what_it_means() -> None:
    liveness = told()
    liveness.note("job", "pod", polled_at=0.0, answered=False)
    assert not liveness.in_doubt("job", 0.0), "it has never answered"
    liveness.note("job", "pod", polled_at=0.0, answered=True)
    assert not liveness.in_doubt("job", 0.0)
    liveness.note("job", "pod", polled_at=1.0, answered=False)
    assert liveness.in_doubt("job", 1.0 + SILENT_SECONDS)
    assert not liveness.in_doubt("job", 1.0 + DOUBT_SECONDS)


def of_namespaces(**coordinators: tuple[int, int]) -> Liveness[str]:
    """How many of each namespace are silent, and how many answer."""
    liveness = told()
    for namespace, (mute, healthy) in coordinators.items():
        for number in range(mute):
            silent(liveness, key=f"{namespace}/{number}")
        for number in range(mute, mute + healthy):
            liveness.note(f"{namespace}/{number}", "pod", polled_at=0.0, answered=True)
    return liveness


@pytest.mark.parametrize(
    "coordinators",
    [
        {"good": (1, 9), "evil": (1_000, 0)},
        {"good": (6, 7), "evil": (1_000, 0)},
        {"good": (1, 0), "evil": (1_000, 0), "other": (0, 1)},
        {"good": (MAX_IGNORED_SILENT, 0), "evil": (1_000, 0), "other": (0, 1)},
    ],
    ids=str,
)
def test_silent_coordinators_of_one_namespace_do_not_protect_those_of_another(coordinators: dict[str, Any]) -> None:
    assert of_namespaces(**coordinators).unresponsive("good/0", LATER) == "pod"


@pytest.mark.parametrize(
    "coordinators",
    [
        {"good": (50, 0)},
        {"good": (50, 49)},
        {"good": (50, 0), "small": (1, 0)},
        {"good": (1, 0), "large": (50, 3)},
        {f"of_{number}": (1, 0) for number in range(20)} | {"good": (1, 0), "beside_us": (0, 1)},
    ],
    ids=lambda value: f"{len(value)} namespaces",
)
def test_who_hears_hardly_any_namespace_is_blind_however_many_there_are(coordinators: dict[str, Any]) -> None:
    assert of_namespaces(**coordinators).unresponsive("good/0", LATER) is None


def knocked(liveness: Liveness[str], reached: list[bool]) -> None:
    """It answers at time 0, and then no more; whether somebody takes or refuses the connections that follow."""
    liveness.note("job", "pod", 0.0, answered=True)
    for number, one in enumerate(reached):
        liveness.note("job", "pod", 1.0 + number / 10, answered=False, reached=one)


def test_one_whose_connections_nobody_takes_has_fallen_sooner() -> None:
    liveness = told()
    knocked(liveness, [False] * MIN_UNREACHED)
    assert liveness.unresponsive("job", 1.0 + GONE_SECONDS - 0.1) is None
    assert liveness.unresponsive("job", 1.0 + GONE_SECONDS) == "pod"


def test_a_node_that_refuses_a_connection_lives_and_its_kubelet_gets_its_time() -> None:
    for reached in ([True, *[False] * (MIN_UNREACHED - 1)], [*[False] * MIN_UNREACHED, True], [False, True, False]):
        liveness = told()
        knocked(liveness, reached)
        assert liveness.unresponsive("job", 1.0 + SILENT_SECONDS - 0.1) is None
        assert liveness.unresponsive("job", 1.0 + SILENT_SECONDS) == "pod"


def test_a_job_that_is_forgotten_is_not_counted() -> None:
    liveness = told()
    for number in range(MAX_IGNORED_SILENT + 1):
        silent(liveness, key=f"job-{number}")
    liveness.forget("job-1")
    assert liveness.unresponsive("job-0", LATER) == "pod"
    assert liveness.unresponsive("job-1", LATER) is None
