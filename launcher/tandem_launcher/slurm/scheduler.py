"""Runs SLURM's commands and parses their output: sbatch, squeue, scontrol, scancel, sacct.

The commands work on every cluster with the user's configuration; a library would have to match the version of each
cluster. Errors are recognized by their messages, which have been the same for years (read with 22.05). Unknown errors
are passed on unchanged.
"""

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import UserError
from tandem.formatting import printable

SECONDS = 30.0
"""Timeout of one command, in seconds; slurmctld itself gives up after some 10 s."""


class SlurmError(UserError):
    """SLURM refused, or does not answer."""


class SlurmUnavailableError(SlurmError):
    """SLURM does not answer, or is too busy; a retry may succeed."""


@dataclass(frozen=True)
class QueuedJob:
    """A pending or running job, or element of an array."""

    id: str
    state: str
    """State as squeue prints it: RUNNING, PENDING, COMPLETING and others."""
    reason: str
    """Reason for which it is pending, in CamelCase; `None` if it is not."""
    partition: str
    nodes: str
    """Nodes, for example `n[0-1]`; empty while it is pending."""
    start: str
    """Start time, or the expected one; `N/A` if SLURM does not know it."""

    @property
    def waits(self) -> bool:
        """Whether it waits for its start or restart."""
        return self.state in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED")


_UNAVAILABLE = (
    "SLURM does not answer: its controller is down, or this machine is not a login node of the cluster. Try again "
    "later; `scontrol ping` shows whether it is up"
)
_ADVICE = tuple(
    (re.compile(pattern, re.IGNORECASE), advice)
    for pattern, advice in (
        (
            r"unable to contact slurm controller|slurm_load_\w+ error: .*(connection|controller)|connection refused|"
            r"socket timed out|communication .*(failure|error)|could not establish a configuration source|"
            r"resolve_ctls_from_dns_srv|\bis DOWN\b",
            _UNAVAILABLE,
        ),
        (r"invalid partition", "there is no such partition here; `sinfo --summarize` lists the partitions"),
        (
            r"invalid account|account.*(expired|not permitted)",
            "the account of the profile is not valid in this partition, or has expired; `sacctmgr show assoc "
            "user=$USER` lists the accounts that you may use",
        ),
        (r"invalid qos", "there is no such quality of service for this account and partition"),
        (
            r"invalid generic resource|invalid gres",
            "the nodes have no such GPUs; `sinfo --format='%P %G'` lists what they have",
        ),
        (r"invalid feature", "no node has this feature (--constraint); `sinfo --format='%P %f'` lists them"),
        (
            r"requested node configuration is not available|more processors requested|node count specification invalid",
            "no nodes of this partition satisfy the job's request; compare its nodes, CPUs, GPUs and memory with "
            "`sinfo --format='%P %D %c %m %G'`",
        ),
        (r"time limit is invalid|exceeds.*time limit", "the time limit is longer than the partition allows"),
        (
            r"(assoc|qos)max\w+per(job|node)",
            "the job requests more than your account or quality of service allows one job; `sacctmgr show assoc "
            "user=$USER` and `sacctmgr show qos` list what they allow",
        ),
        (
            r"accounting/qos policy|max\w*submit\w*limit|maxsubmit|policy \(job submit limit",
            "a limit of your account or quality of service is reached; wait until other jobs have ended",
        ),
        (r"no space left|disk quota exceeded", "the disk is full"),
        (
            r"i/o error writing script",
            "the controller cannot store the job: its own disk is full or fails; tell the cluster's administrators",
        ),
        (
            r"access/permission denied|user.s group not permitted",
            "you may not submit to this partition or change this job",
        ),
        (r"requeue.*disabled|requeue is disabled|operation is disabled", "this cluster does not requeue jobs"),
    )
)
_NOISE = re.compile(r"^(\S*/)?(sbatch|squeue|scontrol|scancel|sacct|sinfo|srun): (error: )?|^slurm_load_\w+ error: ")

