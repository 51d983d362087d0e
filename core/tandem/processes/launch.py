"""The commands and variables of a job's processes, the same on a laptop and in a pod.

Most functions only build values: `tandem_launcher.local` runs them as child processes, the operator puts them into pod
templates.

A volume may hold the run directory of an earlier job of the same name, whose recorded job and failure do not belong to
this one: a process that knows the UID of its job (launch.UID) waits until that job is recorded.
"""

import errno
import hashlib
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # They import pydantic's models, for which a guardian of `tandem run`, which needs a name of a variable, would take
    # a quarter of a second.
    from tandem.job.resource import DistributedTrainingJob
    from tandem.job.variables import EnvVar
    from tandem.rundir.layout import RunDir

RUN_DIR = "TANDEM_RUN_DIR"
_RUN_DIR = re.compile(rf"\$(?:{RUN_DIR}\b|\{{{RUN_DIR}\}}|\({RUN_DIR}\))")
TOKEN = "TANDEM_TOKEN"  # noqa: S105 - the variable's name
TOKEN_DIGEST = "TANDEM_TOKEN_DIGEST"  # noqa: S105 - the variable's name
"""SHA-256, in hexadecimal digits, of a second valid token: the operator's."""
MIN_TOKEN_LENGTH = 16
"""Minimum length of a token in characters: anyone who reaches the coordinator can try any number of tokens."""
COORDINATOR = "TANDEM_COORDINATOR"
REPLICA = "TANDEM_REPLICA"
NODE = "TANDEM_NODE"
POD = "TANDEM_POD"
GENERATION = "TANDEM_GENERATION"
PULSE = "TANDEM_PULSE"
MIRROR = "TANDEM_MIRROR"
"""Memory in which ranks keep copies of the state: process and descriptors of the agent that holds it."""
STANDBY = "TANDEM_STANDBY"
"""Set for ranks that start without a place in a group: they prepare themselves, and wait for one."""
FAILED_STANDBY = "TANDEM_FAILED_STANDBY"
"""Set for ranks of a member whose ranks could not prepare themselves before it joined."""
TRACE = "TANDEM_TRACE"
"""File for a trace of a few steps of rank 0; no trace is written if it is not set (tandem_trainer.step_trace)."""
JOB = "TANDEM_JOB"
CODE = "TANDEM_CODE"
"""Digest of the job's code, if it has any (tandem.rundir.code)."""
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""GPUs that a process may use, by number or UUID; torch reads it for GPUs of AMD, too."""
EVALUATOR_GPUS = "TANDEM_EVALUATOR_GPUS"
"""Number of GPUs of an evaluator pod, which its processes divide; not set if it has none."""
UID = "TANDEM_JOB_UID"
"""UID of the job's object. A recorded job with another UID is an earlier job of that name."""
STORAGE = "TANDEM_STORAGE"
"""The job's storage as JSON, for pods that share no directory (tandem.rundir.sync)."""
UID_ANNOTATION = "tandem.dev/uid"
"""Annotation of a job in a file: the UID of its object. A job of the same name with another UID, on the volume of an
earlier one, is a new attempt."""

SUBMITTED_ANNOTATION = "tandem.dev/submitted-at"
"""Annotation of a job in a file: the time of its submission, RFC 3339."""

AGENT_RESTARTS = 1_000_000_000
"""Restart limit for torchrun, which counts every restart of its workers; the effective budget is the coordinator's."""
SHUTDOWN_SECONDS = 30
"""Default grace period of ranks between SIGTERM and SIGKILL, in seconds."""


def token_weakness(token: str) -> str:
    """Reason for which a user's token is too weak, in a sentence without its full stop; empty if it is not."""
    if len(token) >= MIN_TOKEN_LENGTH and token.isascii() and token.isprintable() and " " not in token:
        return ""
    return (
        f"{TOKEN} has to have {MIN_TOKEN_LENGTH} or more letters, digits and signs, and no spaces: "
        "anyone who knows it controls the job; create one with `openssl rand -hex 32`"
    )


