"""Builds the sbatch scripts of a job from the job, a profile and paths; pure.

No value of a manifest becomes shell code: the scripts contain the path of the run directory, which holds the job, and
numbers. Values of the profile and paths are quoted. `#SBATCH` lines, which only SLURM reads, contain validated names
and numbers, and the profile's own options.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from tandem.formatting import count_noun, printable
from tandem.job.pod_template import cpus
from tandem.job.resource import DistributedTrainingJob
from tandem.processes.launch import module_command
from tandem.processes.supervision import SAVING_SECONDS
from tandem_launcher.slurm.profile import Profile

LOGS = "logs"
"""Folder for the output of batch scripts, in the working directory of the submission. SLURM does not create it."""
EXTEND = "extend.sh"
"""Script in the folder `slurm` of the run directory that a running training submits for one more node."""
PLACEMENT_OPTIONS = {"partition": "partition", "account": "account", "qos": "quality of service"}
"""Options of sbatch that select where a job runs, and their names in messages."""
AFTER_SAVING = 75
"""Part of the warning time that is left for the coordinator and for a slow SLURM, in seconds."""
_PLACEMENT = re.compile(rf"^#SBATCH --({'|'.join(PLACEMENT_OPTIONS)})[= ](\S+)", re.MULTILINE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True)
class ScriptPaths:
    """Paths on the shared file system."""

    run_dir: Path
    """The run directory, absolute."""
    python: str
    """Python with Tandem, used if the profile names no virtual environment."""
    manifest: Path | None = None
    """Manifest, for a script that is submitted by hand; None: the run directory records the job."""
    overrides: Sequence[str] = ()
    """Values of `--set` for the manifest."""


def fitted_overrides(job: DistributedTrainingJob, profile: Profile) -> list[str]:
    """Return the overrides with which a job uses the profile's GPUs, if its manifest requests none."""
    workers, strategy = job.spec.workers, job.spec.trainer.settings_of_loop.strategy
    # With these strategies one process uses all GPUs, or none uses any.
    is_for_ranks = strategy not in ("dp", "model", "hogwild")
    if not profile.gpus or workers.gpus or workers.processes_per_replica or not is_for_ranks:
        return []
    return [f"workers.processesPerReplica={profile.gpus}"]


def describe_idle_gpus(job: DistributedTrainingJob, profile: Profile) -> str:
    """Describe allocated GPUs that the job does not use; empty if it uses all, or runs a user's script."""
    strategy, ranks = job.spec.trainer.settings_of_loop.strategy, job.spec.workers.processes
    allocated = _gpus_of_node(job, profile)
    if allocated <= ranks or strategy in ("dp", "model") or job.spec.trainer.command is not None:
        return ""
    return (
        f"each node has {count_noun(allocated, 'GPU')} and {count_noun(ranks, 'rank')}, so {allocated - ranks} of "
        f"its GPUs "
        f"stay idle; set workers.processesPerReplica to {allocated}, or take a profile with fewer gpus"
    )


def describe_placement(text: str, variables: Mapping[str, str]) -> str:
    """Describe the partition, account and quality of service of a script; empty if it names none.

    Args:
        variables: environment of the submission: sbatch prefers its own variables to the script.
    """
    options = dict(_PLACEMENT.findall(text))
    options |= {
        name: variables[f"SBATCH_{name.upper()}"]
        for name in PLACEMENT_OPTIONS
        if variables.get(f"SBATCH_{name.upper()}")
    }
    return ", ".join(
        f"{PLACEMENT_OPTIONS[name]} {printable(options[name])}" for name in PLACEMENT_OPTIONS if name in options
    )


def has_evaluation_job(job: DistributedTrainingJob, profile: Profile) -> bool:
    """Whether the evaluators run in a job of their own."""
    return profile.evaluators.partition is not None and job.spec.evaluation.processes > 0


def training(job: DistributedTrainingJob, profile: Profile, paths: ScriptPaths) -> str:
    """Build the script of the training: the head on the first node starts processes on all nodes."""
    workers, name = job.spec.workers, job.metadata.name
    separate = has_evaluation_job(job, profile)
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
    flags = [] if separate or not job.spec.evaluation.processes else ["--evaluators"]
    flags += [f"--metrics-targets={Path(profile.metrics_targets).expanduser()}"] if profile.metrics_targets else []
    flags += ["--replace-nodes"] if profile.replace_nodes else []
    flags += [f"--saving-seconds={saving}"] if (saving := profile.warn_seconds - AFTER_SAVING) > SAVING_SECONDS else []
    about = [
        f"Tandem: {name}, {count_noun(workers.replicas, 'node')}.",
        f"SLURM does not create the folder {LOGS}; `tandem submit --slurm` does.",
    ]
    head = [
        "The head starts the coordinator on this node and, with the command after --, one agent on each node.",
        f"At SIGTERM, {profile.warn_seconds} s before the time limit, they save, and the head requeues the job.",
        "At SIGINT they save, and the head ends.",
    ]
    args = ["tandem_launcher.slurm.head", "train", *flags, *_container(profile)]
    return _script(about, options, profile, paths, head, args, step)


