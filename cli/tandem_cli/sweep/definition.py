"""The definition of a sweep: the fields that vary and their values, checked against the job, and the sweep's folder.

A path of the space means what it means in `--set`, and is checked by the same code: a typo gets the same suggestion,
with the line of the sweep's file. Each bound and each value is tried on the job before anything starts: the tenth trial
must not be the first to find out that a batch size does not fit.
"""

import fcntl
import json
import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tandem.errors import ManifestError, Problem, UserError
from tandem.formatting import count_noun, number
from tandem.job.manifest.reading import apply_overrides, node_of, parse_job, parse_sweep, read_source
from tandem.job.manifest.source import Source, parse
from tandem.job.resource import DistributedTrainingJob, Evaluators
from tandem.job.sweep import Dimension, Sweep, SweepSpec
from tandem.model import Model, WholeNumber
from tandem.rundir.durable import read_json_or_none, replace_json
from tandem_cli.local.known import RUNS

DEFINITION, LOCK, LOG = "sweep.json", "sweep.lock", "sweep.log"
LABEL = "tandem.dev/sweep"
"""Label of a trial's job: the name of its sweep."""
POLL_SECONDS = 0.1
Values = Mapping[str, Any]
"""Values of a trial, by the path of the field."""


class TrialPlatform(Model):
    """The place to which the trials go, as the arguments of `Client`."""

    kubernetes: str = ""
    context: str = ""
    slurm: bool = False
    profile: str = ""


class Definition(Model):
    """The record of a sweep in its folder."""

    version: WholeNumber = 1
    sweep: Sweep
    job: dict[str, Any]
    """Manifest of the job, with the settings of the command line."""
    code: str = ""
    """Folder that the trials get; empty: none."""
    destination: TrialPlatform = TrialPlatform()

    @property
    def name(self) -> str:
        """Name of the sweep."""
        return self.sweep.metadata.name

    @property
    def spec(self) -> SweepSpec:
        """The fields that vary, and the choice of their values."""
        return self.sweep.spec

    @property
    def evaluation(self) -> Evaluators:
        """The evaluators of the job, whose metric ranks trials."""
        return self.parsed({}, self.name).spec.evaluation

    def manifest(self, values: Values, name: str) -> dict[str, Any]:
        """Build the manifest of a trial.

        Raises:
            ManifestError: a field does not exist.
        """
        data = apply_overrides(self.job, settings(values))
        metadata = data["metadata"]
        labels = {**(metadata.get("labels") or {}), LABEL: self.name}
        return {**data, "metadata": {**metadata, "name": name, "labels": labels}}

    def trial_name(self, number: int) -> str:
        """Name of a trial's job."""
        return f"{self.name}-{number}"

    def parsed(self, values: Values, name: str) -> DistributedTrainingJob:
        """Validate the job of a trial.

        Raises:
            ManifestError: it is invalid.
        """
        return parse_job(_source(self.manifest(values, name), "<trial>"))


def settings(values: Values) -> list[str]:
    """Write values as settings of `--set`."""
    return [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in values.items()]


def describe(values: Values) -> str:
    """Write the values of a trial in a line, each with the last part of its path."""
    return ", ".join(
        f"{short_path(path, values)} {number(value) if isinstance(value, float) else value}"
        for path, value in values.items()
    )


def short_path(path: str, paths: Collection[str]) -> str:
    """The last part of a path; the whole one where several end alike."""
    last = path.rsplit(".", 1)[-1]
    return last if sum(other.rsplit(".", 1)[-1] == last for other in paths) == 1 else path


def define(
    file: str, overrides: Sequence[str] = (), code: Path | None = None, destination: TrialPlatform | None = None
) -> Definition:
    """Read the file of a sweep and its job, and check both.

    Args:
        overrides: settings of the job for all trials.

    Raises:
        UserError: a file cannot be read, or has mistakes.
    """
    return check(read_source(file), overrides, code, destination)


def check(
    source: Source, overrides: Sequence[str] = (), code: Path | None = None, destination: TrialPlatform | None = None
) -> Definition:
    """Check the document of a sweep, whose job is a file; as `define`."""
    sweep = parse_sweep(source)
    path = Path(sweep.spec.job)
    job = read_source(path if path.is_absolute() else Path(source.file).parent / path)
    return checked_definition(sweep, job, source, overrides, code, destination)


def sweep_summary(definition: Definition) -> str:
    """Describe a sweep in a line."""
    spec = definition.spec
    trials = count_noun(spec.budget.trials, "trial")
    return f"{definition.name}: {trials} of {spec.job}, {count_noun(len(spec.space), 'field')} vary, {spec.sampler}"


def checked_definition(
    sweep: Sweep,
    job: Source,
    source: Source,
    overrides: Sequence[str] = (),
    code: Path | None = None,
    destination: TrialPlatform | None = None,
) -> Definition:
    """Check the space of a sweep against its job.

    Args:
        source: document with the sweep, for the positions of mistakes.

    Raises:
        ManifestError: with every mistake.
    """
    parse_job(job, overrides)
    definition = Definition(
        sweep=sweep,
        job=apply_overrides(job.data, overrides),
        code="" if code is None else str(code.resolve()),
        destination=destination or TrialPlatform(),
    )
    problems = [problem for path in sweep.spec.space for problem in _problems(definition, path, source)]
    if problems:
        raise ManifestError(problems)
    first = {path: next(iter(_corners(dimension))) for path, dimension in sweep.spec.space.items()}
    try:
        definition.parsed(first, definition.trial_name(sweep.spec.budget.trials))
    except ManifestError as error:
        raise ManifestError([_relocated(error.problems[0], source, ("metadata", "name"))]) from None
    if sweep.spec.sampler == "grid" and (path := _without_grid(sweep.spec)):
        place = ("spec", "space", path)
        raise ManifestError([_problem(source, place, f"a grid needs values, or low, high and step, for {path}")])
    return definition


