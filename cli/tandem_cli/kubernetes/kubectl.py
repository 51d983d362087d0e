"""Runs kubectl, which `tandem` uses in place of a client library.

The user's configuration of kubectl (contexts, login plugins, proxies, permissions) works here unchanged, and core needs
no client library, which would be larger than all the rest (0011). The price is one process for each request, a tenth of
a second. So everything about a job is fetched in few concurrent requests.

Answers are limited in size and time, as from any process that may fail.

kubectl has no exit codes for its errors, so they are recognized by their messages, which have been the same for years
(read with 1.35). Unknown errors are passed on unchanged: wrong advice is worse than none.
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

from tandem.formatting import printable, size, truncate_end
from tandem.job.manifest.fields import closest_choice
from tandem_cli.platforms import PlatformError, RunNotFoundError

CHART = "charts/tandem"
CRD = f"{CHART}/files/crd.yaml"
MAX_MESSAGE_LENGTH = 4000
"""Length to which error messages are truncated, in characters."""


class ClusterError(PlatformError):
    """The cluster or kubectl refused. The message contains kubectl's error and advice."""


class NotFound(ClusterError, RunNotFoundError):  # noqa: N818 - named after the API server's reason
    """The object does not exist."""


class UnknownContextError(ClusterError):
    """The context does not exist."""


class NoClusterError(ClusterError):
    """kubectl is installed, but has no cluster configured."""


