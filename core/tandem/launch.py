"""The commands and variables of a job's processes, the same on a laptop and in a pod.

Only builds values; `tandem_cli.local` runs them as child processes, the operator puts them into pod templates.

A volume may hold the directory of an earlier job of the same name. What that one recorded, its job and its failure, is
not this job's: a process that is told which object its job is (launch.UID) waits until that one is recorded.
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

from tandem.job import DistributedTrainingJob
from tandem.rundir.layout import RunDir
from tandem.variables import EnvVar

RUN_DIR = "TANDEM_RUN_DIR"
_RUN_DIR = re.compile(rf"\$(?:{RUN_DIR}\b|\{{{RUN_DIR}\}}|\({RUN_DIR}\))")
TOKEN = "TANDEM_TOKEN"  # noqa: S105 - the variable's name
TOKEN_DIGEST = "TANDEM_TOKEN_DIGEST"  # noqa: S105 - the variable's name
"""The SHA-256, in hexadecimal digits, of another token that is as good: the operator's."""
MIN_TOKEN = 16
"""Characters of a token: whoever reaches the coordinator can try as many as they like."""
COORDINATOR = "TANDEM_COORDINATOR"
REPLICA = "TANDEM_REPLICA"
NODE = "TANDEM_NODE"
POD = "TANDEM_POD"
GENERATION = "TANDEM_GENERATION"
PULSE = "TANDEM_PULSE"
TRACE = "TANDEM_TRACE"
"""Where rank 0 writes a trace of a few of its steps; none is made where it is not set (tandem_trainer.step_trace)."""
JOB = "TANDEM_JOB"
CODE = "TANDEM_CODE"
"""The digest of the job's code, where it has some (tandem.code)."""
UID = "TANDEM_JOB_UID"
"""Which object a pod's job is: what an earlier job of that name has recorded is not taken for it."""
INCARNATION = "tandem.dev/uid"
"""Annotation of a job that comes in a file: which object it is. Another one of the same name, on the volume that the
first one left, is a new try."""

AGENT_RESTARTS = 1_000_000_000
"""torchrun counts every restart of its own workers; the budget that matters is the coordinator's."""
SHUTDOWN_SECONDS = 30
"""What ranks get between SIGTERM and SIGKILL, where nothing else is said."""


def weakness(token: str) -> str:
    """Why a token that somebody has chosen is none, in a sentence without its full stop; empty if it is one."""
    if len(token) >= MIN_TOKEN and token.isascii() and token.isprintable() and " " not in token:
        return ""
    return (
        f"{TOKEN} has to have {MIN_TOKEN} or more letters, digits and signs, and no spaces: "
        "anyone who knows it controls the job; create one with `openssl rand -hex 32`"
    )


def token_digest(token: str) -> str:
    """What TANDEM_TOKEN_DIGEST is for a token."""
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def module_command(module: str, *words: str, python: str = sys.executable) -> list[str]:
    """Start a module of Tandem's, or of a package that it needs.

    `-P`: it is imported from where it is installed. `python -m` alone looks into the working folder first, where a
    `random.py` or a `yaml.py` of the user's would be taken for the module that Tandem imports. An option and not
    PYTHONSAFEPATH, which the user's program would inherit: that has to find what lies beside it.
    """
    return [python, "-P", "-m", module, *words]


def coordinator_command(
    host: str,
    port: int,
    port_file: Path | None = None,
    python: str = sys.executable,
    metrics_port: int | None = None,
) -> list[str]:
    """Start the coordinator. Port 0 takes a free one; `port_file` is where it then writes the port (`ports`).

    Args:
        metrics_port: where /metrics is answered without the token too; None: nowhere.
    """
    command = module_command("tandem_coordinator", "--host", host, "--port", str(port), python=python)
    command += [] if metrics_port is None else ["--metrics-port", str(metrics_port)]
    return command + (["--port-file", str(port_file)] if port_file else [])


def ports(file: Path) -> tuple[int, ...]:
    """The ports that a coordinator has written: its own, and that of /metrics where it has one. Empty: none yet."""
    with suppress(OSError, ValueError):
        return tuple(int(line) for line in file.read_text().split())
    return ()


