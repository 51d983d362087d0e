"""The logs of many containers that are there already, merged while they are read.

Each log is in the order of time already. So however long they are, it takes one kubectl for each container and one line
of each in memory. The clocks of nodes differ, and lines are put in order by them: what is a few milliseconds apart may
change places.
"""

import heapq
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tandem.errors import UserError
from tandem.manifest.fields import nearest
from tandem_cli.kubernetes.kubectl import Kubectl, end, errors_of
from tandem_cli.kubernetes.kubectl_errors import ClusterError, complaint
from tandem_cli.kubernetes.lines import Line, line, lines_of
from tandem_cli.kubernetes.pods import Pod

MOST_PODS = 64
"""Containers that are read at once: each takes a kubectl of some 40 MB."""
SILENCE_SECONDS = 15.0
"""A node that does not send what is there already will not: it is gone, or cut off."""
PREVIOUS = "--previous"

Tell = Callable[[str], None]
"""Says something about the logs that is none of their lines."""


@dataclass(frozen=True)
class Choice:
    """Whose logs are wanted."""

    role: str = ""
    """Pods of one role; empty: of all."""
    names: tuple[str, ...] = ()
    """These alone: worker-0, evaluator-1, coordinator; empty: all."""
    tail: int | None = None
    """Lines of each to begin with; None: all."""


def chosen(pods: Sequence[Pod], choice: Choice) -> list[Pod]:
    """Those of the pods that are wanted and can be read."""
    return [
        pod
        for pod in pods
        if pod.has_logs
        and (not choice.role or pod.role == choice.role)
        and (not choice.names or pod.name in choice.names or pod.pod in choice.names)
    ]


def check(pods: Sequence[Pod], choice: Choice, job: str) -> None:
    """See whether there is what is wanted.

    Raises:
        UserError: a name that none has, or too many at once.
    """
    known = sorted({pod.name for pod in pods})
    for name in choice.names:
        if name not in known and name not in {pod.pod for pod in pods}:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near else f"there are: {', '.join(known[:12]) or 'none'}"
            raise UserError(f"{job} has no pod {name} now; {hint}")
    if (amount := len(chosen(pods, choice))) > MOST_PODS:
        raise UserError(
            f"{job} has {amount} pods, and {MOST_PODS} can be read at once. Choose some by --role, or by name: "
            f"tandem logs {job} {known[0]}"
        )


def whole(kubectl: Kubectl, pods: Sequence[Pod], tail: int | None, seen: dict[str, int], tell: Tell) -> Iterator[Line]:
    """All that is there, in the order of time; also of the container before, where one was started again in place.

    Args:
        seen: takes the time of the last line of each pod, by its uid.

    Raises:
        ClusterError: none of the logs can be read.
    """
    limit = [] if tail is None else [f"--tail={tail}"]
    sources = [ContainerLog(kubectl, pod, [*limit, *more]) for pod in pods for more in _containers(pod)]
    try:
        for source in sources:
            source.start()
        yield from heapq.merge(*(source.lines() for source in sources))
    finally:
        for source in sources:
            source.close()
    for source in sources:
        if source.last:
            seen[source.pod.uid] = max(source.last, seen.get(source.pod.uid, 0))
    # That a container before has left no log is no trouble: the kubelet keeps only some of them.
    failed = [source for source in sources if source.trouble is not None and PREVIOUS not in source.options]
    if failed and len(failed) == len(pods):
        assert failed[0].trouble is not None
        raise failed[0].trouble
    for source in failed:
        tell(f"{source.pod.name}: {first_line(source.trouble)}")


class ContainerLog:
    """The log of one container, from one kubectl."""

    def __init__(
        self, kubectl: Kubectl, pod: Pod, options: Sequence[str], silence: float | None = SILENCE_SECONDS
    ) -> None:
        self.pod, self.options = pod, tuple(options)
        self.last = 0
        """The time of its last line."""
        self.trouble: ClusterError | None = None
        """Why these were not all lines, once they have been read."""
        self._kubectl, self._silence = kubectl, silence
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def start(self) -> None:
        """Begin to read.

        Raises:
            ClusterError: there is no kubectl.
        """
        words = ("logs", self.pod.pod, f"--container={self.pod.container}", "--timestamps", *self.options)
        self._child = self._kubectl.open(*words, errors=self._said)

    def lines(self) -> Iterator[Line]:
        """Its lines."""
        assert self._child is not None
        try:
            for raw in lines_of(self._child, self._silence):
                one = line(raw, self.pod.name, self.last)
                self.last = max(self.last, one.at)
                yield one
        except TimeoutError:
            self.trouble = ClusterError(f"its log did not come within {SILENCE_SECONDS:g} s; is its node there?")
            return
        if self._child.wait() != 0 and not self._stopped:
            self.trouble = complaint(errors_of(self._said))

    def stop(self) -> None:
        """Have the lines end, from another thread."""
        self._stopped = True
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        """Leave nothing open."""
        if self._child is not None:
            end(self._child)
        self._said.close()


def _containers(pod: Pod) -> list[list[str]]:
    """Of a container that waits to be started again, the kubelet shows the last one in any case."""
    return [[PREVIOUS], []] if pod.restarts and pod.state != "waiting" else [[]]


def first_line(error: Exception | None) -> str:
    """Of what was said of an error, the line that says most."""
    return str(error).partition("\n")[0]
