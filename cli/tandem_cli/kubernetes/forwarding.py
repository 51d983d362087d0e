"""A connection to a job's coordinator: its token, and a local port that kubectl forwards to it.

A port-forward ends with its pod, or stays and leads nowhere. So `Forward.check` checks that kubectl runs and that the
coordinator answers. A new port-forward takes the same local port, so an open page reconnects by itself.
"""

import base64
import binascii
import http.client
import re
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from tandem.job import labels as names
from tandem_cli.kubernetes.kubectl import ClusterError, Kubectl, NotFound, end, error_from, errors_of

HOST = "127.0.0.1"
START_SECONDS = 30.0
"""Timeout for kubectl to listen, in seconds."""
ANSWER_SECONDS = 3.0
"""Timeout of a health check of the coordinator, in seconds."""
CHECK_SECONDS = 2.0
"""Interval between checks, in seconds."""
END_SECONDS = 5.0
"""Timeout for the end of a killed kubectl's output, in seconds."""
MAX_MISSES = 2
"""Consecutive failed health checks after which the port-forward is restarted."""

_LISTENS = re.compile(rb"Forwarding from 127\.0\.0\.1:(\d+)")
_FORBIDDEN = "(Forbidden)"


def token(kubectl: Kubectl, job: str) -> str:
    """Fetch the job's token.

    Raises:
        ClusterError: it does not exist, or this user may not read it; the message names the missing permission.
    """
    name = names.token(job)
    try:
        secret = kubectl.json("get", "secret", name)
    except NotFound as error:
        raise NotFound(
            f"{job} has no Secret {name} yet; check that the operator is running. See: tandem events {job}"
        ) from error
    except ClusterError as error:
        if _FORBIDDEN not in str(error):
            raise
        raise ClusterError(
            f"you may not read the Secret {name}, which holds the token of the page. You need permission to `get` this "
            f"one of the `secrets`; ask the administrator of the cluster\n{error}"
        ) from error
    try:
        return base64.b64decode(secret["data"]["token"], validate=True).decode()
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        message = (
            f"the Secret {name} holds no token; delete it, and the operator creates it again with the job's next pod"
        )
        raise ClusterError(message) from error


class Forward:
    """A local port that is forwarded to a job's coordinator. Use it in a `with` statement.

    Args:
        port: local port; 0: a free port.

    Raises:
        ClusterError: the port cannot be forwarded; the message names a missing permission.
    """

    def __init__(self, kubectl: Kubectl, job: str, port: int = 0) -> None:
        self._kubectl, self._job = kubectl, job
        self._child: subprocess.Popen[bytes] | None = None
        self._misses = 0
        self.port = port
        self.port = self._open()

    @property
    def endpoint(self) -> str:
        """Return `host:port` of the local end."""
        return f"{HOST}:{self.port}"

    def check(self) -> bool:
        """Check that the coordinator answers; if it does not, restart the port-forward.

        Raises:
            ClusterError: the port cannot be forwarded now; a later check may succeed.
        """
        if self._child is not None and self._child.poll() is None and self._answers():
            self._misses = 0
            return True
        self._misses += 1
        if self._child is None or self._child.poll() is not None or self._misses >= MAX_MISSES:
            self._misses = 0
            self._open()
        return False

    def close(self) -> None:
        """End the port-forward."""
        if self._child is not None:
            self._child.kill()
            self._reader.join(END_SECONDS)
            end(self._child)
            self._child = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> int:
        self.close()
        service = f"service/{names.coordinator(self._job)}"
        ports = f"{self.port or ''}:http"
        with tempfile.TemporaryFile() as stderr:
            child = self._kubectl.open("port-forward", f"--address={HOST}", service, ports, errors=stderr)
            try:
                port = _read_port(child, time.monotonic() + START_SECONDS)
            except BaseException:
                end(child)
                raise
            if port is None:
                end(child)
                raise self._forward_error(errors_of(stderr))
        self._child = child
        # kubectl prints a line for each connection, and blocks when nobody reads them.
        self._reader = threading.Thread(target=_discard_output, args=(child,), name="port-forward", daemon=True)
        self._reader.start()
        return port

    def _forward_error(self, stderr: str) -> ClusterError:
        if not stderr.strip():
            return ClusterError(
                f"kubectl found no running coordinator within {START_SECONDS:g} s. See: tandem status {self._job}"
                + self._kubectl.options()
            )
        error = error_from(stderr)
        if _FORBIDDEN not in str(error):
            return error
        return ClusterError(
            f"{error}\nThe page needs permission to `get` `services`, to `get`, `list` and `watch` `pods`, and to "
            "`create` `pods/portforward`"
        )

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_SECONDS)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _read_port(child: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Return the port once kubectl prints it; None if it ends, or prints none in time."""
    assert child.stdout is not None
    output = b""
    while (remaining := deadline - time.monotonic()) > 0:
        if not select.select([child.stdout], [], [], remaining)[0]:
            break
        if not (piece := child.stdout.read1(4096)):  # type: ignore[attr-defined]
            return None
        output += piece
        if match := _LISTENS.search(output):
            return int(match[1])
    return None


def _discard_output(child: subprocess.Popen[bytes]) -> None:
    assert child.stdout is not None
    while child.stdout.read1(4096):  # type: ignore[attr-defined]
        pass


def keep_open(
    forward: Forward, end_message: Callable[[], str], notify: Callable[[str], None], seconds: float = CHECK_SECONDS
) -> str:
    """Keep the port-forward open until the job ends, or is deleted.

    Args:
        end_message: returns how the job has ended; empty while it has not.
        notify: called with a sentence when the coordinator stops or starts to answer.

    Returns:
        How the job has ended.
    """
    is_unreachable = False
    while True:
        time.sleep(seconds)
        answers = False
        with suppress(ClusterError):
            answers = forward.check()
        if answers:
            if is_unreachable:
                notify("the coordinator answers again")
            is_unreachable = False
            continue
        if message := end_message():
            return message
        if not is_unreachable:
            notify("the coordinator does not answer; trying again")
        is_unreachable = True
