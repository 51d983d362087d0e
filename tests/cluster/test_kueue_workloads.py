"""Jobs that shrink in the queue of a real Kueue instead of being preempted, for GPUs that are only counted."""

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tandem.wire.reasons import Reason
from tests.support.cluster import ON_OUR_OWN, kueue
from tests.support.cluster.images import Images
from tests.support.cluster.operated import (
    LONG,
    Job,
    Operator,
    manifest,
    operated,
    reads_queues,
    sample_digests,
    training_records,
)
from tests.support.cluster.pinned import Pinned
from tests.support.cluster.pods import Namespace, restricted
from tests.support.planned import planned_samples
from tests.support.processes import tandem
from tests.support.waiting import until

pytestmark = [pytest.mark.full("operator", "coordinator", "trainer"), ON_OUR_OWN, pytest.mark.alone]
GPU = "nvidia.com/gpu"
QUEUE = "gpus"
QUOTA = 8
ASK_QUEUE = """
import json, os, urllib.request
bearer = {"Authorization": "Bearer " + os.environ["TANDEM_TOKEN"]}
with urllib.request.urlopen(urllib.request.Request("http://127.0.0.1:7070/status", headers=bearer)) as answer:
    print(json.dumps(json.load(answer)["status"].get("queue")))
"""
"""Prints the queue that a coordinator shows on its live page."""
ELASTIC = {
    **{"onMembershipChange": "Regroup", "growAfterSeconds": 1, "growCooldownSeconds": 1},
    # Eight ranks share few cores; that one of them is late is no loss.
    "lostAfterSeconds": 30,
}


@pytest.fixture(scope="module", params=[kueue.OLDEST, kueue.NEWEST], ids=lambda pinned: f"kueue {pinned.version}")
def version(request: pytest.FixtureRequest, kueue_programs: list[Path]) -> Pinned:
    """A version of Kueue."""
    pinned: Pinned = request.param
    return pinned


@pytest.fixture(scope="module")
def kueue_process(version: Pinned, tmp_path_factory: pytest.TempPathFactory) -> Iterator[kueue.Kueue]:
    with kueue.running(version, tmp_path_factory.mktemp("kueue")) as process:
        yield process


@pytest.fixture(scope="module")
def namespace(kueue_process: kueue.Kueue) -> Iterator[Namespace]:
    """One with a queue for eight GPUs."""
    with restricted() as found, reads_queues(found):
        kueue.queue(found, QUEUE, {GPU: str(QUOTA)})
        yield found


