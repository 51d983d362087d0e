"""`tandem checkpoints ls | show | verify | diff | export | push | prune`: the checkpoints of a run."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.text import Text

from tandem.errors import UserError
from tandem.formatting import count_noun, one_line, size
from tandem.job.resource import CheckpointSpec
from tandem.rundir.checkpoint import WEIGHTS, Broken, Manifest
from tandem.rundir.layout import RunDir
from tandem_cli.bucket import BucketView, checkpoint_files
from tandem_cli.checkpoints import description, hub, listing, manifest_diff, pruning, verification, weights_export
from tandem_cli.checkpoints.inventory import Entry, Inventory, take_inventory
from tandem_cli.checkpoints.listing import plain
from tandem_cli.checkpoints.manifest_diff import facts
from tandem_cli.checkpoints.selector import choose, counting, sound
from tandem_cli.checkpoints.weights_export import Dtype, ExportOrder, Format
from tandem_cli.cluster import ContextOption, NamespaceOption, validate_job_name
from tandem_cli.kubernetes.kubectl import Kubectl
from tandem_cli.main import needing
from tandem_cli.output import Output, OutputOption, echo, emit
from tandem_cli.runs import RunArgument, open_own_run, open_run
from tandem_launcher.terminal.canvas import PrintableConsole

checkpoints = typer.Typer(
    help="List, verify, compare, export, publish and delete the checkpoints of a run, also while it is running.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="A name, a step, or `latest`, `best` or `final`.", show_default=False)
]


ALL = "all"
WORTH_A_BAR = 256 * 2**20
"""Size in bytes from which reading takes long enough for a progress bar."""


@checkpoints.command("ls")
def list_(
    run: RunArgument,
    output: OutputOption = Output.TEXT,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """List all checkpoints, newest first: size, age, score, whether each counts, and why it is kept.

    `*` marks the best score. KEPT FOR names the rule of the job that keeps a checkpoint; `nothing` means that the next
    save deletes it. With `--namespace` or `--context`, RUN is a job on that cluster.
    """
    inventory = _inventory_of(run, namespace, context)
    if output.is_data:
        emit(listing.as_json(inventory), output)
    else:
        _show(lambda width: listing.lines(inventory, width), output)


@checkpoints.command()
def show(
    run: RunArgument,
    name: NameArgument,
    output: OutputOption = Output.TEXT,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Describe a checkpoint: the progress of training, its lineage, its scores, its files.

    With `--namespace` or `--context`, RUN is a job on that cluster.
    """
    inventory = _inventory_of(run, namespace, context)
    entry = choose(inventory, name)
    if output.is_data:
        emit(description.as_json(entry, inventory), output)
    else:
        _show(lambda width: description.lines(entry, inventory, width), output)


