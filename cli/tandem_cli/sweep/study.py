"""The trials of a sweep, in a journal of Optuna in its folder (ask and tell).

The journal is a file of JSON lines that Optuna's own tools read, too. One driver writes it, which holds the sweep's
lock; so a lock of Optuna's that a killed driver has left is removed, and a line that it has not completed is cut off.

Attributes of a trial here, all written before what they announce:

    run        name of its job, before that is submitted
    rung       number of rungs that it may pass, before it continues behind the last of them
    paused     reason for which it is paused, before it is; empty before it continues
    verdict    reason for which it is stopped, before it is stopped
    cost       written when it has ended
"""

import itertools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from tandem.errors import UserError
from tandem.job.manifest.reading import node_of
from tandem.job.resource import DistributedTrainingJob
from tandem.job.sweep import Dimension, SweepSpec
from tandem.model import finite, whole_number
from tandem_cli.sweep.definition import Definition, SweepFolder, is_whole

JOURNAL = "optuna.log"
LOCK_SUFFIX = ".lock"
"""Suffix of the lock file of Optuna's journal."""
RUN, VERDICT, COST, RUNG, PAUSED = "run", "verdict", "cost", "rung", "paused"
ACTIVE_SECONDS = "active_seconds"
"""Attribute of the study: the time in which a driver was at work."""

State = Literal["Waiting", "Running", "Complete", "Pruned", "Failed"]
STATES: Mapping[TrialState, State] = {
    TrialState.WAITING: "Waiting",
    TrialState.RUNNING: "Running",
    TrialState.COMPLETE: "Complete",
    TrialState.PRUNED: "Pruned",
    TrialState.FAIL: "Failed",
}


