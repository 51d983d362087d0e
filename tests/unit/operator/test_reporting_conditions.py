"""What other tools make of a job's conditions: kstatus, and with it Flux and `kubectl wait`, and Argo CD's Lua."""

from typing import Any

import lupa
import pytest

from tandem.wire.status import Condition, Status
from tandem_operator import kinds, names
from tandem_operator.api import RequestRefused
from tandem_operator.observed import Pod
from tandem_operator.plan import ReconcilePlan
from tandem_operator.reporting import OWNED_CONDITIONS, stalled_status
from tests.support import ROOT, manifests
from tests.support.worlds.operator_job import (
    NOW,
    decided,
    ended,
    heard,
    initialized,
    job,
    surroundings,
    worker,
)
from tests.support.worlds.operator_world import KEY, LOOP, World

LUA = ROOT / "charts/tandem/files/argocd-health.lua"
GENERATION = 7
FOREIGN = {"type": "example.com/Billed", "status": "True", "reason": "Paid", "message": "by the team"}


def concerning(phase: str, *workers: Pod, status: dict[str, Any] | None = None, **spec: Any) -> ReconcilePlan:
    """What is decided about a job whose coordinator says that phase."""
    of = job(status=status or initialized(), **spec)
    said = None if phase == "Silent" else heard(phase)
    return decided(of, surroundings(of, *workers), snapshot=said, generation=GENERATION)


def new() -> Status:
    of = job()
    return decided(of, generation=GENERATION).status


def failed() -> Status:
    return concerning("Failed", worker(0), worker(1)).status


def succeeded() -> Status:
    old = {"phase": "Draining", "completionTime": "1970-01-12T13:00:00Z"}
    return concerning("Succeeded", status=initialized(**old), evaluators={"replicas": 0}).status


def suspended(*workers: Pod) -> Status:
    return concerning("Running", *workers, runPolicy={"suspend": True}).status


def unreadable() -> Status:
    return stalled_status(Status(), GENERATION, "InvalidSpec", "spec.novelty: Extra inputs are not permitted", NOW)


PHASES = [
    ("new", new, "InProgress", "Progressing"),
    ("starting", lambda: concerning("Starting", worker(0)).status, "InProgress", "Progressing"),
    ("running", lambda: concerning("Running", worker(0), worker(1)).status, "Current", "Healthy"),
    ("restarting", lambda: concerning("Restarting", worker(0), worker(1)).status, "InProgress", "Progressing"),
    ("draining", lambda: concerning("Draining", worker(0), worker(1)).status, "Current", "Healthy"),
    ("succeeded", succeeded, "Current", "Healthy"),
    ("failed", failed, "Failed", "Degraded"),
    ("saving, to be suspended", lambda: suspended(worker(0), worker(1)), "InProgress", "Progressing"),
    ("suspended", suspended, "Current", "Suspended"),
    ("unreadable", unreadable, "Failed", "Degraded"),
]


def whole(status: Status, generation: int = GENERATION) -> dict[str, Any]:
    """The job's object as the API server has it."""
    return {**manifests.manifest("digits"), "metadata": {"name": "digits", "generation": generation}} | {
        "status": status.dump()
    }


def kstatus(of: dict[str, Any]) -> str:
    """How kstatus judges a kind that it does not know (sigs.k8s.io/cli-utils, pkg/kstatus/status:
    checkGenericProperties, then checkReadyCondition)."""
    status = of.get("status", {})
    if status.get("observedGeneration", of["metadata"]["generation"]) != of["metadata"]["generation"]:
        return "InProgress"
    for one in status.get("conditions", []):
        if one["type"] == "Reconciling" and one["status"] == "True":
            return "InProgress"
        if one["type"] == "Stalled" and one["status"] == "True":
            return "Failed"
    ready = next((one["status"] for one in status.get("conditions", []) if one["type"] == "Ready"), "True")
    return "Current" if ready == "True" else "InProgress"


