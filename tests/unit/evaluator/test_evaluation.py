"""One shard of the data through the model."""

import math
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, log_loss
from torch import Tensor, nn

from tandem.confidence import mean_interval, share_interval
from tandem.evaluation import Mean
from tandem.job.tasks import Data, ImageParameters
from tandem_evaluator import evaluation
from tandem_evaluator.device import Compute
from tandem_evaluator.evaluation import Evaluation, validation_counts
from tandem_evaluator.result import MAX_WRONG, MergedResult, ShardResult, merge
from tandem_evaluator.scoring import UnusableCheckpoint
from tandem_trainer import data, models

DIGITS = ImageParameters(model="baby-cnn", data=Data(name="digits"))


def weights(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return dict(models.build("baby-cnn", 1, 8, 10).state_dict())


def merged(subject: Evaluation, shards: int, state: dict[str, Tensor]) -> MergedResult:
    results = []
    for shard in range(shards):
        tally = subject.run(state, shard, shards)
        assert tally is not None
        facts: dict[str, Any] = {"checkpoint": "step-000000001", "step": 1, "generation": 1}
        facts |= {"shard": shard, "shards": shards, "seconds": 0.0, "evaluator": "e", "at": 0.0}
        facts |= {"samples": tally.samples, "loss_sum": tally.loss_sum, "confusion": tally.confusion}
        facts |= {"loss_moments": tally.loss_moments}
        facts |= {"wrong": tally.wrong, "validation": validation_counts(tally.held_out)}
        results.append(ShardResult(**facts))
    return merge(results)


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 500])
def test_any_number_of_shards_is_one_pass_over_the_whole_test_set(shards: int) -> None:
    state, samples = weights(), data.load(DIGITS.data, "test")
    model = models.build("baby-cnn", 1, 8, 10)
    model.load_state_dict(state)
    with torch.inference_mode():
        logits = model.eval()(samples.images)
    true, predicted = samples.labels.numpy(), logits.argmax(dim=1).numpy()
    probabilities = logits.double().softmax(dim=1).numpy()

    whole = merged(Evaluation.load(DIGITS), shards, state)

    assert whole.samples == len(samples)
    assert whole.confusion == confusion_matrix(true, predicted, labels=range(10)).tolist()
    assert whole.metrics.loss is not None
    assert whole.metrics.loss == pytest.approx(log_loss(true, probabilities, labels=range(10)), abs=1e-6)
    losses = -np.log(probabilities[np.arange(len(true)), true])
    assert whole.intervals["loss"] == pytest.approx(mean_interval(Mean.from_samples(losses)), abs=1e-6)
    assert whole.intervals["accuracy"] == list(share_interval((true == predicted).sum(), len(true)) or ())
    assert whole.metrics.accuracy == pytest.approx(accuracy_score(true, predicted), abs=1e-12)
    assert whole.metrics.macro_f1 == pytest.approx(f1_score(true, predicted, average="macro"), abs=1e-12)


@pytest.mark.parametrize("shards", [1, 3])
def test_the_wrong_samples_of_which_the_model_is_most_sure_are_named(shards: int) -> None:
    state, samples = weights(), data.load(DIGITS.data, "test")
    model = models.build("baby-cnn", 1, 8, 10)
    model.load_state_dict(state)
    with torch.inference_mode():
        sure, predicted = model.eval()(samples.images).softmax(dim=1).max(dim=1)

    named = merged(Evaluation.load(DIGITS), shards, state).wrong

    assert len(named) == MAX_WRONG
    for one in named:
        assert (one.label, one.prediction) == (int(samples.labels[one.index]), int(predicted[one.index]))
        assert one.label != one.prediction
        assert one.confidence == pytest.approx(float(sure[one.index]), abs=1e-4)
    others = set(torch.nonzero(predicted != samples.labels).flatten().tolist()) - {one.index for one in named}
    assert max(float(sure[index]) for index in others) <= min(one.confidence for one in named) + 1e-4
    assert [one.confidence for one in named] == sorted((one.confidence for one in named), reverse=True)


@pytest.mark.parametrize("shards", [1, 3])
def test_data_that_is_held_out_is_evaluated_beside_the_test_data(shards: int) -> None:
    task = ImageParameters(model="baby-cnn", data=Data(name="digits", validation=0.2))
    state, samples = weights(), data.load(task.data, "validation")
    model = models.build("baby-cnn", 1, 8, 10)
    model.load_state_dict(state)
    with torch.inference_mode():
        predicted = model.eval()(samples.images).argmax(dim=1)

    whole = merged(Evaluation.load(task), shards, state)

    assert whole.validation.samples == len(samples)
    assert whole.validation.metrics.accuracy == pytest.approx(float((predicted == samples.labels).double().mean()))
    assert whole.metrics == merged(Evaluation.load(DIGITS), 1, state).metrics


