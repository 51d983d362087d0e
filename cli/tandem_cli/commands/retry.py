"""`tandem retry NAME`: retries a failed job on a cluster, from its newest checkpoint."""

import time

from tandem.errors import UserError
from tandem.formatting import rfc3339
from tandem.job.labels import RETRY_AT
from tandem_cli.cluster import ContextOption, JobArgument, NamespaceOption, validate_job_name
from tandem_cli.kubernetes.job_view import RESOURCE, fetch_job
from tandem_cli.kubernetes.kubectl import Kubectl
from tandem_cli.output import echo


def retry(name: JobArgument, namespace: NamespaceOption = "", context: ContextOption = "") -> None:
    """Retry a failed job in place, from its newest checkpoint and with its full restart budget.

    Needs kubectl, and uses its configuration.
    """
    kubectl = Kubectl(namespace, context)
    phase = fetch_job(kubectl, validate_job_name(name)).status.phase
    if phase != "Failed":
        raise UserError(f"{name} is {phase}; only a Failed job can be retried")
    kubectl.run("annotate", RESOURCE, name, f"{RETRY_AT}={rfc3339(time.time())}", "--overwrite")
    echo(f"retrying {name}; see: tandem status {name} --watch{kubectl.options()}")
