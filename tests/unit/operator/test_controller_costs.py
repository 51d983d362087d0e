"""What one job costs the API server and the operator."""

from collections import Counter

import pytest

from tandem.job.resource import DistributedTrainingJob
from tandem_operator import kinds, names, objects, pods, reconcile
from tandem_operator.job_memory import MAX_VALUES, Memo
from tandem_operator.reconcile import STATUS_INTERVAL_SECONDS, status_interval
from tests.support.worlds.operator_world import JOB, KEY, NAME, World, merged

OBJECTS = {"Secret": 1, "ConfigMap": 1, "PersistentVolumeClaim": 1, "Service": 1, "Pod": 4}


def life(world: World, looks: int) -> None:
    """So many looks, each with all the news there are; pods and the coordinator get on in between."""
    for _ in range(looks):
        world.tell(list(range(100)))
        world.look()
        world.cluster.tick()


def test_until_it_trains_a_job_costs_its_objects_two_writes_of_its_status_and_one_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    # Nothing is read before it is written.
    monkeypatch.setattr(world.cluster, "get", None)
    life(world, 6)

    assert world.cluster.objects[kinds.JOB, *KEY]["status"]["phase"] == "Running"
    written = Counter((verb, kind.name) for verb, kind, _ in world.cluster.written)
    assert written == {
        ("status", kinds.JOB.name): 2,
        **{("create", kind): count for kind, count in OBJECTS.items()},
    }
    assert world.cluster.told == ["Started"], "a generation is a group that trains"


def test_a_look_at_a_job_of_which_nothing_has_changed_parses_no_spec_and_makes_no_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    life(world, 6)
    done: Counter[str] = Counter()

    def counted(module: object, name: str) -> None:
        original = getattr(module, name)

        def call(*arguments: object) -> object:
            done[name] += 1
            return original(*arguments)

        monkeypatch.setattr(module, name, call)

    for module, name in ((objects, "digest"), (pods, "coordinator"), (pods, "evaluator")):
        counted(module, name)
    parse = DistributedTrainingJob.read
    monkeypatch.setattr(DistributedTrainingJob, "read", lambda data: done.update(["read"]) or parse(data))
    life(world, 5)
    assert done == {}

    world.cluster.edit(kinds.JOB, NAME, {"evaluators": {"template": {"metadata": {"labels": {"a": "b"}}}}})
    life(world, 1)
    assert done["read"] == 1
    assert done["digest"] > 0
    life(world, 6)
    (evaluator,) = [one for one in world.cluster.pods(names.EVALUATOR) if one["status"]["phase"] == "Running"]
    assert evaluator["metadata"]["labels"]["a"] == "b"


def test_a_template_is_merged_once_however_many_pods_are_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[str] = Counter()
    for role in (names.WORKER, names.EVALUATOR, names.COORDINATOR):
        original = getattr(pods, role)
        monkeypatch.setattr(pods, role, lambda *given, of=role, make=original: made.update([of]) or make(*given))
    digested = []
    digest = objects.digest
    monkeypatch.setattr(objects, "digest", lambda value: digested.append(value) or digest(value))
    world = World(
        job=merged(JOB, {"spec": {"workers": {"replicas": 100, "maxReplicas": 100}, "evaluators": {"replicas": 50}}})
    )
    life(world, 6)
    assert len(world.cluster.pods()) == 151
    assert made == {names.WORKER: 1, names.EVALUATOR: 1, names.COORDINATOR: 1}
    assert len(digested) == 6, "four objects, two templates"


def test_values_are_forgotten_when_the_spec_changes_and_when_there_are_many() -> None:
    memo, made = Memo(), []

    def once(spec: object, key: object) -> None:
        memo.once(spec, key, lambda: made.append(key))  # type: ignore[arg-type]

    one, other = object(), object()
    once(one, ["a", {}])
    once(one, ["a", {}])
    assert len(made) == 1
    once(other, ["a", {}])
    assert len(made) == 2
    for number in range(2 * MAX_VALUES):
        once(other, number)
    once(other, 2 * MAX_VALUES - 1)
    assert len(made) == 2 + 2 * MAX_VALUES
    once(other, 0)
    assert len(made) == 3 + 2 * MAX_VALUES


def test_what_changes_all_the_time_is_written_half_as_often_where_there_are_many_jobs() -> None:
    assert [status_interval(jobs) for jobs in (0, 500, 750, 1_000, 9_999)] == [10.0, 10.0, 15.0, 20.0, 20.0]
    assert STATUS_INTERVAL_SECONDS[1] + reconcile.POLL_INTERVAL_SECONDS[1] < 30.0, "no status is older"
