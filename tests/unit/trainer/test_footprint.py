"""The memory of a training step, traced without its weights: beside sizes that can be counted, and where it ends."""

import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tandem.job.footprint import Footprint, FootprintRequest, FootprintResponse, Pass
from tandem.job.trainer import Trainer
from tandem_trainer.footprint import answer_question, moments
from tandem_trainer.task import Task

WIDTH, SAMPLES = 64, 256


def peak(one: Pass) -> int:
    return max(moment.activations + moment.gradients for moment in one.moments)


class Layers(Task[None]):
    """Two linear layers."""

    def model(self) -> nn.Module:
        """[N, 64] → [N, 1]."""
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.5), nn.Linear(WIDTH, 1))

    def data(self, split: Any) -> TensorDataset:
        """Zeros."""
        return TensorDataset(torch.zeros(SAMPLES, WIDTH))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """What it says."""
        return model(batch[0]).squeeze(1)  # type: ignore[no-any-return]


class Twice(Layers):
    """Calls its model twice."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The sum of two views."""
        return (model(batch[0]) + model(-batch[0])).squeeze(1)  # type: ignore[no-any-return]


class DependsOnValues(Layers):
    """Asks what the data is."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Other for other data."""
        return super().loss(model, [batch[0] * 2] if batch[0].sum() > 0 else batch)


class Mean(Layers):
    """Gives one loss for all."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Their mean."""
        return super().loss(model, batch).mean()


class ReadsItsWeights(Layers):
    """Looks at them while it is made."""

    def model(self) -> nn.Module:
        """Never comes so far."""
        model = super().model()
        if next(model.parameters()).sum().item() > 1e9:
            raise ValueError
        return model


class Huge(Layers):
    """400 billion parameters."""

    def model(self) -> nn.Module:
        """[N, 64] → [N, 1]."""
        return nn.Sequential(nn.Linear(WIDTH, 10**9), nn.Linear(10**9, 336), nn.Linear(336, 1))


def asked(task: type[Task[Any]], *micro_batches: int, **loop: Any) -> Footprint:
    trainer = Trainer.parse({"task": f"{__name__}:{task.__name__}", "loop": loop})
    answer = answer_question(FootprintRequest(trainer=trainer, micro_batches=micro_batches), lambda words: None)
    assert answer.footprint is not None, answer.mistakes
    return answer.footprint


PARAMETERS = 4 * (WIDTH * WIDTH + WIDTH + WIDTH + 1)


def test_state_is_what_the_model_and_its_optimizer_hold() -> None:
    found = asked(Layers, 8, emaDecay=0.9)
    assert found.parameters == found.gradients == found.average == PARAMETERS
    # Adam's two numbers for each parameter, and a count of steps for each of four tensors.
    assert found.optimizer == 2 * PARAMETERS + 4 * 4
    assert asked(Layers, 8, optimizer={"name": "sgd"}).optimizer == PARAMETERS
    assert (found.samples, found.data) == (SAMPLES, SAMPLES * WIDTH * 4)
    assert found.blocks == (4 * (WIDTH * WIDTH + WIDTH), 4 * (WIDTH + 1))


def test_activations_grow_with_the_micro_batch_and_gradients_do_not() -> None:
    small, large = asked(Layers, 1024, 2048).passes
    assert (small.samples, large.samples) == (1024, 2048)
    assert 1.9 < peak(large) / peak(small) <= 2.0
    assert small.flops == pytest.approx(large.flops / 2)
    # Two products of matrices forward and three backward: the input needs no gradient.
    assert small.flops == 2 * 1024 * (2 * WIDTH * WIDTH + 3 * WIDTH)


def test_mixed_precision_adds_copies_of_the_weights() -> None:
    assert asked(Layers, 8, precision="bfloat16").casts == PARAMETERS // 2
    assert asked(Layers, 8).casts == 0


def test_a_model_may_be_called_twice() -> None:
    once, twice = asked(Layers, 512), asked(Twice, 512)
    assert twice.untraced == ""
    assert 1.5 < peak(twice.passes[0]) / peak(once.passes[0]) < 2.1


