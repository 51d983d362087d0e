"""The trainer as real processes: the same curve on any number of ranks, and it goes on where it was."""

import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.processes.exitcode import ExitCode
from tandem.rundir.durable import replace_json
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import MAX_REWINDS, decide
from tandem_trainer.checkpoint.reader import read_contents, read_full_weights, read_weights
from tandem_trainer.checkpoint.staging import MIN_PART
from tests.support.bad_surroundings import whole_mnist
from tests.support.ranks import Ranks, kill_when_saved, losses, make_rundir, records, run, sample_ids
from tests.support.waiting import until

PLAIN: dict[str, Any] = {"model": "baby-cnn", "data": {"name": "digits"}, "epochs": 2, "globalBatchSize": 100}
STEPS = 30
"""1,442 samples in batches of 100, twice; the last batch of an epoch has 42."""


def assert_same_curve(
    ours: dict[int, float], reference: dict[int, float], rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    assert ours.keys() == reference.keys()
    torch.testing.assert_close([ours[step] for step in reference], list(reference.values()), rtol=rtol, atol=atol)


def test_one_two_and_three_ranks_learn_the_same_curve(tmp_path: Path) -> None:
    runs = {size: make_rundir(tmp_path / str(size), PLAIN) for size in (1, 2, 3)}
    for size, rundir in runs.items():
        run(rundir, size)
    assert list(losses(runs[1])) == list(range(1, STEPS + 1))
    for size in (2, 3):
        assert sample_ids(runs[size]) == sample_ids(runs[1])
        assert_same_curve(losses(runs[size]), losses(runs[1]))


DROPS: dict[str, Any] = PLAIN | {"model": "cnn", "epochs": 1}


@pytest.mark.full("core", "trainer")
def test_dropout_is_the_same_on_any_number_of_ranks_and_in_any_micro_batches(tmp_path: Path) -> None:
    alone = make_rundir(tmp_path / "alone", DROPS)
    run(alone)
    for size, options in ((2, {}), (3, {"microBatchSize": 9})):
        rundir = make_rundir(tmp_path / str(size), DROPS | options)
        run(rundir, size)
        assert_same_curve(losses(rundir), losses(alone))
    other = make_rundir(tmp_path / "other", DROPS | {"seed": 1})
    run(other)
    assert losses(other)[1] != pytest.approx(losses(alone)[1], rel=1e-4)


def test_micro_batches_change_nothing_but_memory(tmp_path: Path) -> None:
    whole = make_rundir(tmp_path / "whole", PLAIN)
    parts = make_rundir(tmp_path / "parts", PLAIN | {"microBatchSize": 7})
    run(whole)
    run(parts, 2)
    assert_same_curve(losses(parts), losses(whole))


def test_without_partial_batches_an_epoch_has_whole_ones_alone(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path, PLAIN | {"dropLast": True})
    run(rundir, 2)
    assert len(losses(rundir)) == STEPS - 2
    assert {record["samples"] for record in records(rundir, "step")} == {100}


def test_a_batch_smaller_than_the_group_still_counts_each_sample_once(tmp_path: Path) -> None:
    tiny = {"model": "baby-cnn", "data": {"name": "synthetic", "samples": 5, "imageSize": 8}, "globalBatchSize": 2}
    alone, group = make_rundir(tmp_path / "1", tiny | {"epochs": 3}), make_rundir(tmp_path / "3", tiny | {"epochs": 3})
    run(alone)
    run(group, 3)
    assert len(losses(group)) == 9
    assert_same_curve(losses(group), losses(alone))


@pytest.mark.full("core", "trainer")
def test_a_killed_group_of_two_goes_on_as_three_with_the_same_samples(tmp_path: Path) -> None:
    config = PLAIN | {"epochs": 40}
    undisturbed = make_rundir(tmp_path / "undisturbed", config, checkpoint={"everySteps": 20})
    run(undisturbed)
    rundir = make_rundir(tmp_path / "killed", config, checkpoint={"everySteps": 20})
    assert kill_when_saved(rundir, 2) == [ExitCode.PEER_LOST, -signal.SIGKILL]
    run(rundir, 3)
    starts = records(rundir, "start")
    assert starts[1]["step"] % 20 == 0
    assert starts[1]["step"] > 0
    assert rundir.done() is not None
    assert sample_ids(rundir) == sample_ids(undisturbed)
    torch.testing.assert_close(losses(rundir)[600], losses(undisturbed)[600], rtol=2e-2, atol=2e-3)


@pytest.mark.full("core", "trainer")
def test_two_one_three_and_two_ranks_with_kills_between_are_one_undisturbed_run(tmp_path: Path) -> None:
    """With dropout on; every step has the samples and the loss of the run that nobody touched."""
    # Plain descent: Adam would let the last digit of a sum grow over the steps.
    config = DROPS | {"epochs": 100, "optimizer": {"name": "sgd", "learningRate": 0.002}}
    undisturbed = make_rundir(tmp_path / "undisturbed", config)
    run(undisturbed)
    rundir = make_rundir(tmp_path / "killed", config, checkpoint={"everySteps": 10, "keepLast": 100})
    for size in (2, 1, 3):
        kill_when_saved(rundir, size, saves=2)
    run(rundir, 2)
    assert [record["worldSize"] for record in records(rundir, "start")] == [2, 1, 3, 2]
    resumed = [record["step"] for record in records(rundir, "start")]
    assert resumed == sorted(resumed)
    assert resumed[1] > 0
    assert sample_ids(rundir) == sample_ids(undisturbed)
    # Sums of another order of ranks differ in the last digit, and 1,500 steps carry that on; batches differ by tenths.
    assert_same_curve(losses(rundir), losses(undisturbed), rtol=2e-3, atol=2e-3)


@pytest.mark.full("core", "trainer")
def test_a_checkpoint_of_four_ranks_is_resumed_by_one_two_and_three(tmp_path: Path) -> None:
    """A state of 134 MB, of which three of the four write a part."""
    config = {"model": "resnet-18", "data": {"name": "digits"}, "globalBatchSize": 16, "maxSteps": 15}
    rundir = make_rundir(tmp_path / "four", config, checkpoint={"everySteps": 3})
    with Ranks(rundir, 4) as ranks:
        until(lambda: rundir.checkpoint_names(), "a checkpoint")
        for process in ranks.processes:
            os.kill(process.pid, signal.SIGKILL)
    manifest = rundir.committed()[0]
    assert manifest.world_size == 4
    assert not rundir.ended()
    assert manifest.size > 3 * MIN_PART
    for size in (1, 2, 3):
        copy = RunDir(shutil.copytree(rundir.path, tmp_path / str(size)))
        run(copy, size)
        assert records(copy, "start")[1]["step"] == manifest.step
        assert copy.done() is not None


def test_rounded_weights_for_evaluators_round_nothing_that_is_resumed(tmp_path: Path) -> None:
    config = PLAIN | {"epochs": 60}
    undisturbed = make_rundir(tmp_path / "undisturbed", config)
    run(undisturbed)
    rundir = make_rundir(tmp_path / "rounded", config, checkpoint={"everySteps": 10, "weightsPrecision": "bfloat16"})
    kill_when_saved(rundir, 1)
    run(rundir)
    assert records(rundir, "start")[1]["step"] > 0
    assert losses(rundir) == losses(undisturbed), "to the last bit"
    manifest = rundir.committed()[0]
    weights = read_weights(rundir.checkpoint(manifest.name), manifest)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.full("core", "trainer"))])
