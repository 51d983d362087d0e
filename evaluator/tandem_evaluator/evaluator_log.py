"""The logs of an evaluator process: `log/evaluator-NAME.jsonl` for reports, one line per event on standard output.

A small thread records the processor time, so that it also does during a long evaluation.
"""

import json
import secrets
import threading
import time

from tandem.processes.process_age import process_age
from tandem.processes.processor_time import ProcessorTime
from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogWriter
from tandem.rundir.records import EvaluatorEnd, EvaluatorRecord, Usage

BUSY_SECONDS = 1.0
IDLE_SECONDS = 5.0


class EvaluatorLog:
    """The log of one evaluator process. Leaving the `with` block writes the end record."""

    def __init__(self, rundir: RunDir, name: str, gpus: float = 0.0) -> None:
        """
        Args:
            gpus: GPUs of this process, or its share of one.

        Raises:
            OSError: the log cannot be opened.
        """
        self._gpus = gpus or None
        self._writer = LogWriter(rundir.evaluator_log(name))
        self._writer.open()
        self._activity: tuple[str, str | None] = ("starting", None)
        self._processor = ProcessorTime()
        self._process = secrets.token_hex(8)
        self._closed = threading.Event()
        self._usage()
        self._thread = threading.Thread(target=self._watch, name="usage", daemon=True)
        self._thread.start()

    def doing(self, state: str, checkpoint: str | None = None) -> None:
        """Record the process's state from now on: `idle`, or `evaluating` a checkpoint."""
        self._activity = (state, checkpoint)

    def event(self, record: EvaluatorRecord) -> None:
        """Write an event to the log and print it."""
        self._writer.append(record)
        log_event(record.kind, **record.model_dump(exclude={"kind", "time"}, exclude_none=True))

    def close(self) -> None:
        """Write the end record. A second call does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        self._usage()
        self._writer.append(EvaluatorEnd(time=time.time()))
        self._writer.close()

    def _watch(self) -> None:
        """Record the usage once a second while evaluating, less often while idle, and soon after a change between the
        two."""
        written, before = time.monotonic(), self._activity
        while not self._closed.wait(BUSY_SECONDS):
            activity = self._activity
            waited = time.monotonic() - written
            if activity[0] == "evaluating" or activity != before or waited > IDLE_SECONDS - BUSY_SECONDS / 2:
                self._usage()
                written, before = time.monotonic(), activity

    def _usage(self) -> None:
        state, checkpoint = self._activity
        used = Usage(
            time=time.time(),
            cpu_seconds=self._processor.seconds(),
            age=round(process_age(), 3),
            process=self._process,
            state=state,
            checkpoint=checkpoint,
            gpus=self._gpus,
        )
        self._writer.append(used)

    def __enter__(self) -> "EvaluatorLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def log_event(kind: str, **facts: object) -> None:
    """Print one event as a line with its time and key=value fields, as the other processes of a run do."""
    fields = (f"{key}={value if isinstance(value, int) else _word(value)}" for key, value in facts.items())
    now = time.time()
    timestamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now)) + f",{int(1000 * now) % 1000:03d}"
    print(f"{timestamp} level=INFO event={kind}", *fields, flush=True)


def _word(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(char in text for char in ' "=\n') else text
