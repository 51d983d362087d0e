"""The dashboard of all jobs and of the operator."""

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.models import dashboard as model

from tandem.wire import metrics
from tandem.wire.metrics import Metric, OperatorMetric
from tools.dashboards import job_dashboard
from tools.dashboards.panels import DCGM, Panel, Query, choice, graph, listing, number, ranking, source

CHOSEN = 'namespace=~"$namespace"'
WINDOW = "$__rate_interval"


def fleet() -> build.Dashboard:
    """Build the dashboard."""
    link = build.DashboardLink("One job").type(model.DashboardLinkType.LINK)
    link = link.url(f"/d/{job_dashboard.UID}").keep_time(True)
    dashboard = (
        build.Dashboard("Tandem / Fleet")
        .uid("tandem-fleet")
        .tags(["tandem"])
        .description("All DistributedTrainingJobs. What each number means: docs/reference/metrics.md.")
        .time("now-6h", "now")
        .refresh("30s")
        .link(link)
        .with_variable(source())
        .with_variable(choice("namespace", "Namespace", f"label_values({metrics.OPERATOR_JOBS.name}, namespace)", True))
    )
    for title, group in (("Jobs", _jobs()), ("Trouble", _trouble()), ("Operator", _operator()), ("GPUs", _gpus())):
        dashboard = dashboard.with_row(build.Row(title))
        for panel in group:
            dashboard = dashboard.with_panel(panel)
    return dashboard


def series(metric: Metric | OperatorMetric, more: str = "") -> str:
    """The series of the selected namespaces."""
    return f"{metric.name}{{{CHOSEN}{',' + more if more else ''}}}"


def _goodput(window: str, by: str = "") -> str:
    grouped = f"sum by ({by})" if by else "sum"
    compute, everything = series(metrics.TIME, 'phase="compute"'), series(metrics.TIME)
    return f"{grouped} (rate({compute}[{window}])) / {grouped} (rate({everything}[{window}]))"


def _jobs() -> list[Panel]:
    per_job = "max by (namespace, job)"
    busy = f"(sum({series(metrics.RANK_GPU)}) or vector(0))"
    return [
        number(
            "Jobs",
            "Number of jobs by phase.",
            Query(f"sum by (phase) ({series(metrics.OPERATOR_JOBS)})", "{{phase}}"),
            width=12,
        ),
        number(
            "GPUs requested",
            "GPUs requested by jobs that have not ended.",
            Query(f"sum({series(metrics.OPERATOR_GPUS_REQUESTED)})"),
        ),
        number(
            "GPUs ready",
            "GPUs of workers that are in their group.",
            Query(f"sum({series(metrics.OPERATOR_GPUS_READY)})"),
        ),
        number(
            "Goodput",
            "Share of time in which steps were computed, for all jobs over the time shown.",
            Query(_goodput("$__range")),
            unit="percentunit",
        ),
        graph(
            "Jobs by phase",
            "Jobs as the operator reports them.",
            Query(f"sum by (phase) ({series(metrics.OPERATOR_JOBS)})", "{{phase}}"),
            stacked=True,
        ),
        graph(
            "GPUs",
            "Requested, in a group, and busy: the sum of the utilization that NVML reports to ranks with a GPU.",
            Query(f"sum({series(metrics.OPERATOR_GPUS_REQUESTED)})", "requested"),
            Query(f"sum({series(metrics.OPERATOR_GPUS_READY)})", "ready"),
            Query(busy, "busy"),
        ),
        graph(
            "Goodput by job",
            "Share of each job's time in which steps were computed.",
            Query(_goodput("5m", "namespace, job"), "{{namespace}}/{{job}}"),
            unit="percentunit",
            maximum=1,
        ),
        graph(
            "Queues",
            "Workers that queues have admitted, how many of them are lent (over the minimum of their job), and times a "
            "minute that jobs shrank, grew, and gave quota back for others.",
            Query(f"sum by (queue) ({series(metrics.OPERATOR_ADMITTED)})", "{{queue}}"),
            Query(f"sum({series(metrics.OPERATOR_LENT)})", "lent"),
            Query(f"60 * sum(rate({series(metrics.OPERATOR_SHRINKS)}[{WINDOW}]))", "shrinks"),
            Query(f"60 * sum(rate({series(metrics.OPERATOR_GROWTHS)}[{WINDOW}]))", "growths"),
            Query(f"60 * sum(rate({series(metrics.OPERATOR_RELEASED)}[{WINDOW}]))", "given back"),
            width=24,
        ),
        listing(
            "Jobs in queues",
            "Place in the queue, 1 is the next; and the time without workers because of the queue.",
            (
                ("place", f"{per_job} ({series(metrics.OPERATOR_POSITION)})", "none"),
                ("waits", f"{per_job} ({series(metrics.OPERATOR_WAITING)}) > 0", "s"),
                ("waited", f"{per_job} ({series(metrics.OPERATOR_WAITED)})", "s"),
                ("lent workers", f"{per_job} ({series(metrics.OPERATOR_LENT)})", "none"),
            ),
        ),
        listing(
            "Running jobs",
            "Progress of each job.",
            (
                ("step", f"{per_job} ({series(metrics.STEP)})", "none"),
                ("planned", f"{per_job} ({series(metrics.TOTAL_STEPS)})", "none"),
                ("loss", f"{per_job} ({series(metrics.LOSS)})", "none"),
                ("score", f"{per_job} ({series(metrics.BEST_SCORE)})", "none"),
                ("ranks", f"{per_job} ({series(metrics.WORLD_SIZE)})", "none"),
                ("samples/s", f"{per_job} ({series(metrics.THROUGHPUT)})", "none"),
                ("remaining", f"{per_job} ({series(metrics.REMAINING)})", "s"),
            ),
        ),
        graph(
            "Where time goes",
            "Seconds per second by phase, summed over jobs.",
            Query(f"sum by (phase) (rate({series(metrics.TIME)}[{WINDOW}]))", "{{phase}}"),
            stacked=True,
        ),
        graph(
            "Throughput by job",
            "Training samples a second.",
            Query(series(metrics.THROUGHPUT), "{{namespace}}/{{job}}"),
        ),
        graph(
            "Processor use",
            "Busy cores of ranks and evaluators.",
            Query(f"sum({series(metrics.RANK_CPU)})", "ranks"),
            Query(f"sum({series(metrics.EVALUATOR_CPU)})", "evaluators"),
        ),
    ]


