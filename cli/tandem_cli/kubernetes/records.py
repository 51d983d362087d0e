"""What is seen of jobs as JSON for programs: the status in the CRD's own words, and pods and events beside it. Pure."""

from typing import Any

from tandem_cli.kubernetes.events import JobEvent
from tandem_cli.kubernetes.job_view import JobSummary, JobView
from tandem_cli.kubernetes.pods import Pod


def job_record(job: JobSummary) -> dict[str, Any]:
    """A job."""
    return {
        "name": job.name,
        "namespace": job.namespace,
        "uid": job.uid,
        "madeAt": job.made,
        "takenUp": job.taken_up,
        "leaving": job.leaving,
        "status": job.status.dump(),
    }


def view_record(view: JobView) -> dict[str, Any]:
    """A job with its pods and events. Times are seconds since the epoch."""
    return {
        **job_record(view.job),
        "pods": [pod_record(pod) for pod in view.pods],
        "events": [event_record(one) for one in view.job_events],
    }


def pod_record(pod: Pod) -> dict[str, Any]:
    """A pod."""
    return {
        "name": pod.name,
        "pod": pod.pod,
        "role": pod.role,
        "index": pod.index,
        "node": pod.node,
        "state": pod.state,
        "why": pod.why,
        "restarts": pod.restarts,
        "since": pod.since,
    }


def event_record(one: JobEvent) -> dict[str, Any]:
    """An event."""
    return {
        "at": one.at,
        "first": one.first,
        "count": one.count,
        "who": one.who or "job",
        "reason": one.reason,
        "text": one.text,
        "warning": one.warning,
    }
