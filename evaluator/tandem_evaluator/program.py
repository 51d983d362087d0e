"""Scores checkpoints with a program of the user's own (`evaluators.command`).

`tandem.evaluation` documents the program's side. This is the other end: it starts the program, hands out shards, reads
reports, and ends it. A program that announces that it stays gets the next shard through a pipe; one that does not is
run for each shard.

**Failures.** A program that crashes, writes no report or takes too long has failed. It is started afresh and tried once
more, because one that stays may have failed because of an earlier shard, and a machine may run out of memory once. Then
the failure is the result for this checkpoint: retried by every other evaluator it would keep the job open for nothing.
An evaluator that is killed itself records nothing, and others take its shard.

The program and all of its children are one process group, which ends with the evaluator. Its output goes to the
evaluator's own; the last lines are kept for the message.
"""

import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from tandem import evaluation
from tandem.formatting import duration, one_line
from tandem.job.resource import Evaluators
from tandem.processes.launch import module_command, program_command, with_run_dir
from tandem.processes.limits import describe_kill, oom_kills
from tandem.rundir.checkpoint import WEIGHTS, Broken, Manifest, is_damaged
from tandem.rundir.code import environment_without_code
from tandem.rundir.layout import RunDir
from tandem_evaluator.result import ProgramResult, ProgramShard, merge_program
from tandem_evaluator.scoring import ProgramFailed, Work
from tandem_trainer.malloc import adapted_environment

TASK_PROGRAM = module_command("tandem_evaluator.task_program")
"""Command that evaluates checkpoints of a task. It finds the job's code by itself, once it has imported what it
needs."""
TRIES = 2
POLL_SECONDS = 0.1
"""Interval between two checks whether the program has ended, and whether the evaluator has to stop."""
GRACE_SECONDS = 5.0
"""Grace period of a program between SIGTERM, or the end of its pipe, and SIGKILL."""
LAST_LINES = 20
MAX_MESSAGE_LENGTH = 400
"""Maximum length of the last line that a message quotes, in characters."""


class _Failed(Exception):  # noqa: N818 - it says what happened
    """One try has failed; says why."""


class ProgramScoring:
    """Runs the user's program, at most one process at a time.

    Args:
        evaluators: settings with a command.
    """

    def __init__(self, evaluators: Evaluators) -> None:
        assert evaluators.command is not None
        self._command = program_command(with_run_dir([*evaluators.command, *evaluators.args]))
        self._metric, self._timeout = evaluators.metric, evaluators.timeout_seconds
        self._program: _Program | None = None
        self._scored = ""

    def read(self, folder: Path, manifest: Manifest | None) -> Path:
        """Verify the weights of a checkpoint, which the program reads by itself; returns the folder."""
        if manifest is None:
            return folder
        entry = manifest.entry(WEIGHTS)
        for number in range(len(entry.xxh3)):
            if is_damaged(folder, entry, number):
                raise Broken(f"{folder.name}/{entry.path} does not match its checksum")
        return folder

    def score(self, read: Path, work: Work, should_continue: Callable[[], bool]) -> ProgramShard | None:
        """Have the program evaluate a shard."""
        for remaining_tries in reversed(range(TRIES)):
            try:
                report = self._report(read, work, should_continue)
                return None if report is None else self._result(report, work)
            except _Failed as error:
                self.close()
                if not remaining_tries:
                    raise ProgramFailed(str(error)) from error
                print(f"{error}; once more, with the program started afresh", flush=True)
        raise AssertionError

    def read_shard(self, content: Any, work: Work) -> ProgramShard:
        """Parse a published shard."""
        result = ProgramShard.read(content)
        if (result.reference, result.shard, result.shards) != (work.reference, work.shard, work.shards):
            raise ValueError("it is the result of another shard")
        return result

    def merge(self, shards: Sequence[ProgramShard]) -> ProgramResult:
        """Merge the scores of all shards."""
        return merge_program(shards, self._metric)

    def read_merged(self, content: Any) -> ProgramResult:
        """Parse a published result."""
        return ProgramResult.read(content)

    def best_changed(self, rundir: RunDir) -> None:
        """Do nothing."""

    def idle(self) -> None:
        """Do nothing: a program that stays keeps its model and data in memory on purpose."""

    def close(self) -> None:
        """End the program."""
        if self._program is not None:
            self._program.close()
            self._program = None

    def _report(self, folder: Path, work: Work, should_continue: Callable[[], bool]) -> Any:
        """The report as parsed JSON; None if `should_continue` returned False."""
        shard = {
            evaluation.CHECKPOINT: str(folder),
            evaluation.WEIGHTS: str(weights_in(folder)),
            evaluation.STEP: str(work.reference.step),
            evaluation.SHARD: str(work.shard),
            evaluation.SHARDS: str(work.shards),
        }
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        if self._program is None or not self._program.next(shard):
            self.close()
            self._program = _Program(self._command, shard)
        while should_continue():
            if (report := self._program.poll()) is not None:
                self._scored = self._program.scored
                if not self._program.stays:
                    self.close()
                return report
            # The timeout also covers the start of the program, which may load its model for minutes.
            if deadline is not None and time.monotonic() > deadline:
                raise _Failed(f"the program has taken longer than {duration(self._timeout)} (timeoutSeconds)")
        self.close()
        return None

    def _result(self, report: Any, work: Work) -> ProgramShard:
        now = time.time()
        facts = {
            "checkpoint": work.reference.name,
            "step": work.reference.step,
            "generation": work.reference.generation,
            "shard": work.shard,
            "shards": work.shards,
            "seconds": max(0.0, now - work.started),
            "evaluator": work.evaluator,
            "at": now,
            "weights": self._scored,
        }
        try:
            return ProgramShard.read(facts | _parts(report))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field_path = ".".join(map(str, first["loc"]))
            raise _Failed(
                f"the program's report is wrong: {field_path}: {one_line(first['msg'])[:MAX_MESSAGE_LENGTH]}"
            ) from error
        except ValueError as error:
            raise _Failed(f"the program's report is wrong: {one_line(str(error))[:MAX_MESSAGE_LENGTH]}") from error


