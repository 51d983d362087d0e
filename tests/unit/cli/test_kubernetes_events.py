"""What happened to a job, from the events of a whole namespace."""

import pytest

from tandem.formatting import parse_rfc3339
from tandem.job import labels as names
from tandem_cli.kubernetes.job_view import component, job_events
from tandem_cli.view import new_events
from tandem_operator import names as operators
from tests.support.fake_kubectl import event

KIND = "DistributedTrainingJob"
MADE = parse_rfc3339("2026-11-21T12:00:00Z")
assert MADE is not None


@pytest.mark.parametrize("job", ["digits", "d" * 43, "d" * 44, "d" * 63, "7-digits", "a-worker", "x-" * 20 + "y"])
def test_everything_that_the_operator_names_is_known_again(job: str) -> None:
    assert component("Pod", operators.pod(job, operators.WORKER, 12, "e"), job) == "worker-12"
    assert component("Pod", operators.pod(job, operators.EVALUATOR, 3, "e"), job) == "evaluator-3"
    assert component("Pod", operators.pod(job, operators.COORDINATOR, 0, "e"), job) == "coordinator"
    assert component("Service", operators.coordinator(job), job) == "coordinator"
    assert component("PersistentVolumeClaim", operators.checkpoints(job), job) == "checkpoints"
    assert component(KIND, job, job) == ""


@pytest.mark.parametrize("other", ["digits-2", "digit", "my-digits", "digits-worker"])
def test_what_belongs_to_a_job_of_a_similar_name_is_not_told(other: str) -> None:
    assert component(KIND, other, "digits") is None
    assert component("Pod", operators.pod(other, operators.WORKER, 0, "e"), "digits") is None
    assert component("Service", operators.coordinator(other), "digits") is None
    assert component("Pod", "somebody-elses", "digits") is None


def test_the_same_again_is_one_line_with_a_count() -> None:
    first = event("Pod", "digits-worker-0-aaaaa", "BackOff", "Back-off", count=3, type="Warning")
    later = event("Pod", "digits-worker-0-bbbbb", "BackOff", "Back-off", at="2026-11-21T12:05:00Z", count=2)
    (found,) = job_events([later, first], "digits", MADE)
    assert (found.count, found.who) == (5, "worker-0")
    assert found.at - found.first == 280


def test_they_come_in_the_order_of_time_the_newest_last() -> None:
    told = [
        event(KIND, "digits", "B", "second", at="2026-11-21T12:02:00Z"),
        event(KIND, "digits", "A", "first", at="2026-11-21T12:01:00Z"),
    ]
    assert [one.text for one in job_events(told, "digits", MADE)] == ["first", "second"]


def test_within_a_second_the_order_is_that_of_the_cluster() -> None:
    exact = event("Pod", "digits-worker-0-aaaaa", "Scheduled", "assigned", eventTime="2026-11-21T12:01:00.900000Z")
    exact |= {"firstTimestamp": None, "lastTimestamp": None, "count": None}
    exact["metadata"] = {"resourceVersion": "7", "creationTimestamp": "2026-11-21T12:01:00Z"}
    whole = event("Pod", "digits-worker-0-aaaaa", "Started", "started", at="2026-11-21T12:01:00Z")
    whole["metadata"]["resourceVersion"] = "8"
    assert [one.reason for one in job_events([whole, exact], "digits", MADE)] == ["Scheduled", "Started"]


def test_what_was_told_before_the_job_was_made_was_another_jobs() -> None:
    old = event(KIND, "digits", "Succeeded", "the job is complete", at="2026-11-21T11:59:00Z")
    assert job_events([old], "digits", MADE) == ()


def test_a_series_counts_as_often_as_it_says() -> None:
    series = {"count": 40, "lastObservedTime": "2026-11-21T12:10:00.000000Z"}
    told = event("Pod", "digits-worker-0-aaaaa", "FailedScheduling", "no node", series=series, lastTimestamp=None)
    (found,) = job_events([told], "digits", MADE)
    assert (found.count, found.at) == (40, parse_rfc3339("2026-11-21T12:10:00Z"))


def test_news_are_what_is_new_or_happened_again() -> None:
    a, b = event(KIND, "digits", "A", "once"), event(KIND, "digits", "B", "again", count=1)
    before = job_events([a, b], "digits", MADE)
    after = job_events([a, {**b, "count": 2}, event(KIND, "digits", "C", "new")], "digits", MADE)
    assert [one.text for one in new_events(before, after)] == ["again", "new"]
    assert new_events(after, after) == []


def test_a_job_of_the_longest_name_has_labels_that_fit() -> None:
    assert len(f"{names.stem('d' * 63)}-evaluator-999-abcde") == 63
