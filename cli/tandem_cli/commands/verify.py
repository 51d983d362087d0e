"""`tandem verify RUN`: whether a run has taken each sample once in each epoch."""

import json
import subprocess
from typing import Any

import typer

from tandem.errors import UserError
from tandem.formatting import several
from tandem.launch import module_command
from tandem_cli.output import Output, OutputOption, echo, emit
from tandem_cli.runs import RunArgument, opened


def verify(run: RunArgument, output: OutputOption = Output.TEXT) -> None:
    """Read the logs of a run, and say whether each sample was taken once in each epoch, by all ranks.

    Exits with 0 if so, and with 1 if steps are missing or took other samples than the seed gives them.
    """
    # The order of samples is torch's, which this command does without.
    command = module_command("tandem_trainer.sample_audit", str(opened(run).path.resolve()))
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if ended.returncode:
        why = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.returncode}"]
        raise UserError(f"the logs of {run} cannot be compared: {why[0]}")
    found = json.loads(ended.stdout.splitlines()[-1])
    if output.is_data:
        emit(found, output)
    else:
        echo("\n".join(_words(found)))
    if found["problems"]:
        raise typer.Exit(1)


def _words(found: dict[str, Any]) -> list[str]:
    lines = [f"problem   {problem}" for problem in found["problems"]]
    if found["unknown"]:
        lines.append(f"samples   not compared with their order: {found['unknown']}")
    elif not lines:
        within = several(found["epochs"], "whole epoch")
        lines.append(f"samples   each of {found['samples']:,} taken once an epoch, by all ranks; {within}")
    if found["left_out"]:
        lines.append(f"left out  {several(found['left_out'], 'batch', 'batches')}, by rewinds")
    return [*lines, f"steps     {several(found['steps'], 'step')} that count"]
