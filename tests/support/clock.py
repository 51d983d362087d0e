"""An event loop whose clock jumps to what is due next, so that tests of minutes take none."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Jumping(asyncio.SelectorEventLoop):
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
        return self.now


def jumping(work: Coroutine[Any, Any, Any]) -> Any:
    """Run something in time that jumps. It must not wait for anything but time."""
    loop = _Jumping()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