@dataclass(frozen=True)
class Trial:
    """A trial of a sweep."""

    number: int
    """Its number, from 0."""
    values: Mapping[str, Any]
    """The values that it tries, by the path of the field."""
    state: State
    run: str = ""
    """Name of its job; empty before that is submitted."""
    score: float | None = None
    """Its best score so far, by the metric of the job's evaluators; of several checkpoints' scores on the validation
    data, where the job holds some out."""
    step: int | None = None
    """Step of the checkpoint with that score."""
    last_step: int | None = None
    """Step of the newest evaluated checkpoint."""
    scores: Mapping[int, float] = field(default_factory=dict)
    """Scores by step."""
    reason: str = ""
    """Reason for which it was pruned or failed."""
    seconds: float | None = None
    """Time from its start to its end or until now, with pauses of the sweep."""
    cost: float | None = None
    """Cost, if the job has prices."""
    rung: int = 0
    """Number of rungs that it may pass, with the pruner `promotion`."""
    is_paused: bool = False
    """Whether it is paused at the next rung."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state in ("Complete", "Pruned", "Failed")


@contextmanager
def explaining(path: Path) -> Iterator[None]:
    """Explain errors of Optuna about its journal.

    Raises:
        UserError: the journal cannot be used.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of experimental features; ours are few, and tested
            yield
    except OSError as error:
        raise UserError(f"{path} cannot be used: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AssertionError, RuntimeError) as error:
        raise UserError(
            f"{path} cannot be read by Optuna {optuna.__version__}: it is damaged, or was written by another version "
            f"({type(error).__name__}: {error})"
        ) from error


class Study:
    """The trials of a sweep, for its driver.

    Args:
        definition: its space, sampler and pruner.
        folder: folder whose lock is held.

    Raises:
        UserError: the journal is damaged or of another version, or cannot be written.
    """

    def __init__(self, definition: Definition, folder: SweepFolder) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        spec = definition.spec
        self.path = folder.path / JOURNAL
        self._spec = spec
        job = definition.parsed({}, definition.name)
        self.goal = job.spec.evaluation.direction
        self.metric = job.spec.evaluation.metric
        self._distributions = {
            path: distribution(dimension, _kind(path, definition)) for path, dimension in spec.space.items()
        }
        with explaining(self.path):
            _recover(self.path)
            self._study = optuna.create_study(
                storage=_storage(self.path),
                study_name=definition.name,
                direction=StudyDirection[self.goal.upper()],
                load_if_exists=True,
                pruner=_pruner(spec, job),
            )
            # A sampler with the seed of an earlier driver would draw the same values again.
            self._study.sampler = _sampler(spec, len(self._study.trials))
            if spec.sampler == "grid":
                for values in grid(self._distributions, spec):
                    self._study.enqueue_trial(values, skip_if_exists=True)

    def trials(self) -> list[Trial]:
        """All trials, by number."""
        with explaining(self.path):
            return [_trial(frozen, self.goal) for frozen in self._study.get_trials(deepcopy=False)]

    def ask(self) -> Trial:
        """Begin a trial."""
        with explaining(self.path):
            number = self._study.ask(self._distributions).number
        return self.trials()[number]

    def note(self, number: int, name: str, value: Any) -> None:
        """Set an attribute of a trial."""
        with explaining(self.path):
            self._handle(number).set_user_attr(name, value)

    def report(self, number: int, step: int, score: float) -> bool:
        """Report a score of a running trial, and return whether the pruner wants it to end."""
        with explaining(self.path):
            trial = self._handle(number)
            trial.report(score, step)
            return trial.should_prune()

    def end(self, number: int, state: Literal["Complete", "Pruned", "Failed"], value: float | None = None) -> None:
        """End a trial.

        Args:
            value: its score, if it is complete.
        """
        frozen = {name: trial_state for trial_state, name in STATES.items()}[state]
        with explaining(self.path):
            self._study.tell(number, None if state != "Complete" else value, state=frozen)

    @property
    def active_seconds(self) -> float:
        """Time in which earlier drivers were at work, in seconds."""
        with explaining(self.path):
            return finite(self._study.user_attrs.get(ACTIVE_SECONDS)) or 0.0

    def add_active_seconds(self, seconds: float) -> None:
        """Record the time in which drivers were at work, in seconds."""
        with explaining(self.path):
            self._study.set_user_attr(ACTIVE_SECONDS, seconds)

    def _handle(self, number: int) -> optuna.trial.Trial:
        frozen = self._study.get_trials(deepcopy=False)[number]
        return optuna.trial.Trial(self._study, frozen._trial_id)


def read_trials(definition: Definition, folder: SweepFolder) -> list[Trial]:
    """Read the trials of a sweep, which may be running.

    Raises:
        UserError: the journal is damaged or of another version.
    """
    path = folder.path / JOURNAL
    if not path.exists():
        return []
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    goal = definition.evaluation.direction
    with explaining(path):
        studies = optuna.get_all_study_names(_storage(path))
        if definition.name not in studies:
            return []
        study = optuna.load_study(storage=_storage(path), study_name=definition.name)
        return [_trial(frozen, goal) for frozen in study.get_trials(deepcopy=False)]


def importances(definition: Definition, folder: SweepFolder) -> dict[str, float]:
    """Estimate how much each field decides about the score (PED-ANOVA); shares of 1, the largest first.

    Empty while there are too few complete trials to tell.
    """
    path = folder.path / JOURNAL
    with explaining(path):
        study = optuna.load_study(storage=_storage(path), study_name=definition.name)
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < MIN_COMPLETE_TRIALS or len({trial.value for trial in complete}) < 2:
        return {}
    with warnings.catch_warnings(), suppress(ValueError, RuntimeError):
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
    return {}


MIN_COMPLETE_TRIALS = 4
"""Complete trials from which on importances are estimated."""


def ascending(score: float, goal: str) -> float:
    """A score as a number of which less is better."""
    return -score if goal == "Maximize" else score


def best_of(trials: Sequence[Trial], goal: str) -> Trial | None:
    """The best trial: of the complete ones, or of the pruned ones while none is complete."""
    for state in ("Complete", "Pruned"):
        scored = [trial for trial in trials if trial.state == state and trial.score is not None]
        if scored:
            return min(scored, key=lambda trial: (ascending(trial.score or 0.0, goal), trial.number))
    return None


def distribution(dimension: Dimension, kind: str) -> BaseDistribution:
    """The values of a field, as Optuna has them."""
    if dimension.values is not None:
        return CategoricalDistribution(dimension.values)
    assert dimension.low is not None, "a rule of the model"
    assert dimension.high is not None, "a rule of the model"
    if is_whole(dimension, kind):
        return IntDistribution(int(dimension.low), int(dimension.high), dimension.log, int(dimension.step or 1))
    return FloatDistribution(dimension.low, dimension.high, dimension.log, dimension.step)


def grid(distributions: Mapping[str, BaseDistribution], spec: SweepSpec) -> list[dict[str, Any]]:
    """All combinations, the first field changing slowest; at most as many as the budget has."""
    columns = [_points(own) for own in distributions.values()]
    product = itertools.islice(itertools.product(*columns), spec.budget.trials)
    return [dict(zip(distributions, values, strict=True)) for values in product]


def _points(own: BaseDistribution) -> list[Any]:
    if isinstance(own, CategoricalDistribution):
        return list(own.choices)
    assert isinstance(own, FloatDistribution | IntDistribution)
    assert own.step is not None, "checked with the definition"
    count = int((own.high - own.low) / own.step + 1e-9) + 1
    points = [own.low + index * own.step for index in range(count)]
    return [int(point) for point in points] if isinstance(own, IntDistribution) else points


def _kind(path: str, definition: Definition) -> str:
    node = node_of(path, definition.job)
    return "" if node is None else node.kind


def _storage(path: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(path)))


