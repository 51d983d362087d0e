"""SLURM's commands, and what they answer in words: sbatch, squeue, scontrol, scancel, sacct.

They are what a cluster's users have, with whatever is set up for them; there is no library that is older than the
cluster everywhere. What they refuse is known by its words, which have been the same for years (read with 22.05). What
is not known is passed on as it is.
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
"""For one answer; slurmctld itself gives up after 10 s or so."""


class SlurmError(UserError):
    """SLURM refused, or is away."""


class SlurmAwayError(SlurmError):
    """SLURM is away, or too busy; asked again it may answer."""


@dataclass(frozen=True)
class QueuedJob:
    """A job, or an element of an array, that is in the queue or runs."""

    id: str
    state: str
    """RUNNING, PENDING, COMPLETING and others, as squeue says it."""
    reason: str
    """Why it waits: one CamelCase word, or a few; `None` where it does not."""
    partition: str
    nodes: str
    """`n[0-1]`; empty while it has none."""
    start: str
    """When SLURM expects it to start, or when it did; `N/A` where it does not know."""

    @property
    def waits(self) -> bool:
        """Whether it has not started, or waits to be started again."""
        return self.state in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED")


_AWAY = (
    "SLURM does not answer: its controller is away, or this machine is no login node of the cluster. Try again later; "
    "`scontrol ping` shows whether it is up"
)
_ADVICE = tuple(
    (re.compile(pattern, re.IGNORECASE), advice)
    for pattern, advice in (
        (
            r"unable to contact slurm controller|slurm_load_\w+ error: .*(connection|controller)|connection refused|"
            r"socket timed out|communication .*(failure|error)|could not establish a configuration source|"
            r"resolve_ctls_from_dns_srv|\bis DOWN\b",
            _AWAY,
        ),
        (r"invalid partition", "there is no such partition here; `sinfo --summarize` lists those that there are"),
        (
            r"invalid account|account.*(expired|not permitted)",
            "the account of the profile is not valid in this partition, or has expired; `sacctmgr show assoc "
            "user=$USER` lists those that you may use",
        ),
        (r"invalid qos", "there is no such quality of service for this account and partition"),
        (
            r"invalid generic resource|invalid gres",
            "the nodes have no such GPUs; `sinfo --format='%P %G'` lists what they have",
        ),
        (r"invalid feature", "no node has this feature (--constraint); `sinfo --format='%P %f'` lists them"),
        (
            r"requested node configuration is not available|more processors requested|node count specification invalid",
            "no nodes of this partition have what the job asks for; compare its nodes, CPUs, GPUs and memory with "
            "`sinfo --format='%P %D %c %m %G'`",
        ),
        (r"time limit is invalid|exceeds.*time limit", "the time limit is longer than the partition allows"),
        (
            r"(assoc|qos)max\w+per(job|node)",
            "the job asks for more than your account or quality of service allows one job; `sacctmgr show assoc "
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
    "Resources": "all nodes that it could use are busy",
    "Priority": "jobs of higher priority are before it",
    "Dependency": "a job that it depends on has not started or ended",
    "DependencyNeverSatisfied": "a job that it depends on has failed, so it never starts",
    "BeginTime": "it may not start before its begin time",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition takes no jobs now",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows, so it never starts",
    "PartitionTimeLimit": "it asks for more time than the partition allows, so it never starts",
    "PartitionConfig": "it asks for what the partition does not allow, so it never starts",
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
    "JobArrayTaskLimit": "other elements of its array run",
    "Cleaning": "it is being cleaned up after its last start",
    "None": "SLURM has not looked at it yet",
}


def ask(*words: str, environment: Mapping[str, str] | None = None, seconds: float = SECONDS) -> str:
    """What one of SLURM's commands prints.

    Raises:
        SlurmError: it is not there, or refuses.
    """
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except FileNotFoundError:
        raise SlurmError(f"{words[0]} was not found; submit from a login node of a SLURM cluster") from None
    except OSError as error:
        raise SlurmError(f"{words[0]} cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise SlurmAwayError(f"SLURM does not answer: {words[0]} took over {seconds:.0f} s. Try again later") from None
    if done.returncode != 0:
        raise complaint(words[0], done.stderr.strip() or done.stdout)
    return done.stdout


def complaint(command: str, said: str) -> SlurmError:
    """The error for what a command of SLURM has said before it ended with one."""
    lines = [_NOISE.sub("", line.strip()) for line in said.splitlines() if line.strip()]
    words = printable("; ".join(dict.fromkeys(lines)))[:1000] or "it failed without an error message"
    for pattern, advice in _ADVICE:
        if pattern.search(said):
            kind = SlurmAwayError if advice is _AWAY else SlurmError
            return kind(f"{advice} ({command}: {words})")
    return SlurmError(f"{command}: {words}")


def check() -> None:
    """See whether the controller answers: sbatch would try again and again for minutes.

    Raises:
        SlurmError: it does not.
    """
    try:
        ask("scontrol", "ping")
    except SlurmError as error:
        # One of several controllers is enough.
        if " UP" not in str(error):
            raise


def queue(ids: Sequence[str]) -> list[QueuedJob]:
    """Those of these jobs that are in the queue or run.

    Raises:
        SlurmError: SLURM does not say.
    """
    fields = "%i|%T|%r|%P|%N|%S"
    found = []
    for one in ids:
        try:
            text = ask("squeue", "--noheader", "--jobs", one, "--format", fields)
        except SlurmError as error:
            # A job that has ended a while ago is forgotten.
            if "invalid job id" in str(error).lower():
                continue
            raise
        found += [_queued(line) for line in text.splitlines() if line.count("|") == fields.count("|")]
    return found


def _queued(line: str) -> QueuedJob:
    number, state, reason, partition, nodes, start = (printable(part.strip()) for part in line.split("|"))
    return QueuedJob(number, state, reason, partition, nodes, start)


def why(job: QueuedJob) -> str:
    """Why a job waits, as a sentence's end."""
    word = job.reason.partition(",")[0].strip("() ")
    known = REASONS.get(word)
    if known is None and re.match(r"(Assoc|QOS)Grp(?!\w*RunMinutes)\w*Minutes", word):
        known = "its account has no hours left, so it starts only if more are granted"
    if known is None and re.match(r"(Assoc|QOS)Max\w+Per(Job|Node)", word):
        known = "it asks for more than its account or quality of service allows one job, so it never starts"
    if known is None and re.match(r"(Assoc|QOS|MaxCpuPer|MaxMemPer)", word):
        known = "a limit of its account or quality of service is reached"
    said = f"{known} ({job.reason})" if known else job.reason
    # SLURM expects a start of such jobs, too: what it expects is when nodes are free.
    may_start = known is None or not re.search(r"never starts|only if", known)
    expected = may_start and job.start not in ("N/A", "")
    return f"{said}; SLURM expects it to start at {job.start.replace('T', ' ')}" if expected else said


