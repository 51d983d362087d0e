"""The sbatch scripts of a job. Pure: a job, a profile and places become text.

What a manifest holds never becomes text of a shell: the scripts name the run directory, which holds the job, and
numbers. Words of the profile and paths are quoted. `#SBATCH` lines, which SLURM reads and no shell, hold only names
and numbers that were checked, and the options that the profile gives whole.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from tandem.formatting import printable, several
from tandem.job import DistributedTrainingJob
from tandem.launch import module_command
from tandem.pod_template import cpus
from tandem.supervision import SAVING_SECONDS
from tandem_cli.slurm.profile import Profile

LOGS = "logs"
"""Folder for what the batch scripts print, below the one that the job is submitted from. SLURM does not make it."""
EXTEND = "extend.sh"
"""The script, in the folder `slurm` of the run directory, that a running training submits for one more node."""
WHERE = {"partition": "partition", "account": "account", "qos": "quality of service"}
"""Options of sbatch that say where a job may run, and what they are called."""
AFTER_SAVING = 75
"""Seconds of the warning that remain for the coordinator, and for SLURM, which is not always quick."""
_ASKED = re.compile(rf"^#SBATCH --({'|'.join(WHERE)})[= ](\S+)", re.MULTILINE)
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
    workers, strategy = job.spec.workers, job.spec.trainer.settings_of_loop.strategy
    # One process uses all GPUs, or none uses any.
    is_for_ranks = strategy not in ("dp", "model", "hogwild")
    if not profile.gpus or workers.gpus or workers.processes_per_replica or not is_for_ranks:
        return []
    return [f"workers.processesPerReplica={profile.gpus}"]


def idle_gpus(job: DistributedTrainingJob, profile: Profile) -> str:
    """What to say of GPUs that the job is given and does not use; empty if it uses all. What a script uses is its own
    business."""
    strategy, ranks = job.spec.trainer.settings_of_loop.strategy, job.spec.workers.processes
    given = _gpus_of_node(job, profile)
    if given <= ranks or strategy in ("dp", "model") or job.spec.trainer.command is not None:
        return ""
    return (
        f"each node has {several(given, 'GPU')} and {several(ranks, 'rank')}, so {given - ranks} of its GPUs "
        f"stay idle; set workers.processesPerReplica to {given}, or take a profile with fewer gpus"
    )


def asked_for(text: str, variables: Mapping[str, str]) -> str:
    """The partition, account and quality of service that a script asks for, in words; empty where it names none.

    Args:
        variables: of who submits it: sbatch prefers those of its own to what the script says.
    """
    found = dict(_ASKED.findall(text))
    found |= {name: variables[f"SBATCH_{name.upper()}"] for name in WHERE if variables.get(f"SBATCH_{name.upper()}")}
    return ", ".join(f"{WHERE[name]} {printable(found[name])}" for name in WHERE if name in found)


def evaluates_apart(job: DistributedTrainingJob, profile: Profile) -> bool:
    """Whether the evaluators are a job of their own."""
    return profile.evaluators.partition is not None and job.spec.evaluation.processes > 0


def training(job: DistributedTrainingJob, profile: Profile, places: Places) -> str:
    """The script of the training: the head on the first node, and what it starts on all of them."""
    workers, name = job.spec.workers, job.metadata.name
    apart = evaluates_apart(job, profile)
    options = [
        f"--job-name={name}",
        f"--output={LOGS}/{name}_%j.out",
        "--open-mode=append",
        f"--nodes={workers.replicas}",
        *_node(job, profile),
        "--requeue",
        "--no-kill",
        f"--signal=B:TERM@{profile.warn_seconds}",
        *profile.sbatch,
    ]
    step = ["srun", "--nodes=1", "--ntasks=1", f"--cpus-per-task={_node_cores(job, profile)}"]
    step += ["--overlap", "--unbuffered", *_node_gpus(job, profile)]
    what = [] if apart or not job.spec.evaluation.processes else ["--evaluators"]
    what += [f"--metrics-targets={Path(profile.metrics_targets).expanduser()}"] if profile.metrics_targets else []
    what += ["--replace-nodes"] if profile.replace_nodes else []
    what += [f"--saving-seconds={saving}"] if (saving := profile.warn_seconds - AFTER_SAVING) > SAVING_SECONDS else []
    about = [
        f"Tandem: {name}, {several(workers.replicas, 'node')}.",
        f"SLURM does not make the folder {LOGS}; `tandem submit --slurm` does.",
    ]
    head = [
        "The head starts the coordinator on this node and, with the command after --, one agent on each node.",
        f"At SIGTERM, {profile.warn_seconds} s before the time limit, it has them save, and requeues the job.",
        "At SIGINT it has them save, and ends.",
    ]
    words = ["tandem_cli.slurm.head", "train", *what, *_container(profile)]
    return _script(about, options, profile, places, head, words, step)


def extension(job: DistributedTrainingJob, profile: Profile, places: Places) -> str:
    """The script of a job that gives the running training one more node."""
    name = job.metadata.name
    options = [
        f"--job-name={name}-node",
        f"--output={LOGS}/{name}-node_%j.out",
        "--nodes=1",
        *_node(job, profile),
        "--no-requeue",
        *profile.sbatch,
    ]
    about = [
        f"Tandem: one more node for {name} while it runs: for one that it lost, or after `tandem scale`.",
        "The training submits it. Where SLURM takes no jobs from compute nodes, submit it from a login node.",
    ]
    what = ["This keeps the node, on which the training starts an agent, and ends when the training does."]
    return _script(about, options, profile, places, what, ["tandem_cli.slurm.extension"], [])


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
    words = ["tandem_cli.slurm.head", "evaluate", *_container(profile)]
    return _script(about, options, profile, places, head, words, [])


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
    head_command = module_command(words[0], *words[1:], python=_python(profile, places))
    command = [head_command, ["--run-dir", str(places.run_dir)]]
    if places.manifest is not None:
        command.append(["--manifest", str(places.manifest)])
        command += [["--set", one] for one in places.overrides]
    parts = [*map(shlex.join, command), *([f"-- {shlex.join(step)}"] if step else [])]
    lines += ["", *(f"# {line}" for line in head), "exec " + " \\\n    ".join(parts)]
    return "\n".join(lines) + "\n"


def python_on_a_node(profile: Profile, places: Places) -> list[str]:
    """The words that start Python on a node as the script does: with modules, environment and container."""
    lines, python = list(_environment(profile)), _python(profile, places)
    words = [*profile.container, "python" if profile.container else python]
    return ["bash", "-c", "\n".join([*lines, 'exec "$@"']), "bash", *words] if lines else words


def _container(profile: Profile) -> list[str]:
    return [f"--container={word}" for word in profile.container]


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


def _node(job: DistributedTrainingJob, profile: Profile) -> list[str]:
    """What a job with nodes of the training asks for."""
    memory = profile.memory or _memory(job)
    return [
        "--ntasks-per-node=1",
        f"--cpus-per-task={_node_cores(job, profile)}",
        *([f"--mem={memory}"] if memory else []),
        *_node_gpus(job, profile),
        *_common(profile.partition, profile.account, profile.qos, profile.time),
    ]


def _node_cores(job: DistributedTrainingJob, profile: Profile) -> int:
    return profile.cpus or _cores(job) or _least_cores(job, evaluates_apart(job, profile))


def _node_gpus(job: DistributedTrainingJob, profile: Profile) -> list[str]:
    gpus = _gpus_of_node(job, profile)
    return [f"--gpus-per-node={_gpus(gpus, profile)}"] if gpus else []


def _gpus_of_node(job: DistributedTrainingJob, profile: Profile) -> int:
    if job.spec.trainer.settings_of_loop.strategy == "hogwild":
        return 0
    return job.spec.workers.gpus or profile.gpus or 0


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