REASONS: Mapping[str, str] = {
    "Resources": "all suitable nodes are busy",
    "Priority": "jobs with a higher priority are ahead of it",
    "Dependency": "a job that it depends on has not started or ended",
    "DependencyNeverSatisfied": "a job that it depends on has failed, so it never starts",
    "BeginTime": "it may not start before its begin time",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition accepts no jobs",
    "PartitionNodeLimit": "it requests more nodes than the partition allows, so it never starts",
    "PartitionTimeLimit": "it requests more time than the partition allows, so it never starts",
    "PartitionConfig": "the partition does not allow its request, so it never starts",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "NodeDown": "a node that it needs is down",
    "BadConstraints": "no node satisfies its constraints, so it never starts",
    "Licenses": "it waits for a licence",
    "Reservation": "it waits for its reservation",
    "JobHeldUser": "it is held; `scontrol release` lets it start",
    "JobHeldAdmin": "an administrator of the cluster holds it",
    "InvalidAccount": "its account is not valid or has expired, so it never starts",
    "InvalidQOS": "its quality of service is not valid, so it never starts",
    "AccountNotAllowed": "its account may not use this partition",
    "QOSNotAllowed": "its quality of service may not use this partition",
    "JobArrayTaskLimit": "the limit of running elements of its array is reached",
    "Cleaning": "it is being cleaned up after its last start",
    "None": "SLURM has not considered it yet",
}


