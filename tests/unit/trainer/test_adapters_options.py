"""The tables of options: every option of the installed libraries is on one, and what they say is done."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest

from tandem.job import adapter_options
from tandem.job.adapter_options import Option, Table
from tandem_coordinator.prerequisites.adapter import UNDECIDED
from tandem_trainer.adapters.options import check
from tandem_trainer.failure import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore")


def _transformers() -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    return {"transformers.TrainingArguments": TrainingArguments, "transformers.Trainer": Trainer}


def _trl() -> dict[str, Any]:
    from trl import DPOConfig, KTOConfig, RewardConfig, SFTConfig

    return {f"trl.{one.__name__}": one for one in (SFTConfig, DPOConfig, RewardConfig, KTOConfig)}


def _accelerate() -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin

    return {
        "accelerate.Accelerator": Accelerator,
        "accelerate.utils.DataLoaderConfiguration": DataLoaderConfiguration,
        "accelerate.utils.GradientAccumulationPlugin": GradientAccumulationPlugin,
    }


def _lightning() -> dict[str, Any]:
    from lightning.pytorch import Trainer

    return {"lightning.Trainer": Trainer, "lightning.Trainer.fit": Trainer.fit}


@pytest.mark.parametrize("library", [_transformers, _trl, _accelerate, _lightning])
def test_every_option_of_the_installed_library_is_on_its_table(library: Callable[[], dict[str, Any]]) -> None:
    tables = {table.call: table for table in adapter_options.TABLES}
    for call, made in library().items():
        parameters = set(inspect.signature(made).parameters) - {"self"}
        if call.startswith("trl."):
            parameters -= adapter_options.TRAINING_ARGUMENTS.options.keys()
        known = set(tables[call].options)
        assert not parameters - known, f"{call} has options that its table does not: {sorted(parameters - known)}"
        assert not known - parameters, f"{call} has these options no more: {sorted(known - parameters)}"


@pytest.mark.parametrize("library", [_transformers, _trl, _accelerate, _lightning])
def test_the_defaults_of_refused_options_are_those_of_the_installed_library(
    library: Callable[[], dict[str, Any]],
) -> None:
    """A check without the library knows them from the table."""
    tables = {table.call: table for table in adapter_options.TABLES}
    for call, made in library().items():
        for name, option in tables[call].options.items():
            default = inspect.signature(made).parameters[name].default
            if option.treatment == "refused" and name not in UNDECIDED and default is not inspect.Parameter.empty:
                assert adapter_options.is_same(getattr(default, "value", default), option.default) or option.values, (
                    name
                )


def test_every_callback_of_lightning_is_on_the_table() -> None:
    from lightning.pytorch import callbacks

    assert set(callbacks.__all__) == set(adapter_options.LIGHTNING_CALLBACKS.options)


def test_every_trainer_of_trl_has_a_table_or_is_refused() -> None:
    import trl

    trainers = {name for name in dir(trl) if name.endswith("Trainer")}
    with_tables = {name.replace("Config", "Trainer") for name in adapter_options.CONFIGS_OF_TRL}
    assert trainers == with_tables | set(adapter_options.OWN_LOOPS.options)


@pytest.mark.parametrize("table", adapter_options.TABLES, ids=lambda table: str(table.call))
def test_what_is_not_exact_says_why(table: Table) -> None:
    for name, option in table.options.items():
        assert (option.treatment == "exact") == (not option.note), name


TABLE = Table(
    "library.Call",
    {
        "exact": Option("exact"),
        "split": Option("refused", "it splits. Use whole"),
        "kind": Option("refused", "it steps in between. Use another", ("layerwise",)),
        "pushes": Option("warned", "nothing is pushed"),
    },
)
DEFAULTS = {"exact": 1, "split": None, "kind": "adam", "pushes": False, "newer": 0}


def test_a_refused_option_is_named_with_the_reason_and_what_to_use() -> None:
    with pytest.raises(ConfigurationError, match=r"^elastic: split=True of library\.Call: it splits\. Use whole$"):
        check(TABLE, DEFAULTS | {"split": True}, DEFAULTS, "elastic")
    with pytest.raises(ConfigurationError, match="kind='layerwise'"):
        check(TABLE, DEFAULTS | {"kind": "layerwise"}, DEFAULTS, "elastic")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"exact": 2}, ""),
        ({"split": False, "kind": "sgd"}, ""),
        ({"pushes": True}, "elastic: pushes=True of library.Call: nothing is pushed"),
        ({"newer": 3}, "elastic: newer=3 of library.Call is not known to this version of Tandem"),
    ],
)
def test_what_is_warned_of_or_unknown_is_said_once_and_the_rest_is_silent(
    given: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check(TABLE, DEFAULTS | given, DEFAULTS, "elastic")
    assert len(caplog.records) == bool(words)
    assert words in caplog.text
