"""The generated files: fresh, and in the dialects that the API server and editors understand."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from tandem.job.manifest.fields import dotted, named_fields, tree
from tandem.job.resource import DistributedTrainingJob
from tandem.processes.exitcode import ExitCode
from tandem_cli.commands import run
from tests.support import ROOT
from tools import FILES
from tools.crd import COLUMNS, crd, editor_schema
from tools.reference import LOGS, described, exits_page, job_page

SCHEMA: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def check(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools", "--root", str(root), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}[]")


def at(path: str) -> dict[str, Any]:
    return dict(nodes(SCHEMA))[f".{path}"]


@pytest.mark.parametrize("name", FILES)
def test_generated_files_are_fresh(name: str) -> None:
    assert (ROOT / name).read_text() == FILES[name](), "run: make generate"


def test_the_table_of_exit_codes_has_each_of_them_and_the_run_ends_with_those_that_it_says() -> None:
    rows = [line.split(" | ") for line in exits_page().splitlines() if line.startswith("| ") and "`" in line]
    table = {int(row[0].removeprefix("| ")): row for row in rows if row[0].removeprefix("| ").isdecimal()}
    assert {code: row[2] for code, row in table.items()} == {code.value: f"`{code.name}`" for code in ExitCode}
    assert all(len(row[3]) > 20 for row in table.values())
    ends = {run._exit_code(code.value) for code in ExitCode} | {ExitCode.USAGE}
    assert ends == {code for code, row in table.items() if row[1] == "yes"}


def test_a_default_that_the_api_server_has_stored_under_config_stays() -> None:
    assert at("spec.trainer.config.rewindOn")["default"] == "Spikes"
    assert "default" not in at("spec.trainer.loop.rewindOn")  # it depends on the task


@pytest.mark.parametrize("group", ["config", "loop"])
def test_the_api_server_refuses_matrices_of_an_image_model_that_are_split_in_both_forms(group: str) -> None:
    rules = [rule["rule"] for rule in at("spec.trainer")["x-kubernetes-validations"]]
    assert [rule for rule in rules if f"self.{group}.tensorParallel == 1" in rule]


def test_stale_files_are_named_and_end_the_check_with_1(tmp_path: Path) -> None:
    assert check(tmp_path).returncode == 0
    assert check(tmp_path, "--check").returncode == 0
    stale = tmp_path / "docs/reference/job.md"
    stale.write_text(stale.read_text().replace("epochs", "eras"))
    result = check(tmp_path, "--check")
    assert (result.returncode, result.stdout) == (1, "docs/reference/job.md is stale; run: make generate\n")
    assert check(tmp_path).returncode == 0
    assert stale.read_text() == job_page()


def test_the_crd_file_is_the_crd() -> None:
    text = (ROOT / "charts/tandem/files/crd.yaml").read_text()
    assert yaml.safe_load(text) == json.loads(json.dumps(crd()))
    assert "&id" not in text


def test_the_schema_is_structural() -> None:
    """What the API server demands: a type everywhere but at int-or-string, no references, no unions, no null."""
    for path, node in nodes(SCHEMA):
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path
        assert not {"$ref", "$defs", "title", "const", "oneOf", "allOf", "nullable", "propertyNames"} & set(node), path
        assert "anyOf" not in node or node.get("x-kubernetes-int-or-string"), path
        assert node.get("default", 0) is not None, path
        assert node.get("exclusiveMinimum", True) is True, path
        assert node.get("exclusiveMaximum", True) is True, path
        assert not ("properties" in node and "additionalProperties" in node), path


def test_every_field_of_the_models_is_in_the_crd_and_described() -> None:
    known = dict(nodes(SCHEMA))
    for path, node in named_fields(tree(DistributedTrainingJob)):
        if path[0] == "spec":
            assert known["." + dotted(path).replace("[0]", "[]")]["description"] == node.description


def test_bounds_are_in_the_dialect_of_openapi_3_0() -> None:
    rate = at("spec.trainer.loop.optimizer.learningRate")
    assert (rate["minimum"], rate["exclusiveMinimum"]) == (0, True)
    momentum = at("spec.trainer.loop.optimizer.momentum")
    assert (momentum["minimum"], momentum["maximum"], momentum["exclusiveMaximum"]) == (0, 1, True)
    assert "exclusiveMinimum" not in momentum


def test_a_bound_with_a_fraction_is_a_rule_too_for_the_api_server_cuts_it_off() -> None:
    heartbeat = at("spec.elasticity.heartbeatSeconds")
    assert heartbeat["minimum"] == 0.1
    assert [rule["rule"] for rule in heartbeat["x-kubernetes-validations"]] == ["self >= 0.1"]


def test_the_default_of_a_group_keeps_its_rules_as_it_stands() -> None:
    assert at("spec.workers")["default"] == {"minReplicas": 1, "replicas": 1, "resources": {}, "template": {}}
    assert at("spec.checkpoint")["default"]["storage"] == {"retain": True, "shared": True}
    assert "default" not in at("spec.checkpoint.storage.accessModes"), "the operator is told it when it is installed"
    assert at("spec.workers.replicas")["default"] == 1
    assert "default" not in at("spec.evaluators"), "the operator chooses it by the task"
    assert "default" not in at("spec.workers.maxReplicas")


def test_templates_keep_what_they_hold_and_amounts_are_int_or_string() -> None:
    assert at("spec.workers.template")["x-kubernetes-preserve-unknown-fields"] is True
    limits = at("spec.workers.resources.limits")
    assert limits["additionalProperties"]["x-kubernetes-int-or-string"] is True


def test_rules_of_the_models_are_in_the_crd_with_the_field_they_point_at() -> None:
    rules = at("spec.workers")["x-kubernetes-validations"]
    assert {
        "rule": "self.minReplicas <= self.replicas",
        "message": "minReplicas must not be greater than replicas",
        "fieldPath": ".minReplicas",
    } in rules
    for path, node in nodes(SCHEMA):
        for rule in node.get("x-kubernetes-validations", ()) if node.get("type") == "object" else ():
            inner = node
            for name in rule["fieldPath"].removeprefix(".").split("."):
                assert name in inner["properties"], path
                inner = inner["properties"][name]


def test_fields_that_cannot_change_have_a_transition_rule() -> None:
    (rule,) = (rule for rule in at("spec")["x-kubernetes-validations"] if "oldSelf" in rule["rule"])
    assert rule["rule"] == "self.trainer == oldSelf.trainer"
    (rule,) = (rule for rule in at("spec.checkpoint")["x-kubernetes-validations"] if "oldSelf" in rule["rule"])
    assert rule["rule"].startswith("has(self.storage) == has(oldSelf.storage) && ")


def test_scale_and_columns_point_at_fields_that_there_are() -> None:
    version = crd()["spec"]["versions"][0]
    # A filter takes some of a list.
    paths = [re.sub(r"\[\?\(.*\)\]", "[]", column[2]) for column in COLUMNS] + list(
        version["subresources"]["scale"].values()
    )
    known = dict(nodes(SCHEMA))
    assert [path for path in paths if path not in known] == [".metadata.creationTimestamp"]


def test_a_column_says_of_which_checkpoint_it_is_and_there_is_one_for_the_reason() -> None:
    assert [name for name, _, path, *_ in COLUMNS if "Checkpoint" in path] == ["Best", "Best-Checkpoint"]
    assert "Reason" in [name for name, *_ in COLUMNS]


def test_conditions_are_a_list_that_appliers_merge_by_type() -> None:
    assert at("status.conditions")["x-kubernetes-list-map-keys"] == ["type"]
    assert "type" in at("status.conditions[]")["required"]


def test_editors_complete_choices_and_refuse_unknown_fields() -> None:
    workers = editor_schema()["properties"]["spec"]["properties"]["workers"]
    assert workers["additionalProperties"] is False
    assert "minReplicas must not be greater than replicas" in workers["description"]
    evaluators = editor_schema()["properties"]["spec"]["properties"]["evaluators"]
    assert evaluators["properties"]["policy"]["enum"] == ["Latest", "Every"]
    assert editor_schema()["properties"]["metadata"]["additionalProperties"] is True


def test_the_job_page_names_every_field_and_its_links_lead_somewhere() -> None:
    page = job_page()
    for path, _ in named_fields(tree(DistributedTrainingJob)):
        assert f"`{path[-1]}`" in page
    anchors = {
        "".join(letter for letter in line.lower() if letter.isalnum())
        for line in page.splitlines()
        if line.startswith("## ")
    }
    links = {part.split(")")[0] for part in page.split("](#")[1:]}
    assert links
    assert links <= anchors


def test_every_field_of_every_line_of_a_log_says_what_it_is() -> None:
    for _, _, union in LOGS:
        for record in get_args(union):
            fields = {field.name: field.meaning for field in described(record)}
            assert set(fields) == {field.alias for field in record.model_fields.values()} - {"kind", "time"}
            assert all(fields.values()), f"{record.__name__}: {fields}"
