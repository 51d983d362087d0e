"""`tandem prove RUN`: verifies the record of what a run used and produced, and takes some of its steps again."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from tandem.errors import UserError, join_names
from tandem.formatting import count_noun, number
from tandem.rundir.layout import RunDir
from tandem.rundir.provenance import (
    CheckpointEntry,
    CloseEntry,
    GenerationEntry,
    JobEntry,
    ProvenanceChain,
    ScoreEntry,
    read_chain,
    read_public_key,
)
from tandem_cli.bucket import checkpoint_files
from tandem_cli.output import Output, OutputOption, echo, emit
from tandem_cli.prove.files import FilesBesideChain, compare_files
from tandem_cli.prove.replay import Replay, replay
from tandem_cli.prove.window import Window, Windows
from tandem_cli.runs import RunArgument, open_run
from tandem_launcher.terminal.canvas import PrintableConsole

STEPS = re.compile(r"(?P<first>\d{1,15})(-(?P<last>\d{1,15}))?")
COUNT = 10
"""Steps to compare where none are named."""
MAX_LISTED = 3


def prove(
    run: RunArgument,
    steps: Annotated[
        str,
        typer.Option(
            "--steps",
            metavar="FIRST-LAST",
            help="Steps to take again, or `none`.",
            show_default=f"{COUNT}, chosen at random",
        ),
    ] = "",
    key: Annotated[
        Path | None,
        typer.Option(
            "--key",
            metavar="FILE",
            help="The public key, in PEM form, with which every entry has to be signed.",
            show_default="any",
        ),
    ] = None,
    head: Annotated[
        str,
        typer.Option(
            "--head",
            metavar="SHA256",
            help="An entry that the record must have, as an earlier call or the status of a job showed it.",
        ),
    ] = "",
    code: Annotated[
        Path | None,
        typer.Option(
            "--code",
            metavar="DIR",
            help="The job's code. It must be what the job ran.",
            show_default="the pack in the run directory",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Choose the steps by this number.")] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Verify the record of a run, and take some of its steps again, bit for bit.

    The record names the job, each generation, failure, checkpoint and score by their digests, in a chain. The steps are
    taken again on this machine, from the checkpoint before, and have to give the same losses and the same checkpoint.
    That runs the job's code.

    Exits with 0 if everything is the same, and with 1 if not.
    """
    rundir = open_run(run)
    chain = _chain(rundir, None if key is None else read_public_key(key), head)
    files = compare_files(rundir, chain)
    problems = [*chain.problems, *files.problems]
    result = None
    # A record that contradicts itself cannot say what to take again.
    if steps != "none" and not problems:
        result = _replay(rundir, chain, _window(rundir, chain, files, steps, seed), code)
        problems += [text for text in (result.first_difference, result.state) if text]
    if output.is_data:
        emit(_data(chain, files, result, problems), output)
    else:
        echo("\n".join(_report(chain, files, result, problems)))
    if problems:
        raise typer.Exit(1)


def _chain(rundir: RunDir, trusted: str | None, head: str) -> ProvenanceChain:
    try:
        chain = read_chain(rundir.provenance, trusted, head)
    except (OSError, ValueError) as error:
        raise UserError(f"the record of {rundir.path} cannot be read: {error}") from error
    if not chain.count:
        raise UserError(f"{rundir.path} has no record of its provenance: an earlier version of Tandem has trained it")
    return chain


def _window(rundir: RunDir, chain: ProvenanceChain, files: FilesBesideChain, steps: str, seed: int | None) -> Window:
    checkpoints = [entry for entry in chain.entries if isinstance(entry, CheckpointEntry)]
    windows = Windows(rundir.generation_records(), rundir.chain(), checkpoints, files.checkpoints)
    if not steps:
        return windows.choose(COUNT, seed)
    if (match := STEPS.fullmatch(steps)) is None:
        raise UserError(f"--steps takes FIRST-LAST, such as 100-110, or none, and not {steps}")
    first, last = int(match["first"]), int(match["last"] or match["first"])
    if not 1 <= first <= last:
        raise UserError(f"--steps {steps}: steps count from 1, and the first comes first")
    return windows.around(first, last)


