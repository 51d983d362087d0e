"""The dashboards' files: whole in the model of Grafana's SDK, and about metrics that there are."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.models.dashboard import Dashboard

from tandem.wire.metrics import ALL, OPERATOR
from tests.support import ROOT
from tools.dashboards import FILES
from tools.dashboards.panels import DCGM, NEEDS

DASHBOARDS = [name for name in FILES if name.endswith(".json")]
NAMES = {metric.name for metric in (*ALL, *OPERATOR)}


def content(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / name).read_text())
    return found


def panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in content(name)["panels"] if panel["type"] != "row"]


def expressions(name: str) -> Iterator[tuple[str, str]]:
    """Title and query."""
    for panel in panels(name):
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for annotation in content(name).get("annotations", {}).get("list", []):
        yield annotation["name"], annotation["expr"]


def metrics_in(expr: str) -> set[str]:
    found = set(re.findall(r"\b(?:tandem|DCGM)_\w+", expr))
    return {re.sub(r"(?<=tandem_step_seconds)_(bucket|sum|count)$", "", name) for name in found}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_one_in_the_model_of_the_sdk(name: str) -> None:
    parsed = Dashboard.from_json(content(name))
    assert parsed.uid == f"tandem-{Path(name).stem}"
    assert parsed.panels


@pytest.mark.parametrize("name", DASHBOARDS)
def test_queries_are_about_metrics_that_there_are(name: str) -> None:
    for title, expr in expressions(name):
        asked = metrics_in(expr)
        assert asked, title
        assert {one for one in asked if one.startswith("tandem")} <= NAMES, title
        assert any(one.startswith("DCGM") for one in asked) == title.endswith(f"({DCGM})"), title


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_panel_says_what_it_shows_has_a_query_and_the_chosen_data_source(name: str) -> None:
    for panel in panels(name):
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["targets"], panel["title"]
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_stand_side_by_side_and_none_upon_another(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in content(name)["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("name", DASHBOARDS)
def test_variables_are_declared_before_they_are_used(name: str) -> None:
    declared = {variable["name"] for variable in content(name)["templating"]["list"]}
    text = json.dumps(content(name))
    used = set(re.findall(r"\$\{?([a-zA-Z]\w*)", text))
    assert used <= declared, "those of Grafana itself begin with two underscores"
    assert {"datasource", "namespace"} <= declared


def test_what_needs_more_than_the_chart_brings_says_so() -> None:
    marked = {panel["title"] for name in DASHBOARDS for panel in panels(name) if "(needs" in panel["title"]}
    assert marked
    assert all(title.endswith(tuple(f"({needs})" for needs in NEEDS)) for title in marked)


def test_every_metric_is_in_a_dashboard_or_an_alert() -> None:
    shown = {one for name in DASHBOARDS for _, expr in expressions(name) for one in metrics_in(expr)}
    shown |= metrics_in((ROOT / "charts/tandem/files/alerts.yaml").read_text())
    unseen = {
        *("tandem_epoch", "tandem_rank_step", "tandem_straggler_ratio", "tandem_best_step"),
        *("tandem_evaluators_desired", "tandem_steps_total"),
        # Of tasks that count tokens.
        *("tandem_throughput_tokens_per_second", "tandem_throughput_learned_tokens_per_second"),
    }
    assert NAMES - shown == unseen, "show it, or name it here"
