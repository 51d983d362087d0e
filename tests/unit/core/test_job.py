"""The DistributedTrainingJob: its defaults, and what is derived from them."""

from typing import Any

import pytest
from pydantic import ValidationError

from tandem.job.manifest.fields import dotted, named_fields, tree
from tandem.job.resource import DistributedTrainingJob, Elasticity, Evaluators, Workers
from tandem.wire.status import Members
from tests.support import manifests


def job(**spec: Any) -> DistributedTrainingJob:
    trainer = spec.pop("trainer", {"task": "image-classification"})
    return manifests.job("a", **({"trainer": trainer} | spec))


def test_a_task_is_all_a_job_must_name() -> None:
    spec = job().spec
    assert spec.trainer.images.model == "cnn"
    assert (spec.workers.replicas, spec.workers.min_replicas, spec.workers.most) == (1, 1, 1)
    assert spec.evaluation.processes == 1
    assert spec.checkpoint.interval_seconds == 60.0


def test_a_task_of_one_s_own_is_scored_by_its_loss_unless_told() -> None:
    own = {"task": "a.b:C"}
    assert (job(trainer=own).spec.evaluation.metric, job(trainer=own).spec.evaluation.direction) == ("loss", "Minimize")
    assert job(trainer=own).spec.evaluation.processes == 1
    assert job(trainer=own, evaluators={"replicas": 2}).spec.evaluation.metric == "loss"
    named = job(trainer=own, evaluators={"metric": "f1", "goal": "Maximize", "timeoutSeconds": 5.0}).spec.evaluation
    assert (named.metric, named.direction) == ("f1", "Maximize")
    assert job().spec.evaluation.metric == "accuracy"
    assert job(evaluators={"command": ["a.py"]}).spec.evaluation.metric == "accuracy"


def test_the_language_model_takes_loop_and_parameters_and_knows_which_way_its_scores_are_better() -> None:
    trainer = {"task": "causal-lm", "loop": {"epochs": 3}, "parameters": {"layers": 2}}
    spec = job(trainer=trainer).spec
    assert (spec.trainer.settings_of_loop.epochs, spec.evaluation.metric) == (3, "loss")
    for metric, goal in {"bitsPerByte": "Minimize", "perplexity": "Minimize", "accuracy": "Maximize"}.items():
        assert job(trainer=trainer, evaluators={"metric": metric}).spec.evaluation.direction == goal


def test_a_command_has_no_evaluators_unless_told_and_then_it_is_refused() -> None:
    assert job(trainer={"command": ["train.py"]}).spec.evaluation.processes == 0
    assert job(trainer={"command": ["train.py"]}, evaluators={"replicas": 0}).spec.evaluation.processes == 0
    with pytest.raises(ValidationError, match=r"set evaluators.command, or omit evaluators"):
        job(trainer={"command": ["train.py"]}, evaluators={"replicas": 1})


@pytest.mark.parametrize(
    ("workers", "processes"),
    [
        ({}, 1),
        ({"processesPerReplica": 3}, 3),
        ({"resources": {"limits": {"nvidia.com/gpu": 4}}}, 4),
        ({"resources": {"limits": {"nvidia.com/gpu": "2"}}}, 2),
        ({"resources": {"requests": {"nvidia.com/gpu": 2}}}, 2),
        ({"resources": {"limits": {"nvidia.com/gpu": 0}}}, 1),
        ({"resources": {"limits": {"nvidia.com/gpu": 4}}, "processesPerReplica": 1}, 1),
    ],
)
def test_there_is_one_process_for_each_gpu_unless_told_otherwise(workers: dict[str, Any], processes: int) -> None:
    assert job(workers=workers).spec.workers.processes == processes


@pytest.mark.parametrize("amount", ["500m", "1.5", "1e3", "1Ki"])
def test_gpus_come_whole(amount: str) -> None:
    with pytest.raises(ValidationError, match="GPUs come whole"):
        Workers(resources={"limits": {"nvidia.com/gpu": amount}})


@pytest.mark.parametrize("amount", ["2", "500m", "16Gi", "0.5", ".5", "1e3", "1E", 2, 0])
def test_amounts_are_written_as_kubernetes_writes_them(amount: str | int) -> None:
    assert Workers(resources={"limits": {"memory": amount}}).resources["limits"]["memory"] == amount


