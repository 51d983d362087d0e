"""What happens to pods, to the operator and to the number of replicas while a job trains, on a real cluster."""

from collections.abc import Iterator

import pytest

from tests.support.cluster.images import Images
from tests.support.cluster.operated import LONG, Job, Operator, manifest, seen, training_records
from tests.support.cluster.pods import Manifest, Namespace
from tests.support.processes import tandem


@pytest.fixture(scope="module")
def job(namespace: Namespace, operator: Operator) -> Iterator[Job]:
    """A job that trains; each test leaves it so."""
    found = Job(namespace, "long")
    workers = {"replicas": 2, "minReplicas": 1, "maxReplicas": 3}
    found.apply(manifest("long", trainer=LONG, workers=workers, elasticity={"growCooldownSeconds": 1}))
    found.trains()
    found.becomes(lambda: _is_whole(found.status, beyond=0), "its full size")
    yield found
    namespace("delete", "dtj", "long", "--wait=false")


@pytest.mark.timeout(400)
def test_a_killed_worker_is_replaced_and_training_goes_on(namespace: Namespace, job: Job) -> None:
    before, step, generation = job.live("worker"), job.step, job.status["generation"]
    namespace("delete", "pod", before[0], "--force", "--grace-period=0")
    job.becomes(lambda: len(set(job.live("worker")) - set(before)) == 1, "another worker")
    job.trains(beyond=step)
    job.becomes(lambda: _is_whole(job.status, beyond=generation), "its full size")
    assert seen(job, ["generation", "2 workers"])


@pytest.mark.timeout(400)
def test_a_killed_coordinator_comes_back_and_training_does_not_stop(namespace: Namespace, job: Job) -> None:
    workers, generation = job.live("worker"), job.status["generation"]
    before = job.live("coordinator")
    namespace("delete", "pod", *before, "--force", "--grace-period=0")
    job.becomes(lambda: job.live("coordinator") not in ([], before), "another coordinator")
    step = job.step
    job.trains(beyond=step)
    assert (job.live("worker"), job.status["generation"]) == (workers, generation), job.describe()


@pytest.mark.timeout(400)
def test_a_killed_evaluator_comes_back_and_training_does_not_notice(namespace: Namespace, job: Job) -> None:
    generation, before = job.status["generation"], job.live("evaluator")
    namespace("delete", "pod", *before, "--force", "--grace-period=0")
    job.becomes(lambda: job.live("evaluator") not in ([], before), "another evaluator")
    job.trains(beyond=job.step)
    assert job.status["generation"] == generation, job.describe()


@pytest.mark.timeout(400)
def test_an_operator_that_is_killed_takes_up_what_there_is(namespace: Namespace, job: Job, operator: Operator) -> None:
    before, generation = job.live("worker"), job.status["generation"]
    operator.kill()
    operator.start()
    job.trains(beyond=job.step)
    assert (job.live("worker"), job.status["generation"]) == (before, generation), job.describe()

    # What happened while there was none is made good as well.
    operator.kill()
    namespace("delete", "pod", before[0], "--force", "--grace-period=0")
    operator.start()
    job.becomes(lambda: before[0] not in job.live("worker") and len(job.live("worker")) == 2, "two workers")
    job.becomes(lambda: _is_whole(job.status, beyond=generation), "its full size")
    job.trains(beyond=job.step)


@pytest.mark.timeout(400)
def test_a_job_is_scaled_while_it_trains(namespace: Namespace, job: Job) -> None:
    coordinator = job.live("coordinator")
    namespace("scale", "dtj/long", "--replicas=3")
    job.becomes(lambda: job.status["workers"]["summary"] == "3/3", "three workers")
    job.trains(beyond=job.step)
    namespace("scale", "dtj/long", "--replicas=1")
    job.becomes(lambda: job.status["workers"]["summary"] == "1/1", "one worker")
    assert len(job.live("worker")) == 1
    step = job.trains(beyond=job.step)
    namespace("scale", "dtj/long", "--replicas=2")
    job.becomes(lambda: job.status["workers"]["summary"] == "2/2", "two workers")
    assert job.trains(beyond=job.step) > step
    assert job.live("coordinator") == coordinator, "the coordinator need not restart for that"


