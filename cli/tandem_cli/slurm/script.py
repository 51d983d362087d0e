"""The sbatch scripts of a job. Pure: a job, a profile and places become text.

What a manifest holds never becomes text of a shell: the scripts name the run directory, which holds the job, and
numbers. Words of the profile and paths are quoted. `#SBATCH` lines, which SLURM reads and no shell, hold only names
and numbers that were checked, and the options that the profile gives whole.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from tandem.formatting import several
from tandem.job import DistributedTrainingJob
from tandem.pod_template import cpus
from tandem_cli.slurm.profile import Profile

LOGS = "logs"
"""Folder for what the batch scripts print, below the one that the job is submitted from. SLURM does not make it."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True)
class Places:
    """Where things are on the shared file system."""

    run_dir: Path
    """Absolute."""
    python: str
    """The Python that has Tandem, where the profile names no environment."""
    manifest: Path | None = None
    """The manifest, for a script that is submitted by hand; None: the job is recorded in the run directory."""
    overrides: Sequence[str] = ()
    """`--set`, for the manifest."""


def fitted(job: DistributedTrainingJob, profile: Profile) -> list[str]:
    """The overrides by which a job uses the GPUs of the profile, where its manifest requests none."""
    workers = job.spec.workers
    if not profile.gpus or workers.gpus or workers.processes_per_replica:
        return []
    return [f"workers.processesPerReplica={profile.gpus}"]


def evaluates_apart(job: DistributedTrainingJob, profile: Profile) -> bool:
    """Whether the evaluators are a job of their own."""
    return profile.evaluators.partition is not None and job.spec.evaluation.processes > 0


def training(job: DistributedTrainingJob, profile: Profile, places: Places) -> str:
    """The script of the training: the head on the first node, and what it starts on all of them."""
    workers, name = job.spec.workers, job.metadata.name
    apart = evaluates_apart(job, profile)
    gpus = workers.gpus or profile.gpus or 0
    cpus = profile.cpus or _cores(job) or _least_cores(job, apart)
    memory = profile.memory or _memory(job)
    options = [
        f"--job-name={name}",
        f"--output={LOGS}/{name}_%j.out",
        "--open-mode=append",
        f"--nodes={workers.replicas}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}",
        *([f"--mem={memory}"] if memory else []),
        *([f"--gpus-per-node={_gpus(gpus, profile)}"] if gpus else []),
        *_common(profile.partition, profile.account, profile.qos, profile.time),
        "--requeue",
        "--no-kill",
        f"--signal=B:TERM@{profile.warn_seconds}",
        *profile.sbatch,
    ]
    step = ["srun", "--nodes=1", "--ntasks=1", f"--cpus-per-task={cpus}", "--overlap", "--unbuffered"]
    step += [f"--gpus-per-node={_gpus(gpus, profile)}"] if gpus else []
    what = [] if apart or not job.spec.evaluation.processes else ["--evaluators"]
    what += [f"--metrics-targets={Path(profile.metrics_targets).expanduser()}"] if profile.metrics_targets else []
    about = [
        f"Tandem: {name}, {several(workers.replicas, 'node')}.",
        f"SLURM does not make the folder {LOGS}; `tandem submit --slurm` does.",
    ]
    head = [
        "The head starts the coordinator on this node and, with the command after --, one agent on each node.",
        f"At SIGTERM, {profile.warn_seconds} s before the time limit, it has them save, and puts the job into the",
        "queue again. At SIGINT it has them save, and ends.",
    ]
    return _script(about, options, profile, places, head, ["train", *what], step)


def evaluation(job: DistributedTrainingJob, profile: Profile, places: Places) -> str:
    """The script of the evaluators, an array with one element for each replica."""
    own, evaluators, name = profile.evaluators, job.spec.evaluation, job.metadata.name
    options = [
        f"--job-name={name}-evaluators",
        f"--output={LOGS}/{name}-evaluators_%A_%a.out",
        "--open-mode=append",
        f"--array=0-{evaluators.replicas - 1}",
        "--ntasks=1",
        f"--cpus-per-task={own.cpus or evaluators.processes_per_replica}",
        *([f"--mem={own.memory}"] if own.memory else []),
        *_common(own.partition, own.account or profile.account, own.qos, own.time or profile.time),
        "--requeue",
        f"--signal=B:TERM@{profile.warn_seconds}",
        *own.sbatch,
    ]
    about = [f"Tandem: evaluators of {name}."]
    head = ["The head starts the evaluators on this node. They end when training is over and all is evaluated."]
    return _script(about, options, profile, places, head, ["evaluate"], [])


def _script(
    about: list[str],
    options: list[str],
    profile: Profile,
    places: Places,
    head: list[str],
    words: list[str],
    step: list[str],
) -> str:
    lines = ["#!/bin/bash", *(f"# {line}" for line in about), *(f"#SBATCH {option}" for option in options), ""]
    lines += list(_environment(profile))
    command = [_python(profile, places), "-m", "tandem_cli.slurm.head", *words, "--run-dir", str(places.run_dir)]
    if places.manifest is not None:
        command += ["--manifest", str(places.manifest)]
        command += [word for one in places.overrides for word in ("--set", one)]
    command += [f"--container={word}" for word in profile.container]
    parts = [shlex.join(command), *([f"-- {shlex.join(step)}"] if step else [])]
    lines += ["", *(f"# {line}" for line in head), "exec " + " \\\n    ".join(parts)]
    return "\n".join(lines) + "\n"


def python_on_a_node(profile: Profile, places: Places) -> list[str]:
    """The words that start Python on a node as the script does: with modules, environment and container."""
    lines, python = list(_environment(profile)), _python(profile, places)
    words = [*profile.container, "python" if profile.container else python]
    return ["bash", "-c", "\n".join([*lines, 'exec "$@"']), "bash", *words] if lines else words


def _python(profile: Profile, places: Places) -> str:
    venv = None if profile.venv is None else Path(profile.venv).expanduser()
    return places.python if venv is None else str(venv / "bin" / "python")


def _environment(profile: Profile) -> Iterator[str]:
    if profile.modules:
        yield f"module load {shlex.join(profile.modules)}"
    if profile.venv is not None:
        yield f"source {shlex.quote(str(Path(profile.venv).expanduser() / 'bin' / 'activate'))}"
    for name, value in profile.env.items():
        yield f"export {name}={shlex.quote(value)}"


def _common(partition: str | None, account: str | None, qos: str | None, time: str | None) -> list[str]:
    given = {"partition": partition, "account": account, "qos": qos, "time": time}
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def _gpus(count: int, profile: Profile) -> str:
    return f"{profile.gpu_type}:{count}" if profile.gpu_type else str(count)


def _least_cores(job: DistributedTrainingJob, apart: bool) -> int:
    evaluators = job.spec.evaluation
    beside = 0 if apart else -(-evaluators.processes // job.spec.workers.replicas)
    return job.spec.workers.processes + beside


def _cores(job: DistributedTrainingJob) -> int | None:
    asked = cpus(job.spec.workers.asked)
    return None if asked is None else max(1, ceil(asked))


def _memory(job: DistributedTrainingJob) -> str:
    """In MiB, as SLURM counts; empty where the job does not say."""
    asked = job.spec.workers.asked
    text = str(asked["requests"].get("memory", asked["limits"].get("memory", "")))
    number = text.rstrip("iKMGT")
    unit = _UNITS.get(text[len(number) :])
    if unit is None or not number.replace(".", "", 1).isdecimal():
        return ""
    return f"{max(1, ceil(float(number) * unit / 2**20))}M"
