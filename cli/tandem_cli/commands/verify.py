"""`tandem verify RUN`: checks that a run used each sample once in each epoch."""

import json
import subprocess
from typing import Any

import typer

from tandem.errors import UserError
from tandem.formatting import count_noun
from tandem.processes.launch import module_command
from tandem_cli.output import Output, OutputOption, echo, emit
from tandem_cli.runs import RunArgument, open_run


def verify(run: RunArgument, output: OutputOption = Output.TEXT) -> None:
    """Check in the logs of a run that each sample was used once in each epoch, across all ranks.

    Exits with 0 if so, and with 1 if steps are missing or used other samples than the seed determines.
    """
    # Only torch can compute the order of samples, so a process of the trainer does.
    command = module_command("tandem_trainer.sample_audit", str(open_run(run).path.resolve()))
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if ended.returncode:
        reason = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.returncode}"]
        raise UserError(f"the logs of {run} cannot be compared: {reason[0]}")
    audit = json.loads(ended.stdout.splitlines()[-1])
    if output.is_data:
        emit(audit, output)
    else:
        echo("\n".join(_report(audit)))
    if audit["problems"]:
        raise typer.Exit(1)


def _report(audit: dict[str, Any]) -> list[str]:
    lines = [f"problem   {problem}" for problem in audit["problems"]]
    if audit["unknown"]:
        lines.append(f"samples   not compared with their order: {audit['unknown']}")
    elif not lines:
        within = count_noun(audit["epochs"], "whole epoch")
        lines.append(f"samples   each of {audit['samples']:,} taken once an epoch, by all ranks; {within}")
    if audit["left_out"]:
        lines.append(f"left out  {count_noun(audit['left_out'], 'batch', 'batches')}, by rewinds")
    return [*lines, f"steps     {count_noun(audit['steps'], 'step')} that count"]