@pytest.mark.timeout(400)
def test_a_suspended_job_frees_its_pods_and_goes_on_where_it_was(namespace: Namespace, job: Job) -> None:
    job.trains(beyond=job.step)
    before = job.step
    stopped = tandem("stop", "long", "-n", namespace.name)
    assert stopped.returncode == 0, stopped.stderr
    assert job.status["phase"] == "Suspended"
    assert not any(job.pods(role) for role in ("worker", "coordinator", "evaluator"))
    saved = job.status["latestCheckpoint"]["step"]
    assert saved >= before - 50, "the group did not save before it left"
    assert f"long is suspended; saved at step {saved:,}. To resume it: kubectl patch" in stopped.stdout
    namespace("patch", "dtj/long", "--type=merge", "-p", '{"spec":{"runPolicy":{"suspend":false}}}')
    assert job.trains(beyond=saved) > saved
    job.becomes(lambda: len(job.live("evaluator")) == 1, "its evaluator")


@pytest.mark.timeout(400)
def test_an_object_that_somebody_removes_is_made_again(namespace: Namespace, job: Job) -> None:
    gone = ("configmap/long-job", "service/long-coordinator")
    before, generation = set(job.live("worker")), job.status["generation"]
    uids = ("get", *gone, "-o", "jsonpath={.items[*].metadata.uid}")
    old = set(namespace(*uids).split())
    namespace("delete", *gone, "--wait=true")
    job.becomes(lambda: len(set(namespace(*uids, check=False).split()) - old) == 2, "both, made again")
    # The service has another address now, which workers were told at their start.
    job.becomes(lambda: len(now := set(job.live("worker"))) == 2 and not now & before, "two other workers")
    job.becomes(lambda: _is_whole(job.status, beyond=generation), "a group of these")
    job.trains(beyond=job.step)


def _is_whole(status: Manifest, beyond: int) -> bool:
    """Whether a generation after that one has both workers: what stood there before it says so, too."""
    return bool(status["generation"] > beyond and status["workers"]["summary"] == "2/2")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", [("--force", "--grace-period=0"), ()], ids=["killed", "preempted"])
def test_ranks_that_keep_their_state_outlive_a_pod(
    namespace: Namespace, operator: Operator, images: Images, how: tuple[str, ...]
) -> None:
    job = Job(namespace, f"keeps-{'killed' if how else 'preempted'}")
    job.apply(
        manifest(
            job.name,
            trainer=LONG,
            evaluators={"replicas": 0},
            # Whatever is read again, or taken again, would show: nothing is ever saved.
            checkpoint={"everySteps": 10**9, "storage": {"size": "1Gi"}},
            elasticity={"onMembershipChange": "Regroup"},
        )
    )
    job.trains()
    job.becomes(lambda: _is_whole(job.status, beyond=0), "its full size")
    # The first one stays, whose rank writes the log.
    stays, lost = job.live("worker")
    generation = job.status["generation"]
    # On a slow machine the first group began without the second worker.
    before = namespace("logs", stays).count("without a restart")
    namespace("delete", "pod", lost, "--wait=false", *how)
    job.becomes(lambda: job.status["generation"] > generation + 1 and _is_whole(job.status, 0), "its full size again")
    job.trains(beyond=job.step)
    assert stays in job.live("worker")
    log = namespace("logs", stays)
    assert log.count("without a restart") == before + 2, log
    assert "from=None" in log
    # They save when all of them have to go.
    stopped = tandem("stop", job.name, "-n", namespace.name)
    assert "saved at step" in stopped.stdout, stopped.stderr
    records = training_records(job, images, "step")
    namespace("delete", "dtj", job.name, "--wait=false")
    steps = [record["step"] for record in records]
    assert sorted(steps) == [*range(1, len(steps) + 1)], "each step once"
