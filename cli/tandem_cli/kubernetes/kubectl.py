"""Runs kubectl, which does for `tandem` what a client library would.

What people have set up for kubectl (contexts, login plugins, proxies, rights) works here without a word about it, and
core stays without a client of its own, which would be larger than all the rest (0011). The price is a process for each
question, a tenth of a second. So everything about a job is asked in few questions, side by side.

What comes back is bounded in size and time, as from any process that may go wrong.
"""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from tandem.formatting import size
from tandem.manifest.fields import nearest
from tandem.printable import printable
from tandem_cli.kubernetes.kubectl_errors import ClusterError, WrongContext, complaint, warnings

ANSWER_SECONDS = 60.0
"""For one question. kubectl itself asks an API server that refuses five times."""
REQUEST_SECONDS = 30
"""For one request of kubectl's to the API server."""
MOST_BYTES = 256 * 2**20
"""Of one answer: the events of a namespace with very many jobs are the most that is asked for."""
MOST_SAID = 64 * 2**10
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
            f"{command[0]} is not there, and tandem speaks to clusters through it. Install it, and see that "
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
        if len(found) > MOST_BYTES:
            raise ClusterError(f"kubectl's answer is larger than {size(MOST_BYTES)} and was not read to its end")


def errors_of(said: IO[bytes]) -> str:
    """The last of what a kubectl said of errors: what matters comes last."""
    size = said.seek(0, os.SEEK_END)
    said.seek(max(0, size - MOST_SAID))
    return said.read(MOST_SAID).decode(errors="replace")


def _too_slow(arguments: Sequence[str], seconds: float, said: str) -> str:
    last = printable(" ".join(said.split()))[-500:]
    heard = f"; it said: {last}" if last else ""
    return (
        f"`kubectl {' '.join(arguments[:2])}` did not answer within {seconds:g} s{heard}\n"
        "Is the cluster up, and does your login need an answer from you? Try: kubectl get --raw /healthz"
    )
