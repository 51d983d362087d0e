"""A connection to a job's coordinator: its token, and a local port that kubectl forwards to it.

A port-forward ends with the pod that it leads to, or stays and leads nowhere. So it is looked after: whether it lives,
and whether the coordinator answers through it. A new one takes the same port, so a page that was opened finds its
coordinator again by itself.
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

from tandem import labels as names
from tandem_cli.kubernetes.kubectl import ClusterError, Kubectl, NotFound, complaint, end, errors_of

HOST = "127.0.0.1"
START_SECONDS = 30.0
"""For kubectl to say that it listens."""
ANSWER_SECONDS = 3.0
"""For the coordinator's word that it is there."""
LOOK_SECONDS = 2.0
"""Between two looks."""
END_SECONDS = 5.0
"""For the end of what a killed kubectl has said."""
MISSES = 2
"""So often in a row the coordinator does not answer before the way is made anew."""

_LISTENS = re.compile(rb"Forwarding from 127\.0\.0\.1:(\d+)")
_FORBIDDEN = "(Forbidden)"


def token(kubectl: Kubectl, job: str) -> str:
    """The job's token.

    Raises:
        ClusterError: it is not there, or may not be read; says which right is missing.
    """
    name = names.token(job)
    try:
        found = kubectl.json("get", "secret", name)
    except NotFound as error:
        raise NotFound(f"{job} has no Secret {name} yet: is the operator running? See: tandem events {job}") from error
    except ClusterError as error:
        if _FORBIDDEN not in str(error):
            raise
        raise ClusterError(
            f"you may not read the Secret {name}, which holds the key to the page. You need the right to `get` this "
            f"one of the `secrets`; ask the administrator of the cluster\n{error}"
        ) from error
    try:
        return base64.b64decode(found["data"]["token"], validate=True).decode()
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        words = (
            f"the Secret {name} holds no token; delete it, and the operator creates it again with the job's next pod"
        )
        raise ClusterError(words) from error


class Forward:
    """A port of this machine that leads to a job's coordinator. A resource: use it in `with`.

    Args:
        port: of this machine; 0 takes a free one.

    Raises:
        ClusterError: there is no way; says which right is missing, if one is.
    """

    def __init__(self, kubectl: Kubectl, job: str, port: int = 0) -> None:
        self._kubectl, self._job = kubectl, job
        self._child: subprocess.Popen[bytes] | None = None
        self._misses = 0
        self.port = port
        self.port = self._open()

    @property
    def endpoint(self) -> str:
        """host:port."""
        return f"{HOST}:{self.port}"

    def look(self) -> bool:
        """Whether the coordinator is there; if it is not, the way is made anew.

        Raises:
            ClusterError: there is no way now; the next look may find one.
        """
        if self._child is not None and self._child.poll() is None and self._answers():
            self._misses = 0
            return True
        self._misses += 1
        if self._child is None or self._child.poll() is not None or self._misses >= MISSES:
            self._misses = 0
            self._open()
        return False

    def close(self) -> None:
        """Close it."""
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
        where = f"service/{names.coordinator(self._job)}"
        ports = f"{self.port or ''}:http"
        with tempfile.TemporaryFile() as said:
            child = self._kubectl.open("port-forward", f"--address={HOST}", where, ports, errors=said)
            try:
                port = _listening(child, time.monotonic() + START_SECONDS)
            except BaseException:
                end(child)
                raise
            if port is None:
                end(child)
                raise self._no_way(errors_of(said))
        self._child = child
        # kubectl says a line for each connection. Where nobody reads, it stops at the first that finds no room.
        self._reader = threading.Thread(target=_read_on, args=(child,), name="port-forward", daemon=True)
        self._reader.start()
        return port

    def _no_way(self, said: str) -> ClusterError:
        if not said.strip():
            return ClusterError(
                f"kubectl found no running coordinator within {START_SECONDS:g} s. See: tandem status {self._job}"
                + self._kubectl.options()
            )
        error = complaint(said)
        if _FORBIDDEN not in str(error):
            return error
        return ClusterError(
            f"{error}\nThe page needs the rights to `get` `services`, to `get`, `list` and `watch` `pods`, and to "
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


def _listening(child: subprocess.Popen[bytes], deadline: float) -> int | None:
    """The port, once kubectl says it; None if it ends, or says nothing in time."""
    assert child.stdout is not None
    said = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([child.stdout], [], [], left)[0]:
            break
        if not (piece := child.stdout.read1(4096)):  # type: ignore[attr-defined]
            return None
        said += piece
        if found := _LISTENS.search(said):
            return int(found[1])
    return None


def _read_on(child: subprocess.Popen[bytes]) -> None:
    assert child.stdout is not None
    while child.stdout.read1(4096):  # type: ignore[attr-defined]
        pass


def until_it_ends(
    forward: Forward, ended: Callable[[], str], tell: Callable[[str], None], seconds: float = LOOK_SECONDS
) -> str:
    """Keep the way open until the job ends, or is deleted.

    Args:
        ended: how the job has ended; empty while it has not.
        tell: is given what happens, a sentence each.

    Returns:
        How the job has ended.
    """
    away = False
    while True:
        time.sleep(seconds)
        here = False
        with suppress(ClusterError):
            here = forward.look()
        if here:
            if away:
                tell("the coordinator answers again")
            away = False
            continue
        if word := ended():
            return word
        if not away:
            tell("the coordinator does not answer; trying again")
        away = True
