"""What kubectl complains of, in its own words, and what to do about it. Pure.

kubectl has no exit codes for its mistakes, so they are known by their words, which have been the same for years (read
with 1.35). What is not known is passed on as it is: a wrong advice is worse than none.
"""

import re

from tandem.errors import UserError
from tandem.printable import printable

CHART = "charts/tandem"
CRD = f"{CHART}/files/crd.yaml"
MOST = 4000
"""Characters of a complaint that are passed on."""


class ClusterError(UserError):
    """The cluster, or kubectl, refused. Its message has kubectl's words and what to do."""


class NotFound(ClusterError):  # noqa: N818 - reads as the sentence it is
    """The object is not there."""


class WrongContext(ClusterError):  # noqa: N818 - as above
    """There is no such context."""


class NoCluster(ClusterError):  # noqa: N818 - as above
    """kubectl is there, and knows no cluster."""


_ADVICE: tuple[tuple[re.Pattern[str], type[ClusterError], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), kind, advice)
    for pattern, kind, advice in (
        (r"context.*(was not found|does not exist)", WrongContext, "See: kubectl config get-contexts"),
        (
            r"connection to the server localhost:8080 was refused",
            NoCluster,
            "kubectl knows no cluster yet: set KUBECONFIG, or choose one with `kubectl config use-context`",
        ),
        (
            r"doesn't have a resource type \"distributedtrainingjobs|no matches for kind \"DistributedTrainingJob\"",
            ClusterError,
            f"Tandem is not installed on this cluster: install the chart in {CHART}, "
            f"or the kind of jobs alone with `kubectl apply --server-side -f {CRD}`",
        ),
        (
            r"\(Forbidden\).*exceeded quota",
            ClusterError,
            "See `kubectl describe quota`; ask for less, or whoever keeps the cluster for more",
        ),
        (
            r"\(Forbidden\)",
            ClusterError,
            "You may not do that there: try another --namespace or --context, or ask whoever keeps the cluster",
        ),
        (
            r"\(Unauthorized\)|must be logged in|token has expired|getting credentials",
            ClusterError,
            "Log in as you do for kubectl; `kubectl auth whoami` shows whether it worked",
        ),
        (
            r"namespaces \"[^\"]*\" not found",
            NotFound,
            "Choose another --namespace, or make it with `kubectl create namespace`",
        ),
        (r"\(NotFound\)", NotFound, ""),
        (
            r"Apply failed with \d+ conflict",
            ClusterError,
            "Somebody has changed these fields by other means (`kubectl scale`, for instance): take their value over "
            "into the file, or overwrite theirs with --force",
        ),
        (
            r"namespace from the provided object .* does not match",
            ClusterError,
            "Leave --namespace out, or metadata.namespace in the file",
        ),
        (
            r"was refused|no such host|i/o timeout|unable to connect|timeout exceeded|deadline exceeded|"
            r"no route to host|network is unreachable|EOF$",
            ClusterError,
            "The cluster does not answer: is it up, and is this the right --context? Try: kubectl get --raw /healthz",
        ),
    )
)
_NOISE = re.compile(
    r"^([EWIF]\d{4} \d\d:\d\d:\d\d|Warning: |\* <nil>: Invalid value: null: some validation rules were not checked)"
)


def complaint(said: str) -> ClusterError:
    """The error for what kubectl wrote to its standard error before it ended with one."""
    words = _words(said)
    for pattern, kind, advice in _ADVICE:
        if pattern.search(words):
            return kind(f"kubectl: {words}" + (f"\n{advice}" if advice else ""))
    return ClusterError(f"kubectl: {words or 'it ended with an error, and did not say which'}")


def warnings(said: str) -> list[str]:
    """What the API server warns of, in answers that are none the worse for it."""
    return [printable(line.removeprefix("Warning: ")) for line in said.splitlines() if line.startswith("Warning: ")]


def _words(said: str) -> str:
    """Without the lines of its log, which repeat the same five times."""
    lines = [line.rstrip() for line in said.splitlines()]
    kept = [line for line in lines if line and not _NOISE.match(line)] or [line for line in lines if line]
    text = printable("\n".join(kept))
    for opening in ("error: error from server", "Error from server", "error:", "Error:"):
        if text.lower().startswith(opening.lower()):
            text = text[len(opening) :].lstrip()
            break
    return text if len(text) <= MOST else text[: MOST - 1] + "…"