def argocd(of: dict[str, Any]) -> tuple[str, str]:
    """What the script for Argo CD says, run by a real Lua."""
    lua = lupa.LuaRuntime(unpack_returned_tuples=True)
    lua.globals().obj = lua.table_from(of, recursive=True)
    found = lua.execute(LUA.read_text())
    return found["status"], found["message"]


@pytest.mark.parametrize(("status", "verdict", "health"), [one[1:] for one in PHASES], ids=[one[0] for one in PHASES])
def test_kstatus_and_argo_cd_judge_every_phase_as_people_would(status: Any, verdict: str, health: str) -> None:
    of = whole(status())
    assert kstatus(of) == verdict
    assert argocd(of)[0] == health
    changed = whole(status(), GENERATION + 1)
    assert (kstatus(changed), argocd(changed)[0]) == ("InProgress", "Progressing")


def test_argo_cd_is_told_why() -> None:
    assert argocd({"metadata": {"generation": 1}}) == ("Progressing", "the operator has not seen it yet")
    assert argocd(whole(failed()))[1].startswith("TrainingFailed: ")
    assert argocd(whole(unreadable()))[1] == "InvalidSpec: spec.novelty: Extra inputs are not permitted"


def test_a_job_that_does_not_work_as_it_is_written_has_stalled() -> None:
    of, said = job(status=initialized()), heard("Failed").model_copy(update={"reason": "InvalidConfiguration"})
    plan = decided(of, surroundings(of, ended(0, code=78, message="no such model")), snapshot=said)
    (stalled,) = (one for one in plan.status.conditions if one.type == "Stalled")
    assert (stalled.status, stalled.reason) == ("True", "InvalidConfiguration")


def test_an_autoscaler_is_told_how_workers_are_found() -> None:
    assert new().selector == "tandem.dev/job=digits,tandem.dev/role=worker"
    labels = {names.JOB: "digits", names.ROLE: names.WORKER}
    assert new().selector == ",".join(f"{key}={value}" for key, value in labels.items())


def test_conditions_of_other_writers_are_kept_as_they_are() -> None:
    status = initialized()
    status["conditions"].append(FOREIGN)
    plan = concerning("Running", worker(0), worker(1), status=status)
    assert plan.status.conditions[-1] == Condition.parse(FOREIGN)
    assert {one.type for one in plan.status.conditions[:-1]} <= set(OWNED_CONDITIONS)
    later = stalled_status(plan.status, GENERATION, "InvalidSpec", "novelty", NOW)
    assert later.conditions.count(Condition.parse(FOREIGN)) == 1


def test_a_condition_that_somebody_writes_meanwhile_is_not_lost() -> None:
    world = World()
    LOOP.run(world.cluster.patch_status(kinds.JOB, *KEY, {"conditions": [FOREIGN]}))
    again_in = world.look()
    assert again_in is not None
    assert again_in <= 1.0, "it is written at the next look"
    world.resync()
    types = {one.type for one in world.status.conditions}
    assert {FOREIGN["type"], "Initialized", "Running", "Ready", "Reconciling"} <= types


@pytest.mark.parametrize(("code", "stalled"), [(422, True), (400, True), (403, False)])
def test_what_the_api_server_will_never_take_is_stalled_and_what_it_may_take_later_is_not(
    code: int, stalled: bool
) -> None:
    world, words = World(), 'spec.containers[0].resources.limits: Invalid value: "2"'
    world.cluster.refuses = lambda verb, place, body: (
        RequestRefused(code, "Invalid", words)
        if (verb, place[0]) == ("create", kinds.POD) and names.WORKER in place[2]
        else None
    )
    for _ in range(4):
        world.relist()
        world.look()
        world.cluster.tick()
    found = {one["type"]: one for one in world.cluster.objects[kinds.JOB, *KEY]["status"]["conditions"]}
    assert (found.get("Stalled", {}).get("status") == "True") == stalled
    assert (found.get("Reconciling", {}).get("status") == "True") != stalled
    assert words in found["Stalled" if stalled else "Reconciling"]["message"]
    of = world.cluster.objects[kinds.JOB, *KEY]
    assert (kstatus(of), argocd(of)[0]) == (("Failed", "Degraded") if stalled else ("InProgress", "Progressing"))