@checkpoints.command()
def verify(
    run: RunArgument,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Checkpoints to verify. Default: all.", show_default=False),
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Read every byte and compare it with its checksum. Changes nothing.

    Exits with 0 if all are sound, with 1 if one is damaged or cannot be read. A checkpoint that retention deletes
    meanwhile counts as neither.
    """
    inventory = take_inventory(open_run(run))
    chosen = _to_verify(inventory, names)
    verdicts = []
    with _progress(sum(entry.size or 0 for entry in chosen), not output.is_data) as (tick, tell):
        for entry in chosen:
            verdict = _verified(inventory.rundir, entry, tick)
            verdicts.append(verdict)
            if not output.is_data:
                tell(partial(description.verdict, verdict))
    if output.is_data:
        emit([description.verdict_json(verdict) for verdict in verdicts], output)
    if not all(verdict.is_good for verdict in verdicts):
        raise typer.Exit(1)


@checkpoints.command()
def diff(
    run: RunArgument,
    before: Annotated[str, typer.Argument(metavar="A", help="A name, a step, `latest`, `best` or `final`.")],
    after: Annotated[str, typer.Argument(metavar="B", help="Another checkpoint, or OTHER_RUN:NAME.")],
    max_tensors: Annotated[
        int,
        typer.Option("--most", min=1, help="Number of tensors to list for each file, those that differ most first."),
    ] = 20,
    with_state: Annotated[
        bool, typer.Option("--state", help="Also list the tensors of the optimizer's state.")
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Compare two checkpoints, tensor by tensor.

    `largest` is the largest absolute difference of two elements, `relative` the L2 norm of the difference over the norm
    of A. Equal means bitwise equal.
    """
    with needing("checkpoints diff"):
        from tandem_cli.checkpoints import tensor_diff
    sides = _side(run, before), _side(run, after)
    first, second = ((rundir.checkpoint(manifest.name), manifest) for rundir, manifest in sides)
    try:
        with checkpoint_files(sides), _progress(first[1].size, not output.is_data) as (tick, _):
            files = tensor_diff.compare(first, second, tick)
    except FileNotFoundError as error:
        raise UserError(f"retention deleted a checkpoint while it was read: {error.filename}") from error
    except Broken as error:
        raise UserError(f"{error}. `tandem checkpoints verify` says more") from error
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error
    names = [side[0].name if first[0].parent == second[0].parent else str(side[0]) for side in (first, second)]
    contrast = manifest_diff.Contrast(names[0], names[1], tuple(facts(first[1], second[1])), tuple(files))
    if output.is_data:
        emit(manifest_diff.as_json(contrast), output)
    else:
        _show(lambda width: manifest_diff.lines(contrast, max_tensors, with_state, width), output)


@checkpoints.command()
def export(
    run: RunArgument,
    name: NameArgument,
    target: Annotated[
        Path, typer.Option("--to", metavar="PATH", help="File or folder to write; with --name, the folder.")
    ],
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="A safetensors file, a state_dict for torch.load, a folder with config.json, or an adapter.",
        ),
    ] = Format.SAFETENSORS,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="PATTERN", help="Name in that folder, such as {job}-epoch-{epoch}.", show_default=False
        ),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="Cast floating-point tensors to this.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier copy.")] = False,
) -> None:
    """Write a verified copy of a checkpoint's weights in a format that needs no Tandem.

    With `all` as NAME, it copies each checkpoint that counts.

    Fields of PATTERN: job, name, step, epoch, generation, start and end of the slice of the data, loss, and the other
    scores, such as accuracy, macroF1 or perplexity; each with a format if wanted, as in {step:06d}.
    """
    # Ctrl-C removes partial files; a SIGTERM, for example from a scheduler, must do the same.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    inventory = take_inventory(open_run(run))
    if name == ALL and pattern is None:
        raise UserError("export all needs --name with a field that differs between checkpoints, such as {job}-{step}")
    chosen = counting(inventory) if name == ALL else [sound(inventory, name)]
    orders: dict[Path, tuple[Entry, Manifest]] = {}
    for entry, manifest in chosen:
        fields = weights_export.fields(entry, manifest, inventory)
        filled = weights_export.filled(pattern, fields) if pattern is not None else None
        default = f"{fields['job'] or inventory.rundir.path.resolve().name}-{entry.name}"
        path = weights_export.target(target, form, filled, default, inventory.rundir.path)
        if path in orders:
            raise UserError(
                f"--name {pattern} gives {path.name} for {orders[path][0].name} and {entry.name}; add {{step}} to it"
            )
        orders[path] = entry, manifest
        weights_export.refuse_to_overwrite(ExportOrder(path, form, dtype, force))
    for path, (entry, manifest) in orders.items():
        with checkpoint_files([(inventory.rundir, manifest)], WEIGHTS):
            written = weights_export.copy(inventory, entry, manifest, ExportOrder(path, form, dtype, force))
        echo(f"exported  {written.path}")
        echo(
            f"          {entry.name}, verified: {count_noun(written.tensors, 'tensor')}, "
            f"{count_noun(written.parameters, 'element')}, {', '.join(written.dtypes)}, {plain(size(written.size))}"
        )
        if written.note:
            echo(one_line(f"note      {written.note}"))


