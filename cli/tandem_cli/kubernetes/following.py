"""Follows the logs of a job across restarts, replaced pods and broken connections, until the job ends.

Pods of a job come and go. A look-out asks every two seconds which there are, and has a reader follow each container
that has none. A reader goes on from the last line that was shown of its pod, so a connection that breaks, a container
that is started again in place and a pod that is replaced are all the same: the next look finds a container without a
reader. One whose container has ended is read once more, from the last line on, because the reader before may have lost
the end. Lines wait for a moment, so that those of several pods can be put in order.

Rejected: `kubectl logs --selector --follow`. It follows the pods that were there when it began, mentions no connection
that has broken, and ends with an error where one of the pods has not started yet.

Each log is in the order of time already. So however long they are, it takes one kubectl for each container and one line
of each in memory. The clocks of nodes differ, and lines are put in order by them: what is a few milliseconds apart may
change places.
"""

import heapq
import os
import queue
import re
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from tandem.errors import UserError
from tandem.manifest.fields import nearest
from tandem_cli.kubernetes.job_view import ask_job, ask_pods
from tandem_cli.kubernetes.kubectl import ClusterError, Kubectl, NotFound, complaint, end, errors_of
from tandem_cli.log_lines import MAX_COUNT, Choice, Line, Tell, shown
from tandem_cli.view import JobSummary, Pod

_CHUNK = 2**16
_SECOND = 10**9


def line(raw: bytes, who: str, before: int) -> Line:
    """A line as `kubectl logs --timestamps` writes it.

    Args:
        before: the time of the line before, which counts where this one has none.
    """
    text = raw.decode(errors="replace")
    first, _, rest = text.partition(" ")
    at = stamp(first)
    return Line(before, who, shown(text)) if at is None else Line(at, who, shown(rest))


