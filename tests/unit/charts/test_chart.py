"""The chart, as far as it can be read without helm: values, their comments and their schema agree.

What helm makes of it is in tests/cluster/test_chart_rendered.py.
"""

import json
import os
import re
import subprocess
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.wire import metrics
from tests.support import ROOT
from tools import helm_chart

CHART = ROOT / "charts/tandem"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
WHOLE = ("operator.resources", "operator.affinity", "mlflow.resources")
"""One value each, as Kubernetes has it."""


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema, or the one that it refers to."""
    if "$ref" not in schema:
        return schema
    found: dict[str, Any] = SCHEMA["definitions"][schema["$ref"].removeprefix("#/definitions/")]
    return found


def schemas(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema, with its place."""
    schema = resolved(schema)
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from schemas(child, f"{path}.{name}".removeprefix("."))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from schemas(schema[key], f"{path}[]")


def places(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Every value of values.yaml with its schema."""
    for name, value in values.items():
        place = f"{path}.{name}".removeprefix(".")
        child = resolved(schema["properties"][name])
        yield place, value, child
        if "properties" in child and place not in WHOLE:
            yield from places(value, child, place)


def test_chart_and_distribution_have_the_same_version() -> None:
    described = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert described["version"] == described["appVersion"] == project["version"]
    assert described["description"] == project["description"]


def test_every_value_has_a_schema_and_every_schema_a_value() -> None:
    known = {path for path, _, _ in places(VALUES, SCHEMA)}
    spoken = {path for path, _ in schemas(SCHEMA) if path and "[]" not in path and not path.startswith(WHOLE)}
    assert spoken - known == {"global"}
    assert known - spoken == set(WHOLE)


def test_a_group_takes_nothing_that_it_does_not_know() -> None:
    for path, schema in schemas(SCHEMA):
        if "properties" in schema:
            assert schema["additionalProperties"] is False, path


def test_defaults_are_what_the_schema_asks_for() -> None:
    types = {"string": str, "boolean": bool, "integer": int, "array": list, "object": dict}
    for path, value, schema in places(VALUES, SCHEMA):
        if "type" in schema:
            assert isinstance(value, types[schema["type"]]), path
        if "enum" in schema:
            assert value in schema["enum"], path
        if "pattern" in schema:
            assert re.search(schema["pattern"], value), path
        for one in value if isinstance(value, list) else ():
            items = resolved(schema["items"])
            assert one in items.get("enum", [one]), path


def test_every_value_is_on_the_page_and_one_without_a_comment_is_refused(tmp_path: Path) -> None:
    page = helm_chart.values_page()
    for path, value, schema in places(VALUES, SCHEMA):
        if "properties" not in schema or path in WHOLE:
            assert f"| `{path}` | `{json.dumps(value)}` |" in page, path
    entries, lines = helm_chart._entries, ["# one", "a: 1", "b: 2"]
    with pytest.raises(ValueError, match=r"values.yaml:3: there is no comment above 'b'"):
        list(entries(yaml.compose("\n".join(lines)), lines))


def test_every_value_is_used_by_a_template() -> None:
    text = "\n".join(path.read_text() for path in (CHART / "templates").iterdir())
    for path, _, schema in places(VALUES, SCHEMA):
        if "properties" not in schema or path in WHOLE:
            name = path.rpartition(".")[2]
            assert re.search(rf"\.{name}\b", text), path


def test_templates_and_pages_speak_of_values_that_there_are() -> None:
    known = {path for path, _, _ in places(VALUES, SCHEMA)}
    text = "\n".join(path.read_text() for path in (CHART / "templates").iterdir())
    used = set(re.findall(r"\.Values\.([A-Za-z.]+[A-Za-z])", text))
    groups = "|".join(name for name, value in VALUES.items() if isinstance(value, dict) and value)
    page = (ROOT / "docs/install.md").read_text()
    told = set(re.findall(rf"(?<![\w.])((?:{groups})\.(?!md\b)[A-Za-z.]+[A-Za-z])\b", page))
    assert len(used) > 20
    assert len(told) > 8
    assert used <= known
    assert told <= known


def test_the_crd_has_nothing_that_helm_would_take_for_a_template() -> None:
    assert "{{" not in (CHART / "files/crd.yaml").read_text()
    assert not (CHART / "crds").exists(), "helm installs what is in crds/ once and never upgrades it"


def taken_of_jobs(name: str) -> bool:
    """Whether Prometheus takes a series of that name of a job's pod."""
    template = (CHART / "templates/podmonitor.yaml").read_text()
    rules = yaml.safe_load(textwrap.dedent(template.split("metricRelabelings:\n")[1].split("{{-")[0]))
    by_name = [rule for rule in rules if rule.get("sourceLabels") == ["__name__"]]
    return all((rule["action"] == "keep") == bool(re.fullmatch(rule["regex"], name)) for rule in by_name)


def test_of_a_jobs_pod_is_taken_what_jobs_tell_and_nothing_of_the_operators() -> None:
    assert all(taken_of_jobs(metric.name) for metric in metrics.ALL)
    assert [metric.name for metric in metrics.OPERATOR if taken_of_jobs(metric.name)] == []
    assert not taken_of_jobs("kube_pod_info")


@pytest.mark.parametrize("name", ["deployment", "mlflow"])
def test_pods_of_the_chart_go_to_linux_nodes(name: str) -> None:
    """Windows nodes need not be tainted."""
    text = (CHART / "templates" / f"{name}.yaml").read_text()
    selectors = re.findall(r"nodeSelector:\n.*kubernetes\.io/os\W+linux", text)
    assert len(selectors) == text.count("kind: Deployment") == 1


@pytest.mark.parametrize(("address", "host"), [("10.0.0.7", "0.0.0.0"), ("fd00::7", "::")])
def test_the_mlflow_server_listens_where_its_pod_has_an_address(address: str, host: str, tmp_path: Path) -> None:
    text = (CHART / "templates/mlflow.yaml").read_text()
    (script,) = re.findall(r"- '(case .*)'\n", text)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    command = ["sh", "-c", script, "mlflow", "--port=5000"]
    environment = {"PATH": f"{tmp_path}:{os.defpath}", "POD_IP": address}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    assert said == f"-m mlflow server --host={host} --port=5000\n"
