"""What one hostile or odd object does to the others: nothing, and it is told and counted once."""

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from tandem_operator import job_objects, kinds, names
from tandem_operator.api import ListPart
from tandem_operator.bounded import MAX_LINES, WINDOW_SECONDS, UnreadableObjects
from tandem_operator.informer import Cache, Informer, Key
from tandem_operator.kinds import Kind
from tandem_operator.observed import Pod, observe
from tests.support import manifests
from tests.support.worlds.operator_job import TASK

DIGITS = "1" * 5_000
"""More than Python makes a number of."""


def pod(name: str = "p", version: int = 1, job: str = "j", **annotations: Any) -> dict[str, Any]:
    labels = {names.JOB: job, names.ROLE: names.WORKER}
    metadata = {"name": name, "namespace": "n", "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": {**metadata, "labels": labels, "annotations": annotations}}


def job(name: str = "digits", version: int = 1, **spec: Any) -> dict[str, Any]:
    whole = manifests.manifest(name, namespace="n", trainer=TASK, **spec)
    whole["metadata"] |= {"uid": f"uid-{name}", "resourceVersion": str(version), "generation": version}
    return whole


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = {"a": found}
    return found


@pytest.mark.parametrize("digits", [DIGITS, "9" * 10, "٣", "-1", ""])
def test_a_number_that_nobody_of_ours_writes_is_none(digits: str) -> None:
    body = pod(**{names.FAILURES: digits, names.GROUP_SIZE: digits})
    body["metadata"]["labels"] |= {names.INDEX: digits, names.GROUP: "g"}
    found = observe(kinds.POD, body)
    assert isinstance(found, Pod)
    assert found.group is not None
    assert (found.index, found.failures, found.group.size) == (0, 0, 0)


class Lists:
    """An API server that lists what a test has put there."""

    def __init__(self, **objects: list[Any]) -> None:
        self.objects, self.version = objects, 10

    async def pages(self, kind: Kind, namespace: str = "", selector: str = "") -> Any:
        yield ListPart(self.objects.get(kind.plural, []), self.version)


async def listed(api: Any, cache: Cache) -> list[Key]:
    news: list[Key] = []
    await Informer(api, cache, news.append, ())._list_all()
    return news


@pytest.mark.parametrize(
    "bad",
    [
        pod("bad", **{names.FAILURES: DIGITS}),
        {},
        None,
        {"metadata": None},
        {"metadata": {"name": "x"}},
        {**pod("bad"), "status": {"conditions": [{}]}},
        {**pod("bad"), "status": "odd"},
        {"metadata": {**pod("bad")["metadata"], "labels": [], "resourceVersion": DIGITS}},
    ],
)
async def test_an_object_that_cannot_be_read_does_not_end_the_sweep(bad: Any) -> None:
    cache = Cache()
    news = await listed(Lists(pods=[pod("a"), bad, pod("b", job="other")]), cache)
    assert {("n", "j"), ("n", "other")} <= set(news)
    Informer(Lists(), cache, news.append, ()).handle(kinds.POD, "MODIFIED", bad or {})  # type: ignore[arg-type]


def test_it_is_told_and_counted_once_for_each_version(caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache()
    bad = {**pod("bad"), "status": "odd"}
    for body in (bad, bad, {**pod("bad", 2), "status": "odd"}):
        assert cache.upsert(kinds.POD, body) == []
    assert cache.unreadable.counts[kinds.POD.name] == 2
    assert [record.message.partition(" error")[0] for record in caplog.records] == [
        "event=unreadable kind=Pod object=n/bad"
    ] * 2


def test_thousands_of_them_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    told = UnreadableObjects(lambda: now)
    for number in range(5_000):
        told.note(kinds.POD, pod(str(number)), "x" * 10_000)
    assert len(caplog.records) == MAX_LINES
    assert max(len(record.message) for record in caplog.records) < 500
    now = WINDOW_SECONDS
    told.note(kinds.POD, pod("last"), "why")
    assert caplog.records[-2].message == f"event=unreadable-untold count={5_000 - MAX_LINES}"
    assert told.counts[kinds.POD.name] == 5_001


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (nested(9_000), "is nested more than"),
        ({"spec": [{} for _ in range(100_000)]}, "has more than"),
        ({"x" * 2_000_000: 1}, "has more than"),
    ],
)
def test_a_template_without_measure_is_not_kept_and_its_job_says_why(
    template: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache()
    body = job()
    body["spec"]["workers"] = {"template": template}
    assert cache.upsert(kinds.JOB, body) == [("n", "digits")]
    found = cache.job(("n", "digits"))
    assert found is not None
    with pytest.raises(job_objects.InvalidSpec, match=f"spec {why}"):
        job_objects.parsed(found)
    assert len(json.dumps(found)) < 1_000
    assert "event=unreadable kind=DistributedTrainingJob object=n/digits" in caplog.text


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (nested(40), "a pod template is nested more than 32 levels deep"),
        ({"spec": []}, "spec of a pod template must be a group of fields"),
        ({"metadata": {"labels": "x"}}, "metadata.labels of a pod template must be a group of fields"),
        ({"spec": {"containers": 5}}, "spec.containers of a pod template must be a list"),
        ({"spec": {"containers": [None, []]}}, r"spec.containers\[1\] of a pod template must be a group of fields"),
        ({"spec": {"containers": [{"resources": "x"}]}}, r"spec.containers\[0\].resources of a pod template must be"),
        ({"spec": {"containers": [{"resources": {"limits": 3}}]}}, r"\[0\].resources.limits of a pod template must be"),
        ({"spec": {"nodeSelector": ["gpu"]}}, "spec.nodeSelector of a pod template must be a group of fields"),
        ({"spec": {"affinity": {"nodeAffinity": 1}}}, "spec.affinity.nodeAffinity of a pod template must be a group"),
    ],
)
def test_a_template_that_is_none_is_refused_in_words(template: dict[str, Any], why: str) -> None:
    with pytest.raises(job_objects.InvalidSpec, match=why):
        job_objects.parsed(job(workers={"template": template}))


