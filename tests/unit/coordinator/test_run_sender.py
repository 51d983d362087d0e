"""A process beside the coordinator that sends: it is played here, started, read, restarted and ended."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tandem.processes.launch import RUN_DIR, TOKEN
from tandem.rundir.layout import RunDir
from tandem_coordinator import run_sender
from tandem_coordinator.run_sender import RunSender

SAYS = """#!/bin/sh
trap 'echo "{{\\"failing\\": \\"\\"}}"; exit 0' TERM
echo $$ >> {folder}/started
echo "not JSON"
echo '{{"failing": "away"}}'
{then}
"""
WAITS = "while :; do sleep 0.05; done"


class Heard:
    """What the coordinator is told, by a process that does `then` after it has complained."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
        self._folder = folder
        program = folder / "program"
        program.write_text(SAYS.format(folder=folder, then=then))
        program.chmod(0o755)
        monkeypatch.setattr(run_sender, "module_command", lambda *_: [str(program)])
        monkeypatch.setattr(run_sender, "FIRST_PAUSE", 0.01)
        monkeypatch.setattr(run_sender, "MAX_PAUSE", 0.02)
        self.said: list[str] = []
        self._news = asyncio.Event()
        self.uploaded: list[tuple[str, float, int]] = []
        self.sender = RunSender(
            "some.module", RunDir(folder), {}, self._hear, lambda *uploaded: self.uploaded.append(uploaded)
        )

    def _hear(self, failing: str, blocks: bool) -> None:
        self.said.append(f"{failing}, which blocks" if blocks else failing)
        self._news.set()

    @property
    def lives(self) -> list[int]:
        """The processes that there were."""
        file = self._folder / "started"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    async def until(self, count: int) -> None:
        """Wait until so much was said."""
        while len(self.said) < count:
            self._news.clear()
            await self._news.wait()


async def test_what_it_says_is_heard_and_it_is_waited_for_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard(tmp_path, monkeypatch, WAITS)
    await heard.until(1)
    await heard.sender.close()
    assert heard.said == ["away", ""]
    assert len(heard.lives) == 1


async def test_what_was_uploaded_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = """
echo '{"uploaded": "step-000000100", "seconds": 2.5, "bytes": 7}'
echo '{"uploaded": "step-000000200", "seconds": "long", "bytes": 7}'
echo '{"failing": "away again"}'
"""
    heard = Heard(tmp_path, monkeypatch, lines + WAITS)
    await heard.until(2)
    await heard.sender.close()
    assert heard.said == ["away", "away again", ""]
    assert heard.uploaded == [("step-000000100", 2.5, 7)]


async def test_what_blocks_the_job_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard(tmp_path, monkeypatch, f"""echo '{{"failing": "away", "blocks": true}}'; {WAITS}""")
    await heard.until(2)
    await heard.sender.close()
    assert heard.said == ["away", "away, which blocks", ""]


async def test_one_that_is_killed_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard(tmp_path, monkeypatch, WAITS)
    await heard.until(1)
    os.kill(heard.lives[0], signal.SIGKILL)
    await heard.until(2)
    await heard.sender.close()
    assert heard.said == ["away", "away", ""]
    assert len(heard.lives) == 2


@pytest.mark.parametrize("code", [0, 78])
async def test_one_that_is_through_or_cannot_work_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    heard = Heard(tmp_path, monkeypatch, f"exit {code}")
    await heard.until(1)
    await asyncio.sleep(0.2)
    await heard.sender.close()
    assert len(heard.lives) == 1


async def test_one_that_cannot_be_started_is_told_of_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard(tmp_path, monkeypatch, "")
    monkeypatch.setattr(run_sender, "module_command", lambda *_: [str(tmp_path / "nowhere")])
    await heard.until(2)
    await heard.sender.close()
    assert "No such file" in heard.said[0]


async def test_it_gets_its_variables_and_not_the_jobs_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "secret")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "from the environment")
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\nenv > {tmp_path}/environment\necho \'{{"failing": ""}}\'\n')
    program.chmod(0o755)
    monkeypatch.setattr(run_sender, "module_command", lambda *_: [str(program)])
    written = asyncio.Event()
    variables = {"MLFLOW_TRACKING_USERNAME": "me"}
    sender = RunSender("some.module", RunDir(tmp_path / "run"), variables, lambda *_: written.set())
    await written.wait()
    await sender.close()
    found = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines())
    assert TOKEN not in found
    assert (found["MLFLOW_TRACKING_USERNAME"], found["MLFLOW_TRACKING_TOKEN"]) == ("me", "from the environment")
    assert found[RUN_DIR] == str(tmp_path / "run")
