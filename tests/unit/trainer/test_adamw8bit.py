"""AdamW with moments of 8 bits: about the curve of AdamW, a quarter of the memory, and exact checkpoints."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from tandem.job.footprint import FootprintRequest
from tandem.job.tasks import Optimizer
from tandem.job.trainer import Trainer
from tandem_trainer.adamw8bit import block_of, levels
from tandem_trainer.causal_lm import CausalLM, CausalLMConfig
from tandem_trainer.checkpoint.state import CheckpointMismatch
from tandem_trainer.checkpoint.train_state import TrainState
from tandem_trainer.footprint import footprint
from tandem_trainer.models.minigpt import MiniGPT
from tandem_trainer.optimizers import torch_optimizer

SETTINGS = Optimizer(name="adamw8bit", learning_rate=0.003, weight_decay=0.1)
SHAPE = {"layers": 2, "width": 64, "heads": 2, "length": 16}


def language_model() -> MiniGPT:
    return CausalLM(CausalLMConfig.model_validate(SHAPE)).model()


def take(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    found = []
    for step in steps:
        tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(step % 4))
        loss: Tensor = nn.functional.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        for group in optimizer.param_groups:
            group["lr"] = 0.003 * 0.99**step  # as the loop does
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        pytest.param((4096,), None, id="a vector"),
        pytest.param((63, 64), None, id="small"),
        pytest.param((64, 64), 64, id="rows that are short"),
        pytest.param((10, 4864), 256, id="several blocks a row"),
        pytest.param((10, 896), 224, id="rows that are no multiple of 256"),
        pytest.param((896, 16), None, id="rows that are too short"),
        pytest.param((64, 3, 7, 7), 147, id="a kernel"),
        pytest.param((9, 509), None, id="rows of a prime number"),
    ],
)
def test_a_block_is_a_part_of_one_row_whatever_a_rank_holds(shape: tuple[int, ...], block: int | None) -> None:
    assert block_of(shape) == block


def test_it_learns_about_what_adamw_learns() -> None:
    curves = []
    for name in ("adamw", "adamw8bit"):
        torch.manual_seed(0)
        model = language_model()
        optimizer = torch_optimizer(model, SETTINGS.model_copy(update={"name": name}))
        curves.append(take(model, optimizer, range(20)))
    assert curves[0][-1] < 0.9 * curves[0][0]
    assert curves[1] == pytest.approx(curves[0], rel=0.03)
    assert curves[1] != curves[0]


@pytest.mark.parametrize("hyperparameters", [False, True])
def test_a_run_goes_on_from_a_checkpoint_to_the_last_bit(hyperparameters: bool) -> None:
    torch.manual_seed(0)
    model = language_model()
    optimizer = torch_optimizer(model, SETTINGS)
    take(model, optimizer, range(4))
    contents = copy.deepcopy(TrainState(model, optimizer, hyperparameters=hyperparameters).contents({}))
    undisturbed = take(model, optimizer, range(4, 8))

    again = language_model()
    resumed = torch_optimizer(again, SETTINGS)
    kept = TrainState(again, resumed, hyperparameters=hyperparameters)
    kept.check(contents)
    kept.load(contents)
    back = kept.contents({})
    assert back.optimizer.keys() == contents.optimizer.keys()
    assert all(torch.equal(one, back.optimizer[name]) for name, one in contents.optimizer.items())
    assert take(again, resumed, range(4, 8)) == undisturbed
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_a_checkpoint_holds_codes_and_scales_by_name() -> None:
    torch.manual_seed(0)
    model = language_model()
    optimizer = torch_optimizer(model, SETTINGS)
    take(model, optimizer, range(1))
    tensors = TrainState(model, optimizer).contents({}).optimizer
    matrix = "blocks.0.mlp.gate.weight"
    rows, columns = dict(model.named_parameters())[matrix].shape
    codes, scale = (tensors[f"{matrix}/exp_avg.{part}"] for part in ("codes", "scale"))
    assert (codes.dtype, tuple(codes.shape)) == (torch.uint8, (rows, columns))
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (rows, columns // 64))
    assert {one.dtype for name, one in tensors.items() if "norm" in name} == {torch.float32}
    assert all(type(one) is Tensor for one in tensors.values())
    whole = sum(one.nbytes for one in tensors.values())
    assert whole < 0.3 * 2 * sum(one.nbytes for one in model.parameters())


def test_levels_are_dense_where_numbers_are_small() -> None:
    for signed in (True, False):
        found = levels(signed)
        assert len(set(found)) == 256
        assert (found[0], found[-1]) == (-0.99296875 if signed else 0.0, 1.0)
        assert 0.0 in found
        # Between a hundredth and 1 the next level is never further than a fifth.
        assert max(1 - one / two for one, two in pairwise(found) if one > 0.01) < 1 / 5


def test_moments_of_adamw_are_rounded_with_the_next_step_and_its_own_are_nothing_for_adamw() -> None:
    torch.manual_seed(0)
    model = language_model()
    plain = torch_optimizer(model, SETTINGS.model_copy(update={"name": "adamw"}))
    take(model, plain, range(4))
    before = copy.deepcopy(TrainState(model, plain).contents({}))
    other = copy.deepcopy(model)
    rounded = torch_optimizer(other, SETTINGS)
    TrainState(other, rounded).load(before)
    take(other, rounded, range(4, 5))
    take(model, plain, range(4, 5))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    contents = TrainState(other, rounded).contents({})
    assert "blocks.0.mlp.gate.weight/exp_avg_sq.codes" in contents.optimizer
    assert "blocks.0.mlp.gate.weight/exp_avg_sq" not in contents.optimizer
    with pytest.raises(CheckpointMismatch, match="8-bit moments"):
        TrainState(model, plain).check(contents)


def test_tandem_plan_counts_bytes() -> None:
    sizes = {}
    for name in ("adamw", "adamw8bit"):
        loop = {"optimizer": {"name": name}}
        trainer = Trainer.model_validate({"task": "causal-lm", "parameters": SHAPE, "loop": loop})
        sizes[name] = footprint(FootprintRequest(trainer=trainer, micro_batches=(2,)), lambda words: None).optimizer
    assert 0.25 < sizes["adamw8bit"] / sizes["adamw"] < 0.3