def extension(job: DistributedTrainingJob, profile: Profile, paths: ScriptPaths) -> str:
    """Build the script of a job that adds a node to the running training."""
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
        f"Tandem: one more node for {name} while it runs, in place of a lost one or after `tandem scale`.",
        "The training submits it. If SLURM accepts no jobs from compute nodes, submit it from a login node.",
    ]
    comment = ["This holds the node, on which the training starts an agent, and ends when the training does."]
    return _script(about, options, profile, paths, comment, ["tandem_launcher.slurm.extension"], [])


def evaluation(job: DistributedTrainingJob, profile: Profile, paths: ScriptPaths) -> str:
    """Build the script of the evaluators, an array with one element for each replica."""
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
    head = ["The head starts the evaluators on this node. They end when all checkpoints of the training are evaluated."]
    args = ["tandem_launcher.slurm.head", "evaluate", *_container(profile)]
    return _script(about, options, profile, paths, head, args, [])


def _script(
    about: list[str],
    options: list[str],
    profile: Profile,
    paths: ScriptPaths,
    head: list[str],
    args: list[str],
    step: list[str],
) -> str:
    lines = ["#!/bin/bash", *(f"# {line}" for line in about), *(f"#SBATCH {option}" for option in options), ""]
    lines += list(_environment(profile))
    head_command = module_command(args[0], *args[1:], python=_python(profile, paths))
    command = [head_command, ["--run-dir", str(paths.run_dir)]]
    if paths.manifest is not None:
        command.append(["--manifest", str(paths.manifest)])
        command += [["--set", override] for override in paths.overrides]
    parts = [*map(shlex.join, command), *([f"-- {shlex.join(step)}"] if step else [])]
    lines += ["", *(f"# {line}" for line in head), "exec " + " \\\n    ".join(parts)]
    return "\n".join(lines) + "\n"


def python_on_a_node(profile: Profile, paths: ScriptPaths) -> list[str]:
    """Return the command that starts Python on a node as the script does: with modules, environment and container."""
    lines, python = list(_environment(profile)), _python(profile, paths)
    command = [*profile.container, "python" if profile.container else python]
    return ["bash", "-c", "\n".join([*lines, 'exec "$@"']), "bash", *command] if lines else command


def _container(profile: Profile) -> list[str]:
    return [f"--container={word}" for word in profile.container]


def _python(profile: Profile, paths: ScriptPaths) -> str:
    venv = None if profile.venv is None else Path(profile.venv).expanduser()
    return paths.python if venv is None else str(venv / "bin" / "python")


def _environment(profile: Profile) -> Iterator[str]:
    if profile.modules:
        yield f"module load {shlex.join(profile.modules)}"
    if profile.venv is not None:
        yield f"source {shlex.quote(str(Path(profile.venv).expanduser() / 'bin' / 'activate'))}"
    for name, value in profile.env.items():
        yield f"export {name}={shlex.quote(value)}"


def _node(job: DistributedTrainingJob, profile: Profile) -> list[str]:
    """Return the options of a job with nodes of the training."""
    memory = profile.memory or _memory(job)
    return [
        "--ntasks-per-node=1",
        f"--cpus-per-task={_node_cores(job, profile)}",
        *([f"--mem={memory}"] if memory else []),
        *_node_gpus(job, profile),
        *_common(profile.partition, profile.account, profile.qos, profile.time),
    ]


def _node_cores(job: DistributedTrainingJob, profile: Profile) -> int:
    return profile.cpus or _cores(job) or _min_cores(job, has_evaluation_job(job, profile))


def _node_gpus(job: DistributedTrainingJob, profile: Profile) -> list[str]:
    gpus = _gpus_of_node(job, profile)
    return [f"--gpus-per-node={_gpus(gpus, profile)}"] if gpus else []


def _gpus_of_node(job: DistributedTrainingJob, profile: Profile) -> int:
    if job.spec.trainer.settings_of_loop.strategy == "hogwild":
        return 0
    return job.spec.workers.gpus or profile.gpus or 0


def _common(partition: str | None, account: str | None, qos: str | None, time: str | None) -> list[str]:
    options = {"partition": partition, "account": account, "qos": qos, "time": time}
    return [f"--{name}={value}" for name, value in options.items() if value is not None]


def _gpus(count: int, profile: Profile) -> str:
    return f"{profile.gpu_type}:{count}" if profile.gpu_type else str(count)


def _min_cores(job: DistributedTrainingJob, separate: bool) -> int:
    evaluators = job.spec.evaluation
    shared = 0 if separate else -(-evaluators.processes // job.spec.workers.replicas)
    return job.spec.workers.processes + shared


def _cores(job: DistributedTrainingJob) -> int | None:
    requested = cpus(job.spec.workers.asked)
    return None if requested is None else max(1, ceil(requested))


def _memory(job: DistributedTrainingJob) -> str:
    """Return the requested memory in MiB, as SLURM counts; empty if the job requests none."""
    resources = job.spec.workers.asked
    text = str(resources["requests"].get("memory", resources["limits"].get("memory", "")))
    number = text.rstrip("iKMGT")
    unit = _UNITS.get(text[len(number) :])
    if unit is None or not number.replace(".", "", 1).isdecimal():
        return ""
    return f"{max(1, ceil(float(number) * unit / 2**20))}M"
