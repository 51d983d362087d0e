"""The accuracy of each class: the newest checkpoint beside the best. Pure."""

from dataclasses import dataclass

from tandem.confidence import Estimate, differ, share_interval
from tandem.job.tasks import class_names
from tandem_cli.report.run import Ints, RunCheckpoint, RunData


@dataclass(frozen=True)
class ClassAccuracy:
    """Share of the samples of one class that were predicted as this class."""

    name: str
    """Name of the class, or its number."""
    samples: int
    """Test samples of the class."""
    best: Estimate
    """Accuracy of the best checkpoint."""
    newest: Estimate
    """Accuracy of the newest evaluated checkpoint."""

    @property
    def change(self) -> float:
        """Difference since the best checkpoint."""
        return self.newest.value - self.best.value

    @property
    def is_regression(self) -> bool:
        """Whether the newest checkpoint is worse by more than chance."""
        return self.change < 0 and differ(self.best, self.newest)


def newest_evaluated(run: RunData) -> RunCheckpoint | None:
    """Choose the newest checkpoint that counts and is evaluated."""
    return next((c for c in reversed(run.checkpoints) if c.counts and c.evaluation), None)


def class_accuracies(run: RunData) -> list[ClassAccuracy]:
    """Compare the newest evaluated checkpoint with the best, class by class, those that lost most first; empty if they
    are one checkpoint, or have no confusion matrices of the same samples."""
    best, newest = run.best, newest_evaluated(run)
    if best is None or newest is None or best is newest or not best.evaluation or not newest.evaluation:
        return []
    before, after = best.evaluation.confusion, newest.evaluation.confusion
    totals = before.sum(axis=1)
    if before.shape != after.shape or (totals != after.sum(axis=1)).any():
        return []
    names = names_of_classes(run, len(before))
    rows = [
        ClassAccuracy(name, int(total), _accuracy(before, index), _accuracy(after, index))
        for index, (name, total) in enumerate(zip(names, totals, strict=True))
        if total
    ]
    return sorted(rows, key=lambda row: row.change)


def names_of_classes(run: RunData, classes: int) -> list[str]:
    """Names of the classes; their numbers if the data is not built in."""
    data = run.job.spec.trainer.images.data.name if run.job and run.job.spec.trainer.is_built_in else ""
    names = class_names(data)
    return list(names) if classes == len(names) else [str(index) for index in range(classes)]


def _accuracy(confusion: Ints, index: int) -> Estimate:
    right, count = int(confusion[index, index]), int(confusion[index].sum())
    return Estimate(right / count, share_interval(right, count))
