"""The alerts' file: sound, about metrics that there are, and each with a runbook. Whether each fires is promtool's to
say, in tests/cluster/test_alerts.py."""

import re
from typing import Any

import pytest
import yaml

from tandem.wire.metrics import ALL, OPERATOR
from tests.support import ROOT

GROUPS: list[dict[str, Any]] = yaml.safe_load((ROOT / "charts/tandem/files/alerts.yaml").read_text())["groups"]
RULES = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
PAGE = (ROOT / "docs/alerts.md").read_text()


@pytest.mark.parametrize("name", RULES)
def test_an_alert_is_about_metrics_that_there_are(name: str) -> None:
    asked = set(re.findall(r"\btandem_\w+", RULES[name]["expr"]))
    assert asked
    assert asked <= {metric.name for metric in (*ALL, *OPERATOR)}


@pytest.mark.parametrize("name", RULES)
def test_an_alert_has_a_runbook_that_says_what_to_look_at(name: str) -> None:
    page, _, anchor = RULES[name]["annotations"]["runbook_url"].partition("#")
    assert (page, anchor) == ("docs/alerts.md", name.lower())
    section = PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert section.strip().startswith("**"), "what it means comes first"
    assert "\n- " in section
    assert "`" in section


def test_the_page_is_about_these_alerts_and_no_others() -> None:
    assert re.findall(r"^## (\w+)$", PAGE, re.MULTILINE) == list(RULES)


@pytest.mark.parametrize("name", RULES)
def test_an_alert_says_how_bad_it_is_and_of_which_job(name: str) -> None:
    rule = RULES[name]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert {"summary", "description", "runbook_url"} == set(rule["annotations"])
    if "Operator" not in name:
        assert "{{ $labels.namespace }}/{{ $labels.job }}" in rule["annotations"]["summary"]