def _recover(path: Path) -> None:
    """Remove what a killed driver has left: its lock, and a line that it has not completed."""
    path.with_name(path.name + LOCK_SUFFIX).unlink(missing_ok=True)
    if not path.exists():
        return
    with path.open("rb+") as journal:
        content = journal.read()
        if content and not content.endswith(b"\n"):
            journal.truncate(content.rfind(b"\n") + 1)
            os.fsync(journal.fileno())


def _sampler(spec: SweepSpec, trials: int) -> optuna.samplers.BaseSampler:
    if spec.sampler == "tpe":
        return optuna.samplers.TPESampler(seed=spec.seed + trials)
    return optuna.samplers.RandomSampler(seed=spec.seed + trials)


def _pruner(spec: SweepSpec, job: DistributedTrainingJob) -> optuna.pruners.BasePruner:
    first = spec.pruner.min_steps or job.spec.checkpoint.every_steps
    match spec.pruner.name:
        case "asha":
            return optuna.pruners.SuccessiveHalvingPruner(
                min_resource=first or "auto", reduction_factor=spec.pruner.factor
            )
        case "median":
            return optuna.pruners.MedianPruner(n_warmup_steps=max(0, (first or 1) - 1))
        case _:
            return optuna.pruners.NopPruner()


def _trial(frozen: FrozenTrial, goal: str) -> Trial:
    attributes = frozen.user_attrs
    scores = dict(sorted(frozen.intermediate_values.items()))
    step = min(scores, key=lambda key: ascending(scores[key], goal), default=None)
    started = frozen.datetime_start
    values = frozen.params or frozen.system_attrs.get("fixed_params") or {}
    return Trial(
        number=frozen.number,
        values=dict(values),
        state=STATES[frozen.state],
        run=str(attributes.get(RUN, "")),
        score=None if step is None else scores[step],
        step=step,
        last_step=max(scores, default=None),
        scores=scores,
        reason=str(attributes.get(VERDICT) or attributes.get(PAUSED) or ""),
        rung=whole_number(attributes.get(RUNG)) or 0,
        is_paused=frozen.state == TrialState.RUNNING and bool(attributes.get(PAUSED)),
        seconds=None if started is None else ((frozen.datetime_complete or datetime.now()) - started).total_seconds(),
        cost=finite(attributes.get(COST)),
    )
