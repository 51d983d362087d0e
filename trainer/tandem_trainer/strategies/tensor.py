"""The modules of a model that tensor parallelism splits, and how: validation of a task's plan.

A plan is read as torch's `parallelize_module` reads it, which ignores names that do not exist.
"""

import fnmatch
from collections.abc import Iterator

from torch import nn

from tandem_trainer.failure import ConfigurationError
from tandem_trainer.strategies.strategy import Plan

COLWISE, ROWWISE, REPLICATED = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""Names of styles, as in the plans of Hugging Face's models. The last is for a layer whose weights are not split and
whose inputs are a part of the heads (tandem_trainer.strategies.replicated)."""
UNSPLIT_STYLES = frozenset({"colwise_gather_output", "rowwise_split_input", "embedding_rowwise", "embedding_colwise"})
"""Hugging Face's styles of layers with full inputs and full outputs, which need not be split, and are not."""


def check(plan: Plan, model: nn.Module, ranks: int) -> None:
    """Check that torch can follow a plan as it is.

    Args:
        ranks: number of ranks that split a matrix.

    Raises:
        ConfigurationError: the plan splits nothing, has an unknown style, or names no module of the model.
    """
    followed = {pattern: style for pattern, style in plan.items() if style not in UNSPLIT_STYLES}
    if not followed:
        raise ConfigurationError(
            f"tensorParallel: {ranks} needs a plan of which matrices to split and how; the task's "
            "tensor_plan(model) gives it, and neither task nor model has one that splits any "
            "(in a session: distribute(tensor_plan=…))"
        )
    for pattern, style in followed.items():
        if style not in (COLWISE, ROWWISE, REPLICATED):
            raise ConfigurationError(
                f"the plan for tensorParallel has the unknown style {pattern}: {style}; supported are {COLWISE}, "
                f"{ROWWISE} and {REPLICATED}"
            )
        # torch ignores such a pattern, and the matrices would silently stay whole on every rank.
        if not any(_matches(name, pattern) for name, _ in model.named_modules()):
            raise ConfigurationError(f"the plan for tensorParallel names {pattern}, and the model has no such module")


def split_modules(plan: Plan, model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield each module that a plan splits: its name, the module, and the style."""
    for name, module in model.named_modules():
        # The first pattern that matches decides, also if its style does not split the module.
        style = next((style for pattern, style in plan.items() if _matches(name, pattern)), None)
        if style is not None and style not in UNSPLIT_STYLES:
            yield name, module, style


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a module's name: part by part; a * matches no dot, and not the model itself."""
    names, patterns = name.split("."), pattern.split(".")
    return bool(name or not pattern) and len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))
