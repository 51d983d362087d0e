"""Each alert fires when it should and is quiet when it should be, as promtool plays it."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import ROOT
from tests.support.cluster.prometheus import program

RULES = ROOT / "charts/tandem/files/alerts.yaml"
WHOSE = 'job="bert",namespace="lab"'
LABELS = {"job": "bert", "namespace": "lab"}
RUNS = f'tandem_phase{{{WHOSE},phase="Running",pod="p"}}'
HOURS = "x180"


@dataclass(frozen=True)
class Case:
    """What Prometheus has read, every minute, and whether an alert comes of it after so many minutes."""

    alert: str
    why: str
    series: dict[str, str]
    minutes: int
    fires: bool
    more: str = ""
    """The reason that it is told with."""


def of(name: str, more: str = "") -> str:
    return f'{name}{{{WHOSE},pod="p"{more}}}'


STATE = "tandem_operator_job_state_seconds"
SERVICE = 'namespace="tandem-system",job="tandem-operator-metrics",pod="o"'
OTHER = 'namespace="team",job="tandem-operator-metrics",pod="q"'


def state(phase: str, reason: str) -> str:
    return f'{STATE}{{{WHOSE},phase="{phase}",reason="{reason}",pod="o"}}'


CASES = [
    Case(
        "TandemScriptIdle",
        "it waits for ever",
        {RUNS: f"1{HOURS}", of("tandem_ranks_idle_seconds"): f"0+60{HOURS}"},
        30,
        True,
    ),
    Case(
        "TandemScriptIdle",
        "for ten minutes",
        {RUNS: f"1{HOURS}", of("tandem_ranks_idle_seconds"): f"0+60{HOURS}"},
        12,
        False,
    ),
    Case("TandemScriptIdle", "it works", {RUNS: f"1{HOURS}", of("tandem_ranks_idle_seconds"): f"0{HOURS}"}, 60, False),
    Case("TandemJobStalled", "it never made a step", {state("Starting", "Starting"): f"0+60{HOURS}"}, 60, True),
    Case("TandemJobStalled", "it starts", {state("Starting", "Starting"): f"0+60{HOURS}"}, 20, False),
    Case("TandemJobStalled", "a script restarts", {state("Restarting", "MemberLost"): f"0+60{HOURS}"}, 60, True),
    Case(
        "TandemJobFailed",
        "it does not start",
        {state("Failed", "DoesNotStart"): f"0+60{HOURS}"},
        5,
        True,
        "DoesNotStart",
    ),
    Case("TandemJobFailed", "two days ago", {state("Failed", "Diverged"): f"172800+60{HOURS}"}, 5, False),
    Case("TandemJobFailed", "it runs", {state("Running", "Running"): f"0+60{HOURS}"}, 5, False),
    Case(
        "TandemJobPending",
        "no room for long",
        {state("Pending", "Unschedulable"): f"0+60{HOURS}"},
        60,
        True,
        "Unschedulable",
    ),
    Case("TandemJobPending", "no room for a while", {state("Pending", "Unschedulable"): f"0+60{HOURS}"}, 20, False),
    Case("TandemJobPending", "it is queued", {state("Pending", "SchedulingGated"): f"0+60{HOURS}"}, 60, False),
    Case(
        "TandemRestartStorm",
        "the first failure where one is forgiven",
        {of("tandem_restart_budget"): f"1{HOURS}", of("tandem_restart_budget_used"): f"1{HOURS}"},
        10,
        False,
    ),
    Case(
        "TandemOperatorNotReconciling",
        "one of two is gone",
        {
            f"tandem_operator_last_list_seconds{{{SERVICE}}}": "30x20",
            f"tandem_operator_last_list_seconds{{{OTHER}}}": f"30{HOURS}",
        },
        60,
        True,
        "operator",
    ),
    Case(
        "TandemOperatorNotReconciling",
        "one of two compares nothing",
        {
            f"tandem_operator_last_list_seconds{{{SERVICE}}}": f"0+60{HOURS}",
            f"tandem_operator_last_list_seconds{{{OTHER}}}": f"30{HOURS}",
        },
        60,
        True,
        "operator",
    ),
    Case(
        "TandemJobStalled",
        "no step for longer and longer",
        {RUNS: f"1{HOURS}", of("tandem_step_age_seconds"): f"0+60{HOURS}"},
        30,
        True,
    ),
    Case(
        "TandemJobStalled",
        "a step now and then",
        {RUNS: f"1{HOURS}", of("tandem_step_age_seconds"): f"400{HOURS}"},
        30,
        False,
    ),
    Case(
        "TandemJobStalled",
        "the job waits for room",
        {
            of("tandem_phase", ',phase="Pending"'): f"1{HOURS}",
            RUNS: f"0{HOURS}",
            of("tandem_step_age_seconds"): f"0+60{HOURS}",
        },
        30,
        False,
    ),
    Case("TandemLossUseless", "training went back", {of("tandem_rewinds_total"): "0x20 1x160"}, 30, True),
    Case("TandemLossUseless", "it went back long ago", {of("tandem_rewinds_total"): "0x20 1x160"}, 120, False),
    Case("TandemSavesFail", "the disk is full", {of("tandem_saves_failed_in_a_row"): "0x20 1+1x160"}, 30, True),
    Case(
        "TandemSavesFail",
        "one failed, the next did not",
        {of("tandem_saves_failed_in_a_row"): "0x20 1x3 0x150"},
        22,
        False,
    ),
    Case(
        "TandemEvaluationFailed",
        "a checkpoint cannot be read",
        {of("tandem_evaluations_total", ',result="failed"'): "0x20 1x160"},
        30,
        True,
    ),
    Case(
        "TandemEvaluationFailed",
        "checkpoints are skipped",
        {of("tandem_evaluations_total", ',result="skipped"'): "0+1x180"},
        30,
        False,
    ),
    Case(
        "TandemWorseThanBase",
        "three checkpoints are worse",
        {of("tandem_evaluation_worse_than_base"): "0x20 3x160"},
        30,
        True,
    ),
    Case(
        "TandemWorseThanBase",
        "a later one is no worse",
        {of("tandem_evaluation_worse_than_base"): "3x20 0x160"},
        30,
        False,
    ),
    Case("TandemLogLinesLost", "the disk is full", {of("tandem_log_lines_lost_total"): "0x20 0+50x160"}, 30, True),
    Case("TandemLogLinesLost", "all are written", {of("tandem_log_lines_lost_total"): f"0{HOURS}"}, 30, False),
    Case("TandemLossRising", "it rises", {RUNS: f"1{HOURS}", of("tandem_loss"): "1x60 1+0.05x120"}, 100, True),
    Case("TandemLossRising", "it falls", {RUNS: f"1{HOURS}", of("tandem_loss"): "3-0.01x180"}, 100, False),
    Case(
        "TandemLossRising",
        "it rises after training has ended",
        {RUNS: f"0{HOURS}", of("tandem_loss"): "1x60 1+0.05x120"},
        100,
        False,
    ),
    Case(
        "TandemRestartStorm",
        "workers fail",
        {of("tandem_restarts_total", ',reason="WorkerFailed"'): "0x20 0+1x160"},
        60,
        True,
    ),
    Case(
        "TandemRestartStorm",
        "two nodes are lost",
        {of("tandem_restarts_total", ',reason="MemberLost"'): "0x20 2x160"},
        25,
        False,
    ),
    Case(
        "TandemRestartStorm",
        "the job is scaled again and again",
        {of("tandem_restarts_total", ',reason="TargetChanged"'): "0x20 0+1x160"},
        60,
        False,
    ),
    Case(
        "TandemRestartStorm",
        "the budget is nearly used",
        {of("tandem_restart_budget"): f"10{HOURS}", of("tandem_restart_budget_used"): f"8{HOURS}"},
        10,
        True,
    ),
    Case(
        "TandemRestartStorm",
        "there is no budget, and no failure",
        {of("tandem_restart_budget"): f"0{HOURS}", of("tandem_restart_budget_used"): f"0{HOURS}"},
        10,
        False,
    ),
    Case(
        "TandemCheckpointTooOld",
        "nothing is saved any more",
        {
            RUNS: f"1{HOURS}",
            of("tandem_checkpoint_age_seconds"): f"0+60{HOURS}",
            of("tandem_checkpoint_interval_seconds"): f"300{HOURS}",
        },
        60,
        True,
    ),
    Case(
        "TandemCheckpointTooOld",
        "one an hour was asked for",
        {
            RUNS: f"1{HOURS}",
            of("tandem_checkpoint_age_seconds"): f"0+60{HOURS}",
            of("tandem_checkpoint_interval_seconds"): f"3600{HOURS}",
        },
        60,
        False,
    ),
    Case("TandemEvaluatorsBehind", "one waits", {of("tandem_evaluation_wait_seconds"): f"0+60{HOURS}"}, 60, True),
    Case(
        "TandemEvaluatorsBehind",
        "none waits for long",
        {of("tandem_evaluation_wait_seconds"): f"900{HOURS}"},
        60,
        False,
    ),
    Case(
        "TandemGPUsIdle",
        "hardly used",
        {RUNS: f"1{HOURS}", of("tandem_rank_gpu_utilization_ratio", ',rank="0"'): f"0.04{HOURS}"},
        30,
        True,
    ),
    Case(
        "TandemGPUsIdle",
        "one of two works",
        {
            RUNS: f"1{HOURS}",
            of("tandem_rank_gpu_utilization_ratio", ',rank="0"'): f"0.04{HOURS}",
            of("tandem_rank_gpu_utilization_ratio", ',rank="1"'): f"0.9{HOURS}",
        },
        30,
        False,
    ),
    Case(
        "TandemVolumeNearlyFull",
        "a twentieth is free",
        {of("tandem_volume_bytes"): f"1000{HOURS}", of("tandem_volume_free_bytes"): f"50{HOURS}"},
        10,
        True,
    ),
    Case(
        "TandemVolumeNearlyFull",
        "one checkpoint fits, and no second",
        {
            of("tandem_volume_bytes"): f"1000{HOURS}",
            of("tandem_volume_free_bytes"): f"400{HOURS}",
            of("tandem_checkpoint_bytes"): f"300{HOURS}",
        },
        10,
        True,
    ),
    Case(
        "TandemVolumeNearlyFull",
        "there is room",
        {
            of("tandem_volume_bytes"): f"1000{HOURS}",
            of("tandem_volume_free_bytes"): f"400{HOURS}",
            of("tandem_checkpoint_bytes"): f"100{HOURS}",
        },
        10,
        False,
    ),
    Case(
        "TandemOperatorNotReconciling",
        "it compares nothing",
        {'tandem_operator_last_list_seconds{pod="o"}': f"0+60{HOURS}"},
        30,
        True,
    ),
    Case("TandemOperatorNotReconciling", "it is gone", {}, 10, True),
    Case(
        "TandemOperatorNotReconciling",
        "another one holds its Lease",
        {
            'tandem_operator_last_list_seconds{pod="o"}': f"30{HOURS}",
            'tandem_operator_leads{pod="o"}': f"0{HOURS}",
        },
        30,
        True,
    ),
    Case(
        "TandemOperatorNotReconciling",
        "it acts in one of its namespaces",
        {
            'tandem_operator_last_list_seconds{pod="o"}': f"30{HOURS}",
            'tandem_operator_leads{exported_namespace="a"}': f"0{HOURS}",
            'tandem_operator_leads{exported_namespace="b"}': f"1{HOURS}",
        },
        30,
        False,
    ),
    Case(
        "TandemOperatorNotReconciling",
        "it compares every minute",
        {'tandem_operator_last_list_seconds{pod="o"}': f"30{HOURS}"},
        30,
        False,
    ),
    Case(
        "TandemOperatorErrors",
        "half fails",
        {
            'tandem_operator_reconcile_errors_total{pod="o"}': f"0+5{HOURS}",
            'tandem_operator_reconciles_total{pod="o"}': f"0+10{HOURS}",
        },
        60,
        True,
    ),
    Case(
        "TandemOperatorErrors",
        "one in twenty fails",
        {
            'tandem_operator_reconcile_errors_total{pod="o"}': f"0+1{HOURS}",
            'tandem_operator_reconciles_total{pod="o"}': f"0+20{HOURS}",
        },
        60,
        False,
    ),
]


def rules() -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def play(case: Case, folder: Path) -> subprocess.CompletedProcess[str]:
    """Let promtool judge. Words for people are left out of the rules: it would compare them letter by letter."""
    bare = [{key: value for key, value in rule.items() if key != "annotations"} for rule in rules()]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": bare}]}))
    (rule,) = (rule for rule in bare if rule["alert"] == case.alert)
    labels = {**({} if "Operator" in case.alert else LABELS), **rule["labels"]}
    if case.more == "operator":
        labels |= {"namespace": "tandem-system", "job": "tandem-operator-metrics"}
    elif case.more:
        labels["reason"] = case.more
    test = {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
        "alert_rule_test": [
            {
                "eval_time": f"{case.minutes}m",
                "alertname": case.alert,
                "exp_alerts": [{"exp_labels": labels}] if case.fires else [],
            }
        ],
    }
    path = folder / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}))
    return subprocess.run([program("promtool"), "test", "rules", path], capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def turn() -> None:
    """promtool needs no cluster, and waits for nobody."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}: {case.why}")
def test_an_alert_fires_when_it_should_and_only_then(case: Case, tmp_path: Path) -> None:
    judged = play(case, tmp_path)
    assert judged.returncode == 0, judged.stdout + judged.stderr


def test_every_alert_is_played_firing_and_quiet() -> None:
    for rule in rules():
        assert {case.fires for case in CASES if case.alert == rule["alert"]} == {True, False}, rule["alert"]


def test_the_rules_are_sound_with_all_their_words() -> None:
    judged = subprocess.run([program("promtool"), "check", "rules", RULES], capture_output=True, text=True, timeout=60)
    assert judged.returncode == 0, judged.stdout + judged.stderr
