"""Each alert fires when it should and is quiet when it should be, as promtool plays it."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
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
EMPTY: Mapping[str, str] = {}


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


def of(name: str, **labels: str) -> str:
    """A series of the job."""
    more = "".join(f',{label}="{value}"' for label, value in labels.items())
    return f'tandem_{name}{{{WHOSE},pod="p"{more}}}'


def state(phase: str, reason: str) -> str:
    """For how long the operator says that the job is in a state."""
    return f'tandem_operator_job_state_seconds{{{WHOSE},phase="{phase}",reason="{reason}",pod="o"}}'


def operator(name: str, labels: str = 'pod="o"') -> str:
    """A series of an operator."""
    return f"tandem_operator_{name}{{{labels}}}"


def case(
    alert: str,
    minutes: int,
    why: str,
    series: Mapping[str, str] = EMPTY,
    fires: bool = False,
    more: str = "",
    **of_job: str,
) -> Case:
    """A case of these series and those of the job, for three hours unless they say for how long; `runs`: it trains."""
    read = {**series, **{RUNS if name == "runs" else of(name): values for name, values in of_job.items()}}
    return Case(alert, why, {name: v if "x" in v else f"{v}x180" for name, v in read.items()}, minutes, fires, more)


quiet, fires = case, partial(case, fires=True)
SERVICE = 'namespace="tandem-system",job="tandem-operator-metrics",pod="o"'
OTHER = 'namespace="team",job="tandem-operator-metrics",pod="q"'
CASES = [
    fires("TandemScriptIdle", 30, "it waits for ever", runs="1", ranks_idle_seconds="0+60"),
    quiet("TandemScriptIdle", 12, "for ten minutes", runs="1", ranks_idle_seconds="0+60"),
    quiet("TandemScriptIdle", 60, "it works", runs="1", ranks_idle_seconds="0"),
    fires("TandemJobStalled", 60, "it never made a step", {state("Starting", "Starting"): "0+60"}),
    quiet("TandemJobStalled", 20, "it starts", {state("Starting", "Starting"): "0+60"}),
    fires("TandemJobStalled", 60, "a script restarts", {state("Restarting", "MemberLost"): "0+60"}),
    fires("TandemJobFailed", 5, "it does not start", {state("Failed", "DoesNotStart"): "0+60"}, more="DoesNotStart"),
    quiet("TandemJobFailed", 5, "two days ago", {state("Failed", "Diverged"): "172800+60"}),
    quiet("TandemJobFailed", 5, "it runs", {state("Running", "Running"): "0+60"}),
    fires(
        "TandemJobPending", 60, "no room for long", {state("Pending", "Unschedulable"): "0+60"}, more="Unschedulable"
    ),
    quiet("TandemJobPending", 20, "no room for a while", {state("Pending", "Unschedulable"): "0+60"}),
    quiet("TandemJobPending", 60, "it is queued", {state("Pending", "SchedulingGated"): "0+60"}),
    quiet("TandemJobPending", 60, "it waits for its smallest group", {state("Pending", "Queued"): "0+60"}),
    quiet("TandemJobStalled", 60, "it was preempted as a whole", {state("Restarting", "Queued"): "0+60"}),
    quiet(
        "TandemJobStalled",
        60,
        "it was preempted as a whole, and its coordinator says what it did last",
        {
            of("phase", phase="Restarting"): "1",
            operator("queue_wait_seconds", f'{WHOSE},queue="gpus",pod="o"'): "1+60",
        },
        runs="0",
        step_age_seconds="0+60",
    ),
    quiet(
        "TandemRestartStorm", 10, "the first failure where one is forgiven", restart_budget="1", restart_budget_used="1"
    ),
    fires(
        "TandemOperatorNotReconciling",
        60,
        "one of two is gone",
        {operator("last_list_seconds", SERVICE): "30x20", operator("last_list_seconds", OTHER): "30"},
        more="operator",
    ),
    fires(
        "TandemOperatorNotReconciling",
        60,
        "one of two compares nothing",
        {operator("last_list_seconds", SERVICE): "0+60", operator("last_list_seconds", OTHER): "30"},
        more="operator",
    ),
    fires("TandemJobStalled", 30, "no step for longer and longer", runs="1", step_age_seconds="0+60"),
    quiet("TandemJobStalled", 30, "a step now and then", runs="1", step_age_seconds="400"),
    quiet(
        "TandemJobStalled",
        30,
        "the job waits for room",
        {of("phase", phase="Pending"): "1"},
        runs="0",
        step_age_seconds="0+60",
    ),
    fires("TandemLossUseless", 30, "training went back", rewinds_total="0x20 1x160"),
    quiet("TandemLossUseless", 120, "it went back long ago", rewinds_total="0x20 1x160"),
    fires("TandemSavesFail", 30, "the disk is full", saves_failed_in_a_row="0x20 1+1x160"),
    quiet("TandemSavesFail", 22, "one failed, the next did not", saves_failed_in_a_row="0x20 1x3 0x150"),
    fires(
        "TandemEvaluationFailed",
        30,
        "a checkpoint cannot be read",
        {of("evaluations_total", result="failed"): "0x20 1x160"},
    ),
    quiet("TandemEvaluationFailed", 30, "checkpoints are skipped", {of("evaluations_total", result="skipped"): "0+1"}),
    fires("TandemWorseThanBase", 30, "three checkpoints are worse", evaluation_worse_than_base="0x20 3x160"),
    quiet("TandemWorseThanBase", 30, "a later one is no worse", evaluation_worse_than_base="3x20 0x160"),
    fires("TandemWeightsUnchanged", 30, "a checkpoint repeats another", checkpoint_weights_unchanged="0x20 1x160"),
    quiet("TandemWeightsUnchanged", 30, "a later one differs", checkpoint_weights_unchanged="1x20 0x160"),
    fires(
        "TandemNumbersWrong",
        30,
        "a rank differs from the others",
        {of("corruptions_total", reason="RanksDiffer"): "0x20 1x160"},
        more="RanksDiffer",
    ),
    quiet("TandemNumbersWrong", 30, "nothing is wrong", {of("corruptions_total", reason="RanksDiffer"): "0x180"}),
    fires("TandemUploadFails", 40, "the bucket is away", upload_failing="0x20 1x160"),
    quiet("TandemUploadFails", 40, "it was away for ten minutes", upload_failing="0x20 1x9 0x150"),
    fires("TandemLogLinesLost", 30, "the disk is full", log_lines_lost_total="0x20 0+50x160"),
    quiet("TandemLogLinesLost", 30, "all are written", log_lines_lost_total="0"),
    fires("TandemLossRising", 100, "it rises", runs="1", loss="1x60 1+0.05x120"),
    quiet("TandemLossRising", 100, "it falls", runs="1", loss="3-0.01"),
    quiet("TandemLossRising", 100, "it rises after training has ended", runs="0", loss="1x60 1+0.05x120"),
    fires("TandemRestartStorm", 60, "workers fail", {of("restarts_total", reason="WorkerFailed"): "0x20 0+1x160"}),
    quiet("TandemRestartStorm", 25, "two nodes are lost", {of("restarts_total", reason="MemberLost"): "0x20 2x160"}),
    quiet(
        "TandemRestartStorm",
        60,
        "the job is scaled again and again",
        {of("restarts_total", reason="TargetChanged"): "0x20 0+1x160"},
    ),
    fires("TandemRestartStorm", 10, "the budget is nearly used", restart_budget="10", restart_budget_used="8"),
    quiet("TandemRestartStorm", 10, "there is no budget, and no failure", restart_budget="0", restart_budget_used="0"),
    fires(
        "TandemCheckpointTooOld",
        60,
        "nothing is saved any more",
        runs="1",
        checkpoint_age_seconds="0+60",
        checkpoint_interval_seconds="300",
    ),
    quiet(
        "TandemCheckpointTooOld",
        60,
        "one an hour was asked for",
        runs="1",
        checkpoint_age_seconds="0+60",
        checkpoint_interval_seconds="3600",
    ),
    fires("TandemEvaluatorsBehind", 60, "one waits", evaluation_wait_seconds="0+60"),
    quiet("TandemEvaluatorsBehind", 60, "none waits for long", evaluation_wait_seconds="900"),
    fires("TandemGPUsIdle", 30, "hardly used", {of("rank_gpu_utilization_ratio", rank="0"): "0.04"}, runs="1"),
    quiet(
        "TandemGPUsIdle",
        30,
        "one of two works",
        {of("rank_gpu_utilization_ratio", rank="0"): "0.04", of("rank_gpu_utilization_ratio", rank="1"): "0.9"},
        runs="1",
    ),
    fires("TandemVolumeNearlyFull", 10, "a twentieth is free", volume_bytes="1000", volume_free_bytes="50"),
    fires(
        "TandemVolumeNearlyFull",
        10,
        "one checkpoint fits, and no second",
        volume_bytes="1000",
        volume_free_bytes="400",
        checkpoint_bytes="300",
    ),
    quiet(
        "TandemVolumeNearlyFull",
        10,
        "there is room",
        volume_bytes="1000",
        volume_free_bytes="400",
        checkpoint_bytes="100",
    ),
    fires("TandemOperatorNotReconciling", 30, "it compares nothing", {operator("last_list_seconds"): "0+60"}),
    fires("TandemOperatorNotReconciling", 10, "it is gone"),
    fires(
        "TandemOperatorNotReconciling",
        30,
        "another one holds its Lease",
        {operator("last_list_seconds"): "30", operator("leads"): "0"},
    ),
    quiet(
        "TandemOperatorNotReconciling",
        30,
        "it acts in one of its namespaces",
        {
            operator("last_list_seconds"): "30",
            operator("leads", 'exported_namespace="a"'): "0",
            operator("leads", 'exported_namespace="b"'): "1",
        },
    ),
    quiet("TandemOperatorNotReconciling", 30, "it compares every minute", {operator("last_list_seconds"): "30"}),
    fires(
        "TandemOperatorErrors",
        60,
        "half fails",
        {operator("reconcile_errors_total"): "0+5", operator("reconciles_total"): "0+10"},
    ),
    quiet(
        "TandemOperatorErrors",
        60,
        "one in twenty fails",
        {operator("reconcile_errors_total"): "0+1", operator("reconciles_total"): "0+20"},
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
