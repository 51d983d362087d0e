"""The pure parts of `make bench-operator`: what it counts, and what it concludes."""

import pytest

from benchmarks.goals import Outcome
from benchmarks.operators import kubeflow, ours, table
from benchmarks.operators.__main__ import turns
from benchmarks.operators.cast import Cast
from benchmarks.operators.proxy import name_of
from benchmarks.operators.verdict import first_step, two_groups


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("GET", "/api/v1/namespaces/a/pods", "list pods"),
        ("GET", "/api/v1/pods", "list pods"),
        ("GET", "/api/v1/namespaces/a/secrets/b-token", "get secrets"),
        ("POST", "/api/v1/namespaces/a/events", "create events"),
        ("DELETE", "/apis/apps/v1/namespaces/a/deployments/b", "delete deployments"),
        (
            "PATCH",
            "/apis/tandem.dev/v1alpha1/namespaces/a/distributedtrainingjobs/b/status",
            "patch distributedtrainingjobs/status",
        ),
    ],
)
def test_a_request_is_named_by_verb_and_resource(method: str, path: str, name: str) -> None:
    assert name_of(method, path, watch=False) == name


def test_a_watch_is_not_taken_for_a_list() -> None:
    assert name_of("GET", "/apis/batch/v1/namespaces/a/jobs", watch=True) == "watch jobs"


def test_writes_of_statuses_and_events_are_counted_apart_and_reads_are_none() -> None:
    counts = {
        "create pods": 4,
        "delete deployments": 1,
        "patch x/status": 9,
        "create events": 2,
        "patch events": 1,
        "get secrets": 7,
    }
    assert table.writes(counts) == {"objects": 5, "statuses": 9, "events": 3}


def scaled(**changes: object) -> table.Record:
    whole = {
        "kind": "scale",
        "jobs": 2,
        "ages": {"oldest": 29.0},
        "peakMiB": 280.0,
        "startCpuSeconds": 0.04,
        "left": {},
        "lifeCounts": {"create pods": 24, "patch x/status": 900},
    }
    return whole | changes


def test_goals_that_are_reached_are_not_named() -> None:
    assert list(table.missed(scaled())) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ages": {"oldest": 31.0}}, "age 31.0"),
        ({"peakMiB": 290.0}, "memory 304.1"),
        ({"lifeCounts": {"create pods": 25}}, "writes 12.5"),
        ({"startCpuSeconds": 0.05}, "cpu 25.0"),
        ({"left": {"Service": 1}}, "left after all was deleted"),
    ],
)
def test_a_goal_that_is_missed_is_named(changes: dict[str, object], words: str) -> None:
    (missed,) = table.missed(scaled(**changes))
    assert words in missed


def test_another_operator_has_no_goals_but_to_leave_nothing() -> None:
    big = scaled(operator="Kubeflow", ages=None, peakMiB=900.0, lifeCounts={"create pods": 99})
    assert list(table.missed(big)) == []
    assert list(table.missed(big | {"left": {"Service": 1}})) == ["left after all was deleted: {'Service': 1}"]


def whole(**changes: object) -> table.Record:
    seconds = ("applied", "made", "running", "right", "ended", "deleted", "startCpu", "cpu", "steady")
    counts = {"startCounts": {"update x/status": 4}, "steadyCounts": {}}
    rest = {"steadyCores": 0.1, "complaints": 0, "load": [1.0, 1.0], "ages": {"oldest": 29.0, "median": 12.0}}
    return scaled(**dict.fromkeys((f"{name}Seconds" for name in seconds), 1.0), **rest, **counts) | changes


def test_a_column_tells_whose_operator_it_is_as_soon_as_there_are_two() -> None:
    alone, beside = table.scale([whole()]), table.scale([whole(), whole(operator="Kubeflow", ages=None)])
    assert alone.splitlines()[0] == "| what | 2 jobs |"
    assert beside.splitlines()[0] == "| what | Tandem, 2 jobs | Kubeflow, 2 jobs |"
    (age,) = [line for line in beside.splitlines() if line.startswith("| oldest status")]
    assert age.endswith("| 29.0 s (12.0) | tells no step |")


