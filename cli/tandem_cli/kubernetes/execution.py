"""Commands in the pods of a job, through `kubectl exec`: the stacks of ranks, a debugger, and a shell.

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
from tandem.launch import RUN_DIR, module_command
from tandem.stacks import Attachment, Inspection
from tandem_cli.kubernetes.kubectl import ANSWER_SECONDS, ClusterError, Kubectl, complaint, errors_of
from tandem_cli.view import Pod

INSPECT = (*module_command("tandem_trainer.inspection", python="python"),)
"""In a worker's pod. Without what lies in the working folder, which is not Tandem's."""
AT_ONCE = 8
"""Pods that are asked at the same time."""
SHELL = (
    f'cd "${RUN_DIR}" 2>/dev/null || true; '
    "if command -v bash >/dev/null 2>&1; then exec bash; else exec sh; fi"
)  # fmt: skip
"""In the run directory where it can be entered; the pod's variables are there already."""

ATTACH_SECONDS = 90.0
"""For a debugger; the rank itself takes up to a minute."""
_LACKING = re.compile(r"No module named '?tandem_trainer|unrecognized arguments: --attach")
_ENDED = re.compile(r"command terminated with exit code \d+")


def executable(pods: Sequence[Pod]) -> list[Pod]:
    """The pods whose container runs."""
    return [pod for pod in pods if pod.state in ("running", "not ready", "leaving")]


def inspect(kubectl: Kubectl, pod: Pod, rank: int | None) -> Inspection:
    """The ranks of a worker.

    Raises:
        ClusterError: the cluster, or kubectl, refused, or its image is of another version.
    """
    said = _asked(kubectl, pod, [] if rank is None else [f"--rank={rank}"], ANSWER_SECONDS)
    try:
        found = Inspection.read_json(said)
    except ValidationError as error:
        raise ClusterError(f"the answer of {pod.name} cannot be read: {printable(said[:200])!r}") from error
    # People know the worker by its place in the job; processes, by the name of the pod.
    return found.model_copy(update={"ranks": [one.model_copy(update={"replica": pod.name}) for one in found.ranks]})


def attach(kubectl: Kubectl, pod: Pod, rank: int) -> Attachment:
    """Have a rank of a worker let a debugger attach, in the pod.

    Raises:
        ClusterError: as above.
    """
    said = _asked(kubectl, pod, [f"--rank={rank}", "--attach"], ATTACH_SECONDS)
    try:
        return Attachment.read_json(said).model_copy(update={"replica": pod.name})
    except ValidationError as error:
        raise ClusterError(f"the answer of {pod.name} cannot be read: {printable(said[:200])!r}") from error


def forward(kubectl: Kubectl, pod: Pod, port: int) -> int:
    """Lead a port of this machine to the same one of a pod's loopback address, until Ctrl-C or the end of the pod.
    Returns kubectl's exit code; its words go to this terminal."""
    child = subprocess.Popen(kubectl.command("port-forward", "--address=127.0.0.1", f"pod/{pod.pod}", f"{port}:{port}"))
    try:
        return child.wait()
    except KeyboardInterrupt:
        # It got the same signal.
        return child.wait()


def _asked(kubectl: Kubectl, pod: Pod, words: Sequence[str], seconds: float) -> str:
    """The last line that the inspection in a pod prints: Python's start-up in an image of the user's own may print
    lines of its own before."""
    try:
        said = kubectl.ask("exec", pod.pod, f"--container={pod.container}", "--", *INSPECT, *words, seconds=seconds)
    except ClusterError as error:
        if _LACKING.search(str(error)):
            raise ClusterError(
                f"{pod.name} cannot be asked: the image of the job's workers has a version of Tandem that lacks "
                f"`tandem debug{' --attach' * ('--attach' in words)}`, or none"
            ) from error
        raise
    return said.text.strip().rpartition("\n")[2]


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