@checkpoints.command()
def push(
    run: RunArgument,
    name: NameArgument,
    repo: Annotated[
        str, typer.Argument(metavar="REPO", help="Repository on the hub: OWNER/MODEL.", show_default=False)
    ],
    revision: Annotated[
        str, typer.Option("--revision", metavar="BRANCH", help="The branch; created if it does not exist.")
    ] = hub.MAIN,
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="Cast floating-point tensors to this.")] = None,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Message of the commit.", show_default="job, step, scores")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files and their sizes without contacting the hub.")
    ] = False,
) -> None:
    """Push a checkpoint to a repository of a hub, as one commit: the folder that `export --format folder` writes.

    The hub's client takes the token from HF_TOKEN, or from `hf auth login`, and the hub's address from HF_ENDPOINT.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    hub.refuse_without_client()
    inventory = take_inventory(open_run(run))
    entry, manifest = sound(inventory, name)
    with TemporaryDirectory(prefix="tandem-push-") as temporary:
        folder = Path(temporary) / "model"
        with checkpoint_files([(inventory.rundir, manifest)], WEIGHTS):
            weights_export.copy(inventory, entry, manifest, ExportOrder(folder, Format.FOLDER, dtype))
        files = hub.files_of(folder)
        total = sum(count for _, count in files)
        content = f"{entry.name}: {count_noun(len(files), 'file')}, {plain(size(total))}"
        if not dry_run:
            commit_message = message or _commit_message(entry, inventory)
            done = hub.push(
                folder, hub.Destination(repo, revision, private), commit_message, lambda line: echo(line, err=True)
            )
            echo(f"pushed  {one_line(done)}")
            echo(f"        {content}, to the branch {revision}")
            return
    echo(f"would push to {repo}, the branch {revision}")
    for file, count in files:
        echo(f"  {plain(size(count)):>8}  {file}")
    echo(f"  {content}")


def _commit_message(entry: Entry, inventory: Inventory) -> str:
    job = inventory.job
    scores = ", ".join(f"{metric} {value:.4g}" for metric, value in entry.metrics.items())
    return f"{job.metadata.name if job else entry.name}: step {entry.step}{f', {scores}' if scores else ''}"


@checkpoints.command()
def prune(
    run: RunArgument,
    keep_last: Annotated[
        int | None,
        typer.Option("--keep-last", min=1, help="Number of newest checkpoints to keep.", show_default="the job's"),
    ] = None,
    keep_best: Annotated[
        int | None,
        typer.Option("--keep-best", min=0, help="Number of best checkpoints to keep.", show_default="the job's"),
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(
            "--keep-every", min=1, help="Keep checkpoints at multiples of this step.", show_default="the job's"
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Also list checkpoints that do not count: bad, stale, off the lineage, forgotten, earlier code.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
) -> None:
    """List the checkpoints that can be deleted and their size; delete them with --yes, or after a confirmation.

    Never deleted: the newest one that counts, the one that the newest generation resumed from, the final one, and those
    in use. The run may be running.
    """
    inventory = take_inventory(open_own_run(run, "which shows what its run directory has; run the command there"))
    changed = {"keep_last": keep_last, "keep_best": keep_best, "keep_every": keep_every}
    policy = (inventory.job.spec.checkpoint if inventory.job else CheckpointSpec()).model_copy(
        update={field: value for field, value in changed.items() if value is not None}
    )
    confirmed = pruning.plan(inventory, policy, everything)
    _show(lambda width: description.plan(confirmed, width))
    if not confirmed.doomed or not (yes or _confirmed(confirmed)):
        return
    freed, current = 0, pruning.plan(take_inventory(inventory.rundir), policy, everything)
    for checkpoint, spared in pruning.carry_out(inventory.rundir, confirmed, current):
        freed += 0 if spared else checkpoint.size
        if spared:
            echo(one_line(f"spared {checkpoint.name}: {spared}"))
    echo(f"deleted; {plain(size(freed))} freed")


def _inventory_of(run: Path, namespace: str, context: str) -> Inventory:
    """The inventory of a run of this machine or in a bucket; with a cluster, of the job of that name."""
    if not (namespace or context):
        return take_inventory(open_run(run))
    from tandem_cli.kubernetes.copying import copy_manifests  # takes a tenth of a second

    name = validate_job_name(str(run))
    with TemporaryDirectory(prefix="tandem-checkpoints-") as temporary:
        folder = Path(temporary, name)
        copy_manifests(Kubectl(namespace, context), name, folder)
        # The path and the disk are those of the copy.
        return replace(take_inventory(RunDir(folder)), rundir=RunDir(Path(name)), free=None)


def _to_verify(inventory: Inventory, names: Sequence[str] | None) -> list[Entry]:
    """Select the checkpoints to verify, oldest first unless they are named."""
    if not names:
        entries = [entry for entry in reversed(inventory.entries) if entry.state not in ("bad", "stale")]
        if not entries:
            raise UserError(f"{inventory.rundir.path} has no checkpoints")
        return entries
    chosen = {entry.name: entry for entry in (choose(inventory, name) for name in names)}
    for entry in chosen.values():
        if entry.state in ("bad", "stale"):
            raise UserError(f"{entry.name} was set aside{f': {entry.why}' if entry.why else ''}. It is not read again")
    return list(chosen.values())


def _verified(rundir: RunDir, entry: Entry, tick: Callable[[int], None]) -> verification.Verification:
    """Verify a checkpoint; of a run in a bucket, as it is there."""
    if entry.manifest is None or not isinstance(rundir, BucketView):
        return verification.verify(rundir, entry.name, tick)
    try:
        with checkpoint_files([(rundir, entry.manifest)], tick=tick):
            return verification.verify(rundir, entry.name)
    except Broken as error:
        return verification.Verification(entry.name, "damaged", (str(error),))
    except FileNotFoundError:
        return verification.Verification(entry.name, "vanished")


def _side(run: Path, word: str) -> tuple[RunDir, Manifest]:
    """Resolve one side of a comparison: NAME, or OTHER_RUN:NAME."""
    other, colon, name = word.rpartition(":")
    inventory = take_inventory(open_run(Path(other) if colon else run))
    return inventory.rundir, sound(inventory, name)[1]


def _confirmed(plan: pruning.Pruning) -> bool:
    if not sys.stdin.isatty():
        echo("nothing was deleted; --yes deletes them")
        return False
    return typer.confirm(f"Delete {plan.what} and free {plain(size(plan.size))}?")


Lines = Callable[[int | None], list[Text]]
"""Returns the lines for a terminal of that width; None: no terminal."""


def _show(lines: Lines, output: Output = Output.TEXT) -> None:
    _print(PrintableConsole(highlight=False), lines, output)


def _print(console: Console, lines: Lines, output: Output = Output.TEXT) -> None:
    for line in lines(console.width if console.is_terminal and output is not Output.WIDE else None):
        console.print(line, soft_wrap=True)


@contextmanager
def _progress(total: int, is_enabled: bool) -> Iterator[tuple[Callable[[int], None], Callable[[Lines], None]]]:
    """Show a bar on a terminal while bytes are read; yield a callback for read bytes, and one that prints lines."""
    console = PrintableConsole(highlight=False)
    bar = Progress(
        TextColumn("reading"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not is_enabled or not console.is_terminal or total < WORTH_A_BAR,
    )
    with bar:
        task = bar.add_task("reading", total=total)
        yield lambda count: bar.advance(task, count), lambda lines: _print(console, lines)