def outcomes(records: list[table.Record]) -> list[Outcome]:
    return [verdict.outcome for verdict in table.judge(records)]


def test_a_goal_of_one_record_that_is_missed_is_a_verdict_and_one_that_is_met_is_none() -> None:
    assert table.judge([scaled()]) == []
    (verdict,) = table.judge([scaled(peakMiB=290.0)])
    assert str(verdict) == "missed: Tandem, 2 jobs: memory 304.1, more than 300"


def test_statuses_are_right_no_later_than_the_other_operators_for_as_many_objects() -> None:
    own = scaled(rightSeconds=8.0, startCounts={"create pods": 8, "create events": 90})
    other = scaled(operator="Kubeflow", rightSeconds=5.0, startCounts={"create pods": 4}, ages=None)
    assert outcomes([own, other]) == [Outcome.MET]
    assert outcomes([own | {"rightSeconds": 11.0}, other]) == [Outcome.MISSED]


def rounds(fault: str, count: int = 5, **seconds: float) -> list[table.Record]:
    return [{"kind": "pods", "fault": fault, "round": number, "problem": ""} | seconds for number in range(count)]


@pytest.mark.parametrize(
    ("fault", "good", "bad"),
    [
        ("worker deleted", {"full": 4.0, "plainTorch": 2.1}, {"full": 4.2, "plainTorch": 2.1}),
        ("script's worker deleted", {"full": 4.0, "plainTorch": 2.1}, {"full": 4.2, "plainTorch": 2.1}),
        ("node", {"any": 2.5}, {"any": 2.6}),
        ("node and coordinator", {"any": 6.0}, {"any": 6.1}),
    ],
)
def test_the_median_of_a_faults_rounds_is_judged(fault: str, good: dict[str, float], bad: dict[str, float]) -> None:
    assert outcomes(rounds(fault, **good)) == [Outcome.MET]
    assert outcomes(rounds(fault, **bad)) == [Outcome.MISSED]
    assert outcomes(rounds(fault, 3, **bad) + rounds(fault, 2, **good)) == [Outcome.MISSED]
    assert outcomes(rounds(fault, 4, **bad)) == [Outcome.UNJUDGED]


def test_pods_are_there_and_step_soon_after_a_job_is_created() -> None:
    assert outcomes(rounds("created", pods=0.2, any=3.0, plainTorch=2.1)) == [Outcome.MET, Outcome.MET]
    assert outcomes(rounds("created", pods=0.4, any=3.2, plainTorch=2.1)) == [Outcome.MISSED, Outcome.MISSED]


def test_a_round_that_failed_is_named_and_counts_as_longer_than_anything() -> None:
    failed = [one | {"problem": "not within 120 s"} for one in rounds("node", 3)]
    verdicts = table.judge([*failed, *rounds("node", 2, any=2.0)])
    assert str(verdicts[0]) == "missed: pods: node 0: not within 120 s"
    assert str(verdicts[-1]) == "missed: node: the rest steps again: at most 2.5 s: median never of 5"


def test_operators_take_turns_in_the_order_asked_for_some_with_jobs_of_their_own() -> None:
    assert turns(["tandem", "kubeflow=25", "tandem"], [100, 7]) == [
        (ours.TANDEM, 100),
        (kubeflow.DEFAULT, 25),
        (ours.TANDEM, 100),
        (ours.TANDEM, 7),
        (kubeflow.DEFAULT, 25),
        (ours.TANDEM, 7),
    ]


@pytest.mark.parametrize("words", ["kube", "tandem=", "tandem=many", "=5"])
def test_an_operator_that_is_not_there_is_named(words: str) -> None:
    with pytest.raises(ValueError, match=f"'{words}' is none of tandem, kubeflow"):
        turns(["tandem", words], [1])