def ended(job: str) -> str:
    """How a job that is not in the queue any more ended, as SLURM calls it: COMPLETED, CANCELLED, NODE_FAIL.

    Empty where neither the controller nor the accounting remembers it.
    """
    try:
        found = re.search(r"JobState=(\S+)", ask("scontrol", "--oneliner", "show", "job", job))
        if found:
            return printable(found[1])
    except SlurmError:
        pass
    try:
        text = ask("sacct", "--noheader", "--allocations", "--parsable2", "--jobs", job, "--format", "State")
    except SlurmError:
        return ""
    # It says who has cancelled a job, by number: `CANCELLED by 1000`.
    return printable(next(iter(text.split()), ""))


def nodes(job: str) -> list[str]:
    """Names of the nodes that a job has now.

    Raises:
        SlurmError: SLURM does not say.
    """
    found = re.search(r"(?<!\w)NodeList=(\S+)", ask("scontrol", "--oneliner", "show", "job", job))
    if found is None or found[1] == "(null)":
        return []
    return ask("scontrol", "show", "hostnames", found[1]).split()


def steps(job: str) -> dict[str, str]:
    """Names of the steps of a job, and the node of each.

    Raises:
        SlurmError: SLURM does not say.
    """
    text = ask("squeue", "--steps", "--noheader", "--jobs", job, "--format", "%j|%N")
    return dict(line.strip().split("|") for line in text.splitlines() if line.count("|") == 1)


