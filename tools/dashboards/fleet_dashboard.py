"""The dashboard of all jobs and of the operator."""

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.models import dashboard as model

from tandem import metrics
from tandem.metrics import Metric, OperatorMetric
from tools.dashboards import job_dashboard
from tools.dashboards.panels import DCGM, Panel, Query, choice, graph, listing, number, ranking, source

CHOSEN = 'namespace=~"$namespace"'
WINDOW = "$__rate_interval"


def fleet() -> build.Dashboard:
    """Build it."""
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


def of(metric: Metric | OperatorMetric, more: str = "") -> str:
    """The series of the namespaces that are looked at."""
    return f"{metric.name}{{{CHOSEN}{',' + more if more else ''}}}"


def _goodput(window: str, by: str = "") -> str:
    grouped = f"sum by ({by})" if by else "sum"
    compute, everything = of(metrics.TIME, 'phase="compute"'), of(metrics.TIME)
    return f"{grouped} (rate({compute}[{window}])) / {grouped} (rate({everything}[{window}]))"


def _jobs() -> list[Panel]:
    one = "max by (namespace, job)"
    busy = f"(sum({of(metrics.RANK_GPU)}) or vector(0))"
    return [
        number(
            "Jobs",
            "By phase.",
            Query(f"sum by (phase) ({of(metrics.OPERATOR_JOBS)})", "{{phase}}"),
            width=12,
        ),
        number("GPUs asked for", "By jobs that are not over.", Query(f"sum({of(metrics.OPERATOR_GPUS_ASKED)})")),
        number("GPUs ready", "Of workers that are in their group.", Query(f"sum({of(metrics.OPERATOR_GPUS_READY)})")),
        number("Goodput", "Of all jobs, over the time shown.", Query(_goodput("$__range")), unit="percentunit"),
        graph(
            "Jobs by phase",
            "As the operator sees them.",
            Query(f"sum by (phase) ({of(metrics.OPERATOR_JOBS)})", "{{phase}}"),
            stacked=True,
        ),
        graph(
            "GPUs",
            "Asked for, in a group, and kept busy: the sum of what ranks with a GPU are told by NVML.",
            Query(f"sum({of(metrics.OPERATOR_GPUS_ASKED)})", "asked for"),
            Query(f"sum({of(metrics.OPERATOR_GPUS_READY)})", "ready"),
            Query(busy, "busy"),
        ),
        graph(
            "Goodput by job",
            "The part of each job's time in which steps were computed.",
            Query(_goodput("5m", "namespace, job"), "{{namespace}}/{{job}}"),
            unit="percentunit",
            most=1,
        ),
        listing(
            "Jobs that run",
            "What each is at now.",
            (
                ("step", f"{one} ({of(metrics.STEP)})", "none"),
                ("planned", f"{one} ({of(metrics.TOTAL_STEPS)})", "none"),
                ("loss", f"{one} ({of(metrics.LOSS)})", "none"),
                ("score", f"{one} ({of(metrics.BEST_SCORE)})", "none"),
                ("ranks", f"{one} ({of(metrics.WORLD_SIZE)})", "none"),
                ("samples/s", f"{one} ({of(metrics.THROUGHPUT)})", "none"),
                ("left", f"{one} ({of(metrics.REMAINING)})", "s"),
            ),
        ),
        graph(
            "Where time goes",
            "Jobs' worth of time by phase.",
            Query(f"sum by (phase) (rate({of(metrics.TIME)}[{WINDOW}]))", "{{phase}}"),
            stacked=True,
        ),
        graph(
            "Throughput by job",
            "Training samples a second.",
            Query(of(metrics.THROUGHPUT), "{{namespace}}/{{job}}"),
        ),
        graph(
            "Processor use",
            "Cores that ranks and evaluators keep busy.",
            Query(f"sum({of(metrics.RANK_CPU)})", "ranks"),
            Query(f"sum({of(metrics.EVALUATOR_CPU)})", "evaluators"),
        ),
    ]


def _trouble() -> list[Panel]:
    return [
        ranking(
            "Restarts by reason",
            "Groups formed anew in the time shown, by what ended the one before.",
            Query(f"sum by (reason) (increase({of(metrics.RESTARTS)}[$__range]))", "{{reason}}"),
            width=6,
        ),
        graph(
            "Age of the newest checkpoint",
            "What a crash would cost each job.",
            Query(of(metrics.CHECKPOINT_AGE), "{{namespace}}/{{job}}"),
            unit="s",
            width=6,
        ),
        graph(
            "Evaluators behind",
            "For how long a checkpoint has waited, by job.",
            Query(of(metrics.EVALUATION_WAIT), "{{namespace}}/{{job}}"),
            unit="s",
            width=6,
        ),
        graph(
            "Room for checkpoints",
            "The free part of each job's volume.",
            Query(f"{of(metrics.VOLUME_FREE)} / {of(metrics.VOLUME_BYTES)}", "{{namespace}}/{{job}}"),
            unit="percentunit",
            most=1,
            width=6,
        ),
    ]


def _operator() -> list[Panel]:
    looks, errors = metrics.OPERATOR_RECONCILES.name, metrics.OPERATOR_ERRORS.name
    seconds, requests = metrics.OPERATOR_SECONDS.name, metrics.OPERATOR_REQUESTS.name
    return [
        graph(
            "Looks at jobs",
            "A second, those that failed, and objects that could not be read and were passed over.",
            Query(f"sum(rate({looks}[{WINDOW}]))", "looks"),
            Query(f"sum(rate({errors}[{WINDOW}]))", "failed"),
            Query(f"sum(rate({metrics.OPERATOR_UNREADABLE.name}[{WINDOW}]))", "unreadable"),
            width=6,
        ),
        graph(
            "Time of a look",
            "Mean, waiting for the API server and the coordinator included.",
            Query(f"sum(rate({seconds}[{WINDOW}])) / sum(rate({looks}[{WINDOW}]))", "mean"),
            unit="s",
            width=6,
        ),
        graph(
            "Queue",
            "Jobs that are due and wait.",
            Query(f"sum({metrics.OPERATOR_QUEUE.name})", "jobs"),
            width=4,
        ),
        graph(
            "Requests to the API server",
            "A second.",
            Query(f"sum(rate({requests}[{WINDOW}]))", "requests"),
            width=4,
        ),
        graph(
            "Last full comparison",
            "Ago. One is due every minute.",
            Query(f"max({metrics.OPERATOR_AGE.name})", "ago"),
            unit="s",
            width=4,
        ),
    ]


def _gpus() -> list[Panel]:
    chosen = 'exported_namespace=~"$namespace"'
    return [
        graph(
            "Utilization by node",
            "Of GPUs that pods of the chosen namespaces hold.",
            Query(f"avg by (Hostname) (DCGM_FI_DEV_GPU_UTIL{{{chosen}}})", "{{Hostname}}"),
            unit="percent",
            most=100,
            width=12,
            needs=DCGM,
        ),
        graph(
            "Memory by node",
            "In use.",
            Query(f"sum by (Hostname) (DCGM_FI_DEV_FB_USED{{{chosen}}})", "{{Hostname}}"),
            unit="decmbytes",
            width=12,
            needs=DCGM,
        ),
    ]
