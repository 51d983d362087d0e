"""Strategies as commands name them: one, or several that are combined, as `fsdp+tensor` or `pipeline+fsdp`.

`tensor` stands for the `tensorParallel` of the job, `fsdp` behind `pipeline` for copies of a pipeline that split the
state of their stages.
"""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import ValidationError

from tandem.errors import UserError
from tandem.model import RuleBroken
from tandem.tasks import Loop, StrategyName, TaskLoop

TENSOR = "tensor"
COMBINED = ("fsdp+tensor", "pipeline+fsdp", "pipeline+tensor", "pipeline+fsdp+tensor")

_MEANT = {"single": " (one rank alone is any of them with --workers 1)", TENSOR: " (tensorParallel needs one of these)"}


def own(loop: Loop) -> str:
    """What a job has."""
    parts: list[str] = [loop.strategy]
    parts += ["fsdp"] if loop.strategy == "pipeline" and loop.fsdp is not None else []
    parts += [TENSOR] if _splits_matrices(loop) else []
    return "+".join(parts)


def named(text: str, loop: Loop) -> Iterator[str]:
    """The names in a list such as `ddp,fsdp+tensor`, each once.

    Args:
        loop: of the job.

    Raises:
        UserError: one of them is none, or needs something that the job does not say.
    """
    known = (*get_args(StrategyName), *COMBINED)
    for name in dict.fromkeys(part.strip() for part in text.split(",")):
        if name not in known:
            raise UserError(
                f"--strategies: {name!r} is no strategy; write some of {', '.join(known)}{_MEANT.get(name, '')}"
            )
        if TENSOR in name.split("+") and not isinstance(loop, TaskLoop):
            raise UserError(f"--strategies: for {name} the task has to say how matrices are split; this one does not")
        if TENSOR in name.split("+") and not _splits_matrices(loop):
            raise UserError(
                f"--strategies: for {name} the job has to say between how many: set tensorParallel, with strategy fsdp "
                "or pipeline, and as many processes in a worker"
            )
        yield name


def choose(loop: dict[str, Any], name: str) -> None:
    """Have the loop of a manifest use these strategies and no others."""
    first, *more = name.split("+")
    for other in get_args(StrategyName):
        if other not in (first, *more):
            loop.pop(other, None)
    if "fsdp" in more:
        loop.setdefault("fsdp", {})
    if TENSOR not in more:
        loop.pop("tensorParallel", None)
    loop["strategy"] = first


def first_of(error: ValidationError) -> str:
    """The first mistake, in a sentence: why a job cannot take a strategy."""
    detail = error.errors(include_url=False)[0]
    broken = detail.get("ctx", {}).get("error")
    if isinstance(broken, RuleBroken):
        return broken.broken[0].message
    return f"{'.'.join(str(part) for part in detail['loc'])}: {detail['msg']}"


def _splits_matrices(loop: Loop) -> bool:
    return isinstance(loop, TaskLoop) and loop.tensor_parallel > 1