def elements(array: str) -> dict[str, tuple[str, str]]:
    """The elements of an array that run: by their place, the number of their job, and its node.

    Raises:
        SlurmError: SLURM does not say.
    """
    if not array:
        return {}
    text = ask("squeue", "--noheader", "--jobs", array, "--states", "RUNNING", "--format", "%K|%A|%N")
    found = [line.strip().split("|") for line in text.splitlines() if line.count("|") == 2]
    return {place: (job, node) for place, job, node in found}


def batch_host(job: str) -> str:
    """The node of a job's batch script; empty where it has none.

    Raises:
        SlurmError: SLURM does not say.
    """
    found = re.search(r"BatchHost=(\S+)", ask("scontrol", "--oneliner", "show", "job", job))
    return found[1] if found else ""


def life(job: str) -> str:
    """Which life of a job it is, over all requeues; empty if it does not run.

    Raises:
        SlurmError: SLURM does not say.
    """
    try:
        shown = ask("scontrol", "--oneliner", "show", "job", job)
    except SlurmError as error:
        if "invalid job id" in str(error).lower():
            return ""
        raise
    state, restarts = re.search(r"JobState=(\S+)", shown), re.search(r"Restarts=(\d+)", shown)
    if state is None or state[1] not in ("RUNNING", "SUSPENDED"):
        return ""
    return restarts[1] if restarts else "0"


@dataclass(frozen=True)
class NodeState:
    """A node, as the controller sees it."""

    address: str
    """Where others reach it."""
    responds: bool
    """Whether steps can be started on it."""


def node(name: str) -> NodeState:
    """A node of the cluster.

    Raises:
        SlurmError: SLURM does not say.
    """
    text = ask("scontrol", "--oneliner", "show", "node", name)
    address, state = re.search(r"NodeAddr=(\S+)", text), re.search(r"(?<!\w)State=(\S+)", text)
    words = (state[1] if state else "").upper()
    down = "*" in words or any(word in words for word in ("DOWN", "NOT_RESPONDING", "POWERED", "FAIL"))
    return NodeState(address[1] if address else name, not down)


def submit(script: Path, options: Sequence[str], environment: Mapping[str, str]) -> str:
    """Give a script to SLURM, which copies it; returns the job's number.

    Raises:
        SlurmError: it is refused.
    """
    text = ask("sbatch", "--parsable", *options, str(script), environment=environment)
    # On a federation the cluster's name follows.
    return text.strip().splitlines()[-1].partition(";")[0]


def signal_batch(job: str, name: str) -> None:
    """Send a signal to the batch script of a job, and to nothing that it has started.

    Raises:
        SlurmError: it is refused.
    """
    ask("scancel", "--batch", f"--signal={name}", job)


def cancel(job: str) -> None:
    """End a job as SLURM does: SIGTERM to all its processes, SIGKILL after KillWait.

    Raises:
        SlurmError: it is refused.
    """
    ask("scancel", job)


class Throttle:
    """Limits how often something is done.

    Args:
        seconds: between two times, at least.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due = 0.0

    def is_due(self) -> bool:
        """Whether it is time. If it is, the interval begins again."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + self._seconds
        return True

    def hurry(self) -> None:
        """Make it due now."""
        self._due = 0.0