def test_an_average_of_the_weights_is_what_is_evaluated_and_it_goes_on_over_restarts(
    tmp_path: Path, precision: str
) -> None:
    # Plain descent: Adam would let the last digit of a sum grow over the steps.
    config = PLAIN | {"epochs": 60, "emaDecay": 0.999, "optimizer": {"name": "sgd", "learningRate": 0.02}}
    spec = {"everySteps": 20, "keepLast": 100, "weightsPrecision": precision}
    undisturbed = make_rundir(tmp_path / "undisturbed", config, checkpoint=spec)
    run(undisturbed)
    rundir = make_rundir(tmp_path / "killed", config, checkpoint=spec)
    kill_when_saved(rundir, 2, saves=2)
    run(rundir)
    assert 0 < records(rundir, "start")[1]["step"] < 900
    contents = []
    for one in (undisturbed, rundir):
        final = one.committed()[0]
        folder = one.checkpoint(final.name)
        contents.append(read_contents(folder, final))
        average = contents[-1].average
        assert average is not None
        assert_close(read_full_weights(folder, final), average, 0.0)
        assert_close(read_weights(folder, final), average, 0.0 if precision == "float32" else 1e-2)
    theirs, ours = contents
    assert theirs.average is not None
    assert ours.average is not None
    # The average of the run that was killed is the other one's, to the accuracy with which sums of two ranks are.
    assert_close(ours.average, theirs.average, 2e-3)
    apart = max((theirs.average[name] - weight).abs().max().item() for name, weight in theirs.weights.items())
    assert apart > 0.01