def _replay(rundir: RunDir, chain: ProvenanceChain, window: Window, code: Path | None) -> Replay:
    job = _job_of(chain, window)
    start = [] if window.start is None else [(rundir, rundir.manifest(window.start.name))]
    console = PrintableConsole(stderr=True)
    with (
        TemporaryDirectory(prefix="tandem-prove-") as folder,
        checkpoint_files(start),
        console.status(f"taking {_range(window)} again: starting") as status,
    ):

        def tick(step: int) -> None:
            if step:
                status.update(f"taking {_range(window)} again: step {number(step)} of {number(window.end.step)}")

        return replay(rundir, job, window, Path(folder), code, tick)


def _job_of(chain: ProvenanceChain, window: Window) -> JobEntry:
    """The job that a generation trained: the newest one before its entry."""
    job = None
    for entry in chain.entries:
        if isinstance(entry, JobEntry):
            job = entry
        if isinstance(entry, GenerationEntry) and entry.generation == window.generation.generation and job is not None:
            return job
    raise UserError(f"the record has no job before generation {window.generation.generation}")


def _range(window: Window) -> str:
    if window.first == window.last:
        return f"step {number(window.first)}"
    return f"steps {number(window.first)} to {number(window.last)}"


def _report(chain: ProvenanceChain, files: FilesBesideChain, result: Replay | None, problems: list[str]) -> list[str]:
    counts = [
        count_noun(sum(isinstance(entry, kind) for entry in chain.entries), noun)
        for kind, noun in (
            (GenerationEntry, "generation"),
            (CloseEntry, "interruption"),
            (CheckpointEntry, "checkpoint"),
            (ScoreEntry, "score"),
        )
    ]
    rows = [
        ("record", f"{count_noun(chain.count, 'entry', 'entries')}: {', '.join(counts)}"),
        ("head", chain.head),
        ("signed", describe_signers(chain)),
        ("files", f"{number(files.compared)} records, manifests and results are those of the record"),
    ]
    if files.unrecorded:
        rows.append(("extra", f"not in the record: {join_names(files.unrecorded, MAX_LISTED)}"))
    if result is not None:
        rows += _replay_rows(result)
    rows += [("problem", problem) for problem in problems]
    return [f"{label:<9} {text}" for label, text in rows]


def describe_signers(chain: ProvenanceChain) -> str:
    """Describe who has signed a record."""
    if not chain.signers:
        return "no: anyone who can write to the run directory could have rewritten the record"
    unsigned = f"; {count_noun(chain.unsigned, 'entry is', 'entries are')} not signed" if chain.unsigned else ""
    return f"by {join_names(chain.signers, MAX_LISTED)}{unsigned}"


def _replay_rows(result: Replay) -> list[tuple[str, str]]:
    window = result.window
    start = "the beginning" if window.start is None else window.start.name
    ranks = count_noun(window.generation.world_size, "rank")
    rows = [
        ("replay", f"{_range(window)} of generation {window.generation.generation}, with {ranks}, from {start}"),
        ("losses", f"{result.same_losses} of {result.compared} are the same, with the same samples"),
    ]
    if missing := window.last - window.first + 1 - result.compared:
        rows.append(("log", f"{count_noun(missing, 'step')} not in both logs, so only the state covers them"))
    if not result.state:
        files = f"{count_noun(result.steps, 'step')} again give the checkpoint {window.end.name}, bit for bit"
        rows.append(("state", files))
    for name, (then, now) in result.machine.items():
        rows.append(("machine", f"another {name}: {then} then, {now or 'unknown'} now"))
    return rows


def _data(
    chain: ProvenanceChain, files: FilesBesideChain, result: Replay | None, problems: list[str]
) -> dict[str, Any]:
    data: dict[str, Any] = {
        "entries": chain.count,
        "head": chain.head,
        "signers": list(chain.signers),
        "files": files.compared,
        "unrecorded": list(files.unrecorded),
        "problems": problems,
    }
    if result is not None:
        window = result.window
        data["replay"] = {
            "first": window.first,
            "last": window.last,
            "generation": window.generation.generation,
            "from": None if window.start is None else window.start.name,
            "to": window.end.name,
            "steps": result.steps,
            "sameLosses": result.same_losses,
            "compared": result.compared,
            "sameState": not result.state,
            "machine": {name: {"then": then, "now": now} for name, (then, now) in result.machine.items()},
        }
    return data
