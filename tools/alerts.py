"""The alerts, as Prometheus rules. Each has a section in docs/alerts.md.

Thresholds are for jobs of hours. `runbook_url` is a path in this repository, which the chart prefixes with an address.
"""

from dataclasses import dataclass
from typing import Any, Literal

import yaml

from tandem.wire import metrics
from tandem.wire.metrics import OPERATOR_AGE, OPERATOR_ERRORS, OPERATOR_LEADS, OPERATOR_RECONCILES, PHASE

RUNBOOKS = "docs/alerts.md"
BY_JOB = "on (namespace, job)"
PER_JOB = "max by (namespace, job)"
"""Aggregation over pods: for some minutes after a job's coordinator has moved, two pods have its series."""
PER_REASON, SUM_PER_JOB = "max by (namespace, job, reason)", "sum by (namespace, job)"
JOB = "{{ $labels.namespace }}/{{ $labels.job }}"
PLANNED = "MemberJoined|TargetChanged|SettingsChanged|Preempted"
"""The reasons of `tandem.wire.measures.PLANNED` that generations after the first have."""


@dataclass(frozen=True)
class Alert:
    """One rule."""

    name: str
    expr: str
    duration: str
    """Time for which the expression has to hold, in Prometheus' notation."""
    severity: Literal["critical", "warning"]
    summary: str
    description: str

    def rule(self) -> dict[str, Any]:
        """The alert as a Prometheus rule."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.duration,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{RUNBOOKS}#{self.name.lower()}",
            },
        }


def _per_job(metric: metrics.Metric) -> str:
    return f"{PER_JOB} ({metric.name})"


def _phase_is(phases: str) -> str:
    return f'and {BY_JOB} ({PER_JOB} ({PHASE.name}{{phase=~"{phases}"}}) == 1)'


_STARTING = metrics.OPERATOR_STATE.name + '{phase=~"Starting|Restarting",reason!="Queued"}'
_FAILED = metrics.OPERATOR_STATE.name + '{phase="Failed"}'
_PENDING = metrics.OPERATOR_STATE.name + '{phase="Pending",reason!~"SchedulingGated|Queued"}'
_LOSS = f"avg by (namespace, job) (avg_over_time({metrics.LOSS.name}[15m]))"
_LOSS_BEFORE = f"avg by (namespace, job) (avg_over_time({metrics.LOSS.name}[15m] offset 30m))"

JOBS = (
    Alert(
        "TandemJobStalled",
        f"{_per_job(metrics.STEP_AGE)} > 600 {_phase_is('Starting|Running|Restarting')} "
        f"unless on (namespace, job) {PER_JOB} ({metrics.OPERATOR_WAITING.name}) > 0 "
        f"or {PER_JOB} ({_STARTING}) > 1800",
        "5m",
        "critical",
        f"{JOB} has completed no step for {{{{ $value | humanizeDuration }}}}",
        "Its processes run, or are being started, but training makes no progress. A hang restarts the group "
        "automatically after elasticity.hangSeconds; that has not helped.",
    ),
    Alert(
        "TandemScriptIdle",
        f"{_per_job(metrics.IDLE)} > 900 {_phase_is('Running')}",
        "5m",
        "warning",
        f"{JOB} has been idle for {{{{ $value | humanizeDuration }}}}",
        "No process of its script has used a CPU or a GPU, and it may wait forever. It reports no steps, so Tandem "
        "does not restart it.",
    ),
    Alert(
        "TandemJobFailed",
        f"{PER_REASON} ({_FAILED}) < 86400",
        "0m",
        "critical",
        f"{JOB} has failed: {{{{ $labels.reason }}}}",
        "It is not retried automatically. Its checkpoints are kept: fix the cause, and `tandem retry` resumes from the "
        "newest. The alert fires for a day.",
    ),
    Alert(
        "TandemJobPending",
        f"{PER_REASON} ({_PENDING}) > 1800",
        "5m",
        "warning",
        f"{JOB} has been pending for {{{{ $value | humanizeDuration }}}}: {{{{ $labels.reason }}}}",
        "It lacks something that it needs to start. Jobs that wait in a queue are excluded.",
    ),
    Alert(
        "TandemLossUseless",
        f"max by (namespace, job) (increase({metrics.REWINDS.name}[1h])) > 0",
        "0m",
        "warning",
        f"The loss of {JOB} became NaN or useless",
        "Training went back to an earlier checkpoint, and skips the data around the bad step. After three rewinds the "
        "job fails with the reason Diverged.",
    ),
    Alert(
        "TandemLossRising",
        f"({_LOSS} > {_LOSS_BEFORE} + 0.1 * abs({_LOSS_BEFORE})) {_phase_is('Running')}",
        "15m",
        "warning",
        f"The loss of {JOB} rises",
        "Its mean over 15 minutes has stayed more than 10 % above that of 30 minutes ago.",
    ),
    Alert(
        "TandemRestartStorm",
        f'sum by (namespace, job) (increase({metrics.RESTARTS.name}{{reason!~"{PLANNED}"}}[15m])) >= 5 '
        f"or ({_per_job(metrics.FAILURES)} >= 0.8 * {_per_job(metrics.BUDGET)} and {_per_job(metrics.FAILURES)} > 1)",
        "0m",
        "warning",
        f"{JOB} restarts repeatedly",
        "Five groups in 15 minutes ended with a failure or a lost member, or 80 % of the restart budget is used: the "
        "job fails after elasticity.maxRestarts failures.",
    ),
    Alert(
        "TandemCheckpointTooOld",
        f"{_per_job(metrics.CHECKPOINT_AGE)} > 3 * {_per_job(metrics.CHECKPOINT_INTERVAL)} + 600 "
        f"{_phase_is('Running|Restarting')}",
        "5m",
        "critical",
        f"The newest checkpoint of {JOB} is {{{{ $value | humanizeDuration }}}} old",
        "That is more than three checkpoint intervals and ten minutes. A crash would lose all training since then.",
    ),
    Alert(
        "TandemSavesFail",
        f"{_per_job(metrics.SAVES_FAILING)} >= 2",
        "0m",
        "critical",
        f"The last {{{{ $value }}}} saves of {JOB} have failed",
        "Training continues without them. A crash would lose all training since the newest checkpoint.",
    ),
    Alert(
        "TandemUploadFails",
        f"{_per_job(metrics.UPLOAD_FAILING)} > 0",
        "15m",
        "warning",
        f"The bucket of {JOB} lacks data",
        "Training continues, and what is missing is uploaded later. Until then only the volume has it.",
    ),
    Alert(
        "TandemEvaluationFailed",
        f'max by (namespace, job) (increase({metrics.EVALUATIONS.name}{{result="failed"}}[1h])) > 0',
        "0m",
        "warning",
        f"A checkpoint of {JOB} could not be evaluated",
        "An evaluator could not read it, or its weights do not fit the job's model. Other checkpoints may succeed.",
    ),
    Alert(
        "TandemWorseThanBase",
        f"{_per_job(metrics.WORSE_THAN_BASE)} > 0",
        "0m",
        "warning",
        f"{JOB} makes its model worse than the base model",
        "At least the three newest evaluated checkpoints are all worse than the base model, by the deciding metric. "
        "Training continues.",
    ),
    Alert(
        "TandemWeightsUnchanged",
        f"{_per_job(metrics.WEIGHTS_UNCHANGED)} > 0",
        "0m",
        "warning",
        f"{JOB} trains, and its weights do not change",
        "The newest checkpoint has, bit for bit, the weights of an earlier one, although steps were taken in between.",
    ),
    Alert(
        "TandemNumbersWrong",
        f"{PER_REASON} (increase({metrics.CORRUPTIONS.name}[1h])) > 0",
        "0m",
        "critical",
        f"Numbers of {JOB} are wrong: {{{{ $labels.reason }}}}",
        "Ranks held different weights or took different samples, an optimizer state does not belong to its step, or an "
        "evaluator scored other weights than those of its checkpoint. The job's Event names rank and replica.",
    ),
    Alert(
        "TandemLogLinesLost",
        f"max by (namespace, job) (increase({metrics.LINES_LOST.name}[1h])) > 0",
        "0m",
        "warning",
        f"Lines of the logs of {JOB} are lost",
        "The disk refused them. Training continues; reports and the live page have gaps.",
    ),
    Alert(
        "TandemEvaluatorsBehind",
        f"{_per_job(metrics.EVALUATION_WAIT)} > 1800",
        "5m",
        "warning",
        f"Evaluators of {JOB} do not keep up",
        "A checkpoint has waited for {{ $value | humanizeDuration }} and no evaluation was published. Training is not "
        "affected, but the best checkpoint is not known, and at its end the job waits for evaluators.",
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
        f"{_per_job(metrics.VOLUME_FREE)} < 0.1 * {_per_job(metrics.VOLUME_BYTES)} "
        f"or {_per_job(metrics.VOLUME_FREE)} < 2 * {_per_job(metrics.CHECKPOINT_BYTES)}",
        "5m",
        "critical",
        f"The volume of {JOB} is nearly full",
        "{{ $value | humanize1024 }}B are free: less than 10 % of it, or less than two checkpoints. A save that does "
        "not fit is skipped, and training continues.",
    ),
)

OPERATOR = (
    Alert(
        "TandemOperatorNotReconciling",
        f"{PER_JOB} ({OPERATOR_AGE.name}) > 300 "
        f"or ({PER_JOB} (last_over_time({OPERATOR_AGE.name}[6h])) unless {PER_JOB} ({OPERATOR_AGE.name})) "
        f"or absent(last_over_time({OPERATOR_AGE.name}[6h])) "
        f"or {PER_JOB} ({OPERATOR_LEADS.name}) == 0",
        "5m",
        "critical",
        "The operator {{ $labels.namespace }}/{{ $labels.job }} does not reconcile its jobs",
        "It is gone, has not listed objects from the API server for five minutes, or waits for another operator's "
        "Lease. Running jobs continue; unless another operator acts, lost workers are not replaced and no job starts.",
    ),
    Alert(
        "TandemOperatorErrors",
        f"{SUM_PER_JOB} (rate({OPERATOR_ERRORS.name}[10m])) "
        f"/ {SUM_PER_JOB} (rate({OPERATOR_RECONCILES.name}[10m])) > 0.2",
        "15m",
        "warning",
        "More than 20 % of the reconciliations of the operator {{ $labels.namespace }}/{{ $labels.job }} fail",
        "{{ $value | humanizePercentage }} of its reconciliations ended with an error. Each is retried.",
    ),
)


def rules_yaml() -> str:
    """The file of all rules."""
    groups = [
        {"name": "tandem-jobs", "rules": [alert.rule() for alert in JOBS]},
        {"name": "tandem-operator", "rules": [alert.rule() for alert in OPERATOR]},
    ]
    head = "# Generated from tools/alerts.py by `make generate`; do not edit.\n"
    return head + yaml.safe_dump({"groups": groups}, sort_keys=False, width=116, allow_unicode=True)
