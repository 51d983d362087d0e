"""What a real Prometheus answers to every query of a dashboard: for tests to judge, and for pictures."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.cluster.prometheus import Prometheus
from tools.dashboards.panels import NEEDS

MOMENTS = 160
"""Of each series over time."""


@dataclass(frozen=True)
class Period:
    """What is looked at."""

    start: float
    end: float
    """Seconds since the epoch."""
    window: str
    """What stands for Grafana's $__rate_interval."""

    @property
    def step(self) -> float:
        """Seconds between two moments."""
        return (self.end - self.start) / MOMENTS


@dataclass(frozen=True)
class Answer:
    """One query and what came of it."""

    query: str
    legend: str
    unit: str
    right: bool
    """Whether it is drawn against an axis on the right."""
    series: list[dict[str, Any]]
    """As Prometheus answers a range query: metric and values."""

    @property
    def is_empty(self) -> bool:
        return not any(math.isfinite(float(value)) for one in self.series for _, value in one["values"])


@dataclass(frozen=True)
class Panel:
    title: str
    kind: str
    unit: str
    place: dict[str, int]
    """Its grid position: x, y, w, h."""
    answers: list[Answer]
    stacked: bool = False

    @property
    def needs(self) -> str:
        """What it says that it needs, nothing mostly."""
        return next((need for need in NEEDS if self.title.endswith(f"({need})")), "")


@dataclass(frozen=True)
class Recording:
    title: str
    panels: list[Panel]
    marks: list[Answer]
    """Of its annotations."""


def record(dashboard: Path, prometheus: Prometheus, period: Period, variables: dict[str, str]) -> Recording:
    """Ask everything that the dashboard would ask.

    Args:
        variables: value of each of the dashboard's variables.
    """
    content = json.loads(dashboard.read_text())

    def ask(expr: str, legend: str, unit: str = "", right: bool = False, instant: bool = False) -> Answer:
        query = filled(expr, period, variables)
        if instant:
            found = prometheus.now(query, period.end)
            series = [{"metric": one["metric"], "values": [one["value"]]} for one in found]
        else:
            series = prometheus.over(query, period.start, period.end, period.step)
        return Answer(query, legend, unit, right, series)

    panels = []
    for panel in content["panels"]:
        if panel["type"] == "row":
            panels.append(Panel(panel["title"], "row", "", panel["gridPos"], []))
            continue
        defaults, answers = panel["fieldConfig"]["defaults"], []
        overrides = {
            one["matcher"]["options"]: {changed["id"]: changed.get("value") for changed in one["properties"]}
            for one in panel["fieldConfig"].get("overrides", [])
        }
        for target in panel["targets"]:
            own = overrides.get(target["refId"], {})
            unit = str(own.get("unit", defaults.get("unit", "")))
            right = own.get("custom.axisPlacement") == "right"
            instant = bool(target.get("instant"))
            answers.append(ask(target["expr"], target.get("legendFormat", ""), unit, right, instant))
        stacked = (defaults.get("custom") or {}).get("stacking", {}).get("mode") == "normal"
        panels.append(
            Panel(panel["title"], panel["type"], defaults.get("unit", ""), panel["gridPos"], answers, stacked)
        )
    marks = [ask(one["expr"], one["textFormat"]) for one in content.get("annotations", {}).get("list", [])]
    return Recording(content["title"], panels, marks)


def filled(expr: str, period: Period, variables: dict[str, str]) -> str:
    """A query as Grafana sends it."""
    values = {**variables, "__rate_interval": period.window, "__range": f"{period.end - period.start:.0f}s"}
    for name, value in values.items():
        expr = re.sub(rf"\${name}\b", value, expr)
    # $1 is what a regular expression has found, and the server's business.
    assert not re.search(r"\$(?!\d)", expr), expr
    return expr