def token_digest(token: str) -> str:
    """The value of TANDEM_TOKEN_DIGEST for a token."""
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def module_command(module: str, *args: str, python: str = sys.executable) -> list[str]:
    """Build the command that starts a module of Tandem, or of a package that it needs.

    `-P` imports it from where it is installed. `python -m` alone searches the working folder first, where the user's
    `random.py` or `yaml.py` would replace the module that Tandem imports. PYTHONSAFEPATH instead of the option would be
    inherited by the user's program, which must find the modules beside it.
    """
    return [python, "-P", "-m", module, *args]


def coordinator_command(
    host: str,
    port: int,
    port_file: Path | None = None,
    python: str = sys.executable,
    metrics_port: int | None = None,
) -> list[str]:
    """Build the command that starts the coordinator. Port 0 takes a free port and writes it to `port_file`
    (`read_ports`).

    Args:
        metrics_port: port that serves /metrics without the token; None: none.
    """
    command = module_command("tandem_coordinator", "--host", host, "--port", str(port), python=python)
    command += [] if metrics_port is None else ["--metrics-port", str(metrics_port)]
    return command + (["--port-file", str(port_file)] if port_file else [])


def read_ports(file: Path) -> tuple[int, ...]:
    """The ports that a coordinator has written: its own, and that of /metrics if it has one. Empty: none yet."""
    with suppress(OSError, ValueError):
        return tuple(int(line) for line in file.read_text().split())
    return ()


def agent_command(
    job: "DistributedTrainingJob",
    coordinator: str,
    address: str,
    shutdown_seconds: int = SHUTDOWN_SECONDS,
    python: str = sys.executable,
) -> list[str]:
    """Build the command that starts one replica: torchrun with our rendezvous and, after `--`, the job's training
    processes.

    Args:
        coordinator: host:port.
        address: address at which the other replicas reach this one.
        shutdown_seconds: grace period of ranks between SIGTERM and SIGKILL; longer than a save takes.
    """
    spec = job.spec
    command = [
        *module_command("tandem_trainer.agent", python=python),
        *(["--warm"] if spec.elasticity.warm_start else []),
        *([f"--preload={','.join(modules)}"] if (modules := spec.elasticity.preload) else []),
        f"--nnodes={spec.workers.min_replicas}:{spec.workers.most}",
        f"--nproc-per-node={spec.workers.processes}",
        "--rdzv-backend=tandem",
        f"--rdzv-endpoint={coordinator}",
        f"--rdzv-id={job.metadata.name}",
        f"--local-addr={address}",
        f"--max-restarts={AGENT_RESTARTS}",
        f"--shutdown-timeout={shutdown_seconds}",
        "--monitor-interval=0.05",
        "--",
    ]
    if spec.trainer.command is None:
        return [*command, *module_command("tandem_trainer", python=python)]
    program, *args = [*spec.trainer.command, *spec.trainer.args]
    if program in ("python", "python3"):
        # The agent runs scripts and modules with its own Python; with other options, `python` is an ordinary program.
        is_plain = args and (args[0] == "-m" or args[0].endswith(".py"))
        return [*command, *args] if is_plain else [*command, python, *args]
    return [*command, program, *args]


def with_run_dir(args: Sequence[str], variables: Mapping[str, str] = os.environ) -> list[str]:
    """Substitute the run directory for $TANDEM_RUN_DIR, ${TANDEM_RUN_DIR} and, as the kubelet does,
    $(TANDEM_RUN_DIR) in a user's command. No shell expands the arguments, and without this a folder of that name would
    be created."""
    if not (run_dir := variables.get(RUN_DIR)):
        return list(args)
    return [_RUN_DIR.sub(lambda _: run_dir, arg) for arg in args]


def evaluator_command(index: int) -> list[str]:
    """Build the command that starts one evaluator process of a replica."""
    return module_command("tandem_evaluator", "--index", str(index))


