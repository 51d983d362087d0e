"""`tandem init LINE`: writes the manifest of a script."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tandem.errors import UserError
from tandem.job.manifest.reading import parse_job
from tandem.job.manifest.source import parse
from tandem_cli import launch_line
from tandem_cli.output import echo


def init(
    line: Annotated[
        list[str],
        typer.Argument(
            metavar="LINE…",
            help="A script, or the line that starts it: train.py …, python …, torchrun …, accelerate launch ….",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The file; - prints it.", show_default="NAME.yaml"),
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Name of the job.", show_default="that of the script")] = "",
) -> None:
    """Write the manifest of a script, from the line that starts it without Tandem.

    Options must precede the line. Options of torchrun or accelerate become fields; those that Tandem does not need,
    such as the rendezvous, are omitted. An existing file is not overwritten.
    """
    parsed = launch_line.read(line)
    text = parsed.manifest(line, name)
    job = parse_job(parse(text.encode(), "the manifest"))
    if parsed.not_used:
        echo(f"omitted, because Tandem does not need it: {', '.join(parsed.not_used)}", err=True)
    if str(out) == "-":
        echo(text.removesuffix("\n"))
        return
    file = out or Path(f"{job.metadata.name}.yaml")
    try:
        with file.open("x") as opened:
            opened.write(text)
    except FileExistsError:
        raise UserError(f"{file} already exists; choose another --out, or --out - to print the manifest") from None
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from error
    echo(f"wrote {file}; to run it: tandem run {shlex.quote(str(file))}")