def agent_command(
    job: DistributedTrainingJob,
    coordinator: str,
    address: str,
    shutdown_seconds: int = SHUTDOWN_SECONDS,
    python: str = sys.executable,
) -> list[str]:
    """Start one replica: torchrun with our rendezvous and, after `--`, the job's training processes.

    Args:
        coordinator: host:port.
        address: where the other replicas reach this one.
        shutdown_seconds: what ranks get between SIGTERM and SIGKILL; longer than a save takes.
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
    program, *rest = [*spec.trainer.command, *spec.trainer.args]
    if program in ("python", "python3"):
        is_plain = rest and (rest[0] == "-m" or rest[0].endswith(".py"))
        return [*command, *rest] if is_plain else [*command, python, *rest]
    return [*command, program, *rest]


def with_run_dir(words: Sequence[str], variables: Mapping[str, str] = os.environ) -> list[str]:
    """A command of the user's with the run directory in place of $TANDEM_RUN_DIR, ${TANDEM_RUN_DIR} and, as the kubelet
    replaces it, $(TANDEM_RUN_DIR). No shell reads the words, and a folder of that name would be made."""
    if not (run_dir := variables.get(RUN_DIR)):
        return list(words)
    return [_RUN_DIR.sub(lambda _: run_dir, word) for word in words]


def evaluator_command(index: int, python: str = sys.executable) -> list[str]:
    """Start one evaluator process of a replica."""
    return module_command("tandem_evaluator", "--index", str(index), python=python)


def evaluators_command(count: int, python: str = sys.executable) -> list[str]:
    """Start all evaluator processes of a replica."""
    return module_command("tandem_evaluator", "--processes", str(count), python=python)


def program_command(words: Sequence[str], python: str = sys.executable) -> list[str]:
    """A command of the user's as it is started: with our Python where it names none or any, as torchrun does."""
    if words[0] in ("python", "python3"):
        return [python, *words[1:]]
    return [python, *words] if words[0].endswith(".py") else list(words)


def schedule_beside(trace: Path) -> Path:
    """Where rank 0 writes what the ranks of a pipeline did when, if it writes a trace there."""
    return trace.with_suffix(".schedule.json")


def environment(
    job: DistributedTrainingJob, run_dir: Path, replica: str, token: str = "", coordinator: str = ""
) -> dict[str, str]:
    """The variables of one of the job's processes. Evaluators get neither token nor coordinator."""
    own = {RUN_DIR: str(run_dir), REPLICA: replica, "PYTHONUNBUFFERED": "1"}
    if token:
        own |= {TOKEN: token, COORDINATOR: coordinator}
    if job.spec.trainer.code is not None:
        own[CODE] = job.spec.trainer.code
    return _literal(job.spec.trainer.env) | own


def evaluator_environment(job: DistributedTrainingJob, run_dir: Path, replica: str) -> dict[str, str]:
    """The variables of an evaluator."""
    theirs = [one for one in job.spec.evaluation.env if one.name not in (RUN_DIR, REPLICA)]
    # Of a variable that the job names twice, that of the evaluators counts, wherever its value comes from.
    named = {one.name for one in theirs}
    own = environment(job, run_dir, replica)
    return {name: value for name, value in own.items() if name not in named} | _literal(theirs)


def _literal(variables: Sequence[EnvVar]) -> dict[str, str]:
    return {one.name: one.value for one in variables if one.value_from is None}


POLL_SECONDS = 0.1
SAY_WAITING_SECONDS = 10.0
SAY_AGAIN_SECONDS = 60.0


def wait_for_job(rundir: RunDir, say: Callable[[str], None], uid: str = "") -> DistributedTrainingJob | None:
    """The job, as soon as it is recorded; None if it failed before it was.

    Args:
        say: told if that takes long, and every minute from then on.
        uid: which object the job is; empty: whichever is recorded.

    Raises:
        ValueError, OSError: what is recorded is no job, or cannot be read.
    """
    started = time.monotonic()
    due = started + SAY_WAITING_SECONDS
    while True:
        try:
            job = rundir.read_job()
        except FileNotFoundError:
            if rundir.failed() is not None:
                return None
            waits = f"waiting for {rundir.job_file}"
        else:
            if not uid or job.metadata.annotations.get(INCARNATION) == uid:
                return job
            waits = f"{rundir.job_file} is an earlier job's; waiting for the coordinator to record this one"
        if time.monotonic() >= due:
            due += SAY_AGAIN_SECONDS
            say(f"{waits}, for {time.monotonic() - started:.0f} s so far")
        time.sleep(POLL_SECONDS)


EVERYWHERE = "::"
"""All addresses of both families. Where there is no IPv6: all of IPv4."""


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens.

    Args:
        host: an address, or EVERYWHERE.
        port: 0 takes a free one.

    Raises:
        OSError: nobody can listen there.
        OverflowError: that is no port.
    """
    if host != EVERYWHERE:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                (EVERYWHERE, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
        except OSError as error:
            # The kernel knows IPv6, and this machine or container has none.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return socket.create_server(("", port), backlog=backlog)


def endpoint(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