def assert_close(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.float(), theirs[name].float(), rtol=tolerance, atol=tolerance)


def trained_to(path: Path, *epochs: int) -> RunDir:
    """Trained to the end of each of these epochs. The last checkpoint of a run is waited for, so that there is one of
    each; others are skipped where the one before is still being written."""
    for end in epochs:
        rundir = make_rundir(path, PLAIN | {"epochs": end}, checkpoint={"everySteps": 20})
        rundir.done_file.unlink(missing_ok=True)
        run(rundir)
    return rundir


def test_sigterm_saves_at_a_step_and_leaves(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path, PLAIN | {"epochs": 100_000}, checkpoint={"everySeconds": 3600})
    with Ranks(rundir, 2) as ranks:
        until(lambda: len(losses(rundir)) > 20, "steps")
        assert rundir.checkpoint_names() == []
        ranks.processes[1].send_signal(signal.SIGTERM)  # one rank's wish is everybody's
        codes, output = ranks.finish()
    assert codes == [ExitCode.PREEMPTED] * 2, output
    saved = rundir.committed()[0]
    assert saved.step == max(losses(rundir))
    with Ranks(rundir, 1) as ranks:
        until(lambda: len(records(rundir, "start")) == 2, "the second start")
        ranks.processes[0].send_signal(signal.SIGTERM)
        ranks.finish()
    assert records(rundir, "start")[1]["step"] == saved.step


def test_groups_that_fail_sooner_than_the_interval_lasts_get_on(tmp_path: Path) -> None:
    """The interval goes on from the checkpoint that a group resumed from, and not from its start."""
    rundir = make_rundir(tmp_path, PLAIN | {"epochs": 100_000}, checkpoint={"everySeconds": 3600})
    with Ranks(rundir, 1) as ranks:
        until(lambda: len(losses(rundir)) > 5, "steps")
        ranks.processes[0].send_signal(signal.SIGTERM)
        ranks.finish()
    (before,) = rundir.committed()
    # As if that had been hours ago: no start takes so long.
    older = before.model_copy(update={"created_at": before.created_at - 7200})
    replace_json(rundir.checkpoint(before.name) / "manifest.json", older.sealed())
    make_rundir(tmp_path, PLAIN | {"epochs": 100_000}, checkpoint={"everySeconds": 3600, "keepLast": 100})
    with Ranks(rundir, 2):
        until(lambda: len(rundir.checkpoint_names()) > 1, "a checkpoint")
    assert min(saved.step for saved in rundir.committed() if saved.generation > before.generation) == before.step + 1