def of_pytorch(master: int, worker: int, *conditions: tuple[str, str]) -> dict[str, object]:
    return {
        "conditions": [{"type": kind, "status": holds} for kind, holds in conditions],
        "replicaStatuses": {"Master": {"active": master} if master else {}, "Worker": {"active": worker}},
    }


CREATED, RUNNING = ("Created", "True"), ("Running", "True")


@pytest.mark.parametrize(
    ("status", "phase", "right"),
    [
        ({}, "", False),
        (of_pytorch(0, 3, CREATED), "Created", False),
        (of_pytorch(1, 2, CREATED, RUNNING), "Running", False),
        (of_pytorch(1, 3, CREATED, RUNNING), "Running", True),
        (of_pytorch(1, 3, CREATED, ("Running", "False"), ("Succeeded", "True")), "Succeeded", False),
    ],
)
def test_a_status_of_kubeflow_is_right_once_it_tells_of_all_pods(
    status: dict[str, object], phase: str, right: bool
) -> None:
    assert (kubeflow.phase(status), kubeflow.right(status)) == (phase, right)


def test_a_status_of_ours_is_right_once_it_tells_a_step() -> None:
    early = {"phase": "Running", "progress": None}
    assert not ours.TANDEM.right(early)
    assert not ours.TANDEM.right({"phase": "Pending", "progress": {"step": 3}})
    assert ours.TANDEM.right(early | {"progress": {"step": 0}})


def test_jobs_of_both_kinds_have_as_many_pods() -> None:
    replicas = kubeflow.manifest(0)["spec"]["pytorchReplicaSpecs"].values()
    assert sum(replica["replicas"] for replica in replicas) == kubeflow.RAISED.pods == ours.TANDEM.pods


def test_jobs_of_both_kinds_ask_for_the_scheduler_that_does_not_exist() -> None:
    (template,) = {
        str(replica["template"]["spec"]["schedulerName"])
        for replica in kubeflow.manifest(0)["spec"]["pytorchReplicaSpecs"].values()
    }
    assert template == ours.TANDEM.manifest(0)["spec"]["runPolicy"]["schedulerName"]


def generation(number: int, size: int, first: float | None, last: float | None) -> dict[str, object]:
    return {"generation": number, "worldSize": size, "first": first, "last": last}


def test_the_first_step_after_a_fault_is_told_apart_from_the_first_at_full_size() -> None:
    found = [generation(1, 2, 10.0, 20.0), generation(2, 1, 21.5, 23.0), generation(3, 2, 24.0, 30.0)]
    assert (first_step(found, after=20.5), first_step(found, after=20.5, world_size=2)) == (21.5, 24.0)
    assert first_step(found, after=25.0) is None


def test_generations_without_a_step_are_no_group() -> None:
    assert two_groups([generation(1, 2, 10.0, 20.0), generation(2, 1, None, None), generation(3, 2, 20.1, 30.0)]) == []


def test_two_groups_at_once_are_found_also_if_they_are_not_neighbours() -> None:
    found = [generation(1, 1, 10.0, 40.0), generation(2, 1, None, None), generation(3, 2, 39.0, 50.0)]
    (words,) = two_groups(found)
    assert words.startswith("generation 1 made steps until 40.000, 3 from")


def test_a_step_of_a_simulated_job_tells_how_old_a_status_is() -> None:
    cast = Cast(2, started=1000.0)
    assert cast.age(cast.step(1060.0), 1075.0) == pytest.approx(15.0, abs=0.1)


def test_a_simulated_coordinator_answers_only_to_its_jobs_token_and_trains_with_all_workers_only() -> None:
    cast = Cast(2)
    cast.tokens["secret"] = "digits"
    assert cast.snapshot("guess") is None
    early = cast.snapshot("secret")
    cast.part("digits").workers |= {"a", "b"}
    late = cast.snapshot("secret")
    assert (early.status.phase, late.status.phase, late.status.world_size) == ("Pending", "Running", 2)
