"""`tandem retry NAME`: retries a failed job on a cluster, from its newest checkpoint."""

import time

from tandem.errors import UserError
from tandem.formatting import rfc3339
from tandem.labels import RETRY_AT
from tandem_cli.cluster import ContextOption, JobArgument, NamespaceOption, named
from tandem_cli.kubernetes.job_view import RESOURCE, ask_job
from tandem_cli.kubernetes.kubectl import Kubectl
from tandem_cli.output import echo


def retry(name: JobArgument, namespace: NamespaceOption = "", context: ContextOption = "") -> None:
    """Try a failed job again, in place: it goes on from its newest checkpoint, with its whole restart budget.

    Needs kubectl, and uses what is set up for it.
    """
    kubectl = Kubectl(namespace, context)
    phase = ask_job(kubectl, named(name)).status.phase
    if phase != "Failed":
        raise UserError(f"{name} is {phase}; only a job that has Failed is tried again")
    kubectl.ask("annotate", RESOURCE, name, f"{RETRY_AT}={rfc3339(time.time())}", "--overwrite")
    echo(f"{name} is tried again; see: tandem status {name} --watch{kubectl.options()}")
