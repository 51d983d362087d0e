"""A run in a program: its status, logs, numbers and checkpoints, wherever it runs.

Numbers come from the files of the run, read as `tandem report` reads them, so a step that was repeated after a restart
counts once. For a job on Kubernetes each such call first brings the copy in `runs/NAME` up to date, as
`tandem report --namespace` does.
"""

import importlib
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tandem.confidence import Interval
from tandem.errors import UserError
from tandem.rundir.checkpoint import WEIGHTS
from tandem.rundir.layout import RunDir, checkpoint_name
from tandem.wire.status import Phase, Status
from tandem_cli.bucket import checkpoint_files
from tandem_cli.checkpoints import weights_export
from tandem_cli.checkpoints.inventory import Entry, take_inventory
from tandem_cli.checkpoints.selector import sound
from tandem_cli.checkpoints.weights_export import ExportOrder, Format
from tandem_cli.client import notebook
from tandem_cli.log_lines import Line, LogSelection
from tandem_cli.main import needing
from tandem_cli.platforms import IsClosed, PlatformError, Run, RunNotFoundError
from tandem_cli.report.folder import NoRun
from tandem_cli.view import JobView

if TYPE_CHECKING:
    from tandem_cli.report.run import RunCheckpoint, RunData

POLL_SECONDS = 1.0
Until = Phase | Callable[[Status], bool]
"""A phase, or a predicate of the status."""
NEEDED = "client"
"""Name in the messages about a missing module."""


class RunFailedError(UserError):
    """A run has ended without success."""


class RunTimeoutError(UserError, TimeoutError):
    """A run has not reached a state in time. It continues."""


@dataclass(frozen=True)
class StepLoss:
    """The training loss of one optimizer step."""

    step: int
    loss: float
    """Loss as logged; may be NaN or infinite."""
    time: float
    """Time at which it was logged, in seconds since the epoch."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Other values of the step, such as `lr`."""


@dataclass(frozen=True)
class CheckpointScores:
    """The merged evaluation of one checkpoint."""

    checkpoint: str
    """The checkpoint's name."""
    step: int
    metrics: Mapping[str, float]
    """Scores on the test data, by metric."""
    validation: Mapping[str, float] = field(default_factory=dict)
    """Scores on the validation data, by metric; empty if none is held out."""
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """95 % confidence intervals of the scores on the test data, of those that have one."""


class CheckpointHandle:
    """A checkpoint whose manifest is sound."""

    def __init__(self, rundir: RunDir, entry: Entry) -> None:
        self._rundir, self._entry = rundir, entry

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self._entry.name

    @property
    def step(self) -> int:
        """Optimizer steps completed."""
        return self._entry.step

    @property
    def path(self) -> Path:
        """Its folder; of a run in a bucket, only the manifest is in it."""
        return self._rundir.checkpoint(self.name)

    @property
    def size(self) -> int | None:
        """Size in bytes; None if it is unknown."""
        return self._entry.size

    @property
    def metrics(self) -> Mapping[str, float]:
        """Scores on the test data, by metric; empty until it is evaluated."""
        return self._entry.metrics

    @property
    def is_best(self) -> bool:
        """Whether it has the best score of the existing checkpoints."""
        return self._entry.is_best

    @property
    def is_final(self) -> bool:
        """Whether training ended with it."""
        return self._entry.is_final

    def load(self) -> dict[str, Any]:
        """Read its weights: a tensor on the CPU for each name, as `load_state_dict` takes them.

        Reads what `tandem checkpoints export` writes, from a temporary file: verified, as safetensors, without pickle.

        Raises:
            UserError: torch or safetensors is missing, or the checkpoint is damaged or was deleted.
        """
        with needing(NEEDED):
            from safetensors.torch import load_file
        with TemporaryDirectory(prefix="tandem-load-") as folder:
            weights: dict[str, Any] = load_file(self.export(Path(folder) / WEIGHTS))
            return weights

    def export(self, path: str | Path) -> Path:
        """Write its weights as a safetensors file, and return the path; an earlier file is replaced.

        Raises:
            UserError: torch is missing, the checkpoint is damaged or was deleted, or the file cannot be written.
        """
        inventory = take_inventory(self._rundir)
        entry, manifest = sound(inventory, self.name)
        with checkpoint_files([(self._rundir, manifest)], WEIGHTS):
            order = ExportOrder(Path(path), Format.SAFETENSORS, force=True)
            return weights_export.copy(inventory, entry, manifest, order).path

    def __repr__(self) -> str:
        scores = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        return f"<checkpoint {self.name}{f': {scores}' if scores else ''}>"