def test_it_evaluates_without_dropout_and_learns_nothing() -> None:
    subject = Evaluation.load(ImageParameters(model="cnn", data=Data(name="digits")))
    torch.manual_seed(0)
    state = dict(models.build("cnn", 1, 8, 10).state_dict())
    assert subject.run(state, 0, 4) == subject.run(state, 0, 4)


def test_each_checkpoint_is_evaluated_with_its_own_weights() -> None:
    subject = Evaluation.load(DIGITS)
    first, second = subject.run(weights(0), 0, 1), subject.run(weights(1), 0, 1)
    assert first.loss_sum != second.loss_sum
    assert subject.run(weights(0), 0, 1) == first


def test_weights_that_gave_nan_are_counted_and_their_loss_is_none() -> None:
    state = {name: torch.full_like(value, math.nan) for name, value in weights().items()}
    tally = Evaluation.load(DIGITS).run(state, 0, 2)
    assert tally.loss_sum is None
    assert np.sum(tally.confusion) == tally.samples


def test_weights_of_another_model_are_a_misfit() -> None:
    state = weights()
    state.popitem()
    with pytest.raises(UnusableCheckpoint, match="not those of the job's model"):
        Evaluation.load(DIGITS).run(state, 0, 1)


def test_the_model_holds_no_weights_between_two_checkpoints() -> None:
    model = models.build("baby-cnn", 1, 8, 10)
    subject = Evaluation(data.load(DIGITS.data, "test"), model)
    damaged = dict(list(weights().items())[1:])
    for state in (weights(), damaged):
        with suppress(UnusableCheckpoint):
            subject.run(state, 0, 1)
        assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_rounded_weights_are_evaluated_in_the_precision_of_the_model() -> None:
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in weights().items()}
    subject = Evaluation.load(DIGITS)
    assert subject.run(rounded, 0, 1) == subject.run({name: tensor.float() for name, tensor in rounded.items()}, 0, 1)


def test_it_stops_between_two_batches() -> None:
    asked: list[None] = []

    def going_on() -> bool:
        asked.append(None)
        return len(asked) < 3

    samples = data.Samples(torch.zeros(1000, 1, 8, 8), torch.zeros(1000, dtype=torch.int64), classes=10)
    subject = Evaluation(samples, models.build("baby-cnn", 1, 8, 10))
    assert subject.run(weights(), 0, 1, going_on) is None
    assert len(asked) == 3


def test_large_images_come_in_small_batches() -> None:
    seen: list[int] = []

    class Sizes(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(images.numel())
            return torch.zeros(len(images), 10)

    samples = data.Samples(torch.zeros(20, 1, 512, 512), torch.zeros(20, dtype=torch.int64), classes=10)
    assert Evaluation(samples, Sizes()).run({}, 0, 1).samples == 20
    assert max(seen) <= evaluation.MAX_VALUES


class _Resident(Compute):
    """A device on which models stay, as on a GPU."""

    is_gpu = True


def test_a_resident_model_gets_the_weights_in_place_and_scores_as_one_on_a_cpu() -> None:
    subject = Evaluation.load(DIGITS, _Resident(torch.device("cpu")))
    model = subject._model
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    for seed in (0, 1):
        assert merged(subject, 2, weights(seed)) == merged(Evaluation.load(DIGITS), 2, weights(seed))
        assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == places
    with pytest.raises(UnusableCheckpoint, match="not those of the job's model"):
        subject.run({"head.weight": torch.zeros(3)}, 0, 1)
    assert merged(subject, 1, weights(2)) == merged(Evaluation.load(DIGITS), 1, weights(2))


def test_bfloat16_scores_nearly_the_same() -> None:
    exact = merged(Evaluation.load(DIGITS), 2, weights())
    rounded = merged(Evaluation.load(DIGITS, Compute(torch.device("cpu"), "bfloat16")), 2, weights())
    assert exact.metrics.loss is not None
    assert rounded.metrics.loss == pytest.approx(exact.metrics.loss, rel=0.02)
    assert rounded.metrics.accuracy == pytest.approx(exact.metrics.accuracy, abs=0.02)


def test_a_gpu_with_too_little_memory_cannot_use_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Evaluation.load(DIGITS)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. More.")

    monkeypatch.setattr(subject, "_tally", full)
    with pytest.raises(UnusableCheckpoint, match=r"too little memory: CUDA out of memory, Tried to allocate 1.00 GiB;"):
        subject.run(weights(), 0, 1)