@pytest.fixture(scope="module")
def operator(namespace: Namespace, images: Images, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """An operator that looks after the namespace."""
    with operated(namespace, images, tmp_path_factory.mktemp("operator")) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_left(namespace: Namespace) -> Iterator[None]:
    """A test that has failed leaves the next one the whole quota."""
    yield
    namespace("delete", "dtj", "--all", "--wait=false")
    until(lambda: admitted(namespace) == 0, "no quota is held", 120.0)


def queued(name: str, least: int, most: int, **policy: object) -> dict[str, object]:
    workers = {"replicas": most, "minReplicas": least, "maxReplicas": most, "resources": {"limits": {GPU: 1}}}
    run_policy = {"queueName": QUEUE, **policy}
    return manifest(
        name, trainer=LONG, workers=workers, elasticity=ELASTIC, evaluators={"replicas": 0}, runPolicy=run_policy
    )


def size(job: Job) -> int:
    return int(job.status.get("worldSize", 0))


def has(job: Job, workers: int) -> None:
    job.becomes(lambda: size(job) == workers and len(job.live("worker")) == workers, f"a group of {workers}", 180.0)


def admitted(namespace: Namespace) -> int:
    """Number of workers that Kueue has admitted."""
    counts = [
        entry["count"]
        for body in json.loads(namespace("get", "workloads.kueue.x-k8s.io", "-o", "json"))["items"]
        for entry in (body.get("status", {}).get("admission") or {}).get("podSetAssignments", [])
    ]
    return sum(counts)


@pytest.mark.timeout(900)
def test_jobs_shrink_for_others_and_grow_again_and_none_of_them_ever_stops(
    namespace: Namespace, operator: Operator, urgent: str, images: Images
) -> None:
    first, second, third = (Job(namespace, name) for name in ("first", "second", "third"))
    first.apply(queued("first", 1, 6))
    has(first, 6)
    first.trains()
    # Both have priority 0. The second gets its minimum, and then a fair share.
    second.apply(queued("second", 1, 6))
    has(second, 4)
    has(first, 4)
    message = first.status["message"]
    assert "trains with 4 of 6 workers; 2 more wait in the queue gpus" in message, message
    assert Reason.PARTLY_ADMITTED in first.reasons
    before = [job.trains() for job in (first, second)]

    started = time.monotonic()
    third.apply(queued("third", 2, 2, priorityClassName=urgent))
    third.becomes(lambda: len(third.live("worker")) == 2, "its pods")
    print(f"pods of the third job run after {time.monotonic() - started:.1f} s")
    has(first, 3)
    has(second, 3)
    assert admitted(namespace) == QUOTA
    for job, step in zip((first, second), before, strict=True):
        job.trains(beyond=step)

    ended = time.monotonic()
    namespace("delete", "dtj", "third", "--wait=false")
    has(first, 4)
    has(second, 4)
    print(f"the others have their size again after {time.monotonic() - ended:.1f} s")
    for job in (first, second):
        assert job.status.get("restarts", 0) == 0, job.describe()
        assert not [event for event in job.events() if event.startswith("MemberLost")], job.events()

    # With nothing left above their minimum, a whole job gives way, saves, waits and goes on.
    fourth = Job(namespace, "fourth")
    fourth.apply(queued("fourth", 7, 7, priorityClassName=urgent))
    fourth.becomes(lambda: len(fourth.live("worker")) == 7, "its pods", 180.0)
    waiting = [job for job in (first, second) if not job.live("worker")]
    assert len(waiting) == 1
    assert "waits in the queue gpus for 1 worker" in waiting[0].status["message"]
    step = waiting[0].step
    namespace("delete", "dtj", "fourth", "--wait=false")
    has(first, 4)
    has(second, 4)
    assert waiting[0].trains(beyond=step) > step
    for job in (first, second):
        records = training_records(job, images, "step")
        steps = [record["step"] for record in records]
        assert set(steps) == set(range(1, max(steps) + 1)), "no step is lost"
        assert job is waiting[0] or len(steps) == max(steps), "who goes on takes none again"
        assert sample_digests(records) == planned_samples(max(steps))
        pauses = sorted(after["time"] - record["time"] for record, after in pairwise(records))
        print(f"{job.name}: {len(steps)} steps, the longest pauses {[round(pause, 2) for pause in pauses[-6:]]} s")
        namespace("delete", "dtj", job.name, "--wait=false")
    first.becomes(lambda: admitted(namespace) == 0, "nothing is held")


@pytest.mark.timeout(500)
def test_why_a_job_waits_is_said_in_one_sentence(namespace: Namespace, operator: Operator) -> None:
    large, lost = Job(namespace, "large"), Job(namespace, "lost")
    large.apply(queued("large", 9, 9))
    large.becomes(lambda: "for 9 workers" in large.status.get("message", ""), "what it waits for")
    large.becomes(lambda: "insufficient" in large.status["message"], "Kueue's reason")
    assert Reason.QUEUED in large.reasons
    whole = queued("lost", 1, 1)
    whole["spec"]["runPolicy"]["queueName"] = "nowhere"  # type: ignore[index]
    lost.apply(whole)
    lost.becomes(lambda: "nowhere doesn't exist" in lost.status.get("message", ""), "the queue that is missing")
    assert lost.status["queue"]["admitted"] == 0
    kueue.queue(namespace, "nowhere", {GPU: "1"})
    has(lost, 1)
    for job in (large, lost):
        namespace("delete", "dtj", job.name, "--wait=false")


@pytest.mark.timeout(500)
def test_a_job_that_waits_says_its_place_and_who_has_what_it_waits_for_and_names_no_other_tenant(
    namespace: Namespace, operator: Operator, version: Pinned
) -> None:
    first, second, third = (Job(namespace, name) for name in ("first", "second", "third"))
    with restricted() as elsewhere:
        kueue.local_queue(elsewhere, "theirs", of=f"{namespace.name}-{QUEUE}")
        elsewhere("create", "-f", "-", stdin=json.dumps(kueue.workload("confidential", "theirs", {GPU: "2"}, 7)))
        until(lambda: admitted(elsewhere) == 1, "a Workload of another tenant")
        first.apply(queued("first", 6, 6))
        first.becomes(lambda: first.status.get("queue", {}).get("admitted") == 6, "its quota")
        second.apply(queued("second", 2, 2))
        second.becomes(lambda: "1 more needed" in str(second.status) or "2 more needed" in str(second.status), "a wait")
        third.apply(queued("third", 1, 1))
        third.becomes(lambda: third.status.get("queue", {}).get("holders"), "who has the quota", 60.0)
        queue = third.status["queue"]
        assert queue["missing"] == [{"resource": GPU, "flavor": kueue.FLAVOR, "amount": 1.0}]
        (holder,) = queue["holders"]
        assert (holder["kind"], holder["name"], holder["amount"]) == ("DistributedTrainingJob", "first", 6.0)
        elsewhere_in_numbers = {"holders": 1, "amount": 2.0, "lowestPriority": 7, "highestPriority": 7}
        assert queue["otherNamespaces"] == elsewhere_in_numbers
        described = namespace("describe", "dtj", "third")
        assert "confidential" not in described
        assert elsewhere.name not in described
        if version is kueue.NEWEST:
            third.becomes(lambda: third.status["queue"].get("position") == 2, "the second place", 60.0)
            second.becomes(lambda: second.status["queue"].get("position") == 1, "the first place", 60.0)
        else:
            assert "position" not in queue, "the oldest Kueue does not tell here"
        shown = tandem("status", "third", f"--namespace={namespace.name}").stdout
        assert "DistributedTrainingJob first: 6 (priority 0" in shown, shown
        assert "1 job of other namespaces: 2 (priority 7)" in shown, shown
        (coordinator,) = third.live("coordinator")
        # The operator, too, can send it nothing before it answers.
        namespace("wait", "--for=condition=Ready", f"pod/{coordinator}", "--timeout=120s")
        asking = ("exec", coordinator, "--", "python3", "-c", ASK_QUEUE)
        third.becomes(lambda: json.loads(namespace(*asking)) == third.status["queue"], "the same on the live page")
        namespace("delete", "dtj", "first", "--wait=false")
        third.becomes(lambda: third.status["queue"]["admitted"] == 1, "its quota")
        assert third.status["queue"]["missing"] == []
    for job in (second, third):
        namespace("delete", "dtj", job.name, "--wait=false")


@pytest.mark.timeout(700)
def test_training_goes_on_while_kueue_or_the_operator_is_away_and_what_they_missed_is_done_then(
    namespace: Namespace, operator: Operator, urgent: str, kueue_process: kueue.Kueue
) -> None:
    job, third, fourth = (Job(namespace, name) for name in ("lasting", "third", "fourth"))
    whole = queued("lasting", 1, 8)
    whole["spec"]["workers"]["replicas"] = 4  # type: ignore[index]
    job.apply(whole)
    has(job, 4)
    step = job.trains()
    before = job.live("worker")

    kueue_process.kill()
    namespace("scale", "dtj/lasting", "--replicas=6")
    job.becomes(lambda: "Workload lasting-queue-" in job.status.get("message", ""), "why nothing is asked for")
    step = job.trains(beyond=step)
    assert job.live("worker") == before
    kueue_process.start()
    has(job, 6)

    operator.stop()
    third.apply(queued("third", 4, 4, priorityClassName=urgent))
    operator.start()
    third.becomes(lambda: len(third.live("worker")) == 4, "its pods")
    has(job, 4)
    # It dies once Kueue has decided, and before all that follows is done.
    fourth.apply(queued("fourth", 3, 3, priorityClassName=urgent))
    job.becomes(lambda: evicted(namespace, "lasting"), "an evicted Workload")
    operator.kill()
    operator.start()
    fourth.becomes(lambda: len(fourth.live("worker")) == 3, "its pods")
    has(job, 1)
    assert admitted(namespace) == QUOTA
    for other in (third, fourth):
        namespace("delete", "dtj", other.name, "--wait=false")
    has(job, 6)
    job.trains(beyond=step)
    assert job.status.get("restarts", 0) == 0, job.describe()
    assert set(before[:1]) <= set(job.live("worker")), "one has worked all the time"
    namespace("delete", "dtj", "lasting", "--wait=false")
    job.becomes(lambda: admitted(namespace) == 0, "nothing is held")


def evicted(namespace: Namespace, job: str) -> list[str]:
    """Names of a job's Workloads that Kueue has evicted."""
    return [
        body["metadata"]["name"]
        for body in json.loads(namespace("get", "workloads.kueue.x-k8s.io", "-o", "json"))["items"]
        if body["metadata"]["name"].startswith(job)
        and {("Evicted", "True")}
        & {(one["type"], one["status"]) for one in body.get("status", {}).get("conditions", [])}
    ]
