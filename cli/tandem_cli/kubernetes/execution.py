"""Commands in the pods of a job, through `kubectl exec`: the stacks of ranks, a debugger, and a shell.

A user with this permission can do everything that the pod can. So Kubernetes has a separate permission for it, which
many roles lack, and `kubectl` names it in its error.
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
from tandem.processes.launch import RUN_DIR, module_command
from tandem.wire.stacks import Attachment, Inspection
from tandem_cli.kubernetes.kubectl import ANSWER_SECONDS, ClusterError, Kubectl, error_from, errors_of
from tandem_cli.view import PodView

INSPECT = (*module_command("tandem_trainer.inspection", python="python"),)
"""Command of an inspection in a worker's pod. It imports nothing from the working directory, which is the user's."""
MAX_PARALLEL = 8
"""Number of pods that are inspected concurrently."""
SHELL = (
    f'cd "${RUN_DIR}" 2>/dev/null || true; '
    "if command -v bash >/dev/null 2>&1; then exec bash; else exec sh; fi"
)  # fmt: skip
"""Command of a shell in a pod. It starts in the run directory, if that is accessible."""

ATTACH_SECONDS = 90.0
"""Timeout to attach a debugger, in seconds; the rank itself takes up to a minute."""
_UNSUPPORTED = re.compile(r"No module named '?tandem_trainer|unrecognized arguments: --attach")
_ENDED = re.compile(r"command terminated with exit code \d+")


def executable(pods: Sequence[PodView]) -> list[PodView]:
    """Return the pods whose container runs."""
    return [pod for pod in pods if pod.state in ("running", "not ready", "leaving")]


def inspect(kubectl: Kubectl, pod: PodView, rank: int | None) -> Inspection:
    """Inspect the ranks of a worker.

    Raises:
        ClusterError: the cluster, or kubectl, refused, or the image has another version of Tandem.
    """
    output = _run_inspection(kubectl, pod, [] if rank is None else [f"--rank={rank}"], ANSWER_SECONDS)
    try:
        inspection = Inspection.read_json(output)
    except ValidationError as error:
        raise ClusterError(f"the answer of {pod.name} cannot be read: {printable(output[:200])!r}") from error
    # Users know a worker as worker-0; its processes know the name of the pod.
    ranks = [rank.model_copy(update={"replica": pod.name}) for rank in inspection.ranks]
    return inspection.model_copy(update={"ranks": ranks})


def attach(kubectl: Kubectl, pod: PodView, rank: int) -> Attachment:
    """Prepare a rank of a worker for a debugger.

    Raises:
        ClusterError: see `inspect`.
    """
    output = _run_inspection(kubectl, pod, [f"--rank={rank}", "--attach"], ATTACH_SECONDS)
    try:
        return Attachment.read_json(output).model_copy(update={"replica": pod.name})
    except ValidationError as error:
        raise ClusterError(f"the answer of {pod.name} cannot be read: {printable(output[:200])!r}") from error


def forward(kubectl: Kubectl, pod: PodView, port: int) -> int:
    """Forward a local port to the same port of a pod's loopback address, until Ctrl-C or the end of the pod.

    kubectl's output goes to this terminal. Returns its exit code.
    """
    child = subprocess.Popen(kubectl.command("port-forward", "--address=127.0.0.1", f"pod/{pod.pod}", f"{port}:{port}"))
    try:
        return child.wait()
    except KeyboardInterrupt:
        # kubectl got the same signal.
        return child.wait()


def _run_inspection(kubectl: Kubectl, pod: PodView, options: Sequence[str], seconds: float) -> str:
    """Run an inspection in a pod, and return its last line: in a user's image, Python's start-up may print others."""
    try:
        result = kubectl.run("exec", pod.pod, f"--container={pod.container}", "--", *INSPECT, *options, seconds=seconds)
    except ClusterError as error:
        if _UNSUPPORTED.search(str(error)):
            raise ClusterError(
                f"{pod.name} cannot be inspected: the image of the job's workers has a version of Tandem without "
                f"`tandem debug{' --attach' * ('--attach' in options)}`, or no Tandem"
            ) from error
        raise
    return result.text.strip().rpartition("\n")[2]


def inspect_all(
    kubectl: Kubectl, pods: Sequence[PodView], rank: int | None
) -> tuple[list[Inspection], list[UserError]]:
    """Inspect several workers; return the inspections and the errors."""
    inspections, errors = [], []
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        for future in [pool.submit(inspect, kubectl, pod, rank) for pod in pods]:
            try:
                inspections.append(future.result())
            except UserError as error:
                errors.append(error)
    return inspections, errors


def holder(pods: Sequence[PodView], inspection: Inspection, rank: int) -> PodView | None:
    """Return the worker of a rank according to another worker's membership; None if it is unknown."""
    ranks_per_worker = len(inspection.ranks)
    if not ranks_per_worker or rank // ranks_per_worker >= len(inspection.members):
        return None
    return next((pod for pod in pods if pod.pod == inspection.members[rank // ranks_per_worker]), None)


def interact(kubectl: Kubectl, pod: PodView) -> int:
    """Open a shell in a pod on this terminal; return its exit code.

    Raises:
        ClusterError: the cluster, or kubectl, refused.
    """
    args = ("exec", "-it", pod.pod, f"--container={pod.container}", "--", "sh", "-c", SHELL)
    with tempfile.TemporaryFile() as stderr:
        # With a terminal, the shell's standard error comes with its output, so stderr has only kubectl's own errors.
        child = subprocess.Popen(kubectl.command(*args), stderr=stderr)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            code = child.wait()
        finally:
            signal.signal(signal.SIGINT, before)
        errors = errors_of(stderr)
    if code and errors.strip() and not _ENDED.search(errors):
        raise error_from(errors)
    return code
