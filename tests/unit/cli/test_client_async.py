"""The asynchronous client: the same methods, concurrent waits, and no thread after a cancellation."""

import asyncio
import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tandem import AsyncClient, Client, UserError
from tandem.wire.status import Status
from tandem_cli.client import AsyncRun, RunHandle
from tandem_cli.client import run as run_module
from tandem_cli.kubernetes.kubectl import Kubectl
from tandem_cli.kubernetes.platform import OnKubernetes
from tandem_cli.local import platform as local_platform
from tandem_cli.local.platform import OnThisMachine
from tandem_cli.platforms import RunNotFoundError
from tests.support import fake_kubectl as fakes
from tests.support import manifests
from tests.support.fake_kubectl import FakeKubectl
from tests.support.waiting import until
from tests.support.worlds.simulated_run import make_run

NOT_ASYNC = {"find_sweep", "folder", "is_on_kubernetes", "phase", "scales", "statuses", "sweep", "watch"}
"""A property, and a display that takes the cell until its end."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(run_module, "POLL_SECONDS", 0.01)


class Endless:
    """A run that goes on until it is deleted, and counts how often it was asked."""

    copies_run_dir = True

    def __init__(self) -> None:
        self.views, self.is_deleted = 0, False

    def view(self, events: object = None) -> Any:
        self.views += 1
        if self.is_deleted:
            raise RunNotFoundError("it was deleted")
        return SimpleNamespace(job=SimpleNamespace(status=Status.parse({"phase": "Running"})))

    def is_over(self, view: Any) -> bool:
        return False


def endless() -> tuple[Any, AsyncRun]:
    platform: Any = Endless()
    return platform, AsyncRun(RunHandle(platform, "digits"))


def public(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("_")}


@pytest.mark.parametrize(("kind", "synchronous"), [(AsyncRun, RunHandle), (AsyncClient, Client)])
def test_it_has_the_methods_of_the_client_with_their_signatures_and_docstrings(kind: type, synchronous: type) -> None:
    twins, methods = public(kind), public(synchronous)
    assert set(twins) == set(methods) - NOT_ASYNC
    for name, twin in twins.items():
        assert twin.__doc__
        assert inspect.signature(twin).parameters == inspect.signature(methods[name]).parameters, name
        assert inspect.iscoroutinefunction(twin) or inspect.isasyncgenfunction(twin)
    constructors = [inspect.signature(one.__init__).parameters for one in (kind, synchronous)]  # type: ignore[misc]
    assert constructors[0] == constructors[1] or kind is AsyncRun


async def test_runs_are_found_and_read() -> None:
    make_run(Path("runs/digits"), steps=100)
    run = await AsyncClient().run("digits")
    assert (await run.status()).phase == (await run.wait()).phase
    assert len(await run.losses()) == 100
    assert [one.name for one in await AsyncClient().runs()] == [run.name]
    assert "Training loss" in run._repr_html_()
    with pytest.raises(UserError, match="has no checkpoint"):
        await run.checkpoint("best-of-all")
    with pytest.raises(UserError, match="did you mean replicas"):
        await AsyncClient().submit(manifests.manifest(workers={"replica": 2}))


async def test_more_waits_than_threads_go_on_beside_each_other() -> None:
    runs = [endless() for _ in range(100)]
    waits = [asyncio.create_task(run.wait()) for _, run in runs]
    while not all(platform.views > 2 for platform, _ in runs):  # noqa: ASYNC110 - no event tells it
        await asyncio.sleep(0.01)
    for platform, _ in runs:
        platform.is_deleted = True
    ends = await asyncio.gather(*waits, return_exceptions=True)
    assert {type(end) for end in ends} == {RunNotFoundError}


async def test_a_wait_that_is_cancelled_asks_no_more() -> None:
    platform, run = endless()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await run.wait()
    # A question that was on its way may still be answered.
    seen = platform.views + 1
    await asyncio.sleep(0.2)
    assert platform.views <= seen
    with pytest.raises(TimeoutError, match=r"digits is Running after 0\.05 s; it continues"):
        await run.wait(0.05)


async def followed_until_cancelled(run: AsyncRun, lines: int) -> list[str]:
    """Follow the log of a run, and cancel that once it has so many lines; returns them."""
    texts: list[str] = []

    async def follow() -> None:
        async for line in run.logs(follow=True):
            texts.append(line.text)  # noqa: PERF401 - it is looked at meanwhile

    task = asyncio.create_task(follow())
    while len(texts) < lines:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return texts


class TestLogs:
    @pytest.fixture
    def run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncRun:
        """A run that goes on, and has printed two lines."""
        manifests.run_directory(tmp_path / "runs/digits", manifests.job())
        (tmp_path / "runs/digits/log").mkdir(exist_ok=True)
        (tmp_path / "runs/digits/log/worker-0.txt").write_text("one\ntwo\n")
        monkeypatch.setattr(local_platform, "is_alive", lambda path: True)
        return AsyncRun(RunHandle(OnThisMachine(tmp_path / "runs/digits"), "digits"))

    @pytest.fixture(autouse=True)
    def threads(self) -> Iterator[None]:
        yield
        until(lambda: not any("tandem-logs" in one.name for one in threading.enumerate()), "its thread has ended")

    async def test_its_lines_are_those_of_the_run(self, run: AsyncRun) -> None:
        assert [line.text async for line in run.logs()] == ["one", "two"]
        assert [line.text async for line in run.logs(tail=1, names=["worker-0"])] == ["two"]
        with pytest.raises(UserError, match="has no log of worker-1"):
            _ = [line async for line in run.logs(names=["worker-1"])]

    async def test_following_ends_cleanly_when_it_is_cancelled(self, run: AsyncRun) -> None:
        assert await followed_until_cancelled(run, 2) == ["one", "two"]

    async def test_following_pods_leaves_no_kubectl_behind(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "bin").mkdir()
        fake = FakeKubectl(tmp_path / "bin")
        monkeypatch.setenv("PATH", fake.path)
        fake.answers("get", "distributedtrainingjobs.tandem.dev", says=fakes.job(phase="Running"))
        fake.answers("get", "pods", says=fakes.items(fakes.pod("worker", 0)))
        fake.answers("logs", says="2026-11-21T12:00:01Z one\n")
        fake.answers("logs", "--follow", says="2026-11-21T12:00:02Z two\n", stays=True)
        run = AsyncRun(RunHandle(OnKubernetes("digits", Kubectl(), by_name=True), "digits"))
        before = {*psutil.Process().children()}
        assert await followed_until_cancelled(run, 2) == ["one", "two"]
        await asyncio.to_thread(until, lambda: not {*psutil.Process().children()} - before, "kubectl has ended")

    async def test_leaving_the_loop_ends_it(self, run: AsyncRun) -> None:
        async for line in run.logs(follow=True):
            assert line.text == "one"
            break

    async def test_followers_do_not_keep_others_from_their_answers(self, run: AsyncRun) -> None:
        async def follow() -> None:
            async for _ in run.logs(follow=True):
                pass

        tasks = [asyncio.create_task(follow()) for _ in range(40)]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(60):
            assert await run.status() is not None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