def weights_in(path: Path) -> Path:
    """Path of the weights of a checkpoint: the file, in Tandem's and in the Hugging Face Trainer's; any other
    checkpoint as a whole."""
    names = (WEIGHTS, "model.safetensors")
    return next((path / name for name in names if (path / name).is_file()), path)


def _parts(report: Any) -> dict[str, Any]:
    """The content of a report, by the fields of `ProgramShard`.

    Raises:
        ValueError: it is not a report.
    """
    if not isinstance(report, Mapping):
        raise ValueError('it has to be an object such as {"accuracy": {"mean": [90, 100]}}')  # noqa: TRY004
    parts: dict[str, Any] = {}
    histograms: dict[str, Any] = {}
    confusion = None
    completions: list[Any] | None = None
    for name, value in report.items():
        reducer, content, moments = "mean", [value, 1], None
        if isinstance(value, Mapping):
            moments = value.get("moments")
            contents = [item for item in value.items() if item[0] != "moments"]
            if len(contents) == 1:
                ((reducer, content),) = contents
        if reducer == "confusion":
            if confusion is not None:
                raise ValueError("it has more than one confusion matrix")
            confusion = content
        elif reducer == "histogram":
            histograms[name] = content
        elif reducer == "completions":
            if completions is not None:
                raise ValueError("it has completions twice")
            completions = _completions(name, content)
        elif reducer in ("mean", "geometricMean") and isinstance(content, list) and len(content) == 2:
            parts[name] = {"reducer": reducer, "value": _number(name, content[0]), "count": _number(name, content[1])}
            parts[name]["moments"] = moments
        elif reducer in ("sum", "max", "min"):
            parts[name] = {"reducer": reducer, "value": _number(name, content)}
        else:
            raise ValueError(
                f'{name} is {value!r}; give a number, or {{"mean": [total, count]}}, geometricMean, sum, max, min, '
                "confusion, histogram or completions"
            )
    return {"metrics": parts, "confusion": confusion, "histograms": histograms, "completions": completions or []}


def _completions(name: str, content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(entry, list) and len(entry) == 3 for entry in content):
        raise ValueError(f"{name} has to be a list of [number, prompt, text]")
    fields = ("number", "prompt", "text")
    return [dict(zip(fields, entry, strict=True)) for entry in content]