class RunHandle:
    """A run, or a job on a cluster. Each method asks anew, and raises UserError if the platform cannot answer now.

    Args:
        name: name of its job.
        notes: messages of its submission.
    """

    def __init__(self, run: Run, name: str, notes: Sequence[str] = ()) -> None:
        self._run = run
        self.name, self.notes = name, tuple(notes)

    def view(self) -> JobView:
        """Return its status, its processes and its events."""
        return self._run.view()

    def status(self) -> Status:
        """Return its status: phase, message, progress, loss, best checkpoint."""
        return self._run.view(()).job.status

    @property
    def folder(self) -> Path | None:
        """Its run directory; None if that is not on this machine."""
        return None if self._run.copies_run_dir else self._run.run_dir().path

    @property
    def phase(self) -> Phase:
        """Its phase: Pending, Starting, Running, Restarting, Draining, Suspended, Succeeded or Failed."""
        return self.status().phase

    def wait(self, timeout: float | None = None, *, until: Until | None = None, check: bool = False) -> Status:
        """Wait for its end, or for a state before that, and return the status then.

        A run that was stopped has ended, with the phase Suspended; a suspended job on Kubernetes has not. While the
        platform does not answer, it tries again.

        Args:
            timeout: seconds; None: without end.
            until: a phase, or a predicate of the status. The end of the run ends the wait all the same.
            check: raise an error if the run ends without success.

        Raises:
            RunTimeoutError: the time is over. The run continues.
            RunFailedError: with `check`, if it ended in another phase than Succeeded.
            RunNotFoundError: it was deleted.
        """
        for step in self._polls(timeout, until, check):
            if isinstance(step, Status):
                return step
            time.sleep(step)
        raise AssertionError("the last step is a status")

    def poll(self) -> Status | None:
        """Return the status if it has ended, else None, as `subprocess.Popen.poll` does."""
        if not self._run.is_over(self._run.view(())):
            return None
        # It may have ended after the view was taken.
        return self.status()

    def _polls(
        self, timeout: float | None = None, until: Until | None = None, check: bool = False
    ) -> Iterator[float | Status]:
        """Yield the pauses of `wait` in seconds, and finally the status that it returns."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        view, is_last = self._run.view(()), False
        while True:
            status = view.job.status
            if (is_reached := _is_reached(status, until)) or is_last:
                if check and not is_reached and status.phase != "Succeeded":
                    raise RunFailedError(f"{self.name} ended: {status.phase}. {status.message or ''}".rstrip())
                yield status
                return
            if not (is_over := self._run.is_over(view)):
                yield self._pause(deadline, timeout, status)
            try:
                # It may have ended after the view was taken.
                view, is_last = self._run.view(()), is_over
            except RunNotFoundError:
                raise
            except PlatformError:
                if is_over:
                    yield self._pause(deadline, timeout, status)

    def _pause(self, deadline: float, timeout: float | None, status: Status) -> float:
        if (seconds := deadline - time.monotonic()) <= 0:
            raise RunTimeoutError(f"{self.name} is {status.phase} after {timeout:g} s; it continues")
        return min(POLL_SECONDS, seconds)

    def logs(
        self, follow: bool = False, *, names: Sequence[str] = (), role: str = "", tail: int | None = None
    ) -> Iterator[Line]:
        """Yield the lines of its processes in order of time.

        Args:
            follow: also yield new lines, until the end.
            names: processes, for example `worker-0`; empty: all.
            role: worker, evaluator or coordinator; empty: all.
            tail: number of last lines of each process to start with; None: all.
        """
        return self._lines(follow, names, role, tail, lambda: False)

    def _lines(
        self, follow: bool, names: Sequence[str], role: str, tail: int | None, is_closed: IsClosed
    ) -> Generator[Line, None, None]:
        yield from self._run.log(LogSelection(role, tuple(names), tail), follow, lambda text: None, is_closed)

    def losses(self) -> list[StepLoss]:
        """Return the training loss of every step that the model contains, each step once."""
        steps = self._data().model_steps
        lossless = [False] * len(steps) if steps.lossless is None else steps.lossless.tolist()
        columns = {name: values.tolist() for name, values in steps.measures.items()}
        losses = []
        for index, (step, loss, logged_at) in enumerate(
            zip(steps.step.tolist(), steps.loss.tolist(), steps.time.tolist(), strict=True)
        ):
            # NaN is where a step lacks a value.
            values = {name: column[index] for name, column in columns.items() if not math.isnan(column[index])}
            if not lossless[index]:
                losses.append(StepLoss(step, loss, logged_at, values))
        return losses

    def scores(self) -> list[CheckpointScores]:
        """Return the scores of every evaluated checkpoint that counts, whether it still exists or not, by step."""
        checkpoints = [checkpoint for checkpoint in self._data().checkpoints if checkpoint.counts]
        return [scores for checkpoint in checkpoints if (scores := _scores(checkpoint)) is not None]

    def best(self) -> CheckpointScores | None:
        """Return the scores of the best checkpoint; None while there is none."""
        best = self._data().best
        return None if best is None else _scores(best)

    def checkpoints(self) -> list[CheckpointHandle]:
        """Return the checkpoints that count, oldest first; of a job on Kubernetes, those that were copied here."""
        inventory = take_inventory(self._run.run_dir())
        entries = [entry for entry in reversed(inventory.counting) if entry.manifest is not None]
        return [CheckpointHandle(inventory.rundir, entry) for entry in entries]

    def checkpoint(self, word: str | int = "best") -> CheckpointHandle:
        """Return a checkpoint; that of a job on Kubernetes is copied here.

        Args:
            word: `best`, `latest`, `final`, a step, or a name.

        Raises:
            UserError: there is no such checkpoint, or it is damaged.
        """
        selector = checkpoint_name(word) if isinstance(word, int) else "latest" if word == "final" else word
        inventory = take_inventory(self._run.run_dir([selector]))
        entry, _ = sound(inventory, str(word))
        return CheckpointHandle(inventory.rundir, entry)

    def stop(self, now: bool = False) -> str:
        """Save and stop it, and wait for its end; return a sentence that says what is saved.

        Args:
            now: stop immediately, without a save; not on Kubernetes.
        """
        return self._run.stop(now)

    def resume(self) -> str:
        """Resume a suspended job on Kubernetes; other runs continue when they are submitted again."""
        return self._run.resume()

    def scale(self, replicas: int) -> str:
        """Change the number of workers while it runs, on SLURM and Kubernetes; return a sentence about the effect."""
        return self._run.scale(replicas)

    def report(self, path: str | Path | None = None) -> Path:
        """Write the report of the run, one HTML page, and return its path.

        Args:
            path: folder or .html file; None: `report.html` in the run directory.
        """
        with needing(NEEDED):
            import resvg_py  # noqa: F401 - before numpy: where it is missing, the error names the extra

            from tandem_cli.report.writing import write
        try:
            return write(self._run.run_dir().path, None if path is None else Path(path), png=False).page
        except NoRun as error:
            raise UserError(str(error)) from error
        except OSError as error:
            raise UserError(f"the report cannot be written to {error.filename}: {error.strerror}") from error

    def watch(self) -> None:
        """Show it in a notebook, and update the display until its end.

        Interrupting the cell leaves it; the run continues.

        Raises:
            UserError: this is no notebook.
            RunNotFoundError: it was deleted.
        """
        display = notebook.LiveOutput()
        try:
            for step in self._polls():
                display.show(self)
                if not isinstance(step, Status):
                    time.sleep(step)
        except KeyboardInterrupt:
            return

    def __repr__(self) -> str:
        return f"<run {self.name}>"

    def _repr_html_(self) -> str:
        try:
            # Without a copy from a cluster, which may take a minute.
            data = None if self._run.copies_run_dir else self._data()
        except UserError:
            data = None
        try:
            return notebook.html(self.name, self.status(), data)
        except UserError as error:
            return notebook.html(self.name, None, None, str(error))

    def _data(self) -> "RunData":
        with needing(NEEDED):
            from tandem_cli.report.reading import read
        try:
            return read(self._run.run_dir().path)
        except NoRun as error:
            raise UserError(str(error)) from error


def frame(records: Sequence[StepLoss | CheckpointScores]) -> Any:
    """Return losses or scores as a pandas DataFrame, with a column for each value and metric.

    Scores on the validation data have columns such as `validation.accuracy`.

    Raises:
        UserError: pandas is not installed.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        raise UserError(f"a frame needs {error.name}; install it with: pip install pandas") from error
    return pandas.DataFrame([_row(record) for record in records])


def _row(record: StepLoss | CheckpointScores) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for column in fields(record):
        value = getattr(record, column.name)
        if not isinstance(value, Mapping):
            row[column.name] = value
            continue
        prefix = "validation." if column.name == "validation" else ""
        row |= {f"{prefix}{name}": number for name, number in value.items()}
    return row


def _scores(checkpoint: "RunCheckpoint") -> CheckpointScores | None:
    evaluation = checkpoint.evaluation
    if evaluation is None:
        return None
    return CheckpointScores(
        checkpoint.name, checkpoint.step, evaluation.metrics, evaluation.validation, evaluation.intervals
    )


def _is_reached(status: Status, until: Until | None) -> bool:
    if until is None:
        return False
    return status.phase == until if isinstance(until, str) else bool(until(status))
