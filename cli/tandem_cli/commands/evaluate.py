"""`tandem evaluate RUN [CHECKPOINT]… [PROGRAM]`: evaluates checkpoints once more, also with another program.

The run directory stays as it is: scores are printed, and decide nothing. An evaluator process does the work
(tandem_evaluator.once), because that needs torch, which the command line does without.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.errors import UserError
from tandem.formatting import confidence, duration, metric_name, score
from tandem.processes.launch import evaluator_environment, module_command, program_command, with_run_dir
from tandem.rundir.checkpoint import WEIGHTS
from tandem_cli.bucket import checkpoint_files
from tandem_cli.checkpoints.inventory import Entry, Inventory, take_inventory
from tandem_cli.checkpoints.selector import ALIASES, choose, counting
from tandem_cli.output import Output, OutputOption, echo, emit
from tandem_cli.runs import RunArgument, open_run

ALL = "all"
REPLICA = "evaluate"
"""Name of the process among those of the run, for the variables of an evaluator."""


def evaluate(
    run: RunArgument,
    args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CHECKPOINT|PROGRAM",
            help="Names, steps, `latest`, `best`, `final` or `all`; default: `best`, or `latest`. Then another program "
            "than the run's own: a Python file, or a command.",
            show_default=False,
        ),
    ] = None,
    shards: Annotated[
        int, typer.Option("--shards", min=1, help="Cut the evaluation data into this many pieces, one after the other.")
    ] = 1,
    output: OutputOption = Output.TEXT,
) -> None:
    """Evaluate checkpoints of a run once more, also with another program. Records nothing.

    Scores that the run's evaluators have recorded stand beside the new ones. The program works in the folder where you
    are, with what `tandem.evaluation` offers. Ends with 1 if a checkpoint could not be evaluated.
    """
    run_dir = open_run(run)
    inventory = take_inventory(run_dir)
    if (job := inventory.job) is None:
        raise UserError(f"{run_dir.path}: {'; '.join(inventory.faults)}")
    names, program = split_args(args or [], inventory)
    chosen = _chosen(names, inventory)
    command = module_command("tandem_evaluator.once", *(entry.name for entry in chosen), f"--shards={shards}")
    if program:
        command.append(f"--program={json.dumps(_startable(program))}")
    answers, code = [], 0
    own = evaluator_environment(job, run_dir.path.resolve(), REPLICA)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **own, "CUDA_VISIBLE_DEVICES": ""}
    manifests = [(run_dir, entry.manifest) for entry in chosen if entry.manifest is not None]
    with (
        checkpoint_files(manifests, WEIGHTS),
        subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=sys.stderr, text=True
        ) as process,
    ):
        assert process.stdout is not None
        recorded = {entry.name: entry.metrics for entry in chosen}
        for line in process.stdout:
            answer = json.loads(line)
            if program:
                # It is about the metric that the job names, and this program may report others.
                answer.pop("note", None)
            answer["recorded"] = dict(recorded.get(answer["checkpoint"], {}))
            answers.append(answer)
            if not output.is_data:
                echo("\n".join(_lines(answer, is_other=bool(program))))
        code = process.wait()
    if output.is_data:
        emit(answers, output)
    if code and len(answers) < len(chosen):
        raise typer.Exit(code if code > 0 else 1)
    if any("failed" in answer for answer in answers):
        raise typer.Exit(1)


def split_args(args: Sequence[str], inventory: Inventory) -> tuple[list[str], list[str]]:
    """Split arguments into names of checkpoints and the program, which begins with the first word that names none."""
    names = {entry.name for entry in inventory.entries} | {*ALIASES, ALL}
    for index, word in enumerate(args):
        if word not in names and not word.isdecimal() and not word.startswith("step-"):
            return list(args[:index]), list(args[index:])
    return list(args), []


def _chosen(names: Sequence[str], inventory: Inventory) -> list[Entry]:
    """Select the named checkpoints, each once, in the order of the names; without names the best, or the newest.

    Raises:
        UserError: there is no such checkpoint, or none that can be read.
    """
    if not names:
        candidates = [entry for entry, _ in counting(inventory)]
        return [next((entry for entry in candidates if entry.is_best), candidates[-1])]
    entries: dict[str, Entry] = {}
    for name in names:
        matching = [entry for entry, _ in counting(inventory)] if name == ALL else [choose(inventory, name)]
        entries |= {entry.name: entry for entry in matching}
    return list(entries.values())


def _startable(program: Sequence[str]) -> list[str]:
    """Check that a program can be started, and return its command.

    Raises:
        UserError: there is no such file or program.
    """
    first = program[0]
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise UserError(f"{first}: no such file, and no checkpoint of this run")
    elif shutil.which(program_command(with_run_dir(program))[0]) is None:
        raise UserError(f"{first} is neither a checkpoint of this run nor a program that can be started")
    return list(program)


def _lines(answer: Mapping[str, Any], is_other: bool) -> list[str]:
    """Format the answer for one checkpoint."""
    name = answer["checkpoint"]
    if "failed" in answer:
        return [f"{name}  not evaluated: {answer['failed']}"]
    scores = _scores(answer["metrics"], answer.get("intervals", {}))
    lines = [f"{name}  {scores}  in {duration(answer['seconds'])}"]
    if note := answer.get("note"):
        lines.append(f"  {note}")
    if recorded := answer["recorded"]:
        same = {name: answer["metrics"].get(name) for name in recorded} == recorded
        lines.append("  as recorded" if same else f"  recorded: {_scores(recorded, {})}")
    elif not is_other:
        lines.append("  not recorded yet")
    return lines


def _scores(metrics: Mapping[str, float | None], intervals: Mapping[str, Sequence[float]]) -> str:
    return ", ".join(
        f"{metric_name(name)} {'not finite' if value is None else score(name, value)}"
        f"{confidence(name, intervals.get(name))}"
        for name, value in metrics.items()
    )
