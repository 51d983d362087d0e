"""A process beside the coordinator that sends the run elsewhere: to a tracking server, or into a bucket.

It follows the run directory, is restarted when it dies, and reports its problems as JSON lines {"failing": "…"}, with
"blocks": true where no generation can begin because of it, and what it has uploaded as {"uploaded": "…", "seconds": …,
"bytes": …}. It is a process of its own, so that neither large imports (MLflow's take seconds and 200 MB) nor a server
that hangs ever hold up a heartbeat.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from tandem.processes.exitcode import ExitCode
from tandem.processes.launch import RUN_DIR, TOKEN, module_command
from tandem.rundir.layout import RunDir

FIRST_PAUSE, MAX_PAUSE = 1.0, 60.0
"""Time before the process is restarted, in seconds, doubled with each end soon after a start, up to the maximum."""
HEALTHY_SECONDS = 60.0
MAX_LINE_LENGTH = 2**16

log = logging.getLogger("tandem.coordinator")


class RunSender:
    """The process that sends one job's run.

    Args:
        module: its program.
        environment: its variables besides the coordinator's, which it gets without the job's token.
        on_problem: called with the reason why the receiver lacks something, and whether no generation can begin because
            of it; with "" once it has everything.
        on_uploaded: called with each checkpoint that has been uploaded, its seconds and its bytes.
    """

    def __init__(
        self,
        module: str,
        rundir: RunDir,
        environment: Mapping[str, str],
        on_problem: Callable[[str, bool], None],
        on_uploaded: Callable[[str, float, int], None] = lambda name, seconds, size: None,
    ) -> None:
        inherited = {name: value for name, value in os.environ.items() if name != TOKEN}
        self._variables = {**inherited, **environment, RUN_DIR: str(rundir.path), "PYTHONUNBUFFERED": "1"}
        self._module, self._on_problem, self._on_uploaded = module, on_problem, on_uploaded
        self._process: asyncio.subprocess.Process | None = None
        self._closing = False
        self._running = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Have the process send the final values, and wait for its exit, without a time limit."""
        self._closing = True
        if self._process is None or self._process.returncode is not None:
            self._running.cancel()
        else:
            with suppress(ProcessLookupError):
                self._process.terminate()
        await asyncio.wait([self._running])

    async def _run(self) -> None:
        pause = FIRST_PAUSE
        while True:
            started = time.monotonic()
            try:
                code = await self._run_once()
            except (OSError, ValueError) as error:
                # It cannot be started, or writes a line that cannot be read.
                code = ExitCode.FAILED
                self._on_problem(f"the process that sends: {error}", False)
            if code in (ExitCode.DONE, ExitCode.CONFIGURATION) or self._closing:
                return
            log.warning("event=sender-ended module=%s code=%d", self._module, code)
            pause = FIRST_PAUSE if time.monotonic() - started > HEALTHY_SECONDS else min(MAX_PAUSE, 2 * pause)
            await asyncio.sleep(pause)

    async def _run_once(self) -> int:
        self._process = process = await asyncio.create_subprocess_exec(
            *module_command(self._module),
            env=self._variables,
            # It is open for as long as this process lives.
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE_LENGTH,
            start_new_session=True,
        )
        assert process.stdout is not None
        problem = None
        async for line in process.stdout:
            with suppress(ValueError, TypeError, KeyError):
                content = json.loads(line)
                if "uploaded" in content:
                    self._on_uploaded(str(content["uploaded"]), float(content["seconds"]), int(content["bytes"]))
                    continue
                problem = str(content["failing"])
                self._on_problem(problem, content.get("blocks") is True)
        code = await process.wait()
        if code not in (ExitCode.DONE, ExitCode.CONFIGURATION) and not problem:
            self._on_problem(f"the process that sends has ended with exit code {code}, and is started again", False)
        return code
