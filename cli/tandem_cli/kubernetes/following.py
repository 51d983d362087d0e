"""The logs of a job as they come, over restarts, replaced pods and broken connections, until it ends.

Pods of a job come and go. A look-out asks every two seconds which there are, and has a reader follow each container
that has none. A reader goes on from the last line that was shown of its pod, so a connection that breaks, a container
that is started again in place and a pod that is replaced are all the same: the next look finds a container without a
reader. One whose container has ended is read once more, from the last line on, because the reader before may have lost
the end. Lines wait for a moment, so that those of several pods can be put in order.

Rejected: `kubectl logs --selector --follow`. It follows the pods that were there when it began, mentions no connection
that has broken, and ends with an error where one of the pods has not started yet.
"""

import heapq
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from tandem.errors import UserError
from tandem_cli.kubernetes.job_view import JobSummary, ask_job, ask_pods
from tandem_cli.kubernetes.kubectl import Kubectl
from tandem_cli.kubernetes.kubectl_errors import ClusterError, NotFound
from tandem_cli.kubernetes.lines import Line
from tandem_cli.kubernetes.pods import Pod
from tandem_cli.kubernetes.streams import MOST_PODS, Choice, ContainerLog, Tell, chosen, first_line

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
                for pod in wanted[:MOST_PODS]:
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
