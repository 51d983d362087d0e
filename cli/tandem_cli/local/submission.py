"""Submits jobs to this machine: starts `tandem run --detach`, which checks the job and continues in the background.

The run belongs to its own session, so it outlives the process that submits it, such as the kernel of a notebook.
"""

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem.errors import UserError
from tandem.formatting import one_line
from tandem.job.manifest.reading import STDIN
from tandem.processes.launch import module_command
from tandem_cli.job_words import summary
from tandem_cli.local.platform import OnThisMachine
from tandem_cli.log_lines import printable_line
from tandem_cli.packing import Pack
from tandem_cli.platforms import Checked, Cluster, Report, SubmittedJob

ERROR = "error: "
_NOTE = re.compile(r'time=\S+ event=info text=(?P<text>".*")$')
"""A note of `tandem run` without a terminal."""


class ThisMachine(Cluster):
    """This machine.

    Args:
        run_dir: run directory of a single job; None: a folder in `runs`, named after the job.
        fresh: move an earlier run away and start over.
    """

    def __init__(self, run_dir: Path | None = None, fresh: bool = False) -> None:
        self._run_dir, self._fresh = run_dir, fresh

    def submit(
        self, jobs: Sequence[Checked], settings: tuple[str, ...], pack: Pack | None, report: Report
    ) -> Iterator[SubmittedJob]:
        if self._run_dir is not None and len(jobs) > 1:
            raise UserError("a run directory is for one job")
        for job, _, source in jobs:
            path = self._run_dir or Path("runs") / job.metadata.name
            # A text that is no file is read from standard input.
            file = source.file if Path(source.file).is_file() else STDIN
            argv = ["run", file, "--detach", "--run-dir", str(path)]
            argv += [word for setting in settings for word in ("--set", setting)]
            argv += ["--code", str(pack.folder)] if pack is not None else []
            argv += ["--fresh"] if self._fresh else []
            result = subprocess.run(
                module_command("tandem_cli.main", *argv),
                input="\n".join(source.lines).encode() if file == STDIN else b"",
                capture_output=True,
                check=False,
                start_new_session=True,
            )
            lines = _lines(result.stdout)
            if result.returncode != 0:
                message = "\n".join(
                    _lines(result.stderr) or lines[-1:] or [f"tandem run ended with exit code {result.returncode}"]
                )
                raise UserError(message.removeprefix(ERROR).replace("<stdin>", source.file))
            for line in lines:
                if note := _NOTE.match(line):
                    report(str(json.loads(note["text"])), False)
            yield SubmittedJob(run=OnThisMachine(path), outcome="started", description=one_line(summary(job)))


def _lines(output: bytes) -> list[str]:
    return [printable_line(line) for line in output.decode(errors="replace").splitlines()]
