"""Options of accelerate under the adapter: a run that was killed ends as an undisturbed one, or it is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, ParallelismConfig
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from tandem.rundir.layout import RunDir
from tandem_trainer.adapters.accelerate import elastic
from tandem_trainer.failure import ConfigurationError
from tests.support.interrupted import assert_same_when_killed, drawn, kill_when_saved, script

pytestmark = pytest.mark.filterwarnings("ignore")
ALL = pytest.mark.full("core", "trainer")
NEVER = 1000
ROWS = TensorDataset(
    torch.randn(64, 8, generator=torch.Generator().manual_seed(1)),
    torch.randint(3, (64,), generator=torch.Generator().manual_seed(2)),
)
"""Six steps of twelve in an epoch, the last one of four."""
SCHEDULES: dict[str, Any] = {
    "step": lambda optimizer: StepLR(optimizer, 5, 0.7),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 40),
    # As many steps as the samples make without a remainder, one fewer in each epoch than there are.
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=15),
}


@pytest.fixture(autouse=True)
def _accelerate_begins_anew() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(
    folder: Path,
    *,
    kill_at: int = NEVER,
    schedule: str = "step",
    loader: dict[str, Any] | None = None,
    begin: dict[str, Any] | None = None,
    clip: float = 0.0,
    registers: bool = False,
    forgets: bool = False,
    pair: bool = False,
    stop_at: int = NEVER,
    **options: Any,
) -> dict[str, Any]:
    """Train, up to a kill; where it ended.

    Args:
        pair: whether another model, with an optimizer of its own, is trained beside it.
        stop_at: step at which the script has no more time.
    """
    _accelerate_begins_anew.__wrapped__()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **options)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    rates: Any = SCHEDULES[schedule](optimizer)
    source = DataLoader(ROWS, **({"batch_size": 12, "shuffle": True} | (loader or {})))
    model, optimizer, source, rates = accelerator.prepare(model, optimizer, source, rates)
    models: Any = {"first": model}
    optimizers: Any = {"first": optimizer}
    if pair:
        other = nn.Linear(8, 3)
        learner = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
        models["second"], optimizers["second"] = accelerator.prepare(other, learner)
    seen = {"batches": 0}
    if registers:
        accelerator.register_for_checkpointing(StepLR(torch.optim.SGD(model.parameters(), 0.1), 1))
    kept = {} if forgets else {"schedule": rates}
    with script():
        run = elastic(
            accelerator,
            source,
            models if pair else model,
            optimizers if pair else optimizer,
            folder=str(folder),
            checkpoint={"everySteps": kill_at},
            seen=seen,
            **({"epochs": 3} | kept | (begin or {})),
        )
        with run:
            for rows, labels in run:
                if run.session.step == kill_at:
                    kill_when_saved(folder, kill_at)
                if run.session.step + 1 == stop_at:
                    run.session.stop("24 hours are over")
                with accelerator.accumulate(*models.values()):
                    accelerator.backward(cross_entropy(sum(one(rows) for one in models.values()), labels))
                    if clip and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), clip)
                    for one in optimizers.values():
                        one.step()
                    rates.step()
                    for one in optimizers.values():
                        one.zero_grad()
                seen["batches"] += 1
    accelerator.end_training()
    return {
        "step": run.session.step,
        "rate": rates.get_last_lr(),
        "seen": seen["batches"],
        "weights": torch.cat([one.detach().flatten() for each in models.values() for one in each.parameters()]),
    }


CASES: dict[str, dict[str, Any]] = {
    "OneCycleLR": {"schedule": "one cycle"},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2, "schedule": "cosine"},
    "gradient_accumulation_plugin": {
        "gradient_accumulation_plugin": GradientAccumulationPlugin(3, adjust_scheduler=False, sync_each_batch=True),
        "begin": {"epochs": 6},
    },
    "sync_with_dataloader": {"gradient_accumulation_plugin": GradientAccumulationPlugin(2, sync_with_dataloader=False)},
    "split_batches": {"dataloader_config": DataLoaderConfiguration(split_batches=True)},
    "even_batches": {"dataloader_config": DataLoaderConfiguration(even_batches=False)},
    "use_seedable_sampler": {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)},
    "non_blocking": {"dataloader_config": DataLoaderConfiguration(non_blocking=True)},
    "step_scheduler_with_optimizer": {"step_scheduler_with_optimizer": False},
    "mixed_precision": {"mixed_precision": "bf16"},
    "rng_types": {"rng_types": ["torch"]},
    "drop_last": {"loader": {"drop_last": True}},
    "max_steps": {"begin": {"epochs": 9, "max_steps": 13}},
    "global_batch_size": {"begin": {"global_batch_size": 10}, "gradient_accumulation_steps": 2},
    "clip_grad_norm_": {"clip": 0.1},
    "two models": {"pair": True, "gradient_accumulation_steps": 2},
}
ALONE = ("gradient_accumulation_plugin", "sync_with_dataloader", "step_scheduler_with_optimizer")
"""Not beside gradient_accumulation_steps, and not beside a schedule that ends."""
ALWAYS = ("OneCycleLR", "step_scheduler_with_optimizer")


@pytest.mark.parametrize("kill_at", [pytest.param(2, marks=ALL), pytest.param(6, marks=ALL), 8])
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ALWAYS else ALL) for name in CASES])
def test_killed_and_resumed_it_ends_with_the_weights_of_the_undisturbed_run(
    tmp_path: Path, name: str, kill_at: int
) -> None:
    assert_same_when_killed(train, tmp_path, kill_at, **CASES[name])


@ALL
@pytest.mark.parametrize("name", [name for name in CASES if name not in ALONE])
def test_options_that_are_drawn_together_are_as_exact(tmp_path: Path, name: str) -> None:
    kill_at, case = drawn(CASES, name, ALONE)
    assert_same_when_killed(train, tmp_path, kill_at, **case)


def test_a_limit_of_time_stops_it_early(tmp_path: Path) -> None:
    assert train(tmp_path, stop_at=4)["step"] == 4
    assert RunDir(tmp_path).done()["stoppedEarly"] == "stopped early after step 4 of 18: 24 hours are over"


def test_a_model_that_is_divided_is_refused_by_the_option_that_divides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Accelerator, "parallelism_config", property(lambda self: ParallelismConfig()), raising=False)
    with pytest.raises(ConfigurationError, match=r"^elastic\(accelerator\): parallelism_config=True of accelerate"):
        train(tmp_path)


def test_one_process_that_reads_for_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^elastic\(accelerator\): dispatch_batches=True of accelerate"):
        train(tmp_path, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))


@pytest.mark.parametrize("case", [{"forgets": True}, {"registers": True}], ids=["prepared", "registered"])
def test_what_the_script_prepares_or_registers_and_does_not_give_is_refused(
    tmp_path: Path, case: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match="a StepLR was prepared or registered, but checkpoints would not"):
        train(tmp_path, **case)