def run(*args: str, environment: Mapping[str, str] | None = None, seconds: float = SECONDS) -> str:
    """Run one of SLURM's commands and return its output.

    Raises:
        SlurmError: the command is missing, or failed.
    """
    try:
        done = subprocess.run(
            args,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except FileNotFoundError:
        raise SlurmError(f"{args[0]} was not found; submit from a login node of a SLURM cluster") from None
    except OSError as error:
        raise SlurmError(f"{args[0]} cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise SlurmUnavailableError(
            f"SLURM does not answer: {args[0]} took over {seconds:.0f} s. Try again later"
        ) from None
    # Some commands print their error to standard output.
    if done.returncode != 0:
        raise error_from(args[0], done.stderr.strip() or done.stdout)
    return done.stdout


def error_from(command: str, output: str) -> SlurmError:
    """Turn the output of a failed command into an exception."""
    lines = [_NOISE.sub("", line.strip()) for line in output.splitlines() if line.strip()]
    message = printable("; ".join(dict.fromkeys(lines)))[:1000] or "it failed without an error message"
    # The first match wins: an unavailable controller comes first, because a retry may help.
    for pattern, advice in _ADVICE:
        if pattern.search(output):
            kind = SlurmUnavailableError if advice is _UNAVAILABLE else SlurmError
            return kind(f"{advice} ({command}: {message})")
    return SlurmError(f"{command}: {message}")


def check() -> None:
    """Check that the controller answers: sbatch would retry for minutes.

    Raises:
        SlurmError: it does not answer.
    """
    try:
        run("scontrol", "ping")
    except SlurmError as error:
        # One of several controllers suffices.
        if " UP" not in str(error):
            raise


def queue(ids: Sequence[str]) -> list[QueuedJob]:
    """Return those of the jobs that are pending or running.

    Raises:
        SlurmError: SLURM does not answer.
    """
    fields = "%i|%T|%r|%P|%N|%S"
    queued = []
    # One squeue per job: it fails as a whole if it has forgotten one of several.
    for job in ids:
        try:
            text = run("squeue", "--noheader", "--jobs", job, "--format", fields)
        except SlurmError as error:
            # The controller forgets a job some minutes after its end.
            if "invalid job id" in str(error).lower():
                continue
            raise
        queued += [_queued(line) for line in text.splitlines() if line.count("|") == fields.count("|")]
    return queued


def _queued(line: str) -> QueuedJob:
    number, state, reason, partition, nodes, start = (printable(part.strip()) for part in line.split("|"))
    return QueuedJob(number, state, reason, partition, nodes, start)


def wait_reason(job: QueuedJob) -> str:
    """Describe why a job is pending, as the end of a sentence."""
    word = job.reason.partition(",")[0].strip("() ")
    explanation = REASONS.get(word)
    # Families of reasons, of which SLURM has one for each resource; from the special to the general.
    if explanation is None and re.match(r"(Assoc|QOS)Grp(?!\w*RunMinutes)\w*Minutes", word):
        explanation = "its account has no hours left, so it starts only if more are granted"
    if explanation is None and re.match(r"(Assoc|QOS)Max\w+Per(Job|Node)", word):
        explanation = "it requests more than its account or quality of service allows one job, so it never starts"
    if explanation is None and re.match(r"(Assoc|QOS|MaxCpuPer|MaxMemPer)", word):
        explanation = "a limit of its account or quality of service is reached"
    description = f"{explanation} ({job.reason})" if explanation else job.reason
    # SLURM also estimates a start for jobs that never start: the time at which nodes are free.
    may_start = explanation is None or not re.search(r"never starts|only if", explanation)
    expected = may_start and job.start not in ("N/A", "")
    return f"{description}; SLURM expects it to start at {job.start.replace('T', ' ')}" if expected else description


def final_state(job: str) -> str:
    """Return the final state of an ended job, as SLURM names it: COMPLETED, CANCELLED, NODE_FAIL.

    Empty if neither the controller nor the accounting remembers the job.
    """
    try:
        match = re.search(r"JobState=(\S+)", run("scontrol", "--oneliner", "show", "job", job))
        if match:
            return printable(match[1])
    except SlurmError:
        # The controller forgets ended jobs after MinJobAge; the accounting database, if there is one, does not.
        pass
    try:
        text = run("sacct", "--noheader", "--allocations", "--parsable2", "--jobs", job, "--format", "State")
    except SlurmError:
        return ""
    # The state of a cancelled job includes the user ID: `CANCELLED by 1000`.
    return printable(next(iter(text.split()), ""))


def nodes(job: str) -> list[str]:
    """Return the names of the nodes that a job has now.

    Raises:
        SlurmError: SLURM does not answer.
    """
    match = re.search(r"(?<!\w)NodeList=(\S+)", run("scontrol", "--oneliner", "show", "job", job))
    if match is None or match[1] == "(null)":
        return []
    return run("scontrol", "show", "hostnames", match[1]).split()


def steps(job: str) -> dict[str, str]:
    """Return the node of each step of a job, by the step's name.

    Raises:
        SlurmError: SLURM does not answer.
    """
    text = run("squeue", "--steps", "--noheader", "--jobs", job, "--format", "%j|%N")
    return dict(line.strip().split("|") for line in text.splitlines() if line.count("|") == 1)


def elements(array: str) -> dict[str, tuple[str, str]]:
    """Return the running elements of an array: the job and the node by index.

    Raises:
        SlurmError: SLURM does not answer.
    """
    if not array:
        return {}
    text = run("squeue", "--noheader", "--jobs", array, "--states", "RUNNING", "--format", "%K|%A|%N")
    rows = [line.strip().split("|") for line in text.splitlines() if line.count("|") == 2]
    return {index: (job, node) for index, job, node in rows}


def batch_host(job: str) -> str:
    """Return the node of a job's batch script; empty if it has none.

    Raises:
        SlurmError: SLURM does not answer.
    """
    match = re.search(r"BatchHost=(\S+)", run("scontrol", "--oneliner", "show", "job", job))
    return match[1] if match else ""


def life(job: str) -> str:
    """Return the number of restarts of a running job; empty if it does not run.

    Raises:
        SlurmError: SLURM does not answer.
    """
    try:
        text = run("scontrol", "--oneliner", "show", "job", job)
    except SlurmError as error:
        if "invalid job id" in str(error).lower():
            return ""
        raise
    state, restarts = re.search(r"JobState=(\S+)", text), re.search(r"Restarts=(\d+)", text)
    if state is None or state[1] not in ("RUNNING", "SUSPENDED"):
        return ""
    return restarts[1] if restarts else "0"


@dataclass(frozen=True)
class NodeState:
    """A node, as the controller sees it."""

    address: str
    """Address at which other nodes reach it."""
    responds: bool
    """Whether steps can be started on it."""


def node(name: str) -> NodeState:
    """Query a node of the cluster.

    Raises:
        SlurmError: SLURM does not answer.
    """
    text = run("scontrol", "--oneliner", "show", "node", name)
    address, state = re.search(r"NodeAddr=(\S+)", text), re.search(r"(?<!\w)State=(\S+)", text)
    flags = (state[1] if state else "").upper()
    is_down = "*" in flags or any(flag in flags for flag in ("DOWN", "NOT_RESPONDING", "POWERED", "FAIL"))
    return NodeState(address[1] if address else name, not is_down)


def submit(script: Path, options: Sequence[str], environment: Mapping[str, str]) -> str:
    """Submit a script, which SLURM copies; return the job ID.

    Raises:
        SlurmError: SLURM refuses it.
    """
    text = run("sbatch", "--parsable", *options, str(script), environment=environment)
    # In a federation the name of the cluster follows.
    return text.strip().splitlines()[-1].partition(";")[0]


def signal_batch(job: str, name: str) -> None:
    """Send a signal to the batch script of a job only, not to the processes that it started.

    Raises:
        SlurmError: SLURM refuses it.
    """
    run("scancel", "--batch", f"--signal={name}", job)


def cancel(job: str) -> None:
    """Cancel a job: SIGTERM to all its processes, SIGKILL after KillWait.

    Raises:
        SlurmError: SLURM refuses it.
    """
    run("scancel", job)


class Throttle:
    """Limits the rate of an action.

    Args:
        seconds: minimum interval, in seconds.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due = 0.0

    def is_due(self) -> bool:
        """Whether the action is due; if so, the interval starts again."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + self._seconds
        return True

    def hurry(self) -> None:
        """Make the action due now."""
        self._due = 0.0
