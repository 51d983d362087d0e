"""The alerts, as Prometheus rules. Each has a section in docs/alerts.md.

Thresholds are for jobs of hours. `runbook_url` is a path of this repository, which the chart puts an address before.
"""

from dataclasses import dataclass
from typing import Any, Literal

import yaml

from tandem import metrics
from tandem.metrics import OPERATOR_AGE, OPERATOR_ERRORS, OPERATOR_LEADS, OPERATOR_RECONCILES, PHASE

RUNBOOKS = "docs/alerts.md"
BY_JOB = "on (namespace, job)"
EACH = "max by (namespace, job)"
"""A job's coordinator may have just moved: for some minutes its series are there twice, from two pods."""
EACH_REASON, ALL = "max by (namespace, job, reason)", "sum by (namespace, job)"
JOB = "{{ $labels.namespace }}/{{ $labels.job }}"
PLANNED = "MemberJoined|TargetChanged|SettingsChanged|Preempted"
"""The reasons of `tandem.measures.PLANNED` that generations after the first have."""


@dataclass(frozen=True)
class Alert:
    """One rule."""

    name: str
    expr: str
    lasts: str
    """For how long it has to hold, as Prometheus writes it."""
    severity: Literal["critical", "warning"]
    summary: str
    description: str

    def rule(self) -> dict[str, Any]:
        """As Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.lasts,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{RUNBOOKS}#{self.name.lower()}",
            },
        }


def _each(metric: metrics.Metric) -> str:
    return f"{EACH} ({metric.name})"


def _phase_is(phases: str) -> str:
    return f'and {BY_JOB} ({EACH} ({PHASE.name}{{phase=~"{phases}"}}) == 1)'


_STARTING = metrics.OPERATOR_STATE.name + '{phase=~"Starting|Restarting"}'
_FAILED = metrics.OPERATOR_STATE.name + '{phase="Failed"}'
_PENDING = metrics.OPERATOR_STATE.name + '{phase="Pending",reason!="SchedulingGated"}'
_LOSS = f"avg by (namespace, job) (avg_over_time({metrics.LOSS.name}[15m]))"
_LOSS_BEFORE = f"avg by (namespace, job) (avg_over_time({metrics.LOSS.name}[15m] offset 30m))"

JOBS = (
    Alert(
        "TandemJobStalled",
        f"{_each(metrics.STEP_AGE)} > 600 {_phase_is('Starting|Running|Restarting')} or {EACH} ({_STARTING}) > 1800",
        "5m",
        "critical",
        f"{JOB} has made no step for {{{{ $value | humanizeDuration }}}}",
        "Its processes are there, or are being started, and training does not go on. What hangs is started again by "
        "itself after elasticity.hangSeconds; this has not helped.",
    ),
    Alert(
        "TandemScriptIdle",
        f"{_each(metrics.IDLE)} > 900 {_phase_is('Running')}",
        "5m",
        "warning",
        f"{JOB} has done nothing for {{{{ $value | humanizeDuration }}}}",
        "No process of its script has used a processor or a GPU, and it may wait for ever. Tandem does not know its "
        "steps, so it is not started again.",
    ),
    Alert(
        "TandemJobFailed",
        f"{EACH_REASON} ({_FAILED}) < 86400",
        "0m",
        "critical",
        f"{JOB} has failed: {{{{ $labels.reason }}}}",
        "It is not tried again by itself. Its checkpoints stay: mend what was wrong, and `tandem retry` goes on from "
        "the newest. Told for a day.",
    ),
    Alert(
        "TandemJobPending",
        f"{EACH_REASON} ({_PENDING}) > 1800",
        "5m",
        "warning",
        f"{JOB} waits for {{{{ $value | humanizeDuration }}}}: {{{{ $labels.reason }}}}",
        "It has not what it needs to start. Jobs that wait in a queue are not meant.",
    ),
    Alert(
        "TandemLossUseless",
        f"max by (namespace, job) (increase({metrics.REWINDS.name}[1h])) > 0",
        "0m",
        "warning",
        f"The loss of {JOB} became NaN or useless",
        "Training went back to an earlier checkpoint and leaves the data out that it stumbled over. After three times "
        "the job fails as Diverged.",
    ),
    Alert(
        "TandemLossRising",
        f"({_LOSS} > {_LOSS_BEFORE} + 0.1 * abs({_LOSS_BEFORE})) {_phase_is('Running')}",
        "15m",
        "warning",
        f"The loss of {JOB} rises",
        "Its mean over a quarter of an hour is a tenth above that of half an hour ago, and stays there.",
    ),
    Alert(
        "TandemRestartStorm",
        f'sum by (namespace, job) (increase({metrics.RESTARTS.name}{{reason!~"{PLANNED}"}}[15m])) >= 5 '
        f"or ({_each(metrics.FAILURES)} >= 0.8 * {_each(metrics.BUDGET)} and {_each(metrics.FAILURES)} > 1)",
        "0m",
        "warning",
        f"{JOB} is restarted again and again",
        "Five groups in a quarter of an hour were ended by a failure or a loss, or four fifths of the restart budget "
        "are used: with elasticity.maxRestarts failures the job fails.",
    ),
    Alert(
        "TandemCheckpointTooOld",
        f"{_each(metrics.CHECKPOINT_AGE)} > 3 * {_each(metrics.CHECKPOINT_INTERVAL)} + 600 "
        f"{_phase_is('Running|Restarting')}",
        "5m",
        "critical",
        f"The newest checkpoint of {JOB} is {{{{ $value | humanizeDuration }}}} old",
        "Three times as long as the job asks for, and ten minutes more. All that was trained since would be lost.",
    ),
    Alert(
        "TandemSavesFail",
        f"{_each(metrics.SAVES_FAILING)} >= 2",
        "0m",
        "critical",
        f"The last {{{{ $value }}}} saves of {JOB} have failed",
        "Training goes on without. All that was trained since the newest checkpoint would be lost.",
    ),
    Alert(
        "TandemEvaluationFailed",
        f'max by (namespace, job) (increase({metrics.EVALUATIONS.name}{{result="failed"}}[1h])) > 0',
        "0m",
        "warning",
        f"A checkpoint of {JOB} could not be evaluated",
        "An evaluator could not read it, or its weights are not those of the job's model. Others may have more luck.",
    ),
    Alert(
        "TandemWorseThanBase",
        f"{_each(metrics.WORSE_THAN_BASE)} > 0",
        "0m",
        "warning",
        f"{JOB} makes its model worse than the one it began with",
        "The checkpoints that were evaluated last, three at least, are all worse than the base model, by the metric "
        "that decides. Training goes on.",
    ),
    Alert(
        "TandemLogLinesLost",
        f"max by (namespace, job) (increase({metrics.LINES_LOST.name}[1h])) > 0",
        "0m",
        "warning",
        f"Lines of the logs of {JOB} are lost",
        "The disk did not take them. Training goes on; reports and the live page have gaps.",
    ),
    Alert(
        "TandemEvaluatorsBehind",
        f"{_each(metrics.EVALUATION_WAIT)} > 1800",
        "5m",
        "warning",
        f"Evaluators of {JOB} do not keep up",
        "A checkpoint has waited for {{ $value | humanizeDuration }} and no evaluation was published. Training does "
        "not mind, but the best checkpoint is not known, and at its end the job waits for evaluators.",
    ),
    Alert(
        "TandemGPUsIdle",
        f"avg by (namespace, job) ({metrics.RANK_GPU.name}) < 0.1 {_phase_is('Running')}",
        "15m",
        "warning",
        f"The GPUs of {JOB} are idle",
        "The job runs, and its GPUs were busy for {{ $value | humanizePercentage }} of the time.",
    ),
    Alert(
        "TandemVolumeNearlyFull",
        f"{_each(metrics.VOLUME_FREE)} < 0.1 * {_each(metrics.VOLUME_BYTES)} "
        f"or {_each(metrics.VOLUME_FREE)} < 2 * {_each(metrics.CHECKPOINT_BYTES)}",
        "5m",
        "critical",
        f"The volume of {JOB} is nearly full",
        "{{ $value | humanize1024 }}B are left: less than a tenth of it, or less than two checkpoints. A save that "
        "does not fit is skipped, and training goes on without.",
    ),
)

OPERATOR = (
    Alert(
        "TandemOperatorNotReconciling",
        f"{EACH} ({OPERATOR_AGE.name}) > 300 "
        f"or ({EACH} (last_over_time({OPERATOR_AGE.name}[6h])) unless {EACH} ({OPERATOR_AGE.name})) "
        f"or absent(last_over_time({OPERATOR_AGE.name}[6h])) "
        f"or {EACH} ({OPERATOR_LEADS.name}) == 0",
        "5m",
        "critical",
        "The operator {{ $labels.namespace }}/{{ $labels.job }} does not look after its jobs",
        "It is gone, has not compared anything with the API server for five minutes, or waits for another one's Lease. "
        "Jobs that train go on; where no other one acts, lost workers are not replaced, and nothing new starts.",
    ),
    Alert(
        "TandemOperatorErrors",
        f"{ALL} (rate({OPERATOR_ERRORS.name}[10m])) / {ALL} (rate({OPERATOR_RECONCILES.name}[10m])) > 0.2",
        "15m",
        "warning",
        "A fifth of what the operator {{ $labels.namespace }}/{{ $labels.job }} looks at fails",
        "{{ $value | humanizePercentage }} of its looks at jobs ended with an error. Each is tried again.",
    ),
)


def rules_yaml() -> str:
    """The rules' file."""
    groups = [
        {"name": "tandem-jobs", "rules": [alert.rule() for alert in JOBS]},
        {"name": "tandem-operator", "rules": [alert.rule() for alert in OPERATOR]},
    ]
    head = "# Generated from tools/alerts.py by `make generate`; do not edit.\n"
    return head + yaml.safe_dump({"groups": groups}, sort_keys=False, width=116, allow_unicode=True)