def evaluators_command(count: int, python: str = sys.executable) -> list[str]:
    """Build the command that starts all evaluator processes of a replica."""
    return module_command("tandem_evaluator", "--processes", str(count), python=python)


def program_command(args: Sequence[str]) -> list[str]:
    """Build the command that starts a user's program: with our Python where it names none or `python`, as torchrun
    does."""
    if args[0] in ("python", "python3"):
        return [sys.executable, *args[1:]]
    return [sys.executable, *args] if args[0].endswith(".py") else list(args)


def schedule_path(trace: Path) -> Path:
    """Path of the recorded schedule of a pipeline, which rank 0 writes beside its trace."""
    return trace.with_suffix(".schedule.json")


def environment(
    job: "DistributedTrainingJob", run_dir: Path, replica: str, token: str = "", coordinator: str = ""
) -> dict[str, str]:
    """The environment variables of one of the job's processes. Evaluators get neither token nor coordinator."""
    own = {RUN_DIR: str(run_dir), REPLICA: replica, "PYTHONUNBUFFERED": "1"}
    if token:
        own |= {TOKEN: token, COORDINATOR: coordinator}
    if job.spec.trainer.code is not None:
        own[CODE] = job.spec.trainer.code
    return _literal(job.spec.trainer.env) | own


def evaluator_environment(job: "DistributedTrainingJob", run_dir: Path, replica: str) -> dict[str, str]:
    """The variables of an evaluator."""
    specified = [variable for variable in job.spec.evaluation.env if variable.name not in (RUN_DIR, REPLICA)]
    # A variable of the evaluators overrides the trainer's, wherever its value comes from.
    overridden = {variable.name for variable in specified}
    inherited = environment(job, run_dir, replica)
    return {name: value for name, value in inherited.items() if name not in overridden} | _literal(specified)


def _literal(variables: Sequence["EnvVar"]) -> dict[str, str]:
    return {variable.name: variable.value for variable in variables if variable.value_from is None}


POLL_SECONDS = 0.1
FIRST_MESSAGE_SECONDS, MESSAGE_SECONDS = 10.0, 60.0
"""Delay of the first message of `wait_for_job`, and interval of the further ones."""


def wait_for_job(rundir: "RunDir", log: Callable[[str], None], uid: str = "") -> "DistributedTrainingJob | None":
    """Wait until the job is recorded, and read it; None if it failed before it was recorded.

    Args:
        log: called with a message if this takes long, and every minute from then on.
        uid: UID of the job's object; empty: any job.

    Raises:
        ValueError, OSError: the recorded job is invalid, or cannot be read.
    """
    started = time.monotonic()
    due = started + FIRST_MESSAGE_SECONDS
    while True:
        try:
            job = rundir.read_job()
        except FileNotFoundError:
            # The coordinator records the job, or that it cannot start.
            if rundir.failed() is not None:
                return None
            waiting = f"waiting for {rundir.job_file}"
        else:
            # The volume may still have the job of an earlier object of that name.
            if not uid or job.metadata.annotations.get(UID_ANNOTATION) == uid:
                return job
            waiting = f"{rundir.job_file} belongs to an earlier job; waiting for the coordinator to record this one"
        if time.monotonic() >= due:
            due += MESSAGE_SECONDS
            log(f"{waiting}, for {time.monotonic() - started:.0f} s so far")
        time.sleep(POLL_SECONDS)


ALL_ADDRESSES = "::"
"""All addresses of IPv6 and IPv4; without IPv6, all of IPv4."""


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """Create a listening socket.

    Args:
        host: an address, or EVERYWHERE.
        port: 0 takes a free one.

    Raises:
        OSError: the address cannot be listened on.
        OverflowError: the port is out of range.
    """
    if host != ALL_ADDRESSES:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                (ALL_ADDRESSES, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
        except OSError as error:
            # The kernel supports IPv6, but this machine or container has no IPv6 address.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return socket.create_server(("", port), backlog=backlog)


def endpoint(host: str, port: int) -> str:
    """Format `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