@pytest.mark.parametrize("amount", ["", "lots", "1 Gi", "-1", "1gi", -1, 0.5, True, None, "٣"])
def test_other_amounts_are_refused(amount: object) -> None:
    with pytest.raises(ValidationError):
        job(workers={"resources": {"limits": {"memory": amount}}})


def test_the_direction_of_the_best_score_follows_the_metric() -> None:
    assert Evaluators(metric="loss").direction == "Minimize"
    assert Evaluators(metric="macroF1").direction == "Maximize"
    assert Evaluators(metric="loss", goal="Maximize").direction == "Maximize"


def test_checkpoints_come_every_minute_only_if_nothing_else_is_said() -> None:
    assert job(checkpoint={"everySteps": 50}).spec.checkpoint.interval_seconds is None
    assert job(checkpoint={"everySteps": 50, "everySeconds": 5}).spec.checkpoint.interval_seconds == 5


@pytest.mark.parametrize("more", [{"everySteps": 50}, {"everySeconds": 5.0}])
def test_an_interval_that_is_chosen_excludes_one_that_is_given(more: dict[str, float]) -> None:
    assert job(checkpoint={"every": "Auto"}).spec.checkpoint.interval_seconds == 60.0, "until a save has been measured"
    with pytest.raises(ValidationError, match="every: Auto chooses the interval itself"):
        job(checkpoint={"every": "Auto", **more})


def test_not_a_number_and_infinity_are_refused() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValidationError):
            Elasticity(hang_seconds=value)


def test_members_tell_themselves_in_one_word() -> None:
    assert Members(desired=4, ready=3).summary == "3/4"
    assert Members.parse(Members(desired=4, ready=3).dump()).summary == "3/4"


@pytest.mark.parametrize("role", ["workers", "evaluators", "coordinator"])
@pytest.mark.parametrize(
    ("template", "name"),
    [
        ({"metadata": {"labels": {"kueue.x-k8s.io/pod-group-name": "x"}}}, "kueue.x-k8s.io/pod-group-name"),
        ({"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "x"}}}, "kueue.x-k8s.io/queue-name"),
        ({"metadata": {"annotations": {"kueue.x-k8s.io/pod-group-total-count": "9"}}}, "pod-group-total-count"),
        ({"metadata": {"labels": {"tandem.dev/job": "another"}}}, "tandem.dev/job"),
        ({"metadata": {"annotations": {"tandem.dev/failures": "9"}}}, "tandem.dev/failures"),
        ({"spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}}, "kueue.x-k8s.io/admission"),
    ],
)
def test_a_template_does_not_set_what_pods_are_found_and_queued_by(
    role: str, template: dict[str, Any], name: str
) -> None:
    with pytest.raises(ValidationError, match=f"must not set .*{name}.*runPolicy.queueName"):
        job(**{role: {"template": template}})


def test_a_template_may_set_any_other_label_and_gate() -> None:
    labels = {"kueue.x-k8s.io/priority-class": "urgent", "team": "vision"}
    annotations = {"kueue.x-k8s.io/podset-required-topology": "rack", "sidecar.istio.io/inject": "false"}
    gates = [{"name": "example.org/ready"}]
    template = {"metadata": {"labels": labels, "annotations": annotations}, "spec": {"schedulingGates": gates}}
    assert job(workers={"template": template}).spec.workers.template == template


def test_a_job_survives_being_written_and_read() -> None:
    original = job(workers={"replicas": 3, "template": {"spec": {"nodeSelector": {"a": None}}}})
    assert DistributedTrainingJob.parse(original.dump()).spec.workers.replicas == 3


def test_every_field_says_what_it_means() -> None:
    silent = [dotted(path) for path, node in named_fields(tree(DistributedTrainingJob)) if not node.description]
    assert silent == []


def test_texts_and_lists_that_rules_compare_have_an_upper_bound() -> None:
    """The API server prices `self.trainer == oldSelf.trainer` by the bounds, and refuses what has none."""
    boundless = [
        dotted(path)
        for path, node in named_fields(tree(DistributedTrainingJob))
        if path[:2] == ("spec", "trainer")
        and node.kind in ("text", "list")
        and not node.choices
        and not node.max_length
    ]
    assert boundless == []