_ADVICE: tuple[tuple[re.Pattern[str], type[ClusterError], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), kind, advice)
    for pattern, kind, advice in (
        (r"context.*(was not found|does not exist)", UnknownContextError, "See: kubectl config get-contexts"),
        (
            r"connection to the server localhost:8080 was refused",
            NoClusterError,
            "kubectl has no cluster configured: set KUBECONFIG, or choose one with `kubectl config use-context`",
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
            "You do not have permission: try another --namespace or --context, or ask the administrator of the cluster",
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
            "These fields were changed by other means (for example `kubectl scale`): copy the values into the file, "
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


def error_from(stderr: str) -> ClusterError:
    """Turn the standard error of a failed kubectl into an exception."""
    message = _message(stderr)
    for pattern, kind, advice in _ADVICE:
        if pattern.search(message):
            return kind(f"kubectl: {message}" + (f"\n{advice}" if advice else ""))
    return ClusterError(f"kubectl: {message or 'it failed without an error message'}")


def warnings(stderr: str) -> list[str]:
    """Return the API server's warnings in the standard error of a successful kubectl."""
    return [printable(line.removeprefix("Warning: ")) for line in stderr.splitlines() if line.startswith("Warning: ")]


def _message(stderr: str) -> str:
    """Return the message without the lines of kubectl's log, which repeat it five times."""
    lines = [line.rstrip() for line in stderr.splitlines()]
    message_lines = [line for line in lines if line and not _NOISE.match(line)] or [line for line in lines if line]
    text = printable("\n".join(message_lines))
    for opening in ("error: error from server", "Error from server", "error:", "Error:"):
        if text.lower().startswith(opening.lower()):
            text = text[len(opening) :].lstrip()
            break
    return truncate_end(text, MAX_MESSAGE_LENGTH)


ANSWER_SECONDS = 60.0
"""Timeout of one kubectl, in seconds. It repeats a refused request five times."""
REQUEST_SECONDS = 30
"""Timeout of one request of kubectl to the API server, in seconds."""
MAX_ANSWER_BYTES = 256 * 2**20
"""Limit of one answer, in bytes; the largest are the events of a namespace with very many jobs."""
MAX_STDERR_BYTES = 64 * 2**10
"""Bytes at the end of standard error that are read."""
_CHUNK = 2**16


@dataclass(frozen=True)
class KubectlResult:
    """Output of a kubectl that succeeded."""

    text: str
    warnings: tuple[str, ...] = ()
    """Warnings of the API server."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl with a namespace and a context; empty values mean kubectl's defaults."""

    namespace: str = ""
    context: str = ""
    program: str = "kubectl"

    def run(self, *arguments: str, stdin: str = "", seconds: float = ANSWER_SECONDS) -> KubectlResult:
        """Run kubectl and wait for its end.

        Args:
            stdin: the standard input.
            seconds: timeout, in seconds.

        Raises:
            ClusterError: it is not installed, failed, took too long or printed too much.
        """
        command = self.command(f"--request-timeout={REQUEST_SECONDS}s", *arguments)
        with tempfile.TemporaryFile() as stderr, tempfile.TemporaryFile() as source:
            source.write(stdin.encode())
            source.seek(0)
            child = _started(command, source, stderr)
            try:
                output = _read(child, time.monotonic() + seconds)
                failed = child.wait(seconds) != 0
            except (TimeoutError, subprocess.TimeoutExpired):
                raise ClusterError(_too_slow(arguments, seconds, errors_of(stderr))) from None
            finally:
                end(child)
            errors = errors_of(stderr)
        if failed:
            raise self._with_contexts(error_from(errors))
        return KubectlResult(output.decode(errors="replace"), tuple(warnings(errors)))

    def json(self, *arguments: str) -> Any:
        """Run kubectl and parse its output as JSON.

        Raises:
            ClusterError: see `run`, or the output is no JSON.
        """
        text = self.run(*arguments, "-o", "json").text
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ClusterError(f"kubectl {' '.join(arguments)} did not answer with JSON: {error}") from None

    def open(self, *arguments: str, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start kubectl and leave it running; its output is a pipe. End it with `end`.

        Raises:
            ClusterError: it is not installed.
        """
        return _started(self.command(*arguments), subprocess.DEVNULL, errors)

    def command(self, *arguments: str) -> list[str]:
        """Return the command line."""
        chosen = [f"--context={self.context}"] if self.context else []
        chosen += [f"--namespace={self.namespace}"] if self.namespace else []
        return [self.program, *chosen, *arguments]

    def options(self) -> str:
        """Return the options that select the same cluster in a `tandem` command, each after a space."""
        chosen = f" -n {self.namespace}" if self.namespace else ""
        return chosen + (f" --context {self.context}" if self.context else "")

    def _with_contexts(self, error: ClusterError) -> ClusterError:
        """Replace the error for an unknown context by one that suggests existing contexts."""
        if not isinstance(error, UnknownContextError) or not self.context:
            return error
        try:
            contexts = Kubectl(program=self.program).run("config", "get-contexts", "-o", "name").text.split()
        except ClusterError:
            return error
        suggestion = closest_choice(self.context, contexts)
        hint = f"did you mean {suggestion}?" if suggestion else f"contexts here: {', '.join(contexts[:8]) or 'none'}"
        return UnknownContextError(f"there is no context {self.context}; {printable(hint)}")


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill kubectl and close its output."""
    child.kill()
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def _started(command: Sequence[str], source: IO[bytes] | int, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    if shutil.which(command[0]) is None:
        raise ClusterError(
            f"{command[0]} was not found, and tandem needs it to reach clusters. Install it, and check that "
            f"`{command[0]} get nodes` works; for this machine alone there is `tandem run`"
        )
    return subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE, stderr=stderr)


def _read(child: subprocess.Popen[bytes], deadline: float) -> bytes:
    assert child.stdout is not None
    descriptor, output = child.stdout.fileno(), bytearray()
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        if not (piece := os.read(descriptor, _CHUNK)):
            return bytes(output)
        output += piece
        if len(output) > MAX_ANSWER_BYTES:
            raise ClusterError(f"kubectl's answer is larger than {size(MAX_ANSWER_BYTES)} and was not read to its end")


def errors_of(stderr: IO[bytes]) -> str:
    """Return the end of a kubectl's standard error, which has the decisive message."""
    length = stderr.seek(0, os.SEEK_END)
    stderr.seek(max(0, length - MAX_STDERR_BYTES))
    return stderr.read(MAX_STDERR_BYTES).decode(errors="replace")


def _too_slow(arguments: Sequence[str], seconds: float, stderr: str) -> str:
    last_output = printable(" ".join(stderr.split()))[-500:]
    detail = f"; its last output: {last_output}" if last_output else ""
    return (
        f"`kubectl {' '.join(arguments[:2])}` did not answer within {seconds:g} s{detail}\n"
        "Is the cluster up, and does your login need an answer from you? Try: kubectl get --raw /healthz"
    )