def _number(name: str, value: Any) -> float | None:
    """A number of a report; None if it is not finite."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}, which is no number")  # noqa: TRY004
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large for a float") from None
    return number if math.isfinite(number) else None


class _Program:
    """A running program.

    Raises:
        _Failed: it cannot be started.
    """

    def __init__(self, command: Sequence[str], shard: Mapping[str, str]) -> None:
        self.stays = False
        self.scored = ""
        """Digest of the weights of the last report, where the program names it."""
        self._is_busy, self._is_silent = True, False
        self._buffer = b""
        self._ended: float | None = None
        self._oom_kills = oom_kills()
        """The kernel's counter when the newest shard was handed out."""
        descriptor, path = tempfile.mkstemp(prefix="tandem-report-", suffix=".json")
        os.close(descriptor)
        self._report = Path(path)
        child_in, self._work = os.pipe()
        self._reports, child_out = os.pipe()
        os.set_blocking(self._reports, False)
        is_task_program = command[: len(TASK_PROGRAM)] == TASK_PROGRAM
        inherited = environment_without_code(os.environ) if is_task_program else os.environ
        variables = {**adapted_environment(os.environ), **inherited, **shard}
        variables |= {evaluation.REPORT: path, evaluation.CHANNEL: f"{child_in},{child_out}"}
        try:
            self._process = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(child_in, child_out),
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._work)
            os.close(self._reports)
            self._report.unlink(missing_ok=True)
            raise _Failed(f"the program {command[0]} cannot be started: {error.strerror}") from error
        finally:
            os.close(child_in)
            os.close(child_out)
        assert self._process.stdout is not None
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._reader = threading.Thread(target=self._copy, args=(self._process.stdout,), name="output", daemon=True)
        self._reader.start()

    def next(self, shard: Mapping[str, str]) -> bool:
        """Hand out the next shard. False if no program waits for it."""
        if not self.stays or self._process.poll() is not None:
            return False
        message = {
            "folder": shard[evaluation.CHECKPOINT],
            "weights": shard[evaluation.WEIGHTS],
            "step": int(shard[evaluation.STEP]),
            "shard": int(shard[evaluation.SHARD]),
            "shards": int(shard[evaluation.SHARDS]),
        }
        try:
            # The message is smaller than the pipe's buffer, so the write does not block.
            os.write(self._work, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            return False
        self._is_busy = True
        self._oom_kills = oom_kills()
        return True

    def poll(self) -> Any:
        """Wait a moment for a report; None if there is none yet.

        Raises:
            _Failed: the program has ended without a report, or wrote an invalid one.
        """
        readable, _, _ = select.select([self._reports], [], [], POLL_SECONDS if self._ended is None else 0)
        if readable:
            content = os.read(self._reports, 2**20)
            self._is_silent = not content
            self._buffer += content
        if len(self._buffer) > evaluation.MAX_REPORT_BYTES:
            raise _Failed(f"the program's report has more than {evaluation.MAX_REPORT_BYTES:,} bytes")
        while (line := self._line()) is not None:
            message = _json(line)
            if isinstance(message, Mapping) and message.get("stays") is True:
                self.stays = True
            elif isinstance(message, Mapping) and message.get("metrics") is not None:
                self._is_busy = False
                self.scored = str(message.get("weights", ""))
                return message["metrics"]
            else:
                raise _Failed("the program wrote something else than reports into its channel")
        if (code := self._process.poll()) is None:
            if self._is_silent:
                # The program has closed its end of the channel, as one may that does not know it.
                time.sleep(POLL_SECONDS)
            return None
        if self._ended is None:
            # Its last message may still be in the pipe.
            self._ended = time.monotonic()
            return None
        return self._read_report(code)

    def close(self) -> None:
        """End the program and all of its children: one that waits for work by closing its pipe, any other by
        signals."""
        os.close(self._work)
        if self.stays and not self._is_busy:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
        self._reader.join(GRACE_SECONDS)
        os.close(self._reports)
        self._report.unlink(missing_ok=True)

    def _line(self) -> bytes | None:
        line, newline, remaining = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = remaining
        return line

    def _read_report(self, code: int) -> Any:
        self._reader.join(POLL_SECONDS)
        last = next((line for line in reversed(self._lines) if line.strip()), "")
        quoted = f": {one_line(last)[:MAX_MESSAGE_LENGTH]}" if last else ""
        if code < 0:
            if killed := describe_kill(code, self._oom_kills):
                raise _Failed(f"the program was {killed}{quoted}")
            with suppress(ValueError):
                raise _Failed(f"the program was killed by {signal.Signals(-code).name}{quoted}")
        if code != 0:
            raise _Failed(f"the program ended with exit code {code}{quoted}")
        if self.stays:
            raise _Failed(f"the program ended without a report{quoted}")
        if self._report.stat().st_size > evaluation.MAX_REPORT_BYTES:
            raise _Failed(f"the program's report has more than {evaluation.MAX_REPORT_BYTES:,} bytes")
        content = self._report.read_bytes()
        report = _json(content) if content else None
        if report is None:
            raise _Failed(f"the program ended without a report in {evaluation.REPORT}")
        return report

    def _copy(self, output: IO[bytes]) -> None:
        """Forward the program's output, and keep the last lines."""
        with output:
            for line in iter(lambda: output.readline(2**16), b""):
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
                self._lines.append(line.decode(errors="replace").rstrip())


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Failed(f"the program's report is not JSON: {one_line(str(error))[:MAX_MESSAGE_LENGTH]}") from error
