"""Runs kubectl, which `tandem` uses in place of a client library.

What people have set up for kubectl (contexts, login plugins, proxies, rights) works here without a word about it, and
core stays without a client of its own, which would be larger than all the rest (0011). The price is a process for each
question, a tenth of a second. So everything about a job is asked in few questions, side by side.

What comes back is bounded in size and time, as from any process that may go wrong.

kubectl has no exit codes for its mistakes, so they are known by their words, which have been the same for years (read
with 1.35). What is not known is passed on as it is: a wrong advice is worse than none.
"""

import json
import os
import re
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from tandem.formatting import printable, shortened, size
from tandem.manifest.fields import nearest
from tandem_cli.platforms import Gone, PlatformError

CHART = "charts/tandem"
CRD = f"{CHART}/files/crd.yaml"
MAX_COUNT = 4000
"""Characters of a complaint that are passed on."""


class ClusterError(PlatformError):
    """The cluster, or kubectl, refused. Its message has kubectl's words and what to do."""


class NotFound(ClusterError, Gone):  # noqa: N818 - reads as the sentence it is
    """The object is not there."""


class WrongContext(ClusterError):  # noqa: N818 - reads as the sentence it is
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
            f"Tandem is not installed on this cluster: install the chart in {CHART}, or only the CRD with `kubectl "
            f"apply --server-side -f {CRD}`",
        ),
        (
            r"\(Forbidden\).*exceeded quota",
            ClusterError,
            "See `kubectl describe quota`; request less, or ask the administrator of the cluster for more",
        ),
        (
            r"\(Forbidden\).*pods/exec",
            ClusterError,
            "The missing right is `create` on `pods/exec` in the job's namespace; the administrator of the cluster can "
            "grant it with a Role",
        ),
        (
            r"\(Forbidden\)",
            ClusterError,
            "You may not do that there: try another --namespace or --context, or ask the administrator of the cluster",
        ),
        (
            r"\(Unauthorized\)|must be logged in|token has expired|getting credentials",
            ClusterError,
            "Log in as you do for kubectl; `kubectl auth whoami` shows whether it worked",
        ),
        (
            r"namespaces \"[^\"]*\" not found",
            NotFound,
            "Choose another --namespace, or create it with `kubectl create namespace`",
        ),
        (r"\(NotFound\)", NotFound, ""),
        (
            r"Apply failed with \d+ conflict",
            ClusterError,
            "These fields were changed by other means (for example `kubectl scale`): copy their values into the file, "
            "or overwrite them with --force",
        ),
        (
            r"namespace from the provided object .* does not match",
            ClusterError,
            "Omit --namespace, or metadata.namespace in the file",
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
    return ClusterError(f"kubectl: {words or 'it failed without an error message'}")


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
    return shortened(text, MAX_COUNT)


ANSWER_SECONDS = 60.0
"""For one question. kubectl itself asks an API server that refuses five times."""
REQUEST_SECONDS = 30
"""For one request of kubectl's to the API server."""
MAX_BYTES = 256 * 2**20
"""Of one answer: the events of a namespace with very many jobs are the most that is asked for."""
MAX_SAID = 64 * 2**10
"""Bytes of what it says of errors that are read."""
_CHUNK = 2**16


@dataclass(frozen=True)
class KubectlResult:
    """What a question brought."""

    text: str
    warnings: tuple[str, ...] = ()
    """What the API server warns of."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl with a namespace and a context; empty ones are kubectl's own choice."""

    namespace: str = ""
    context: str = ""
    program: str = "kubectl"

    def ask(self, *arguments: str, given: str = "", seconds: float = ANSWER_SECONDS) -> KubectlResult:
        """Run it to its end.

        Args:
            given: its standard input.
            seconds: after which it is ended.

        Raises:
            ClusterError: it is not there, ended with an error, took too long or said too much.
        """
        command = self.command(f"--request-timeout={REQUEST_SECONDS}s", *arguments)
        with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as source:
            source.write(given.encode())
            source.seek(0)
            child = _started(command, source, said)
            try:
                output = _read(child, time.monotonic() + seconds)
                failed = child.wait(seconds) != 0
            except (TimeoutError, subprocess.TimeoutExpired):
                raise ClusterError(_too_slow(arguments, seconds, errors_of(said))) from None
            finally:
                end(child)
            errors = errors_of(said)
        if failed:
            raise self._with_contexts(complaint(errors))
        return KubectlResult(output.decode(errors="replace"), tuple(warnings(errors)))

    def json(self, *arguments: str) -> Any:
        """The same, for an answer in JSON.

        Raises:
            ClusterError: as above, or it is none.
        """
        text = self.ask(*arguments, "-o", "json").text
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ClusterError(f"kubectl {' '.join(arguments)} did not answer with JSON: {error}") from None

    def open(self, *arguments: str, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start it and leave it running; its output is a pipe. To be ended with `end`.

        Raises:
            ClusterError: it is not there.
        """
        return _started(self.command(*arguments), subprocess.DEVNULL, errors)

    def command(self, *arguments: str) -> list[str]:
        """The command line."""
        chosen = [f"--context={self.context}"] if self.context else []
        chosen += [f"--namespace={self.namespace}"] if self.namespace else []
        return [self.program, *chosen, *arguments]

    def options(self) -> str:
        """The same choice for another `tandem` command, each option with a space before it."""
        chosen = f" -n {self.namespace}" if self.namespace else ""
        return chosen + (f" --context {self.context}" if self.context else "")

    def _with_contexts(self, error: ClusterError) -> ClusterError:
        """A context that is not there is told with those that are."""
        if not isinstance(error, WrongContext) or not self.context:
            return error
        try:
            known = Kubectl(program=self.program).ask("config", "get-contexts", "-o", "name").text.split()
        except ClusterError:
            return error
        near = nearest(self.context, known)
        meant = f"did you mean {near}?" if near else f"contexts here: {', '.join(known[:8]) or 'none'}"
        return WrongContext(f"there is no context {self.context}; {printable(meant)}")


def end(child: subprocess.Popen[bytes]) -> None:
    """Have it gone, whether it wants to or not."""
    child.kill()
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def _started(command: Sequence[str], source: IO[bytes] | int, said: IO[bytes]) -> subprocess.Popen[bytes]:
    if shutil.which(command[0]) is None:
        raise ClusterError(
            f"{command[0]} was not found, and tandem needs it to reach clusters. Install it, and check that "
            f"`{command[0]} get nodes` works; for this machine alone there is `tandem run`"
        )
    return subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE, stderr=said)


def _read(child: subprocess.Popen[bytes], deadline: float) -> bytes:
    assert child.stdout is not None
    descriptor, found = child.stdout.fileno(), bytearray()
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        if not (piece := os.read(descriptor, _CHUNK)):
            return bytes(found)
        found += piece
        if len(found) > MAX_BYTES:
            raise ClusterError(f"kubectl's answer is larger than {size(MAX_BYTES)} and was not read to its end")


def errors_of(said: IO[bytes]) -> str:
    """The last of what a kubectl said of errors: what matters comes last."""
    size = said.seek(0, os.SEEK_END)
    said.seek(max(0, size - MAX_SAID))
    return said.read(MAX_SAID).decode(errors="replace")


def _too_slow(arguments: Sequence[str], seconds: float, said: str) -> str:
    last = printable(" ".join(said.split()))[-500:]
    heard = f"; it said: {last}" if last else ""
    return (
        f"`kubectl {' '.join(arguments[:2])}` did not answer within {seconds:g} s{heard}\n"
        "Is the cluster up, and does your login need an answer from you? Try: kubectl get --raw /healthz"
    )
