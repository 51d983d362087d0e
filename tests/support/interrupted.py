"""A run with an adapter, interrupted and gone on with in this process: as a killed one is, at the cost of no start."""

import contextlib
import random
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tandem.rundir.layout import RunDir
from tandem_trainer import session
from tests.support.waiting import until


class Killed(BaseException):
    """Ends a run between two statements; no library and no session takes it for an error of its own."""


def kill_when_saved(folder: Path, step: int) -> NoReturn:
    """End the run once the checkpoint after a step is committed, which a writer beside it does."""
    until(lambda: any(one.step == step for one in RunDir(folder).committed()), "a checkpoint")
    raise Killed


def drawn(cases: Mapping[str, Mapping[str, Any]], name: str, alone: Collection[str]) -> tuple[int, dict[str, Any]]:
    """The step of a kill, and a case together with two others.

    Args:
        alone: names of cases that do not go together with every other one.
    """
    chance = random.Random(name)
    case: Any = cases[name]
    for other in chance.sample([other for other in cases if other not in (name, *alone)], 2):
        case = _joined(case, cases[other])
    return chance.randint(2, 5), case


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return {**first, **{key: _joined(first[key], one) if key in first else one for key, one in second.items()}}
    return first + second if isinstance(first, tuple) and isinstance(second, tuple) else second


def assert_same_when_killed(run: Callable[..., dict[str, Any]], folder: Path, kill_at: int, **case: Any) -> Any:
    """A run that is killed after a step and goes on ends as an undisturbed one: with its weights, to the last bit, and
    with all else that `run` tells of it. Returns what its DONE says."""
    expected = run(folder / "undisturbed", **case)
    assert expected["step"] > kill_at
    assert run(folder / "killed", kill_at=kill_at, **case)["step"] == kill_at
    found = run(folder / "killed", **case)
    assert {**found, "weights": None} == {**expected, "weights": None}
    assert found["weights"].equal(expected["weights"])
    done = RunDir(folder / "killed").done()
    assert done["totalSteps"] == expected["step"]
    return done


@contextlib.contextmanager
def script() -> Iterator[None]:
    """The life of a script's process, as far as a session sees it."""
    on_term = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.suppress(Killed):
            yield
            for one in [*session._open]:
                one._end_of_script()
    finally:
        for one in session._open:
            # The writer of a process that is killed ends with it.
            if one._elastic is not None:
                one._elastic._saver.close()
        session._open.clear()
        signal.signal(signal.SIGTERM, on_term)
