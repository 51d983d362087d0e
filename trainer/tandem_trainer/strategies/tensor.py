"""Which matrices of a model tensor parallelism splits, and how: what a task's plan says, checked.

A plan is read as torch's `parallelize_module` reads it, which passes over a name that is not there.
"""

import fnmatch
from collections.abc import Iterator

from torch import nn

from tandem_trainer.failure import ConfigurationError
from tandem_trainer.strategies.strategy import Plan

COLWISE, ROWWISE, REPLICATED = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""By the names that models of Hugging Face use in their plans, too. The last is for a layer whose weights are not split
and that is given a part of the heads (tandem_trainer.strategies.replicated)."""
WHOLE = frozenset({"colwise_gather_output", "rowwise_split_input", "embedding_rowwise", "embedding_colwise"})
"""Words of theirs for layers with whole inputs and whole outputs, which may as well not be split, and are not."""


def check(plan: Plan, model: nn.Module, ranks: int) -> None:
    """Refuse a plan that torch would not follow as it stands.

    Args:
        ranks: how many split a matrix.

    Raises:
        ConfigurationError: it splits nothing, has another word than these, or names no module of the model.
    """
    followed = {pattern: style for pattern, style in plan.items() if style not in WHOLE}
    if not followed:
        raise ConfigurationError(
            f"tensorParallel: {ranks} needs a plan of which matrices to split and how; the task's "
            "tensor_plan(model) gives it, and neither task nor model has one that splits any "
            "(in a session: distribute(tensor_plan=…))"
        )
    for pattern, style in followed.items():
        if style not in (COLWISE, ROWWISE, REPLICATED):
            raise ConfigurationError(
                f"the plan for tensorParallel says {pattern}: {style}; known are {COLWISE}, {ROWWISE} and {REPLICATED}"
            )
        if not any(_is_meant(name, pattern) for name, _ in model.named_modules()):
            raise ConfigurationError(f"the plan for tensorParallel names {pattern}, and the model has no such module")


def split_modules(plan: Plan, model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Each module that a plan splits, with its name before it and how after it."""
    for name, module in model.named_modules():
        # The first pattern that means it, also where that leaves it whole.
        style = next((style for pattern, style in plan.items() if _is_meant(name, pattern)), None)
        if style is not None and style not in WHOLE:
            yield name, module, style


def _is_meant(name: str, pattern: str) -> bool:
    """Whether a pattern means a module: part by part, and a * stands for no dot, nor for the model itself."""
    names, patterns = name.split("."), pattern.split(".")
    return bool(name or not pattern) and len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))
