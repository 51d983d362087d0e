"""Options of Lightning's Trainer under Elastic: a run that was killed ends as an undisturbed one, or it is refused."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from tandem.rundir.layout import RunDir
from tandem_trainer.adapters.lightning import Elastic
from tandem_trainer.failure import ConfigurationError
from tests.support.interrupted import Killed, assert_same_when_killed, drawn, kill_when_saved, script

pytestmark = pytest.mark.filterwarnings("ignore")
ALL = pytest.mark.full("core", "trainer")
NEVER = 1000
QUIET = {
    "accelerator": "cpu",
    "max_epochs": 3,
    "num_sanity_val_steps": 0,
    "enable_checkpointing": False,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
ROWS = TensorDataset(
    torch.randn(64, 8, generator=torch.Generator().manual_seed(1)),
    torch.randint(3, (64,), generator=torch.Generator().manual_seed(2)),
)
"""Six steps of twelve in an epoch, the last one of four."""


class Module(lightning.LightningModule):
    def __init__(self, schedule: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))
        self.schedule = schedule

    def training_step(self, batch: Any, number: int) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val", cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        match self.schedule:
            case "plateau":
                kept = {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "val"}
            case "step":
                kept = {"scheduler": CosineAnnealingLR(optimizer, 40), "interval": "step"}
            case "epoch":
                kept = {"scheduler": StepLR(optimizer, 1, 0.7)}
            case _:
                return optimizer
        return {"optimizer": optimizer, "lr_scheduler": kept}


class KillAt(Callback):
    def __init__(self, folder: Path, step: int) -> None:
        self._folder, self._step = folder, step

    def on_train_batch_start(self, trainer: lightning.Trainer, *others: Any) -> None:
        if trainer.global_step == self._step:
            kill_when_saved(self._folder, self._step)


def fit(
    folder: Path,
    *,
    kill_at: int = NEVER,
    callbacks: tuple[Callable[[], Callback], ...] = (),
    schedule: str = "",
    loader: dict[str, Any] | None = None,
    begin: dict[str, Any] | None = None,
    fails_after: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train, up to a kill, or one of the code after the loop; where it ended."""
    source = DataLoader(ROWS, **({"batch_size": 12, "shuffle": True} | (loader or {})))
    elastic = Elastic(source, folder=str(folder), checkpoint={"everySteps": kill_at})
    # What averages weights stands before, which must not matter.
    chosen = [*(make() for make in callbacks), elastic, KillAt(folder, kill_at)]
    trainer = lightning.Trainer(**(QUIET | {"callbacks": chosen, "default_root_dir": str(folder)} | options))
    module = Module(schedule)
    with script():
        trainer.fit(module, elastic.loader, DataLoader(ROWS, batch_size=32), **(begin or {}))
        if fails_after:
            raise Killed
    return {
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "weights": torch.cat([one.detach().flatten() for one in module.parameters()]),
    }


CASES: dict[str, dict[str, Any]] = {
    "limit_train_batches": {"limit_train_batches": 5, "max_epochs": 4},
    "EMAWeightAveraging": {"callbacks": (lambda: EMAWeightAveraging(decay=0.9),)},
    "EarlyStopping": {"callbacks": (lambda: EarlyStopping("val", patience=1, min_delta=0.5),), "max_epochs": 6},
    "limit_train_batches as a part": {"limit_train_batches": 0.5, "accumulate_grad_batches": 2, "max_epochs": 5},
    "two averages": {"callbacks": (lambda: EMAWeightAveraging(decay=0.9), WeightAveraging), "schedule": "plateau"},
    "accumulate_grad_batches": {"accumulate_grad_batches": 2, "schedule": "step"},
    "max_steps": {"max_steps": 13, "max_epochs": -1, "schedule": "epoch"},
    "val_check_interval as a part": {"val_check_interval": 0.5, "schedule": "plateau"},
    "val_check_interval": {"val_check_interval": 2, "schedule": "plateau"},
    "check_val_every_n_epoch": {"check_val_every_n_epoch": None, "val_check_interval": 4, "schedule": "plateau"},
    "gradient_clip_val": {"gradient_clip_val": 0.1},
    "precision": {"precision": "bf16-mixed"},
    "reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1},
    "drop_last": {"loader": {"drop_last": True}},
    "min_epochs": {
        "min_epochs": 2,
        "max_epochs": 6,
        "callbacks": (lambda: EarlyStopping("val", patience=0, min_delta=9.0),),
    },
    "enable_checkpointing": {"enable_checkpointing": True, "callbacks": (lambda: ModelCheckpoint(save_last=True),)},
    "barebones": {"barebones": True} | dict.fromkeys(list(QUIET)[2:]),
}
ALONE = ("barebones", "check_val_every_n_epoch", "two averages", "min_epochs", "EarlyStopping")
"""They exclude other options, or end before the kill."""
ALWAYS = ("limit_train_batches", "EMAWeightAveraging", "EarlyStopping")


@pytest.mark.parametrize("kill_at", [2, pytest.param(6, marks=ALL), 8])
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ALWAYS else ALL) for name in CASES])
def test_killed_and_resumed_it_ends_with_the_weights_of_the_undisturbed_run(
    tmp_path: Path, name: str, kill_at: int
) -> None:
    done = assert_same_when_killed(fit, tmp_path, kill_at, **CASES[name])
    is_early = name in ("EarlyStopping", "min_epochs")
    assert ("EarlyStopping: no better val in" in done.get("stoppedEarly", "")) == is_early


