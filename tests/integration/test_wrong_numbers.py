"""Numbers that are wrong are named within a bounded number of steps, and where nothing is wrong nothing is named."""

import re
import time
from pathlib import Path

import pytest

from tandem.processes.exitcode import ExitCode
from tandem.rundir.layout import RunDir
from tandem.wire.status import Corruption
from tandem_coordinator.run_watcher import RunDirectory
from tests.support import SCRIPTS, manifests
from tests.support.ranks import Ranks, losses, make_rundir, records, run

ALL = pytest.mark.full("core", "trainer")
SCRIPT, FLIPPING = str(SCRIPTS / "lying.py"), str(SCRIPTS / "flipping.py")
LEAVES = 11


def rundir_of(path: Path, reaction: str = "Continue") -> RunDir:
    checkpoint, elasticity = {"everySteps": 5, "keepLast": 9}, {"onCorruption": reaction}
    job = manifests.job("lying", trainer={"command": ["python", SCRIPT]}, checkpoint=checkpoint, elasticity=elasticity)
    return manifests.run_directory(path, job)


def watched(rundir: RunDir) -> tuple[RunDirectory, list[Corruption]]:
    """What the coordinator knows of a run that has just begun."""
    directory = RunDirectory(rundir, rundir.read_job().spec.evaluation)
    return directory, [*directory.poll(time.time()).corruptions]


def finish(rundir: RunDir, how: str, optimizer: str) -> None:
    with Ranks(rundir, 1, SCRIPT, how, optimizer) as ranks:
        codes, output = ranks.finish()
    assert codes == [ExitCode.DONE], output


def interrupted(rundir: RunDir, optimizer: str) -> None:
    with Ranks(rundir, 1, SCRIPT, "none", optimizer, str(LEAVES)) as ranks:
        codes, output = ranks.finish()
    assert codes == [ExitCode.PREEMPTED], output


@pytest.mark.parametrize(("how", "first", "count"), [("swaps", 8, 2), pytest.param("repeats", 9, 22, marks=ALL)])
def test_samples_that_come_twice_or_late_are_named_by_the_next_vote(
    tmp_path: Path, how: str, first: int, count: int
) -> None:
    rundir = rundir_of(tmp_path)
    directory, before = watched(rundir)
    finish(rundir, how, "AdamW")
    (found,) = directory.poll(time.time()).corruptions
    assert (before, found.reason, found.count) == ([], "SamplesDiffer", count)
    record = records(rundir, "corruption")[0]
    assert record["message"].startswith("rank 0 (worker-0 on ")
    assert f": step {first} took other samples than seed and order give it" in record["message"]
    # A save comes every five steps, and a vote before each.
    assert record["count"] <= 5


@pytest.mark.parametrize("reaction", ["Stop", "Off"])
def test_a_job_says_that_wrong_numbers_end_it_or_that_nothing_is_compared(tmp_path: Path, reaction: str) -> None:
    rundir = rundir_of(tmp_path, reaction)
    directory, _ = watched(rundir)
    with Ranks(rundir, 1, SCRIPT, "swaps", "AdamW") as ranks:
        codes, output = ranks.finish()
    found = [(one.reason, one.count) for one in directory.poll(time.time()).corruptions]
    if reaction == "Off":
        assert (codes, found) == ([ExitCode.DONE], []), output
    else:
        # Step 8 is named by the vote before the save after step 10, which therefore does not happen.
        assert (codes, found[0][0]) == ([ExitCode.FAILED], "SamplesDiffer"), output
        assert rundir.checkpoint_names() == ["step-000000005"]


