"""`tandem shell JOB [WHO]`: a shell beside a process of a run, or in a pod of a job."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tandem.errors import UserError
from tandem_cli.cluster import ContextOption, NamespaceOption, named
from tandem_cli.kubernetes.execution import executable, interact
from tandem_cli.kubernetes.following import Choice, check
from tandem_cli.kubernetes.job_view import ask_job, ask_pods
from tandem_cli.kubernetes.kubectl import Kubectl
from tandem_cli.local import processes
from tandem_cli.local.known import is_alive
from tandem_cli.local.processes import Surroundings
from tandem_cli.output import echo
from tandem_cli.runs import TargetArgument, asked, completed_processes, local

FIRST = "worker-0"
PLAIN = "/bin/sh"


def shell(
    name: TargetArgument,
    who: Annotated[
        str,
        typer.Argument(
            metavar="WHO",
            help="worker-0, evaluator-1 or coordinator.",
            autocompletion=completed_processes,
        ),
    ] = FIRST,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Open a shell in the pod of a worker; for a run of this machine, one with the variables of that process.

    It starts in the run directory on a cluster, and in the folder of the process here. Training continues.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("tandem shell needs a terminal; for a single command on a cluster there is `kubectl exec`")
    path = local(name, namespace, context)
    if path is not None:
        _here(path, who)
    with asked(name, namespace, context):
        raise typer.Exit(_on_a_cluster(Kubectl(namespace, context), named(name), who))


def _here(path: Path, who: str) -> NoReturn:
    if is_alive(path):
        found = processes.surroundings(path, who)
        whose = f"of {who}" if found.rank is None else f"of {who} (rank {found.rank})"
        echo(f"a shell with the variables {whose}, in {found.folder}; `exit` leaves it", err=True)
    else:
        found = processes.beside(path)
        echo(f"{path} is not running: this is a shell in its run directory; `exit` leaves it", err=True)
    _become(found)


def _become(found: Surroundings) -> NoReturn:
    program = os.environ.get("SHELL") or PLAIN
    try:
        os.chdir(found.folder)
        os.execvpe(program, [program], found.variables)  # noqa: S606 - it is the user's own shell
    except OSError as error:
        raise UserError(f"the shell {program} cannot be started in {found.folder}: {error.strerror}") from error


def _on_a_cluster(kubectl: Kubectl, name: str, who: str) -> int:
    job = ask_job(kubectl, name)
    if job.ended:
        raise UserError(
            f"{name} has ended ({job.status.phase}), and its pods with it. See: tandem status "
            f"{shlex.quote(name)}{kubectl.options()}"
        )
    pods = ask_pods(kubectl, name)
    check(pods, Choice("", (who,)), name)
    running = executable([pod for pod in pods if who in (pod.name, pod.pod)])
    if not running:
        why = next((pod.why or pod.state for pod in reversed(pods) if who in (pod.name, pod.pod)), "it has no pod")
        raise UserError(f"{who} of {name} is not running now: {why}")
    return interact(kubectl, running[-1])