def _trouble() -> list[Panel]:
    return [
        ranking(
            "Restarts by reason",
            "Groups formed again in the time shown, by the end of the one before.",
            Query(f"sum by (reason) (increase({series(metrics.RESTARTS)}[$__range]))", "{{reason}}"),
            width=6,
        ),
        graph(
            "Age of the newest checkpoint",
            "Training time that a crash would cost each job.",
            Query(series(metrics.CHECKPOINT_AGE), "{{namespace}}/{{job}}"),
            unit="s",
            width=6,
        ),
        graph(
            "Evaluators behind",
            "Time for which a checkpoint has waited, by job.",
            Query(series(metrics.EVALUATION_WAIT), "{{namespace}}/{{job}}"),
            unit="s",
            width=6,
        ),
        graph(
            "Space for checkpoints",
            "Free share of each job's volume.",
            Query(f"{series(metrics.VOLUME_FREE)} / {series(metrics.VOLUME_BYTES)}", "{{namespace}}/{{job}}"),
            unit="percentunit",
            maximum=1,
            width=6,
        ),
    ]


def _operator() -> list[Panel]:
    reconciles, errors = metrics.OPERATOR_RECONCILES.name, metrics.OPERATOR_ERRORS.name
    seconds, requests = metrics.OPERATOR_SECONDS.name, metrics.OPERATOR_REQUESTS.name
    return [
        graph(
            "Reconciliations",
            "Reconciliations a second, failed ones, and objects that could not be read and were skipped.",
            Query(f"sum(rate({reconciles}[{WINDOW}]))", "reconciliations"),
            Query(f"sum(rate({errors}[{WINDOW}]))", "failed"),
            Query(f"sum(rate({metrics.OPERATOR_UNREADABLE.name}[{WINDOW}]))", "unreadable"),
            width=6,
        ),
        graph(
            "Reconciliation time",
            "Mean time, including the API server and the coordinator.",
            Query(f"sum(rate({seconds}[{WINDOW}])) / sum(rate({reconciles}[{WINDOW}]))", "mean"),
            unit="s",
            width=6,
        ),
        graph(
            "Queue",
            "Jobs that wait for a reconciliation.",
            Query(f"sum({metrics.OPERATOR_QUEUE.name})", "jobs"),
            width=4,
        ),
        graph(
            "Requests to the API server",
            "Requests a second.",
            Query(f"sum(rate({requests}[{WINDOW}]))", "requests"),
            width=4,
        ),
        graph(
            "Last full list",
            "Time since all objects were listed. One list is due every minute.",
            Query(f"max({metrics.OPERATOR_AGE.name})", "age"),
            unit="s",
            width=4,
        ),
    ]


def _gpus() -> list[Panel]:
    chosen = 'exported_namespace=~"$namespace"'
    return [
        graph(
            "Utilization by node",
            "Utilization of the GPUs of pods in the selected namespaces.",
            Query(f"avg by (Hostname) (DCGM_FI_DEV_GPU_UTIL{{{chosen}}})", "{{Hostname}}"),
            unit="percent",
            maximum=100,
            width=12,
            needs=DCGM,
        ),
        graph(
            "Memory by node",
            "GPU memory in use.",
            Query(f"sum by (Hostname) (DCGM_FI_DEV_FB_USED{{{chosen}}})", "{{Hostname}}"),
            unit="decmbytes",
            width=12,
            needs=DCGM,
        ),
    ]