def test_a_truncated_checkpoint_is_passed_over_and_reported(tmp_path: Path) -> None:
    rundir = trained_to(tmp_path, 1, 2)
    rundir.done_file.unlink()
    newest, before = rundir.committed()[:2]
    path = rundir.checkpoint(newest.name) / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert f"checkpoint={newest.name} passed over" in run(rundir)
    assert records(rundir, "passed")[0]["checkpoint"] == newest.name
    assert records(rundir, "start")[-1]["step"] == before.step
    assert (rundir.checkpoints / f"{newest.name}.bad").is_dir()
    assert rundir.done() is not None


def test_a_slice_of_the_data_and_then_another_one_from_its_weights(tmp_path: Path) -> None:
    first = make_rundir(tmp_path / "first", PLAIN | {"data": {"name": "digits", "end": 700}, "epochs": 10})
    run(first, 2)
    assert len(losses(first)) == 70
    rest = {"data": {"name": "digits", "start": 700}, "initialWeights": str(first.path)}
    second = make_rundir(tmp_path / "second", PLAIN | rest)
    run(second, 2)
    untrained = make_rundir(tmp_path / "untrained", PLAIN | {"data": {"name": "digits", "start": 700}})
    run(untrained, 1)
    assert sample_ids(second) == sample_ids(untrained)
    assert losses(second)[1] < 0.7 * losses(untrained)[1], "it begins where the first run ended"
    assert second.generation_records()[0].origin.checkpoint == first.committed()[0].reference


MNIST = {"name": "mnist", "download": False}
DIGITS = {"name": "digits"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data": {**MNIST, "start": 20}}, "data.start 20 is not a slice of mnist, which has 20"),
        ({"data": MNIST, "dropLast": True}, "dropLast leaves out all of the 20 samples"),
        ({"data": {**MNIST, "end": 2000}}, "data.start 0 and data.end 2000 is not a slice of mnist"),
        ({"initialWeights": "nowhere.safetensors"}, "initialWeights nowhere.safetensors cannot be read: No such file"),
        ({"initialWeights": __file__}, "it is not a safetensors file"),
    ],
)
def test_data_and_weights_that_are_not_there_are_a_mistake_in_one_sentence(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    whole_mnist(tmp_path, count=20)
    data = {**options.get("data", DIGITS), "path": str(tmp_path / "data")}
    rundir = make_rundir(tmp_path / "run", PLAIN | options | {"data": data})
    with Ranks(rundir, 1) as ranks:
        codes, output = ranks.finish()
    assert codes == [ExitCode.CONFIGURATION], output
    assert said in rundir.failed()["message"]


def test_a_finished_run_started_again_only_says_so(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path, PLAIN)
    run(rundir)
    before = rundir.committed()[0]
    rundir.done_file.unlink()
    run(rundir)
    assert rundir.committed()[0] == before
    assert rundir.done() is not None


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bfloat16", "gradientClipNorm": 1.0, "optimizer": {"name": "adamw", "weightDecay": 0.01}},
        {"model": "simple-net", "optimizer": {"name": "sgd"}, "schedule": {"name": "cosine", "warmupSteps": 5}},
        {"model": "cnn", "activationCheckpointing": True, "deterministic": True, "schedule": {"name": "linear"}},
        {"syncBatchNorm": True, "model": "resnet-18", "maxSteps": 3, "globalBatchSize": 16},
    ],
    ids=["bfloat16-clip-adamw", "sgd-cosine", "recompute-deterministic", "resnet-sync-batch-norm"],
)
def test_every_setting_trains_on_two_ranks(tmp_path: Path, options: dict[str, Any]) -> None:
    rundir = make_rundir(tmp_path, PLAIN | {"model": "baby-cnn"} | options)
    output = run(rundir, 2)
    curve = losses(rundir)
    assert len(curve) == options.get("maxSteps", STEPS)
    if "maxSteps" not in options:
        assert curve[STEPS] < curve[1]
    if "syncBatchNorm" in options:
        assert "syncBatchNorm ignored" in output


