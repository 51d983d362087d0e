"""`tandem copy SOURCE [TARGET]`: a run directory, from a cluster to this machine, or from and to a bucket.

tandem copy digits                        a job on Kubernetes, into runs/digits
tandem copy runs/digits s3://bucket/…     a run of this machine, into a bucket
tandem copy s3://bucket/… runs/digits     a run in a bucket, to this machine
"""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tandem.errors import UserError, join_names
from tandem.formatting import one_line, size
from tandem.rundir.store import Store, is_url
from tandem_cli.bucket import download, upload
from tandem_cli.cluster import ContextOption, NamespaceOption, validate_job_name
from tandem_cli.kubernetes import copying
from tandem_cli.kubernetes.kubectl import Kubectl
from tandem_cli.output import echo
from tandem_cli.runs import open_run
from tandem_launcher.bucket_access import open_store, progress
from tandem_launcher.local.prepare import locked

MAX_LISTED_CHECKPOINTS = 5


def copy(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A job on Kubernetes, a run of this machine, or the URL of a run in a bucket.",
            show_default=False,
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A new or empty folder, an earlier copy of the run, or the URL of a bucket: s3://, gs:// or az://.",
            show_default="runs/NAME",
        ),
    ] = "",
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoint",
            metavar="WORD",
            help="Checkpoints to copy: a name, `latest`, `best`, `all` or `none`. Repeatable. A bucket gets all.",
            show_default="latest and best",
        ),
    ] = None,
    image: Annotated[
        str,
        typer.Option(
            "--image",
            help="Image with Tandem, for a job that has no pods any more.",
            show_default="that of the job's last pod",
        ),
    ] = "",
    endpoint: Annotated[
        str, typer.Option("--endpoint", metavar="URL", help="Server of the bucket, if not the provider's own.")
    ] = "",
    region: Annotated[str, typer.Option("--region", help="Region of the bucket.")] = "",
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Copy a run: its logs, scores and checkpoints, from a cluster to this machine, or from or to a bucket.

    All commands for runs work on the copy: `report`, `compare`, `export`, `checkpoints`. The job may be running or
    over. Run the same command again to copy new files.
    """
    if is_url(target):
        _to_bucket(source, open_store(target, endpoint, region))
        return
    selectors = checkpoint or ["latest", "best"]
    if is_url(source):
        store = open_store(source, endpoint, region)
        folder = Path(target or Path("runs", store.location.prefix.rpartition("/")[2]))
        copied = download(store, folder, selectors)
    else:
        folder = Path(target or Path("runs", source))
        with progress("copying") as tick:
            copied = copying.copy(
                Kubectl(namespace, context), validate_job_name(source), folder, selectors, image, tick
            )
    with_what = f", with {join_names(copied.checkpoints, MAX_LISTED_CHECKPOINTS)}" if copied.checkpoints else ""
    echo(f"copied    {size(copied.size)} to {folder}{with_what}")
    for fault in copied.faults:
        echo("", mark=f"warning: {one_line(fault)}; not copied", colour="yellow", err=True)
    echo(f"next      tandem report {shlex.quote(str(folder))}")
    if copied.faults:
        raise typer.Exit(1)


def _to_bucket(source: str, store: Store) -> None:
    """Copy a run of this machine into a bucket."""
    if is_url(source):
        raise UserError("copy from one bucket to another by way of a folder: tandem copy URL FOLDER, then FOLDER URL")
    run_dir = open_run(Path(source))
    # A run that is alive has an upload of its own.
    with locked(run_dir.path):
        sent = upload(run_dir, store)
    echo(f"copied    {size(sent)} to {store.location}")
    echo(f"next      tandem report {store.location}")
