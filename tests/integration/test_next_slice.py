"""A run that takes over weights, moments and schedule of the one before takes the steps that that would have taken."""

from pathlib import Path
from typing import Any

import pytest

from tandem.rundir.layout import RunDir
from tests.support.ranks import losses, make_rundir, records, run

pytestmark = pytest.mark.timeout(200)

# Every batch is the whole slice, so that the order of the data makes no difference.
CONFIG: dict[str, Any] = {
    "model": "baby-cnn",
    "data": {"name": "digits", "end": 64},
    "globalBatchSize": 64,
    "epochs": 30,
    "optimizer": {"name": "adamw", "learningRate": 0.002, "weightDecay": 0.1},
    "schedule": {"name": "cosine", "warmupSteps": 4, "totalSteps": 24},
}


def trained(path: Path, steps: int, ranks: int = 1, **more: Any) -> RunDir:
    """Train up to a step, from where the folder ends."""
    rundir = make_rundir(path, CONFIG | more | {"maxSteps": steps})
    rundir.done_file.unlink(missing_ok=True)
    run(rundir, ranks)
    return rundir


def rates(rundir: RunDir) -> dict[int, float]:
    return {one["step"]: one["lr"] for one in records(rundir, "step")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return trained(tmp_path_factory.mktemp("whole") / "run", 24)


def test_moments_and_schedule_go_on_over_runs_and_a_restart(tmp_path: Path, whole: RunDir) -> None:
    given = {"initialOptimizer": "MomentsAndSchedule"}
    first = trained(tmp_path / "first", 8)
    second = trained(tmp_path / "second", 4, **given, initialWeights=str(first.path))
    # From its own checkpoint, on other ranks.
    second = trained(tmp_path / "second", 8, ranks=2, **given, initialWeights=str(first.path))
    third = trained(tmp_path / "third", 8, **given, initialWeights=str(second.path))
    for number, one in enumerate((first, second, third)):
        before = 8 * number
        expected = {step - before: loss for step, loss in losses(whole).items() if before < step <= before + 8}
        assert losses(one) == pytest.approx(expected, rel=1e-3)
        expected = {step - before: rate for step, rate in rates(whole).items() if before < step <= before + 8}
        assert rates(one) == pytest.approx(expected)


@pytest.mark.full("trainer")
def test_moments_alone_go_on_under_a_schedule_of_their_own_and_by_default_neither_does(
    tmp_path: Path, whole: RunDir
) -> None:
    first = trained(tmp_path / "first", 8)
    begun = {"initialWeights": str(first.path)}
    fresh = trained(tmp_path / "fresh", 4, **begun)
    moments = trained(tmp_path / "moments", 4, **begun, initialOptimizer="Moments")
    for one in (fresh, moments):
        assert losses(one)[1] == pytest.approx(losses(whole)[9], rel=1e-3)
        assert rates(one)[1] == pytest.approx(rates(whole)[1])
    assert losses(fresh)[3] != pytest.approx(losses(moments)[3], rel=1e-3)
