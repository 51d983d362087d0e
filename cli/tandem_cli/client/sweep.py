"""A sweep in a program. Its driver is a process of its own, which outlives the program or the notebook's kernel."""

import math
import time
from collections.abc import Mapping
from html import escape
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import UserError
from tandem.job.manifest.reading import parse_sweep, read_source
from tandem.job.manifest.source import Source, parse
from tandem.job.resource import API_VERSION
from tandem.job.sweep import SWEEP_KIND, Sweep
from tandem_cli.client.job_input import DATA, JobInput, as_json, read_input, without_lines
from tandem_cli.client.run import RunHandle, RunTimeoutError
from tandem_cli.local.known import RUNS
from tandem_cli.main import needing
from tandem_cli.sweep.definition import Definition, SweepFolder, TrialPlatform, check, checked_definition

if TYPE_CHECKING:
    from tandem_cli.client.client import Client
    from tandem_cli.sweep.study import Trial

POLL_SECONDS = 0.5
NEEDED = "sweep"
"""Name in the messages about a missing module."""
SweepInput = str | PathLike[str] | Mapping[str, Any] | Sweep
"""The file of a sweep, its text, a dict of it or of its `spec`, or a model of it."""


class SweepHandle:
    """A sweep. Each method reads its folder anew."""

    def __init__(self, client: "Client", folder: SweepFolder) -> None:
        self._client, self._folder = client, folder
        self._definition = folder.definition()
        self.name = self._definition.name
        self.folder = folder.path
        """Its folder, with the runs of its trials, `best.yaml` and `best.safetensors`."""

    @property
    def is_running(self) -> bool:
        """Whether its driver is at work."""
        return self._folder.is_running

    def trials(self) -> "list[Trial]":
        """Return all trials, by number: their values, states and scores."""
        with needing(NEEDED):
            from tandem_cli.sweep.study import read_trials
        return read_trials(self._definition, self._folder)

    def best(self) -> "Trial | None":
        """Return the best trial; None while none has a score."""
        with needing(NEEDED):
            from tandem_cli.sweep.study import best_of
        return best_of(self.trials(), self._definition.evaluation.direction)

    def run(self, trial: "int | Trial") -> RunHandle:
        """Return the run of a trial.

        Raises:
            UserError: there is no such trial, or it was not submitted yet.
        """
        with needing(NEEDED):
            from tandem_cli.sweep.best import run_of
        if isinstance(trial, int):
            trials = self.trials()
            if not 0 <= trial < len(trials):
                raise UserError(f"{self.name} has no trial {trial}; it has {len(trials)}")
            trial = trials[trial]
        return run_of(trial, self._folder, self._client)

    def wait(self, timeout: float | None = None) -> "list[Trial]":
        """Wait until its driver has ended, and return all trials.

        Args:
            timeout: seconds; None: without end.

        Raises:
            RunTimeoutError: the time is over. The sweep continues.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self.is_running:
            if time.monotonic() > deadline:
                raise RunTimeoutError(f"{self.name} is running after {timeout:g} s; it continues")
            time.sleep(POLL_SECONDS)
        return self.trials()

    def stop(self) -> None:
        """Save and stop its trials, and wait for the end of its driver.

        Raises:
            UserError: it is not running.
        """
        self._folder.stop()

    def resume(self) -> None:
        """Start a driver again, which continues the sweep; trials that ran continue.

        Raises:
            UserError: it is running.
        """
        _start(self._folder)

    def report(self, path: str | Path | None = None) -> Path:
        """Write the page of the sweep, and return its path.

        Args:
            path: an .html file; None: `sweep.html` in its folder.
        """
        with needing(NEEDED):
            from tandem_cli.report.comparison_page import write
            from tandem_cli.sweep.page import sweep_page
        target = self.folder / "sweep.html" if path is None else Path(path)
        write(sweep_page(self._definition, self._folder), target)
        return target

    def _repr_html_(self) -> str:
        try:
            with needing(NEEDED):
                from tandem_cli.sweep.page import trials_html
            return trials_html(self.name, self.trials(), self._definition.evaluation, self.is_running)
        except UserError as error:
            return f"<p>{escape(self.name)}: {escape(str(error))}</p>"

    def __repr__(self) -> str:
        return f"<sweep {self.name}>"


def start_sweep(
    client: "Client",
    sweep: SweepInput,
    job: JobInput | None,
    name: str,
    overrides: tuple[str, ...],
    code: Path | None,
    folder: Path | None,
    destination: TrialPlatform,
) -> SweepHandle:
    """Check a sweep, record it, and start its driver. Arguments: those of `Client.sweep`."""
    with needing(NEEDED):
        import optuna  # noqa: F401 - before anything is recorded
    with without_lines():
        definition = _definition(sweep, job, name, overrides, code, destination)
    place = SweepFolder(folder or RUNS / definition.name)
    place.record(definition)
    _start(place)
    return SweepHandle(client, place)


def _start(folder: SweepFolder) -> None:
    with needing(NEEDED):
        from tandem_cli.sweep.background import start_in_background
    start_in_background(folder)


def _definition(
    sweep: SweepInput,
    job: JobInput | None,
    name: str,
    overrides: tuple[str, ...],
    code: Path | None,
    destination: TrialPlatform,
) -> Definition:
    if isinstance(sweep, Mapping | Sweep):
        data = sweep.dump() if isinstance(sweep, Sweep) else dict(sweep)
        if "spec" not in data:
            data = {"apiVersion": API_VERSION, "kind": SWEEP_KIND, "metadata": {}, "spec": data}
        data = {**data, "metadata": {**data.get("metadata", {})}, "spec": {**data["spec"]}}
        job_source = None if job is None else read_input(job)
        if job_source is not None:
            data["spec"]["job"] = job_source.file
        if name or "name" not in data["metadata"]:
            data["metadata"]["name"] = name or _name_of(job_source)
        source = parse(as_json(data, DATA).encode(), DATA)
    else:
        text = fspath(sweep)
        source = parse(text.encode(), "<text>") if isinstance(sweep, str) and "\n" in text else read_source(text)
        job_source = None if job is None else read_input(job)
    if job_source is None:
        return check(source, overrides, code, destination)
    return checked_definition(parse_sweep(source), job_source, source, overrides, code, destination)


def _name_of(job: Source | None) -> str:
    """Name of the sweep of a job."""
    metadata = job.data.get("metadata") if job is not None and isinstance(job.data, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return f"{name}-sweep" if isinstance(name, str) and name else "sweep"