def stamp(text: str) -> int | None:
    """Nanoseconds since the epoch of an RFC 3339 time, None for anything else."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)", text)
    if found is None:
        return None
    whole, fraction, zone = found.groups()
    try:
        at = datetime.fromisoformat(whole + zone)
    except ValueError:
        return None
    return int(at.timestamp()) * _SECOND + int((fraction or "0").ljust(9, "0"))


def lines_of(child: subprocess.Popen[bytes], silence: float | None) -> Iterator[bytes]:
    """The lines that a process writes to its pipe, without their ends; long ones are cut.

    Args:
        silence: seconds without a byte after which it is given up; None: never.

    Raises:
        TimeoutError: it was silent for so long.
    """
    assert child.stdout is not None
    rest, is_cut = b"", False
    while True:
        ready, _, _ = select.select([child.stdout], [], [], silence)
        if not ready:
            raise TimeoutError
        piece = os.read(child.stdout.fileno(), _CHUNK)
        *whole, rest = (rest + piece).split(b"\n")
        for one in whole:
            if not is_cut:
                yield one[:MAX_COUNT]
            is_cut = False
        if len(rest) > MAX_COUNT and not is_cut:
            yield rest[:MAX_COUNT] + " …".encode()
            is_cut = True
        if is_cut:
            rest = b""
        if not piece:
            if rest:
                yield rest
            return


MAX_PODS = 64
"""Containers that are read at once: each takes a kubectl of some 40 MB."""
SILENCE_SECONDS = 15.0
"""A node that does not send what is there already will not: it is gone, or cut off."""
PREVIOUS = "--previous"


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
    if (amount := len(chosen(pods, choice))) > MAX_PODS:
        raise UserError(
            f"{job} has {amount} pods, and {MAX_PODS} can be read at once. Choose some by --role, or by name: "
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
            self.trouble = ClusterError(f"its log did not arrive within {SILENCE_SECONDS:g} s; is its node reachable?")
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


LOOK_SECONDS = 2.0
HOLD_SECONDS = 0.4
"""How long a line waits for earlier ones of other pods."""
LAST_SECONDS = 10.0
"""For what is still to be read when the job has ended."""
TOLD_AGAIN_SECONDS = 60.0
"""A trouble that stays is not told with every look."""
JOIN_SECONDS = 3.0
"""For a question or a line that is under way when it is closed."""
_ENDED = ("done", "failed", "waiting")
"""States of pods whose container writes nothing now: those that wait have ended before, or they had no log."""
_WAITING = 10_000
"""Lines that wait to be shown before readers wait, too."""


class Follower:
    """Lines as they come, until the job ends. To be closed."""

    def __init__(self, kubectl: Kubectl, name: str, choice: Choice, seen: dict[str, int], tell: Tell) -> None:
        """
        Args:
            seen: the time of the last line that was shown of each pod, by its uid; of others all is shown.
        """
        self._kubectl, self._name, self._choice, self._tell = kubectl, name, choice, tell
        self._seen = dict(seen)
        self._news: queue.Queue[_News] = queue.Queue(_WAITING)
        self._closed = threading.Event()
        self._readers: dict[str, _Reader] = {}
        self._read_to_the_end: set[tuple[str, int]] = set()
        self._met: dict[str, str] = {}
        self._look_out = threading.Thread(target=self._look_again_and_again, daemon=True)
        self._missing: set[str] = set()
        self._told: dict[str, float] = {}
        self._leave_at = float("inf")
        self._over = False

    def lines(self) -> Iterator[Line]:
        """Each as soon as none before it is to be expected."""
        self._look_out.start()
        held: list[tuple[Line, float]] = []
        while not self._is_over():
            try:
                news = self._news.get(timeout=HOLD_SECONDS / 4)
            except queue.Empty:
                news = None
            if isinstance(news, Line):
                heapq.heappush(held, (news, time.monotonic()))
            elif news is not None:
                self._take_in(news)
            while held and time.monotonic() - held[0][1] >= HOLD_SECONDS:
                yield heapq.heappop(held)[0]
        while held:
            yield heapq.heappop(held)[0]

    def close(self) -> None:
        """End everything that was started."""
        self._closed.set()
        for reader in self._readers.values():
            reader.stop()
        for reader in self._readers.values():
            reader.join()
        if self._look_out.is_alive():
            self._look_out.join(JOIN_SECONDS)

    def _is_over(self) -> bool:
        if not self._news.empty():
            return False
        return time.monotonic() > self._leave_at or (self._over and not self._readers)

    def _take_in(self, news: "_Look | _Ended | str") -> None:
        match news:
            case str():
                self._tell_once(news)
            case _Ended():
                self._readers.pop(news.pod.uid, None)
                if news.last:
                    self._seen[news.pod.uid] = max(news.last, self._seen.get(news.pod.uid, 0))
                if news.was_last and news.trouble is None:
                    self._read_to_the_end.add(_incarnation(news.pod))
                elif news.trouble is not None:
                    self._tell_once(f"{news.pod.name}: {first_line(news.trouble)}; trying again")
            case _Look(job=None):
                self._tell_once(f"{self._name} was deleted")
                self._finish()
                self._over = True
            case _Look():
                wanted = chosen(news.pods, self._choice)
                self._forget({pod.uid for pod in news.pods})
                for pod in wanted[:MAX_PODS]:
                    self._read(pod)
                left = [pod for pod in wanted if _incarnation(pod) not in self._read_to_the_end]
                if news.job is not None and news.job.ended:
                    self._finish()
                    self._over = not left

    def _finish(self) -> None:
        self._leave_at = min(self._leave_at, time.monotonic() + LAST_SECONDS)

    def _read(self, pod: Pod) -> None:
        self._introduce(pod)
        if pod.uid in self._readers or _incarnation(pod) in self._read_to_the_end:
            return
        reader = _Reader(self._kubectl, pod, self._seen.get(pod.uid, 0), self._put)
        reader.start()
        self._readers[pod.uid] = reader

    def _introduce(self, pod: Pod) -> None:
        """Say so where a pod has taken another one's place."""
        if pod.uid not in self._met:
            if pod.name in self._met.values():
                self._tell(f"{pod.name} is now {pod.pod}" + (f" on {pod.node}" if pod.node else ""))
            self._met[pod.uid] = pod.name

    def _forget(self, there: Collection[str]) -> None:
        """A reader of a pod that is gone ends by itself, unless its node is gone as well."""
        gone = {uid for uid in self._readers if uid not in there}
        for uid in gone & self._missing:
            self._readers[uid].stop()
        self._missing = gone

    def _tell_once(self, text: str) -> None:
        now = time.monotonic()
        if now - self._told.get(text, float("-inf")) > TOLD_AGAIN_SECONDS:
            self._told[text] = now
            self._tell(text)

    def _look_again_and_again(self) -> None:
        while not self._closed.is_set():
            self._put(self._look())
            self._closed.wait(LOOK_SECONDS)

    def _look(self) -> "_Look | str":
        try:
            # The job first: the pods of one that has ended are those that there will ever be.
            job = ask_job(self._kubectl, self._name)
            return _Look(job, ask_pods(self._kubectl, self._name))
        except NotFound:
            return _Look(None, ())
        except UserError as error:
            return f"{first_line(error)}; trying again"

    def _put(self, news: "_News") -> None:
        while not self._closed.is_set():
            try:
                self._news.put(news, timeout=0.5)
                return
            except queue.Full:
                continue


@dataclass(frozen=True)
class _Look:
    """What the look-out has seen; no job where there is none any more."""

    job: JobSummary | None
    pods: tuple[Pod, ...]


@dataclass(frozen=True)
class _Ended:
    """A reader has come to the end of its log, or of its connection."""

    pod: Pod
    last: int
    was_last: bool
    """Whether the container had ended before it began: then there is nothing more."""
    trouble: ClusterError | None


_News = Line | _Look | _Ended | str


class _Reader:
    """Follows one container from a line on, in a thread of its own."""

    def __init__(self, kubectl: Kubectl, pod: Pod, after: int, put: Callable[[_News], None]) -> None:
        self._pod, self._after, self._put = pod, after, put
        self._was_last = pod.state in _ENDED
        since = [f"--since-time={_rfc3339(after)}"] if after else []
        self._source = ContainerLog(kubectl, pod, [*since, *([] if self._was_last else ["--follow"])], silence=None)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._source.start()
        self._thread.start()

    def stop(self) -> None:
        """End its connection, and with it the thread."""
        self._source.stop()

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        try:
            for one in self._source.lines():
                if one.at > self._after:
                    self._put(one)
        finally:
            self._source.close()
        self._put(_Ended(self._pod, self._source.last, self._was_last, self._source.trouble))


def _incarnation(pod: Pod) -> tuple[str, int]:
    return pod.uid, pod.restarts


def _rfc3339(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