def test_a_rewound_run_goes_on_from_before_and_leaves_the_bad_data_out(tmp_path: Path) -> None:
    undisturbed = make_rundir(tmp_path / "undisturbed", PLAIN | {"epochs": 8}, checkpoint={"everySteps": 20})
    run(undisturbed)
    rundir = trained_to(tmp_path / "rewound", 4, 8)
    rundir.done_file.unlink()
    decided = decide([], 2, bad_step=70, loss=None, total_data_steps=8 * 15)
    assert decided is not None
    rundir.record_rewind(decided)
    run(rundir)
    start = records(rundir, "start")[-1]
    assert start["step"] == 60 < decided.resume_before
    left_out = decided.skip_to - decided.skip_from
    assert start["totalSteps"] == 8 * 15 - left_out
    taken, expected = sample_ids(rundir), sample_ids(undisturbed)
    for step in range(start["step"] + 1, start["totalSteps"] + 1):
        assert taken[step] == expected[step if step <= decided.skip_from else step + left_out], step
    assert {manifest.generation for manifest in rundir.committed() if manifest.step > start["step"]} == {3}


def test_the_learning_rate_follows_its_schedule(tmp_path: Path) -> None:
    schedule = {"name": "cosine", "warmupSteps": 4, "finalFraction": 0.1}
    rundir = make_rundir(tmp_path, PLAIN | {"schedule": schedule, "optimizer": {"learningRate": 0.01}})
    run(rundir)
    rates = [record["lr"] for record in records(rundir, "step")]
    assert rates[:5] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01])
    assert rates == rates[:4] + sorted(rates[4:], reverse=True)
    assert rates[-1] < 0.0012


def test_a_useless_loss_is_rewound_and_after_a_few_times_the_run_has_failed(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path, PLAIN | {"epochs": 30, "optimizer": {"name": "sgd", "learningRate": 1e9}})
    for expected in (*[ExitCode.REWOUND] * MAX_REWINDS, ExitCode.DIVERGED):
        assert not rundir.ended()
        with Ranks(rundir, 2) as ranks:
            codes, output = ranks.finish()
        assert codes == [expected] * 2, output
    assert [rewind.number for rewind in rundir.rewind_records()] == [1, 2, 3]
    failed = rundir.failed()
    assert failed["reason"] == "Diverged"
    assert "lower learning rate" in failed["message"]


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"data": {"name": "mnist", "path": "/nonexistent/mnist", "download": False}}, "data.path: /nonexistent/mnist"),
        ({"precision": "float16", "data": {"name": "digits"}}, "float16 needs a GPU"),
    ],
)
def test_a_job_that_cannot_work_is_refused_in_one_sentence(tmp_path: Path, config: Any, complaint: str) -> None:
    rundir = make_rundir(tmp_path, config)
    with Ranks(rundir, 1) as ranks:
        codes, output = ranks.finish()
    assert codes == [ExitCode.CONFIGURATION]
    assert complaint in output
    assert "Traceback" not in output
    failed = rundir.failed()
    assert (failed["reason"], failed["exitCode"]) == ("ConfigurationError", ExitCode.CONFIGURATION)


def test_weights_of_a_finished_run_classify_the_test_set(tmp_path: Path) -> None:
    from tandem_trainer import data, models

    rundir = make_rundir(tmp_path, {"model": "cnn", "data": {"name": "digits"}, "epochs": 12})
    run(rundir, 2)
    config = rundir.read_job().spec.trainer.images
    test = data.load(config.data, "test")
    model = models.build(config.model, test.channels, test.image_size, test.classes).eval()
    manifest = rundir.committed()[0]
    model.load_state_dict(read_weights(rundir.checkpoint(manifest.name), manifest))
    with torch.inference_mode():
        accuracy = (model(test.images).argmax(1) == test.labels).float().mean()
    assert accuracy > 0.95