def _problems(definition: Definition, path: str, source: Source) -> Iterator[Problem]:
    """Mistakes of one field of the space."""
    place = ("spec", "space", path)
    try:
        node_of(path, definition.job)
    except ManifestError as error:
        yield _relocated(error.problems[0], source, place)
        return
    for value in _corners(definition.spec.space[path]):
        try:
            definition.parsed({path: value}, definition.trial_name(0))
        except ManifestError as error:
            yield _relocated(error.problems[0], source, place, f"{path}={value}: ")
            return


def _corners(dimension: Dimension) -> list[Any]:
    """Values that stand for all: each listed one, or both ends of a range."""
    if dimension.values is not None:
        return dimension.values
    assert dimension.low is not None, "a rule of the model"
    assert dimension.high is not None, "a rule of the model"
    ends = [dimension.low, dimension.high]
    return [int(end) for end in ends] if is_whole(dimension) else ends


def is_whole(dimension: Dimension, kind: str = "") -> bool:
    """Whether a range has whole numbers only.

    Args:
        kind: kind of the field in the models; empty if it is unknown.
    """
    numbers = (dimension.low, dimension.high, dimension.step)
    return kind == "integer" or (kind != "number" and all(number is None or number.is_integer() for number in numbers))


def _without_grid(spec: SweepSpec) -> str:
    """The first field that has infinitely many values; empty if there is none."""
    for path, dimension in spec.space.items():
        if dimension.values is None and dimension.step is None:
            return path
    return ""


def _relocated(problem: Problem, source: Source, place: tuple[str, ...], prefix: str = "") -> Problem:
    """A mistake in the job of a trial, at its place in the sweep's file."""
    return _problem(source, place, prefix + problem.message, problem.suggestion, problem.allowed)


def _problem(source: Source, place: tuple[str, ...], message: str, suggestion: str = "", allowed: str = "") -> Problem:
    position = source.keys.get(place) or source.values.get(place) or source.values[()]
    return source.problem(position, place, message, suggestion=suggestion, allowed=allowed, given="")


def _source(data: Mapping[str, Any], name: str) -> Source:
    return parse(json.dumps(data).encode(), name)


@dataclass(frozen=True)
class SweepFolder:
    """The folder of a sweep."""

    path: Path

    def definition(self) -> Definition:
        """Read the definition.

        Raises:
            UserError: there is none, or it cannot be read.
        """
        content = read_json_or_none(self.path / DEFINITION)
        if content is None:
            raise UserError(f"{self.path} has no sweep")
        try:
            return Definition.read(content)
        except ValidationError:
            raise UserError(f"{self.path / DEFINITION} is damaged, or of a newer version of tandem") from None

    def record(self, definition: Definition) -> None:
        """Record a definition. One that is there already may get another budget, and another number of workers.

        Raises:
            UserError: the folder has another sweep or a run, or cannot be written.
        """
        if (self.path / DEFINITION).exists():
            recorded = self.definition()
            if changed := _changed(recorded, definition):
                raise UserError(
                    f"{self.path} has a sweep with another {changed}; give the sweep another name, or delete the folder"
                )
        elif self.path.exists() and any(self.path.iterdir()):
            raise UserError(f"{self.path} exists and has no sweep; give the sweep another name")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            replace_json(self.path / DEFINITION, definition.dump())
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror}") from error

    def run_dir(self, name: str) -> Path:
        """Run directory of a trial on this machine or on SLURM."""
        return self.path / name

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the sweep: it has one driver.

        Raises:
            UserError: another process drives it, or the folder cannot be written.
        """
        try:
            lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror}") from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{self.path} is running, in process {self.driver() or 'unknown'}") from None
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(lock)

    @property
    def is_running(self) -> bool:
        """Whether a process drives the sweep."""
        with suppress(OSError):
            lock = os.open(self.path / LOCK, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(lock)
        return False

    def driver(self) -> int | None:
        """Process id of the driver; for a moment after its start that of the one before, or None."""
        with suppress(OSError, ValueError):
            return int((self.path / LOCK).read_text())
        return None

    def stop(self) -> None:
        """Stop the sweep as Ctrl-C does, and wait for its end: its trials save and stop.

        Raises:
            UserError: it is not running.
        """
        if not self.is_running:
            raise UserError(f"{self.path} is not running")
        interrupted = None
        while self.is_running:
            # One that has just begun has not written its process id yet.
            if (driver := self.driver()) is not None and driver != interrupted:
                interrupted = driver
                with suppress(ProcessLookupError):
                    os.kill(driver, signal.SIGINT)
            time.sleep(POLL_SECONDS)


def _changed(recorded: Definition, definition: Definition) -> str:
    """The part in which two definitions differ; empty if one continues the other."""
    before, now = (
        {**part.dump(), "sweep": {**part.sweep.dump()["spec"], "budget": None, "workers": None}}
        for part in (recorded, definition)
    )
    if before["sweep"]["space"] != now["sweep"]["space"]:
        return "space"
    if before["job"] != now["job"]:
        return "job"
    if before["destination"] != now["destination"]:
        return "place for its trials"
    before["sweep"].pop("job")
    now["sweep"].pop("job")
    return "sampler or pruner" if before["sweep"] != now["sweep"] else ""


def is_sweep(path: Path) -> bool:
    """Whether a folder is that of a sweep."""
    return (path / DEFINITION).is_file()


def find_sweep(word: str) -> SweepFolder | None:
    """The sweep in a folder, or of a name in `runs/`; None if there is none."""
    for path in (Path(word), RUNS / word):
        if is_sweep(path):
            return SweepFolder(path)
    return None