def test_what_depends_on_values_is_counted_without_activations_and_says_so() -> None:
    found = asked(DependsOnValues, 8)
    assert found.passes == ()
    assert found.untraced == "a step cannot be traced: it depends on the values of data"
    assert (found.parameters, found.optimizer) == (PARAMETERS, 2 * PARAMETERS)


def test_a_model_that_this_machine_could_not_hold_is_traced() -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = asked(Huge, 2)
    assert found.parameters > 1.5e12 > memory
    assert found.passes[0].accumulating > 2 * 10**9 * 4


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Mean, "Mean.loss returned a value of the shape () for 8 samples"),
        (ReadsItsWeights, "ReadsItsWeights.model cannot be made without its weights: DataDependentOutputException"),
    ],
)
def test_a_wrong_task_is_told_at_its_field(task: type[Task[Any]], words: str) -> None:
    trainer = Trainer.parse({"task": f"{__name__}:{task.__name__}"})
    (mistake,) = answer_question(FootprintRequest(trainer=trainer, micro_batches=(8,)), lambda words: None).mistakes
    assert mistake.path == ("spec", "trainer", "task")
    assert words in mistake.message


def test_parameters_are_checked_as_before_a_run() -> None:
    trainer = Trainer.parse({"task": f"{__name__}:Layers", "parameters": {"width": 3}})
    (mistake,) = answer_question(FootprintRequest(trainer=trainer, micro_batches=(8,)), lambda words: None).mistakes
    assert mistake.path == ("spec", "trainer", "parameters", "width")


class Split(Layers):
    """Its layers can be split."""

    def tensor_plan(self, model: nn.Module, ranks: int) -> dict[str, str]:
        """The numbers between the layers."""
        return {"0": "colwise", "3": "rowwise"}


class Convolution(Split):
    """Splits what cannot be."""

    def model(self) -> nn.Module:
        """[N, 64] → [N, 1], by a convolution."""
        return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 1, 8), nn.Flatten(), nn.Linear(1, 1))

    def tensor_plan(self, model: nn.Module, ranks: int) -> dict[str, str]:
        """Its own."""
        return {"1": "colwise"}


def split_in(task: type[Task[Any]], ranks: int) -> FootprintResponse:
    trainer = Trainer.parse({"task": f"{__name__}:{task.__name__}", "loop": {"strategy": "fsdp"}})
    return answer_question(
        FootprintRequest(trainer=trainer, micro_batches=(512,), tensor_parallel=ranks), lambda words: None
    )


def test_a_rank_that_splits_matrices_holds_and_computes_its_part() -> None:
    whole, half = split_in(Split, 1).footprint, split_in(Split, 2).footprint
    assert whole is not None
    assert half.parameters == half.gradients == 4 * (WIDTH * WIDTH // 2 + WIDTH // 2 + WIDTH // 2 + 1)
    assert half.passes[0].flops == whole.passes[0].flops / 2
    assert peak(half.passes[0]) < 0.6 * peak(whole.passes[0])
    # What the second layer gives; what goes into the first one has no gradient.
    assert (whole.passes[0].added_up, half.passes[0].added_up) == (0, 512 * 1 * 4)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Layers, "tensorParallel: 2 needs a plan of which matrices to split"),
        (Convolution, "splits a Conv2d; only Linear and Embedding can be"),
    ],
)
def test_what_cannot_be_split_is_told(task: type[Task[Any]], words: str) -> None:
    (mistake,) = split_in(task, 2).mistakes
    assert words in mistake.message


