"""What a training script calls: `tandem.log` and `tandem.pausing`. Outside of a job they do nothing.

    import tandem
    tandem.log(step=step, loss=loss.item(), samples=64, total=1000, perplexity=12.3)

Core knows neither the pulse nor the training log, which belong to the trainer, and imports nothing for them. The agent
that starts the ranks names the module that takes the values, in the variable STEP_LOG; it is imported at the first
call. Where the variable is missing there is no job (docs/decisions/0031-log-from-any-loop.md).
"""

import os
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, Protocol, SupportsFloat, SupportsIndex, cast

STEP_LOG = "TANDEM_STEP_LOG"
"""Variable with the name of a module that has the functions of `StepLogModule`."""
MAX_VALUES, MAX_NAME_LENGTH = 16, 40
"""Names of other values, and the letters of one: each is a curve, a column and a series."""


def is_name(name: str) -> bool:
    """Whether a value may be called so."""
    return name.isidentifier() and len(name) <= MAX_NAME_LENGTH


class StepLogModule(Protocol):
    """The module that takes what a script logs."""

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
    """Tell the job how far this script is. Any process of it may call this, or one alone, after any number of steps.

    Numbers may be tensors and arrays of one element; one on a GPU is waited for.

    Args:
        step: optimizer steps completed over the whole run: 1 after the first one.
        loss: of the training data; may be NaN or infinite.
        samples: of one step, of all processes together; also where only every tenth step is logged.
        total: steps of the whole run, which give percentage and remaining time.
        values: anything else that is a number, up to 16 names of up to 40 letters over the life of the process.

    Raises:
        TypeError: `step`, `samples` or `total` is no whole number, or another value no number.
        ValueError: one of them is negative or too large, or a name cannot be taken.
    """
    if (module := _module()) is not None:
        module.log(step, loss, samples, total, values)


def pausing(name: str) -> AbstractContextManager[None]:
    """Do something that takes as long as it takes and is no part of a step, such as a validation: no hang is declared
    until the end of the block.

        with tandem.pausing("validation"):
            accuracy = evaluate(model)

    Args:
        name: what is shown meanwhile, 1 to 16 ASCII characters.

    Raises:
        ValueError: a pause cannot be called so.
    """
    module = _module()
    return nullcontext() if module is None else module.pausing(name)


_found: StepLogModule | None = None


def _module() -> StepLogModule | None:
    """The module that the job names; None outside of one."""
    global _found
    # Not remembered while it is missing: warm ranks are forked from a process that has no job yet.
    if _found is None and (name := os.environ.get(STEP_LOG)):
        _found = cast("StepLogModule", import_module(name))
    return _found
