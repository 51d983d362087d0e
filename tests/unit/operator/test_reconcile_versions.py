"""The ranks of a group are of one version, whatever the operator was told since they began."""

from typing import Any

import pytest

from tandem_operator import names
from tandem_operator.observed import Pod
from tandem_operator.pods import Images
from tandem_operator.reconcile import reconcile
from tests.support.worlds.operator_job import TASK, ended, heard, initialized, job, situation, surroundings, worker

NEWER = Images(operator="operator:2", trainer="trainer:2", evaluator="evaluator:2")


def images_of_workers(*workers: Pod, **spec: Any) -> list[str]:
    """What the workers run that are made after an upgrade of the operator."""
    of = job(status=initialized(), **{"workers": {"replicas": 3}, **spec})
    plan = reconcile(situation(of, surroundings(of, *workers), snapshot=heard()), NEWER)
    made = [one for one in plan.create_pods if one["metadata"]["labels"][names.ROLE] == names.WORKER]
    return [one["spec"]["containers"][0]["image"] for one in made]


def test_who_joins_a_group_runs_what_the_group_runs_also_after_an_upgrade() -> None:
    trains = worker(0, image="trainer:1")
    assert images_of_workers(trains, ended(1, image="trainer:1")) == ["trainer:1"] * 2


@pytest.mark.parametrize(
    "state", [{"started": None, "ready": False, "phase": "Pending", "waiting": "ImagePullBackOff"}, {"deleting": True}]
)
def test_with_nobody_left_of_it_a_group_begins_anew_with_the_newer_version(state: dict[str, Any]) -> None:
    assert set(images_of_workers(worker(0, image="trainer:1", **state))) == {"trainer:2"}
    assert set(images_of_workers(ended(0, image="trainer:1"))) <= {"trainer:2"}


def test_a_job_that_names_its_image_is_not_touched_by_that() -> None:
    trainer = {**TASK, "image": "mine:7"}
    assert set(images_of_workers(worker(0, image="mine:7"), trainer=trainer)) == {"mine:7"}
