"""A clock that tests set, and an event loop whose clock jumps to what is due next: tests of minutes take none."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class Clock:
    """Time that stands still until a test moves it; called as `time.monotonic` is, or with whose time is asked for."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self, *_: object) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


class Jumping(asyncio.SelectorEventLoop):
    """The loop that `jumping` runs."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self.now = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None = None) -> Any:
            if timeout is not None and timeout > 0:
                self.now += timeout
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        """Seconds since it was made."""
        return self.now

    def pass_over(self, seconds: float) -> None:
        """Let time go by in which nothing else could run, as long work in a callback does."""
        self.now += seconds


def jumping(work: Coroutine[Any, Any, Any]) -> Any:
    """Run something in time that jumps. It must not wait for anything but time."""
    loop = Jumping()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
