"""Functions for training scripts: `tandem.log` and `tandem.pausing`. Outside of a job they do nothing.

    import tandem
    tandem.log(step=step, loss=loss.item(), samples=64, total=1000, perplexity=12.3)

The pulse and the training log belong to the trainer, and core imports neither. The agent that starts the ranks names
the module that receives the values in the variable STEP_LOG; it is imported at the first call. Without the variable
there is no job (docs/decisions/0031-log-from-any-loop.md).
"""

import os
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, Protocol, SupportsFloat, SupportsIndex, cast

STEP_LOG = "TANDEM_STEP_LOG"
"""Environment variable with the name of a module that has the functions of `StepLogModule`."""
MAX_VALUES, MAX_NAME_LENGTH = 16, 40
"""Maximum number of names of further values, and maximum length of one in characters: each is a curve, a column and a
series."""


def is_name(name: str) -> bool:
    """Whether a value may have this name."""
    return name.isidentifier() and len(name) <= MAX_NAME_LENGTH


class StepLogModule(Protocol):
    """The module that receives logged values."""

    def log(self, step: Any, loss: Any, samples: Any, total: Any, values: dict[str, Any]) -> None:
        """See `tandem.log`."""

    def pausing(self, name: str) -> AbstractContextManager[None]:
        """See `tandem.pausing`."""


def log(
    step: SupportsIndex,
    *,
    loss: SupportsFloat | None = None,
    samples: SupportsIndex | None = None,
    total: SupportsIndex | None = None,
    **values: SupportsFloat,
) -> None:
    """Log the progress of this script. Any of its processes may call this, or only one, after any number of steps.

    Numbers may be tensors and arrays of one element; a tensor on a GPU is synchronized.

    Args:
        step: optimizer steps completed over the whole run: 1 after the first one.
        loss: of the training data; may be NaN or infinite.
        samples: samples of one step over all processes; also where only every tenth step is logged.
        total: steps of the whole run, for percentage and remaining time.
        values: further numbers, up to 16 names of up to 40 letters over the life of the process.

    Raises:
        TypeError: `step`, `samples` or `total` is no whole number, or another value no number.
        ValueError: one of them is negative or too large, or a name cannot be taken.
    """
    if (module := _module()) is not None:
        module.log(step, loss, samples, total, values)


def pausing(name: str) -> AbstractContextManager[None]:
    """Mark a pause of unknown length outside of a step, such as a validation: no hang is declared until the end of the
    block.

        with tandem.pausing("validation"):
            accuracy = evaluate(model)

    Args:
        name: name shown meanwhile, 1 to 16 ASCII characters.

    Raises:
        ValueError: the name is invalid.
    """
    module = _module()
    return nullcontext() if module is None else module.pausing(name)


_imported: StepLogModule | None = None


def _module() -> StepLogModule | None:
    """The module that receives logged values; None outside of a job."""
    global _imported
    # A missing module is not cached: warm ranks are forked from a process that has no job yet.
    if _imported is None and (name := os.environ.get(STEP_LOG)):
        _imported = cast("StepLogModule", import_module(name))
    return _imported