class Tall(Layers):
    """Four linear layers, which make two stages of two."""

    def model(self) -> nn.Module:
        """[N, 64] → [N, 1]."""
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The sum of what is made of a sample."""
        return model(batch[0]).sum(1)  # type: ignore[no-any-return]


class Nested(Layers):
    """A block within a block."""

    def model(self) -> nn.Module:
        """[N, 64] → [N, 1]."""
        return nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 1))


def test_blocks_are_those_that_fsdp_gathers() -> None:
    layer, last = 4 * (WIDTH * WIDTH + WIDTH), 4 * (WIDTH + 1)
    assert asked(Nested, 8).blocks == (2 * layer, last)
    assert asked(Nested, 8, strategy="fsdp", fsdp={"wrapParameters": WIDTH * WIDTH}).blocks == (layer, layer)
    assert asked(Nested, 8, strategy="fsdp", fsdp={"wrapParameters": 10}).blocks == (layer, layer, last)
    assert asked(Nested, 8, strategy="fsdp", fsdp={"wrapParameters": 2 * WIDTH * WIDTH}).blocks == (2 * layer,)


def staged(task: type[Task[Any]], *micro_batches: int, **loop: Any) -> FootprintResponse:
    trainer = Trainer.parse({"task": f"{__name__}:{task.__name__}", "loop": {"strategy": "pipeline", **loop}})
    return answer_question(
        FootprintRequest(trainer=trainer, micro_batches=micro_batches, by_stage=True), lambda words: None
    )


def test_stages_keep_their_inputs_and_what_they_pass_on() -> None:
    answer = staged(Tall, 1024, 2048)
    assert answer.footprint is not None, answer.mistakes
    first, last = answer.footprint.stages
    layer, values = 4 * WIDTH * WIDTH, 4 * WIDTH * 1024
    assert first.parameters == first.gradients == last.parameters == 2 * layer
    small, large = first.passes
    # The batch, what the first layer makes of it, and what is passed on.
    assert small.kept == 3 * values
    assert large.kept == 2 * small.kept
    assert small.sent == values
    # Backward: what is passed on is gone; beside the rest are two gradients, and one of a matrix that is added.
    assert 3 * values < small.peak <= 5 * values + layer
    assert small.flops == 3 * 2 * 2 * 1024 * WIDTH * WIDTH
    (found, _) = last.passes
    assert found.sent == 4, "a loss"
    assert found.kept >= 3 * values


def test_copies_of_weights_that_a_stage_makes_are_told_apart() -> None:
    matrix, values = 4 * WIDTH * WIDTH, 4 * WIDTH * 1024
    full, half = staged(Tall, 1024).footprint, staged(Tall, 1024, precision="bfloat16").footprint
    assert half is not None
    assert [one.passes[0].uncast for one in full.stages] == [None, None]
    first, last = (one.passes[0] for one in half.stages)
    assert last.uncast is not None
    # Those of two matrices, in half the bytes; the first needs no gradient of its input, and lets go of its copy.
    assert first.kept - first.uncast.kept == matrix / 2
    assert last.kept - last.uncast.kept == matrix
    assert first.forward - first.uncast.forward == matrix
    assert 2 * values < first.uncast.kept <= first.uncast.peak < first.peak


class Again(Tall):
    """Four layers, of which the third is the first one again."""

    def model(self) -> nn.Module:
        """[N, 64] → [N, 1]."""
        first, second, last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        return nn.Sequential(first, second, first, last)


def test_a_weight_that_stages_share_is_counted_once_on_each_rank() -> None:
    layer = 4 * WIDTH * WIDTH
    answer = staged(Again, 8)
    assert answer.footprint is not None, answer.mistakes
    assert answer.footprint.parameters == 3 * layer
    assert [one.parameters for one in answer.footprint.stages] == [2 * layer] * 2
    answer = staged(Again, 8, pipeline={"schedule": "interleaved1f1b"})
    assert answer.footprint is not None, answer.mistakes
    assert [one.gradients for one in answer.footprint.stages] == [layer, layer, 0, layer]


def test_what_cannot_be_cut_is_told() -> None:
    (mistake,) = staged(Layers, 8, pipeline={"stages": 5, "chunks": 5}).mistakes
    assert mistake.message == "the model has 4 parts, too few for 5 stages"


@given(st.dictionaries(st.integers(0, 1000), st.integers(0, 2000), min_size=1), st.integers(1, 16))
def test_of_all_moments_those_are_kept_that_are_the_peak_for_a_share_of_the_gradients(
    most: dict[int, int], parts: int
) -> None:
    """Most by size of gradients, of which there are no more than that."""
    most = {min(gradients, total): total for gradients, total in most.items()}
    kept = moments(most, 0)
    peak = max(one.activations + one.gradients / parts for one in kept)
    assert peak == max(total - gradients + gradients / parts for gradients, total in most.items())
    assert max(one.activations for one in kept) == max(total - gradients for gradients, total in most.items())
    assert len(kept) == len(set(kept)) <= len(most)
