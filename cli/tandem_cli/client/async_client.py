"""The client for programs with an event loop: the same methods, as coroutines.

    client = AsyncClient(kubernetes="team-a")
    runs = await asyncio.gather(*(client.submit(job) for job in jobs))
    statuses = await asyncio.gather(*(run.wait() for run in runs))

Each call runs the synchronous method in a thread of the loop's executor. A cancelled `wait` or `logs` leaves no thread
behind. Another call that was cancelled ends by itself, and takes effect: a job may have been submitted.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from tandem.wire.status import Status
from tandem_cli.client.client import Client
from tandem_cli.client.run import RunHandle, Until
from tandem_cli.log_lines import Line

P = ParamSpec("P")
T = TypeVar("T")


def _of_run(
    method: Callable[Concatenate[RunHandle, P], T],
) -> Callable[Concatenate["AsyncRun", P], Coroutine[Any, Any, T]]:
    @wraps(method)
    async def call(self: "AsyncRun", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(method, self.handle, *args, **kwargs)

    return call


def _of_client(
    method: Callable[Concatenate[Client, P], RunHandle],
) -> Callable[Concatenate["AsyncClient", P], Coroutine[Any, Any, "AsyncRun"]]:
    @wraps(method)
    async def call(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> AsyncRun:
        return AsyncRun(await asyncio.to_thread(method, self.client, *args, **kwargs))

    return call


class AsyncRun:
    """A run whose methods are coroutines. `handle` is the same run for synchronous code."""

    def __init__(self, handle: RunHandle) -> None:
        self.handle, self.name, self.notes = handle, handle.name, handle.notes

    view = _of_run(RunHandle.view)
    status = _of_run(RunHandle.status)
    poll = _of_run(RunHandle.poll)
    losses = _of_run(RunHandle.losses)
    scores = _of_run(RunHandle.scores)
    best = _of_run(RunHandle.best)
    checkpoints = _of_run(RunHandle.checkpoints)
    checkpoint = _of_run(RunHandle.checkpoint)
    stop = _of_run(RunHandle.stop)
    scale = _of_run(RunHandle.scale)
    resume = _of_run(RunHandle.resume)
    report = _of_run(RunHandle.report)

    async def wait(self, timeout: float | None = None, *, until: Until | None = None, check: bool = False) -> Status:  # noqa: ASYNC109
        """Wait as `RunHandle.wait` does."""
        polls = self.handle._polls(timeout, until, check)
        while True:
            step = await asyncio.to_thread(next, polls)
            if isinstance(step, Status):
                return step
            await asyncio.sleep(step)

    async def logs(
        self, follow: bool = False, *, names: Sequence[str] = (), role: str = "", tail: int | None = None
    ) -> AsyncGenerator[Line, None]:
        """Yield the lines that `RunHandle.logs` yields."""
        closed = threading.Event()
        lines = self.handle._lines(follow, names, role, tail, closed.is_set)
        loop = asyncio.get_running_loop()
        # A thread of its own: it may wait for a line for as long as the run lasts.
        executor = ThreadPoolExecutor(1, "tandem-logs")
        try:
            while (line := await loop.run_in_executor(executor, next, lines, None)) is not None:
                yield line
        finally:
            # A thread that waits for a line ends by itself, and then closes what it reads from.
            closed.set()
            executor.submit(lines.close)
            executor.shutdown(wait=False)

    def __repr__(self) -> str:
        return repr(self.handle)

    def _repr_html_(self) -> str:
        return self.handle._repr_html_()


class AsyncClient:
    """A client whose methods are coroutines. Arguments: those of `Client`, which is `client` for synchronous code."""

    def __init__(self, *, kubernetes: str = "", context: str = "", slurm: bool | str = False) -> None:
        self.client = Client(kubernetes=kubernetes, context=context, slurm=slurm)

    submit = _of_client(Client.submit)
    train = _of_client(Client.train)
    run = _of_client(Client.run)

    async def runs(self) -> list[AsyncRun]:
        """Return all runs, as `Client.runs` does."""
        return [AsyncRun(run) for run in await asyncio.to_thread(self.client.runs)]

    def __repr__(self) -> str:
        return f"Async{self.client!r}"
