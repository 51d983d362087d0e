"""Follows the logs of a job across restarts, replaced pods and broken connections, until the job ends.

Pods of a job come and go. A poller lists them every two seconds, and starts a reader for each container without one. A
reader continues after the last line that was shown of its pod. So a broken connection, a container that restarts in
place and a pod that is replaced are the same case: the next poll finds a container without a reader. A container that
has ended is read once more after its last line, because the reader before may have lost the end. Lines are held back
for a moment, so that those of several pods can be sorted.

Rejected: `kubectl logs --selector --follow`. It follows only the pods that exist when it starts, does not report broken
connections, and fails if one of the pods has not started yet.

Each log is already in order of time. So a merge takes one kubectl and one line in memory per container, however long
the logs are. Lines are sorted by the clocks of their nodes, which differ: lines a few milliseconds apart may swap.
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
from tandem.job.manifest.fields import closest_choice
from tandem_cli.kubernetes.job_view import fetch_job, fetch_pods
from tandem_cli.kubernetes.kubectl import ClusterError, Kubectl, NotFound, end, error_from, errors_of
from tandem_cli.log_lines import MAX_LINE_BYTES, Line, LogSelection, Notify, printable_line
from tandem_cli.view import JobSummary, PodView

_CHUNK = 2**16
_SECOND = 10**9


def parse_line(raw: bytes, process: str, previous: int) -> Line:
    """Parse a line of `kubectl logs --timestamps`.

    Args:
        previous: timestamp of the line before, used if this line has none.
    """
    text = raw.decode(errors="replace")
    first, _, message = text.partition(" ")
    timestamp = parse_timestamp(first)
    if timestamp is None:
        return Line(previous, process, printable_line(text))
    return Line(timestamp, process, printable_line(message))


def parse_timestamp(text: str) -> int | None:
    """Parse an RFC 3339 time into nanoseconds since the epoch; None if it is none."""
    match = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)", text)
    if match is None:
        return None
    seconds, fraction, zone = match.groups()
    try:
        time_of_day = datetime.fromisoformat(seconds + zone)
    except ValueError:
        return None
    return int(time_of_day.timestamp()) * _SECOND + int((fraction or "0").ljust(9, "0"))


def read_lines(child: subprocess.Popen[bytes], silence: float | None) -> Iterator[bytes]:
    """Yield the lines that a process writes to its pipe, without line breaks; long lines are truncated.

    Args:
        silence: timeout without output, in seconds; None: no timeout.

    Raises:
        TimeoutError: the process wrote nothing for `silence` seconds.
    """
    assert child.stdout is not None
    pending, is_cut = b"", False
    while True:
        ready, _, _ = select.select([child.stdout], [], [], silence)
        if not ready:
            raise TimeoutError
        # At most one incomplete line is pending: a program that prints no line breaks must not fill the memory.
        piece = os.read(child.stdout.fileno(), _CHUNK)
        *complete, pending = (pending + piece).split(b"\n")
        for raw in complete:
            if not is_cut:
                yield raw[:MAX_LINE_BYTES]
            is_cut = False
        if len(pending) > MAX_LINE_BYTES and not is_cut:
            yield pending[:MAX_LINE_BYTES] + " …".encode()
            is_cut = True
        if is_cut:
            pending = b""
        if not piece:
            if pending:
                yield pending
            return


MAX_PODS = 64
"""Number of containers read at once; each takes a kubectl of some 40 MB."""
SILENCE_SECONDS = 15.0
"""Timeout for existing lines, in seconds. A node that sends none in this time is down or unreachable."""
PREVIOUS = "--previous"


def select_pods(pods: Sequence[PodView], selection: LogSelection) -> list[PodView]:
    """Return the selected pods whose logs can be read."""
    return [
        pod
        for pod in pods
        if pod.has_logs
        and (not selection.role or pod.role == selection.role)
        and (not selection.names or pod.name in selection.names or pod.pod in selection.names)
    ]


def validate_selection(pods: Sequence[PodView], selection: LogSelection, job: str) -> None:
    """Check that the selected pods exist.

    Raises:
        UserError: no pod has one of the names, or too many pods are selected.
    """
    names = sorted({pod.name for pod in pods})
    for name in selection.names:
        if name not in names and name not in {pod.pod for pod in pods}:
            suggestion = closest_choice(name, names)
            hint = f"did you mean {suggestion}?" if suggestion else f"its pods: {', '.join(names[:12]) or 'none'}"
            raise UserError(f"{job} has no pod {name}; {hint}")
    if (count := len(select_pods(pods, selection))) > MAX_PODS:
        raise UserError(
            f"{job} has {count} pods, and at most {MAX_PODS} can be read at once. Select some with --role, or by name: "
            f"tandem logs {job} {names[0]}"
        )


def merged_lines(
    kubectl: Kubectl, pods: Sequence[PodView], tail: int | None, last_timestamps: dict[str, int], notify: Notify
) -> Iterator[Line]:
    """Yield the existing lines in order of time, including those before a restart of the container.

    Args:
        last_timestamps: receives the timestamp of the last line of each pod, by UID.

    Raises:
        ClusterError: none of the logs can be read.
    """
    limit = [] if tail is None else [f"--tail={tail}"]
    # One kubectl for each container, all started before the merge: it needs the first line of every log.
    sources = [ContainerLog(kubectl, pod, [*limit, *more]) for pod in pods for more in _containers(pod)]
    try:
        for source in sources:
            source.start()
        yield from heapq.merge(*(source.lines() for source in sources))
    finally:
        for source in sources:
            source.close()
    # A follower continues from here, without a gap and without a repetition.
    for source in sources:
        if source.last_timestamp:
            last_timestamps[source.pod.uid] = max(source.last_timestamp, last_timestamps.get(source.pod.uid, 0))
    # A missing log of a previous container is no error: the kubelet keeps only some of them.
    failed = [source for source in sources if source.error is not None and PREVIOUS not in source.options]
    # One unreadable log must not hide the others; if none can be read, the command fails.
    if failed and len(failed) == len(pods):
        assert failed[0].error is not None
        raise failed[0].error
    for source in failed:
        notify(f"{source.pod.name}: {first_line(source.error)}")


class ContainerLog:
    """Reads the log of one container with one kubectl."""

    def __init__(
        self, kubectl: Kubectl, pod: PodView, options: Sequence[str], silence: float | None = SILENCE_SECONDS
    ) -> None:
        self.pod, self.options = pod, tuple(options)
        self.last_timestamp = 0
        """Timestamp of the last line, in nanoseconds; 0 before the first."""
        self.error: ClusterError | None = None
        """Error that cut the log off; None if it was read completely."""
        self._kubectl, self._silence = kubectl, silence
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def start(self) -> None:
        """Start kubectl.

        Raises:
            ClusterError: kubectl is not installed.
        """
        args = ("logs", self.pod.pod, f"--container={self.pod.container}", "--timestamps", *self.options)
        self._child = self._kubectl.open(*args, errors=self._errors)

    def lines(self) -> Iterator[Line]:
        """Yield the lines."""
        assert self._child is not None
        try:
            for raw in read_lines(self._child, self._silence):
                line = parse_line(raw, self.pod.name, self.last_timestamp)
                self.last_timestamp = max(self.last_timestamp, line.timestamp)
                yield line
        except TimeoutError:
            self.error = ClusterError(
                f"its log did not arrive within {SILENCE_SECONDS:g} s; check that its node is reachable"
            )
            return
        if self._child.wait() != 0 and not self._is_stopped:
            self.error = error_from(errors_of(self._errors))

    def stop(self) -> None:
        """End the iteration over the lines, from another thread."""
        self._is_stopped = True
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        """End kubectl and close its files."""
        if self._child is not None:
            end(self._child)
        self._errors.close()


def _containers(pod: PodView) -> list[list[str]]:
    """Return the options of `kubectl logs` for each container of a pod, the previous one first.

    While a container waits for its restart, the kubelet shows the previous one without an option.
    """
    return [[PREVIOUS], []] if pod.restarts and pod.state != "waiting" else [[]]


def first_line(error: Exception | None) -> str:
    """Return the first line of an error, which summarizes it."""
    return str(error).partition("\n")[0]


POLL_SECONDS = 2.0
HOLD_SECONDS = 0.4
"""Time that a line is held back for earlier ones of other pods, in seconds."""
DRAIN_SECONDS = 10.0
"""Timeout to read the rest when the job has ended, in seconds."""
REPEAT_SECONDS = 60.0
"""Interval after which a persistent error is reported again, in seconds."""
JOIN_SECONDS = 3.0
"""Timeout for a running poll or reader when the follower is closed, in seconds."""
_IDLE_STATES = ("done", "failed", "waiting")
"""States of pods whose container writes nothing: waiting ones with a log have ended before."""
_QUEUE_SIZE = 10_000
"""Number of lines in the queue at which readers block."""


class Follower:
    """Yields new lines of a job until it ends. Close it after use."""

    def __init__(
        self, kubectl: Kubectl, name: str, selection: LogSelection, last_timestamps: dict[str, int], notify: Notify
    ) -> None:
        """
        Args:
            last_timestamps: timestamp of the last shown line of each pod, by UID; other pods are shown completely.
        """
        self._kubectl, self._name, self._selection, self._notify = kubectl, name, selection, notify
        self._last_timestamps = dict(last_timestamps)
        self._messages: queue.Queue[_Message] = queue.Queue(_QUEUE_SIZE)
        self._is_closed = threading.Event()
        self._readers: dict[str, _Reader] = {}
        self._complete: set[tuple[str, int]] = set()
        self._names_by_uid: dict[str, str] = {}
        self._poller = threading.Thread(target=self._poll_loop, daemon=True)
        self._missing: set[str] = set()
        self._reported_at: dict[str, float] = {}
        self._deadline = float("inf")
        self._is_job_over = False

    def lines(self, is_closed: Callable[[], bool] = lambda: False) -> Iterator[Line]:
        """Yield each line once no earlier one is expected.

        Args:
            is_closed: whether to end before the job does.
        """
        self._poller.start()
        pending: list[tuple[Line, float]] = []
        while not (is_closed() or self._is_over()):
            try:
                message = self._messages.get(timeout=HOLD_SECONDS / 4)
            except queue.Empty:
                message = None
            # Only this thread handles messages, so the state below needs no lock.
            if isinstance(message, Line):
                heapq.heappush(pending, (message, time.monotonic()))
            elif message is not None:
                self._handle(message)
            # The heap sorts by timestamp; a line leaves it only when earlier ones had time to arrive.
            while pending and time.monotonic() - pending[0][1] >= HOLD_SECONDS:
                yield heapq.heappop(pending)[0]
        # The job is over: nothing earlier can arrive any more.
        while pending:
            yield heapq.heappop(pending)[0]

    def close(self) -> None:
        """Stop the poller and all readers."""
        self._is_closed.set()
        for reader in self._readers.values():
            reader.stop()
        for reader in self._readers.values():
            reader.join()
        if self._poller.is_alive():
            self._poller.join(JOIN_SECONDS)

    def _is_over(self) -> bool:
        if not self._messages.empty():
            return False
        return time.monotonic() > self._deadline or (self._is_job_over and not self._readers)

    def _handle(self, message: "_Poll | _EndOfLog | str") -> None:
        match message:
            case str():
                self._notify_once(message)
            case _EndOfLog():
                # Without a reader, the next poll starts one again unless the log is complete.
                self._readers.pop(message.pod.uid, None)
                if message.last_timestamp:
                    self._last_timestamps[message.pod.uid] = max(
                        message.last_timestamp, self._last_timestamps.get(message.pod.uid, 0)
                    )
                # A live container may print more after a broken connection; only a final reader completes the log.
                if message.is_final and message.error is None:
                    self._complete.add(_incarnation(message.pod))
                elif message.error is not None:
                    self._notify_once(f"{message.pod.name}: {first_line(message.error)}; trying again")
            case _Poll(job=None):
                self._notify_once(f"{self._name} was deleted")
                self._start_draining()
                self._is_job_over = True
            case _Poll():
                selected = select_pods(message.pods, self._selection)
                self._stop_readers({pod.uid for pod in message.pods})
                # Later pods get a reader when earlier ones have ended.
                for pod in selected[:MAX_PODS]:
                    self._ensure_reader(pod)
                unread = [pod for pod in selected if _incarnation(pod) not in self._complete]
                # An ended job is over when its remaining logs are read, or at the latest after DRAIN_SECONDS.
                if message.job is not None and message.job.ended:
                    self._start_draining()
                    self._is_job_over = not unread

    def _start_draining(self) -> None:
        self._deadline = min(self._deadline, time.monotonic() + DRAIN_SECONDS)

    def _ensure_reader(self, pod: PodView) -> None:
        self._report_replacement(pod)
        # One reader per pod, and none for a container whose log is complete.
        if pod.uid in self._readers or _incarnation(pod) in self._complete:
            return
        reader = _Reader(self._kubectl, pod, self._last_timestamps.get(pod.uid, 0), self._enqueue)
        reader.start()
        self._readers[pod.uid] = reader

    def _report_replacement(self, pod: PodView) -> None:
        """Notify the user when a pod has replaced another one."""
        if pod.uid not in self._names_by_uid:
            if pod.name in self._names_by_uid.values():
                self._notify(f"{pod.name} is now {pod.pod}" + (f" on {pod.node}" if pod.node else ""))
            self._names_by_uid[pod.uid] = pod.name

    def _stop_readers(self, existing: Collection[str]) -> None:
        """Stop the readers of pods that are gone.

        A reader of a deleted pod usually ends by itself; the second poll that misses its pod stops it, in case the
        node is gone as well.
        """
        missing = {uid for uid in self._readers if uid not in existing}
        for uid in missing & self._missing:
            self._readers[uid].stop()
        self._missing = missing

    def _notify_once(self, text: str) -> None:
        now = time.monotonic()
        if now - self._reported_at.get(text, float("-inf")) > REPEAT_SECONDS:
            self._reported_at[text] = now
            self._notify(text)

    def _poll_loop(self) -> None:
        while not self._is_closed.is_set():
            self._enqueue(self._poll())
            self._is_closed.wait(POLL_SECONDS)

    def _poll(self) -> "_Poll | str":
        try:
            # The job first: once it has ended, no further pods can appear.
            job = fetch_job(self._kubectl, self._name)
            return _Poll(job, fetch_pods(self._kubectl, self._name))
        except NotFound:
            # The job was deleted: an end, not an error.
            return _Poll(None, ())
        except UserError as error:
            return f"{first_line(error)}; trying again"

    def _enqueue(self, message: "_Message") -> None:
        while not self._is_closed.is_set():
            try:
                self._messages.put(message, timeout=0.5)
                return
            except queue.Full:
                continue


@dataclass(frozen=True)
class _Poll:
    """Result of a poll; `job` is None if it was deleted."""

    job: JobSummary | None
    pods: tuple[PodView, ...]


@dataclass(frozen=True)
class _EndOfLog:
    """Message of a reader whose log or connection has ended."""

    pod: PodView
    last_timestamp: int
    is_final: bool
    """Whether the container had ended before the reader started, so that the log is complete."""
    error: ClusterError | None


_Message = Line | _Poll | _EndOfLog | str


class _Reader:
    """Follows one container from a timestamp on, in a thread of its own."""

    def __init__(self, kubectl: Kubectl, pod: PodView, after: int, put: Callable[[_Message], None]) -> None:
        self._pod, self._after, self._enqueue = pod, after, put
        self._is_final = pod.state in _IDLE_STATES
        since = [f"--since-time={_rfc3339(after)}"] if after else []
        self._source = ContainerLog(kubectl, pod, [*since, *([] if self._is_final else ["--follow"])], silence=None)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start kubectl and the thread."""
        self._source.start()
        self._thread.start()

    def stop(self) -> None:
        """End the connection, and with it the thread."""
        self._source.stop()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        try:
            for line in self._source.lines():
                # --since-time has whole seconds, so lines that were already shown come again.
                if line.timestamp > self._after:
                    self._enqueue(line)
        finally:
            self._source.close()
        self._enqueue(_EndOfLog(self._pod, self._source.last_timestamp, self._is_final, self._source.error))


def _incarnation(pod: PodView) -> tuple[str, int]:
    return pod.uid, pod.restarts


def _rfc3339(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
