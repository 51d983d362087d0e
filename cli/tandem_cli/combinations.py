"""Names of strategies in commands: single ones and combinations, such as `fsdp+tensor` or `pipeline+fsdp`.

`tensor` means the job's `tensorParallel`; `fsdp` after `pipeline` means replicas of a pipeline that shard the state of
their stages.
"""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import ValidationError

from tandem.errors import UserError
from tandem.job.tasks import Loop, StrategyName
from tandem.model import RuleBroken

TENSOR = "tensor"
COMBINED = ("fsdp+tensor", "pipeline+fsdp", "pipeline+tensor", "pipeline+fsdp+tensor")

_HINTS = {"single": " (one rank alone is any of them with --workers 1)", TENSOR: " (tensorParallel needs one of these)"}


def strategy_of(loop: Loop) -> str:
    """Return the job's strategy, for example `fsdp+tensor`."""
    parts: list[str] = [loop.strategy]
    parts += ["fsdp"] if loop.strategy == "pipeline" and loop.fsdp is not None else []
    parts += [TENSOR] if _splits_matrices(loop) else []
    return "+".join(parts)


def parse_names(text: str, loop: Loop) -> Iterator[str]:
    """Yield the distinct names in a list such as `ddp,fsdp+tensor`.

    Args:
        loop: the job's training loop.

    Raises:
        UserError: a name is unknown, or needs a setting that the job lacks.
    """
    names = (*get_args(StrategyName), *COMBINED)
    for name in dict.fromkeys(part.strip() for part in text.split(",")):
        if name not in names:
            raise UserError(
                f"--strategies: {name!r} is not a strategy; choose from {', '.join(names)}{_HINTS.get(name, '')}"
            )
        if TENSOR in name.split("+") and not _splits_matrices(loop):
            raise UserError(
                f"--strategies: {name} needs tensorParallel: set it, with strategy fsdp or pipeline, and as "
                "many processes in a worker"
            )
        yield name


def choose(loop: dict[str, Any], name: str) -> None:
    """Change the loop of a manifest to these strategies only."""
    first, *more = name.split("+")
    for other in get_args(StrategyName):
        if other not in (first, *more):
            loop.pop(other, None)
    if "fsdp" in more:
        loop.setdefault("fsdp", {})
    if TENSOR not in more:
        loop.pop("tensorParallel", None)
    loop["strategy"] = first


def first_error(error: ValidationError) -> str:
    """Return the first validation error as a sentence."""
    detail = error.errors(include_url=False)[0]
    broken = detail.get("ctx", {}).get("error")
    if isinstance(broken, RuleBroken):
        return broken.broken[0].message
    return f"{'.'.join(str(part) for part in detail['loc'])}: {detail['msg']}"


def _splits_matrices(loop: Loop) -> bool:
    return loop.tensor_parallel > 1
