"""Commands in the pods of a job, through `kubectl exec`: the stacks of ranks, and a shell.

A user who may do that may do all that the pod may. So Kubernetes has a right of its own for it, which many roles lack,
and `kubectl` tells which one.
"""

import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from pydantic import ValidationError

from tandem.errors import UserError
from tandem.formatting import printable
from tandem.launch import RUN_DIR
from tandem.stacks import Inspection
from tandem_cli.kubernetes.job_view import Pod
from tandem_cli.kubernetes.kubectl import ClusterError, Kubectl, complaint, errors_of

INSPECT = ("python", "-P", "-m", "tandem_trainer.inspection")
"""In a worker's pod. Without what lies in the working folder, which is not Tandem's."""
AT_ONCE = 8
"""Pods that are asked at the same time."""
SHELL = (
    f'cd "${RUN_DIR}" 2>/dev/null || true; '
    "if command -v bash >/dev/null 2>&1; then exec bash; else exec sh; fi"
)  # fmt: skip
"""In the run directory where it can be entered; the pod's variables are there already."""

_LACKING = re.compile(r"No module named '?tandem_trainer")
_ENDED = re.compile(r"command terminated with exit code \d+")


def executable(pods: Sequence[Pod]) -> list[Pod]:
    """The pods whose container runs."""
    return [pod for pod in pods if pod.state in ("running", "not ready", "leaving")]


def inspect(kubectl: Kubectl, pod: Pod, rank: int | None) -> Inspection:
    """The ranks of a worker.

    Raises:
        ClusterError: the cluster, or kubectl, refused, or its image is of another version.
    """
    wanted = [] if rank is None else [f"--rank={rank}"]
    try:
        said = kubectl.ask("exec", pod.pod, f"--container={pod.container}", "--", *INSPECT, *wanted).text
    except ClusterError as error:
        if _LACKING.search(str(error)):
            raise ClusterError(
                f"{pod.name} cannot be asked: the image of the job's workers has a version of Tandem that lacks "
                "`tandem debug`, or none"
            ) from error
        raise
    try:
        # Python's start-up in an image of the user's own may print lines of its own before.
        found = Inspection.read_json(said.strip().rpartition("\n")[2])
    except ValidationError as error:
        raise ClusterError(f"the answer of {pod.name} cannot be read: {printable(said[:200])!r}") from error
    # People know the worker by its place in the job; processes, by the name of the pod.
    return found.model_copy(update={"ranks": [one.model_copy(update={"replica": pod.name}) for one in found.ranks]})


def inspect_all(kubectl: Kubectl, pods: Sequence[Pod], rank: int | None) -> tuple[list[Inspection], list[UserError]]:
    """The ranks of several workers, and the errors of those that could not be asked."""
    found, errors = [], []
    with ThreadPoolExecutor(AT_ONCE) as askers:
        for asked in [askers.submit(inspect, kubectl, pod, rank) for pod in pods]:
            try:
                found.append(asked.result())
            except UserError as error:
                errors.append(error)
    return found, errors


def holder(pods: Sequence[Pod], found: Inspection, rank: int) -> Pod | None:
    """The worker of a rank, by what another worker knows of their order; None if nobody knows."""
    each = len(found.ranks)
    if not each or rank // each >= len(found.members):
        return None
    return next((pod for pod in pods if pod.pod == found.members[rank // each]), None)


def interact(kubectl: Kubectl, pod: Pod) -> int:
    """A shell in a pod, on this terminal; returns its exit code.

    Raises:
        ClusterError: the cluster, or kubectl, refused.
    """
    words = ("exec", "-it", pod.pod, f"--container={pod.container}", "--", "sh", "-c", SHELL)
    with tempfile.TemporaryFile() as said:
        # On a terminal, what the shell writes to its standard error comes with the rest: these are kubectl's own words.
        child = subprocess.Popen(kubectl.command(*words), stderr=said)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            code = child.wait()
        finally:
            signal.signal(signal.SIGINT, before)
        errors = errors_of(said)
    if code and errors.strip() and not _ENDED.search(errors):
        raise complaint(errors)
    return code