@pytest.mark.parametrize(
    ("how", "optimizer"),
    [
        ("forgets", "AdamW"),
        pytest.param("older", "AdamW", marks=ALL),
        pytest.param("older", "Adam", marks=ALL),
    ],
)
def test_an_optimizer_that_does_not_come_back_is_named_at_the_restore(tmp_path: Path, how: str, optimizer: str) -> None:
    rundir = rundir_of(tmp_path)
    directory, _ = watched(rundir)
    interrupted(rundir, optimizer)
    assert directory.poll(time.time()).corruptions == []
    finish(rundir, how, optimizer)
    (found,) = directory.poll(time.time()).corruptions
    assert (found.reason, found.count) == ("OptimizerDiffers", 1)
    text = re.search(r"^rank 0 \(worker-0 on .* with (\d+) updates of 0.weight, and had made (\d+) when", found.message)
    assert text, found.message
    assert int(text[1]) == (0 if how == "forgets" else int(text[2]) - 5)


@ALL
def test_a_rank_that_restores_other_weights_is_named_before_it_trains(tmp_path: Path) -> None:
    rundir = rundir_of(tmp_path)
    directory, _ = watched(rundir)
    interrupted(rundir, "AdamW")
    with Ranks(rundir, 2, SCRIPT, "flips", "AdamW") as ranks:
        codes, output = ranks.finish()
    assert codes == [ExitCode.FAILED] * 2, output
    (found,) = directory.poll(time.time()).corruptions
    assert found.reason == "RanksDiffer"
    assert re.match(
        r"rank 1 \(worker-1 on .+\): ranks \[1\] hold another state than the others: 1 tensor", found.message
    )


def test_moments_of_another_step_in_a_checkpoint_are_named_when_it_is_complete(tmp_path: Path) -> None:
    rundir = rundir_of(tmp_path)
    directory, _ = watched(rundir)
    finish(rundir, "stale", "AdamW")
    (found,) = directory.poll(time.time()).corruptions
    assert found.reason == "OptimizerDiffers"
    assert "holds an optimizer state after 1 updates of 0.weight" in found.message
    assert found.count >= 2


@pytest.mark.parametrize(
    "optimizer",
    ["AdamW", *(pytest.param(name, marks=ALL) for name in ("Adam", "SGD", "Adagrad", "RMSprop", "NAdam", "Rprop"))],
)
def test_of_a_run_that_was_interrupted_and_is_right_nothing_is_named(tmp_path: Path, optimizer: str) -> None:
    rundir = rundir_of(tmp_path)
    directory, _ = watched(rundir)
    interrupted(rundir, optimizer)
    run(rundir, 1, SCRIPT, "none", optimizer)
    assert directory.poll(time.time()).corruptions == []
    assert len(records(rundir, "step")) == 30


# With dropout, whose draws a comparison could change.
DELICATE = {"model": "cnn", "data": {"name": "digits"}, "epochs": 2, "globalBatchSize": 100}


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"microBatchSize": 9}, marks=ALL),
        pytest.param({"precision": "bfloat16"}, marks=ALL),
        # Batch norm.
        pytest.param({"model": "resnet-18", "maxSteps": 12}, marks=ALL),
    ],
)
def test_a_flipped_bit_of_a_gradient_is_named_and_comparisons_change_nothing(
    tmp_path: Path, options: dict[str, object]
) -> None:
    rundirs = {name: make_rundir(tmp_path / name, DELICATE | options) for name in ("right", "flipped")}
    off = make_rundir(tmp_path / "off", DELICATE | options, elasticity={"onCorruption": "Off"})
    run(rundirs["right"], 2, FLIPPING, "5", "0")
    # The first, and the one that the second comparison needs, and so on.
    with Ranks(rundirs["flipped"], 2, FLIPPING, "5", "20", "2") as ranks:
        codes, output = ranks.finish()
    assert codes == [ExitCode.DONE] * 2, output
    run(off, 2, FLIPPING, "5", "0")
    assert losses(rundirs["right"]) == losses(rundirs["flipped"]) == losses(off)
    assert len({rundir.committed()[0].weights_digest for rundir in (*rundirs.values(), off)}) == 1
    found = records(rundirs["flipped"], "corruption")
    assert {record["reason"] for record in found} == {"GradientsDiffer"}
    assert {record["message"].partition(" on ")[0] for record in found} == {"rank 1 (worker-1"}