@ALL
@pytest.mark.parametrize("name", [name for name in CASES if name not in ALONE])
def test_options_that_are_drawn_together_are_as_exact(tmp_path: Path, name: str) -> None:
    kill_at, case = drawn(CASES, name, ALONE)
    assert_same_when_killed(fit, tmp_path, kill_at, **case)


class StopAt(Callback):
    """Ends training early."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: lightning.Trainer, *others: Any) -> None:
        trainer.should_stop = trainer.global_step >= self._step


@pytest.mark.parametrize("callbacks", [(), (lambda: StopAt(8),), (lambda: StopAt(16),)])
def test_code_after_the_loop_sees_the_averaged_weights_again_when_it_is_run_once_more(
    tmp_path: Path, callbacks: tuple[Callable[[], Callback], ...]
) -> None:
    """After all steps, and after an early end in the second of three epochs and in the last one."""
    callbacks = (lambda: EMAWeightAveraging(decay=0.9), *callbacks)
    before = fit(tmp_path, callbacks=callbacks, fails_after=True)
    again = fit(tmp_path, callbacks=callbacks)
    assert {**again, "weights": None} == {**before, "weights": None}
    assert again["weights"].equal(before["weights"])
    assert RunDir(tmp_path).done()["totalSteps"] == before["step"]


REFUSED: dict[str, dict[str, Any]] = {
    "fast_dev_run=True": {"fast_dev_run": True},
    "overfit_batches=2": {"overfit_batches": 2},
    "max_time": {"max_time": "00:00:00:30"},
    "val_check_interval='a time'": {"val_check_interval": "00:00:00:30"},
    "StochasticWeightAveraging": {"callbacks": (lambda: StochasticWeightAveraging(0.05),)},
    "GradientAccumulationScheduler": {"callbacks": (lambda: GradientAccumulationScheduler({0: 1}),)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_elastic_cannot_keep_is_refused_by_name_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^Elastic: {name} of|^Elastic: .*`{name}`"):
        fit(tmp_path, **REFUSED[name])
    assert RunDir(tmp_path).committed() == []


def test_a_checkpoint_of_another_run_is_refused_and_one_of_an_earlier_start_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path / "refused", begin={"ckpt_path": "elsewhere/other.ckpt"})
    failure = RunDir(tmp_path / "refused").failed()
    assert failure["message"].startswith("Elastic: ckpt_path='elsewhere/other.ckpt' of lightning.Trainer.fit: ")
    own: dict[str, Any] = {
        "enable_checkpointing": True,
        "callbacks": (lambda: ModelCheckpoint(str(tmp_path / "own"), save_last=True, every_n_train_steps=4),),
        "begin": {"ckpt_path": "last"},
    }
    expected = fit(tmp_path / "undisturbed", max_epochs=1)
    fit(tmp_path / "one", kill_at=5, max_epochs=1, **own)
    assert (tmp_path / "own" / "last.ckpt").exists()
    with caplog.at_level(logging.WARNING, "tandem_trainer"):
        found = fit(tmp_path / "two", max_epochs=1, **own)
    assert "last.ckpt is not read; training resumes from the run directory" in caplog.text
    assert found["step"] == 6
    assert found["weights"].equal(expected["weights"])


def test_state_in_on_save_checkpoint_of_a_module_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Module, "on_save_checkpoint", lambda self, checkpoint: None)
    with caplog.at_level(logging.WARNING, "tandem_trainer"):
        fit(tmp_path, max_epochs=1)
    assert "Elastic does not call on_save_checkpoint of Module" in caplog.text


def test_a_short_epoch_has_the_steps_of_its_limit(tmp_path: Path) -> None:
    assert fit(tmp_path, limit_train_batches=5, max_epochs=4)["step"] == 20


def test_a_part_of_an_epoch_has_as_many_steps_as_without_elastic(tmp_path: Path) -> None:
    """Eight of ten batches, four in a step: the loader counts, and not the steps of a whole epoch."""
    options = {"limit_train_batches": 0.8, "accumulate_grad_batches": 4, "max_epochs": 2}
    alone = lightning.Trainer(**(QUIET | {"default_root_dir": str(tmp_path)} | options))
    alone.fit(Module(), DataLoader(ROWS, batch_size=7), DataLoader(ROWS, batch_size=32))
    assert fit(tmp_path, loader={"batch_size": 7}, **options)["step"] == alone.global_step == 4


class Shadow(Callback):
    """An average of the weights as many scripts write it, which has no state."""

    def on_train_batch_end(self, trainer: Any, module: Any, *others: Any) -> None:
        now = {name: one.detach().clone() for name, one in module.named_parameters()}
        before = getattr(self, "shadow", now)
        self.shadow = {name: one * 0.1 + before[name] * 0.9 for name, one in now.items()}


class Teacher(Callback):
    """A copy of the weights that stays as it is."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.shadow = {name: one.detach().clone() for name, one in module.named_parameters()}


def test_weights_in_a_callback_without_a_state_are_refused_when_they_would_first_be_lost(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path / "shadow", callbacks=(Shadow,), kill_at=2)
    failure = RunDir(tmp_path / "shadow").failed()
    assert "Shadow holds copies of the weights that checkpoints do not have" in failure["message"]
    assert fit(tmp_path / "teacher", callbacks=(Teacher,))["step"] == 18