def test_nothing_but_what_is_needed_is_kept_of_a_status_without_measure() -> None:
    cache = Cache()
    conditions = [{"type": "Running", "status": "True", "message": "x" * 2**19}]
    cache.upsert(kinds.JOB, {**job(), "status": {"phase": "Succeeded", "conditions": conditions}})
    found = cache.job(("n", "digits"))
    assert found is not None
    assert found["status"] == {"phase": "Succeeded"}


def test_the_operator_parses_what_the_api_server_takes() -> None:
    script = """
import json
from tandem_operator import bounded
bounded.prepare()
for opened, closed in ('{"a":', "}"), ("[", "]"):
    json.loads(opened * 10_000 + "1" + closed * 10_000)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    "value", [nested(9_000), "x" * 1_000_000, 10**400, None, []], ids=["deep", "long", "1", "0", "[]"]
)
def test_of_a_pod_nothing_is_kept_that_no_api_server_writes(value: Any) -> None:
    cache = Cache()
    for field in ("name", "uid"):
        body = pod()
        body["metadata"][field] = value
        assert cache.upsert(kinds.POD, body) == []
    state = {"terminated": {"exitCode": value, "reason": value, "message": "x"}}
    status = {"phase": value, "containerStatuses": [{"name": names.WORKER, "restartCount": value, "state": state}]}
    body = {**pod(), "status": status}
    found = observe(kinds.POD, body)
    assert isinstance(found, Pod)
    body["metadata"]["labels"] |= {names.ROLE: value, names.GROUP: value, names.QUEUE: value}
    cache.upsert(kinds.POD, body)
    assert cache.children(("n", "j")).pods(names.WORKER, "") == []
    assert (found.code, found.restarts) == (None, 0)
    assert len(found.phase) <= 256


@pytest.mark.parametrize("field", ["name", "namespace", "uid"])
@pytest.mark.parametrize(
    "value", [[[]] * 400_000, "x" * 1_000_000, "", 1, None], ids=["lists", "long", "", "1", "null"]
)
def test_a_job_without_a_name_is_none(field: str, value: Any) -> None:
    cache = Cache()
    body = job()
    body["metadata"][field] = value
    assert cache.upsert(kinds.JOB, body) == []
    assert cache.job_keys() == []


@pytest.mark.parametrize("field", ["resourceVersion", "generation", "creationTimestamp", "deletionTimestamp"])
@pytest.mark.parametrize(
    "value", [nested(9_000), "x" * 1_000_000, 10**400, True, None], ids=["deep", "long", "1", "b", "0"]
)
def test_of_a_jobs_metadata_nothing_else_is_kept_than_what_an_api_server_writes(field: str, value: Any) -> None:
    cache = Cache()
    body = job()
    body["metadata"][field] = value
    cache.upsert(kinds.JOB, body)
    found = cache.job(("n", "digits"))
    assert found is not None
    assert {name: found["metadata"][name] for name in ("resourceVersion", "generation")} == {
        "resourceVersion": "" if field == "resourceVersion" else "1",
        "generation": 1,
    }
    assert found["metadata"].get(field, "") in ("", 1)
    assert ("deletionTimestamp" in found["metadata"]) == (field == "deletionTimestamp")


def test_a_pod_that_is_given_to_another_job_is_that_ones_alone() -> None:
    cache = Cache()
    cache.upsert(kinds.POD, pod(job="a"))
    assert cache.upsert(kinds.POD, pod(version=2, job="b")) == [("n", "b"), ("n", "a")]
    assert cache.children(("n", "a")).objects == {}
    assert cache.remove(kinds.POD, "n", "p", "uid-p") == ("n", "b")
    assert cache.children(("n", "b")).objects == {}


async def test_after_a_restore_of_etcd_what_is_listed_is_so(caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache()
    api = Lists(pods=[pod("a", 900), pod("gone", 950)], distributedtrainingjobs=[job(version=1_000)])
    api.version = 1_000
    await listed(api, cache)
    restored = job(version=40, workers={"replicas": 7})
    api.objects, api.version = {"pods": [pod("a", 30, job="b")], "distributedtrainingjobs": [restored]}, 50
    assert set(await listed(api, cache)) == {("n", "digits"), ("n", "b"), ("n", "j")}
    found = cache.job(("n", "digits"))
    assert found is not None
    assert found["spec"]["workers"] == {"replicas": 7}
    assert [thing.name for thing in cache.children(("n", "b")).objects.values()] == ["a"]
    assert cache.children(("n", "j")).objects == {}
    assert "event=versions-went-back kind=Pod known=950 listed=50" in caplog.text
    # From here on what watches tell is newer again.
    assert cache.upsert(kinds.POD, pod("a", 51, job="b", **{names.FAILURES: "3"})) == [("n", "b")]


async def test_a_list_does_not_undo_what_a_watch_told_meanwhile() -> None:
    cache = Cache()

    class Slow(Lists):
        async def pages(self, kind: Kind, namespace: str = "", selector: str = "") -> Any:
            cache.upsert(kinds.POD, pod("a", 12, **{names.FAILURES: "2"}))
            cache.upsert(kinds.POD, pod("new", 13))
            yield ListPart(self.objects.get(kind.plural, []), 10)

    await listed(Slow(pods=[pod("a", 9)]), cache)
    found = {thing.name: thing for thing in cache.children(("n", "j")).objects.values()}
    assert (found["a"].version, set(found)) == (12, {"a", "new"})


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tandem.operator")
