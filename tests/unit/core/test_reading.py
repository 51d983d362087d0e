"""Reading manifests: what kubectl reads is read, and every mistake is told with its place and what was meant."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import ManifestError, Problem, UserError
from tandem.job.manifest.fields import suggestion, tree
from tandem.job.manifest.reading import apply_overrides, parse_job, read_job
from tandem.job.manifest.source import parse, parse_value
from tandem.job.resource import DistributedTrainingJob
from tests.support import ROOT, manifests

GOOD = """\
apiVersion: tandem.dev/v1alpha1
kind: DistributedTrainingJob
metadata:
  name: good
spec:
  trainer:
    task: image-classification
    config:
      optimizer:
        learningRate: 1e-3
"""


def job(text: str, *overrides: str) -> DistributedTrainingJob:
    return parse_job(parse(text.encode(), "job.yaml"), overrides)


def problems(text: str | bytes, *overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(ManifestError) as caught:
        parse_job(parse(text.encode() if isinstance(text, str) else text, "job.yaml"), overrides)
    return caught.value.problems


def the_problem(text: str | bytes, *overrides: str) -> Problem:
    found = problems(text, *overrides)
    assert len(found) == 1, found
    return found[0]


# What is taken


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_right(path: Path) -> None:
    assert read_job(path).metadata.name == path.stem


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E3", 1000),
        ("5.0", 5),
        (".5", 0.5),
        ("1_000", 1000),
        ("010", 8),
        ("0o10", 8),
        ("0x1F", 31),
        ("08", 8),
        ("-7", -7),
        ("9223372036854775807", 2**63 - 1),
        ("+7", 7),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("yes", True),
        ("off", False),
        ("null", None),
        ("~", None),
        ("'1'", "1"),
        ('"yes"', "yes"),
        ("1e", "1e"),
        ("0b", "0b"),
        ("1.2.3", "1.2.3"),
        ("10Gi", "10Gi"),
        ("{a: [1, two]}", {"a": [1, "two"]}),
    ],
)
def test_scalars_mean_what_kubectl_takes_them_for(text: str, value: object) -> None:
    read = parse_value(text)
    assert read == value
    assert type(read) is type(value)


def test_a_field_left_empty_counts_as_left_out() -> None:
    read = job(GOOD + "  workers:\n  evaluators: null\n  checkpoint:\n    everySteps:\n")
    assert read.spec.workers.replicas == 1
    assert read.spec.evaluators is None


def test_nulls_inside_a_template_stay() -> None:
    read = job(GOOD + "  workers:\n    template:\n      spec: {nodeSelector: null}\n")
    assert read.spec.workers.template == {"spec": {"nodeSelector": None}}


def test_anchors_and_merges_work() -> None:
    text = GOOD + "  workers: &group\n    replicas: 2\n    processesPerReplica: 2\n"
    text += "  evaluators:\n    <<: *group\n    replicas: 3\n"
    read = job(text).spec.evaluation
    assert (read.replicas, read.processes_per_replica) == (3, 2)


@pytest.mark.parametrize("text", ["---\n" + GOOD, GOOD + "---\n", "# c\n---\n" + GOOD + "...\n", "\ufeff" + GOOD])
def test_empty_documents_and_marks_around_the_one_are_passed_over(text: str) -> None:
    assert job(text).metadata.name == "good"


def test_windows_line_ends_are_read_and_counted() -> None:
    assert job(GOOD.replace("\n", "\r\n")).metadata.name == "good"
    assert the_problem((GOOD + "  worker: {}\n").replace("\n", "\r\n")).line == 11


def test_kubernetes_metadata_that_is_not_ours_is_kept() -> None:
    read = job(GOOD.replace("  name: good", "  name: good\n  uid: abc\n  finalizers: [x]"))
    assert read.metadata.name == "good"


# What is refused


def test_all_mistakes_are_told_at_once_in_the_order_of_the_lines() -> None:
    text = GOOD.replace("1e-3", "fast").replace("name: good", "name: Good") + (
        "  workers:\n    replicas: 0\n    bogus: 1\n  elasticity:\n    lostAfterSeconds: 1\n"
    )
    found = problems(text)
    assert [(problem.line, problem.field) for problem in found] == [
        (4, "metadata.name"),
        (10, "spec.trainer.config.optimizer.learningRate"),
        (12, "spec.workers.replicas"),
        (13, "spec.workers.bogus"),
        (15, "spec.elasticity.lostAfterSeconds"),
    ]


def test_an_unknown_field_does_not_hide_the_rules_of_its_group() -> None:
    text = GOOD + "  workers:\n    replica: 2\n    minReplicas: 3\n    maxReplicas: 9\n"
    assert [problem.field for problem in problems(text)] == ["spec.workers.replica", "spec.workers.minReplicas"]


def test_the_mark_stands_under_what_was_written() -> None:
    problem = the_problem(GOOD + "  workers: {replicas: 'four', minReplicas: 1}\n")
    assert problem.excerpt[problem.column - 1 :][: problem.width] == "'four'" == problem.given


def test_an_unknown_field_is_marked_at_its_name() -> None:
    problem = the_problem(GOOD + "  worker: {}\n")
    assert (problem.line, problem.column, problem.width, problem.suggestion) == (11, 3, 6, "workers")


def test_a_misspelt_field_is_not_also_called_missing() -> None:
    assert the_problem(GOOD.replace("apiVersion", "apiversion")).suggestion == "apiVersion"


def test_a_missing_field_is_told_at_the_group_that_lacks_it() -> None:
    problem = the_problem(GOOD + "    env:\n    - value: x\n")
    assert (problem.field, problem.line, problem.column) == ("spec.trainer.env[0].name", 12, 7)


@pytest.mark.parametrize("limits", ["[1]", "[[a]]", "{cpu: [1]}", "x", "3"])
def test_a_value_that_is_no_group_where_one_is_wanted_is_told_at_its_place(limits: str) -> None:
    problem = the_problem(GOOD + f"  workers: {{resources: {{limits: {limits}}}}}\n")
    assert problem.field.startswith("spec.workers.resources.limits")
    assert problem.line == 11


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("config: {epochs: '5'}", "'5' without quotes"),
        ("env: [{name: A, value: 5}]", "the same in quotes"),
        ("task: image-clasification", "image-classification"),
        ("task: causal_lm", "causal-lm"),
        ("config: {data: {name: fashion_mnist}}", "fashion-mnist"),
        ("config: {optimizer: {name: ADAM}}", "adam"),
        ("args: --lr 3 --name 'a b'", '[--lr, "3", --name, "a b"]'),
        ("args: --tags=[x] yes", '["--tags=[x]", "yes"]'),
        ("args: '--name \"a'", ""),
        ("env: A=b", ""),
    ],
)
def test_what_was_probably_meant_is_said(written: str, meant: str) -> None:
    text = GOOD.split("  trainer:")[0] + "  trainer:\n    task: image-classification\n    " + written + "\n"
    if written.startswith("args"):
        text = text.replace("task: image-classification", "command: [x]")
    if written.startswith("task"):
        text = text.replace("    task: image-classification\n", "", 1)
    assert the_problem(text).suggestion == meant.replace("'", "")


def test_a_command_line_is_taken_apart_into_its_words() -> None:
    text = GOOD.split("  trainer:")[0] + "  trainer:\n    command: python train.py\n"
    assert the_problem(text).suggestion == "[python, train.py]"


@pytest.mark.parametrize("amount", ["0.5", "'0.5'"])
def test_half_a_gpu_is_refused_and_nothing_is_suggested_that_would_be_refused(amount: str) -> None:
    problem = the_problem(GOOD + f"  workers: {{resources: {{limits: {{nvidia.com/gpu: {amount}}}}}}}\n")
    given = 'the text "0.5"' if "'" in amount else "0.5"
    field = "spec.workers.resources.limits.nvidia.com/gpu"
    assert (problem.suggestion, problem.field) == ("", field)
    assert problem.message == f"{field} must be a whole number, not {given}: devices come whole"


def test_a_zero_character_is_told_without_a_regular_expression() -> None:
    text = GOOD.replace("task: image-classification", 'command: [python, "a\\0b"]')
    assert the_problem(text).message.startswith("spec.trainer.command[1] must be text without zero characters, not ")


def test_half_a_core_is_suggested_in_quotes() -> None:
    assert the_problem(GOOD + "  workers: {resources: {limits: {cpu: 0.5}}}\n").suggestion == '"0.5"'


@pytest.mark.parametrize("name", ["a b/../c", "A", "..", "-a", "a_b", ""])
@pytest.mark.parametrize(
    "field",
    [
        "metadata.namespace",
        "spec.checkpoint.storage.claimName",
        "spec.runPolicy.queueName",
        "spec.runPolicy.priorityClassName",
    ],
)
def test_a_name_that_no_object_can_have_is_refused_with_the_rule(field: str, name: str) -> None:
    problem = the_problem(GOOD, f"{field}={name}")
    assert (problem.field, problem.given) == (field, name)
    assert "lower-case letters, digits" in problem.message


@pytest.mark.parametrize(
    ("parent", "wrong", "meant"),
    [
        ("spec", "replicas", "spec.workers.replicas or spec.evaluators.replicas"),
        ("spec", "suspend", "spec.runPolicy.suspend"),
        ("spec.workers", "min_replicas", "minReplicas"),
        ("spec.workers", "minreplicas", "minReplicas"),
        ("spec.workers", "nprocPerNode", "processesPerReplica"),
        ("spec.trainer", "epochs", "spec.trainer.loop.epochs"),
        ("spec.trainer.config", "lr", "spec.trainer.config.optimizer.learningRate"),
        ("spec.trainer.config", "batchSize", "globalBatchSize"),
        ("spec.checkpoint", "every_step", "everySteps"),
        ("spec.workers.resources", "limit", "limits"),
        ("", "name", "metadata.name or spec.trainer.loop.optimizer.name"),
        ("spec", "qqqq", ""),
    ],
)
def test_the_nearest_right_name_is_found_anywhere_in_the_tree(parent: str, wrong: str, meant: str) -> None:
    path = tuple(parent.split(".")) if parent else ()
    assert suggestion(tree(DistributedTrainingJob), path, wrong) == meant


def outcome(text: bytes) -> DistributedTrainingJob | ManifestError:
    try:
        return parse_job(parse(text, "f"))
    except ManifestError as error:
        return error


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_with_a_place(text: str) -> None:
    found = outcome(text.encode("utf-8", "surrogatepass"))
    assert isinstance(found, ManifestError)
    assert all(problem.message and problem.file == "f" for problem in found.problems)


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_NAMES = st.sampled_from(["spec", "trainer", "workers", "replicas", "config", "task", "env", "name", "limits", "x"])
_ANY = st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=4))


@given(st.dictionaries(st.sampled_from(["trainer", "workers", "evaluators", "checkpoint", "x"]), _ANY))
def test_whatever_stands_in_the_spec_never_ends_in_a_stack_trace(spec: dict[str, Any]) -> None:
    head = {"apiVersion": "tandem.dev/v1alpha1", "kind": "DistributedTrainingJob", "metadata": {"name": "a"}}
    found = outcome(json.dumps(head | {"spec": spec}).encode())
    assert isinstance(found, DistributedTrainingJob) or found.problems


# Files


def test_a_missing_file_names_the_one_that_was_probably_meant(tmp_path: Path) -> None:
    (tmp_path / "digits.yaml").write_text(GOOD)
    with pytest.raises(UserError, match=r"digit\.yaml does not exist; did you mean .*digits\.yaml\?"):
        read_job(tmp_path / "digit.yaml")


@pytest.mark.parametrize(
    ("make", "message"), [("folder", "is a folder"), ("nul", "cannot be read"), ("long", "cannot")]
)
def test_what_is_no_file_is_named(tmp_path: Path, make: str, message: str) -> None:
    path = {"folder": str(tmp_path), "nul": "a\0b", "long": "x" * 5000}[make]
    with pytest.raises(UserError, match=message):
        read_job(path)


def test_a_pipe_can_be_a_manifest(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, GOOD.encode())
    os.close(write)
    try:
        assert read_job(f"/dev/fd/{read}").metadata.name == "good"
    finally:
        os.close(read)


# Settings from the command line


@pytest.mark.parametrize(
    ("setting", "get", "value"),
    [
        ("spec.workers.replicas=3", lambda s: s.workers.replicas, 3),
        ("workers.replicas=3", lambda s: s.workers.replicas, 3),
        (
            "trainer.config.optimizer.learningRate=1e-4",
            lambda s: s.trainer.settings_of_loop.optimizer.learning_rate,
            1e-4,
        ),
        ("trainer.config.compile=true", lambda s: s.trainer.settings_of_loop.compile, True),
        ("evaluators.policy=Every", lambda s: s.evaluation.policy, "Every"),
        ("trainer.image=7", lambda s: s.trainer.image, "7"),
        ("trainer.env[0].name=A", lambda s: s.trainer.env[0].name, "A"),
        ("trainer.env.0.name=A", lambda s: s.trainer.env[0].name, "A"),
        ("trainer.env=[{name: A, value: b=c}]", lambda s: s.trainer.env[0].value, "b=c"),
        ("trainer.config=null", lambda s: s.trainer.config, None),
        ("workers.resources.limits.nvidia.com/gpu=2", lambda s: s.workers.processes, 2),
        (
            "workers.template.spec.nodeSelector.a\\.b=c",
            lambda s: s.workers.template["spec"]["nodeSelector"]["a.b"],
            "c",
        ),
    ],
)
def test_a_setting_changes_its_field(setting: str, get: Any, value: object) -> None:
    assert get(job(GOOD, setting).spec) == value


def test_metadata_can_be_set_and_the_last_setting_counts() -> None:
    read = job(GOOD, "metadata.name=a", "metadata.name=b", "metadata.labels.team.x/y=z")
    assert (read.metadata.name, read.metadata.labels) == ("b", {"team.x/y": "z"})


def test_settings_leave_the_data_they_were_given_alone() -> None:
    data = {"spec": {"workers": {"replicas": 1}}}
    assert apply_overrides(data, ["workers.replicas=2"]) == {"spec": {"workers": {"replicas": 2}}}
    assert data == {"spec": {"workers": {"replicas": 1}}}


@pytest.mark.parametrize(
    ("setting", "message", "meant"),
    [
        ("trainer.config.epoch=3", "unknown field epoch in spec.trainer.config", "spec.trainer.config.epochs"),
        ("epochs=3", "unknown field epochs in spec", "spec.trainer.loop.epochs"),
        ("worker.replicas=3", "unknown field worker in spec", "spec.workers.replicas"),
        ("workers.min_replicas=1", "unknown field min_replicas", "spec.workers.minReplicas"),
        ("workers.replicas", "takes path=value", ""),
        ("=3", "takes path=value", ""),
        ("workers.replicas=", "lacks a value", ""),
        ("workers.replicas=[1", "a list whose ] is missing", ""),
        ("workers.replicas=0", "must be a whole number from 1", ""),
        ("workers.replicas=two", "must be a whole number from 1", ""),
        ("workers.minReplicas=2", "minReplicas must not be greater", ""),
        ("evaluators.policy=every", "must be one of Latest, Every", "Every"),
        ("trainer.env[3].name=A", "has 0 entries", ""),
        ("workers.replicas.x=1", "unknown field x", ""),
    ],
)
def test_a_wrong_setting_is_told_like_a_wrong_field(setting: str, message: str, meant: str) -> None:
    problem = the_problem(GOOD, setting)
    assert problem.place == "--set"
    assert problem.excerpt == setting
    assert message in problem.message
    assert problem.suggestion == meant


def test_all_wrong_settings_are_told_at_once() -> None:
    assert len(problems(GOOD, "a=1", "b=2")) == 2


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"pretrained": "m", "dpo": True}, "unknown field dpo in spec.trainer.parameters; preference tuning is for"),
        ({"beta": 0.1}, "unknown field beta in spec.trainer.parameters; preference tuning is for the trainers of TRL"),
        ({"pretrained": "m", "max_length": 64}, "unknown field max_length in spec.trainer.parameters"),
        ({"pretrained": "m", "lora": {"rnk": 3}}, "unknown field rnk in spec.trainer.parameters.lora"),
        ({"pretrained": "m", "length": "64"}, "spec.trainer.parameters.length must be a whole number from 8 to"),
        ({"pretrained": "m", "data": {"path": "a", "test": 0.9}}, "data.test must be a number, greater than 0 and"),
        ({"pretrained": "m", "data": {}}, "spec.trainer.parameters.data: give exactly one of path and dataset"),
        ({"pretrained": "m", "layers": 3}, "layers belongs to the small model"),
        ({"width": 30}, "spec.trainer.parameters: width must be a multiple of twice the 4 heads"),
    ],
)
def test_parameters_of_causal_lm_are_checked_without_torch(parameters: dict[str, Any], said: str) -> None:
    """Otherwise a rank finds it, after torch has started and a cluster has given its nodes."""
    _refuses("causal-lm", parameters, said)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"modle": "cnn"}, "unknown field modle in spec.trainer.parameters"),
        ({"model": "cnnn"}, "spec.trainer.parameters.model must be one of cnn, baby-cnn"),
        ({"data": {"name": "digits", "samples": 4}}, "samples is only for the synthetic data set"),
        ({"data": {"name": "synthetic", "imageSize": 4}}, "model cnn needs images of at least 6×6 pixels"),
        ({"epochs": 3}, "unknown field epochs in spec.trainer.parameters"),
    ],
)
def test_parameters_of_images_are_checked_without_torch(parameters: dict[str, Any], message: str) -> None:
    _refuses("image-classification", parameters, message)


def _refuses(task: str, parameters: dict[str, Any], message: str) -> None:
    text = json.dumps(manifests.manifest(trainer={"task": task, "parameters": parameters}))
    with pytest.raises(ManifestError) as caught:
        parse_job(parse(text.encode(), "job.json"))
    (problem,) = caught.value.problems
    assert message in problem.message
    assert problem.line == 1
    # Of a task of the user's own only that task knows.
    own = json.dumps(manifests.manifest(trainer={"task": "a:B", "parameters": parameters}))
    assert parse_job(parse(own.encode(), "job.json")).spec.trainer.parameters == parameters
