"""Profiles of SLURM clusters: options of every job, from the user's configuration `~/.config/tandem/slurm.yaml`.

    default: gpu
    profiles:
      gpu:
        partition: gpu
        account: ml-group
        time: "24:00:00"
        modules: [cuda/12.4]
        venv: ~/envs/tandem

A profile belongs to the user, so its options for sbatch are passed on. Each must still be one line, and every value
that reaches a shell is quoted.
"""

import os
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, ValidationError

from tandem.errors import UserError
from tandem.formatting import printable
from tandem.job.manifest.fields import closest_choice
from tandem.model import Model

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.,:=@+/%*\[\]()&|!-]+$", max_length=256)]
"""Value of an option of sbatch, without spaces, quotes and other characters with a meaning to a shell."""
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=1024)]
"""One line of text."""
Limit = Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d{1,2}){0,2}$")]
"""Time as SLURM writes it: minutes, `HH:MM:SS`, or `D-HH:MM:SS`."""
Memory = Annotated[str, Field(pattern=r"^\d+[KMGT]?$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
SbatchOption = Annotated[str, Field(pattern=r"^--[a-z][^\x00-\x1f\x7f]*$", max_length=1024)]
Names = Annotated[list[Word], Field(max_length=64)]


class EvaluatorProfile(Model):
    """Options of the evaluators."""

    partition: Word | None = None
    """Partition of CPU nodes, in which the evaluators run as a job of their own. Default: they run on the nodes of the
    training."""
    account: Word | None = None
    """Account of the evaluators' job. Default: that of the training."""
    qos: Word | None = None
    """Quality of service of the evaluators' job."""
    time: Limit | None = None
    """Time limit of the evaluators' job. Default: that of the training."""
    cpus: Annotated[int, Field(ge=1)] | None = None
    """CPU cores of each evaluator replica. Default: one for each of its processes."""
    memory: Memory | None = None
    """Memory of each evaluator replica, for instance `8G`."""
    sbatch: Annotated[list[SbatchOption], Field(max_length=64)] = []
    """Further options of sbatch, one each."""


class Profile(Model):
    """Options of the jobs on one SLURM cluster, or on one part of it."""

    partition: Word | None = None
    """Partition of the training nodes. Default: the cluster's."""
    account: Word | None = None
    """Account that is charged."""
    qos: Word | None = None
    """Quality of service."""
    time: Limit | None = None
    """Time limit, for instance `24:00:00`. A job that reaches it saves and is requeued. Default: the
    partition's."""
    warn_seconds: Annotated[int, Field(ge=30, le=3600)] = 120
    """Seconds between the start of the last save and the time limit or an announced preemption. A save may take 30 s;
    each second above 120 extends that."""
    gpus: Annotated[int, Field(ge=0, le=64)] | None = None
    """GPUs of each node, where the manifest requests none in `workers.resources`. One rank uses each."""
    gpu_type: Word | None = None
    """Type of the GPUs as SLURM calls it, for instance `a100`."""
    cpus: Annotated[int, Field(ge=1)] | None = None
    """CPU cores of each node. Default: one for each rank and for each evaluator process on the node."""
    memory: Memory | None = None
    """Memory of each node, for instance `64G`. Default: the partition's."""
    modules: Names = []
    """Environment modules to load, in this order."""
    venv: Line | None = None
    """Folder of the virtual environment with Tandem, on the shared file system. Default: that of the submission."""
    container: Annotated[list[Line], Field(max_length=64)] = []
    """Command that runs the Python of agents and evaluators in a container, for instance
    `[apptainer, exec, --nv, /shared/tandem.sif]`. Tandem without torch must also be installed outside the container."""
    env: Annotated[dict[VariableName, Line], Field(max_length=256)] = {}
    """Environment variables of all processes, for instance `NCCL_SOCKET_IFNAME`."""
    metrics_targets: Line | None = None
    """Folder in which Prometheus looks for target files (`file_sd_configs`). A running job keeps one there and serves
    its metrics without a token. Default: none."""
    replace_nodes: bool = True
    """Whether a running job replaces a failed node, and adds nodes after `tandem scale`. Each comes with a one-node job
    that ends with the training."""
    sbatch: Annotated[list[SbatchOption], Field(max_length=64)] = []
    """Further options of sbatch for the training, one each, for instance `--constraint=a100`."""
    evaluators: EvaluatorProfile = EvaluatorProfile()
    """Options of the evaluators."""


class Profiles(Model):
    """Content of the configuration file."""

    default: str | None = None
    """Profile that is used if none is named. Default: the only one."""
    profiles: dict[str, Profile] = {}


def file() -> Path:
    """Return the path of the configuration file, which may not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "tandem" / "slurm.yaml"


def profile(name: str = "") -> Profile:
    """Read a profile by name, or the default one; without a file it is empty.

    Raises:
        UserError: there is no profile of this name, or the file is invalid.
    """
    path = file()
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        if name:
            raise UserError(f"there is no profile {name}: {path} is missing") from None
        return Profile()
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {printable(' '.join(str(error).split()))}") from error
    try:
        profiles = Profiles.model_validate(content if content is not None else {})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {printable(place)}: {printable(first['msg'])}") from None
    names = list(profiles.profiles)
    chosen = name or profiles.default or (names[0] if len(names) == 1 else "")
    if not chosen and not names:
        return Profile()
    if not chosen:
        raise UserError(f"{path} has several profiles and no default; choose one with --profile: {', '.join(names)}")
    if chosen not in profiles.profiles:
        hint = f"; did you mean {suggestion}?" if (suggestion := closest_choice(chosen, names)) else ""
        raise UserError(f"{path} has no profile {printable(chosen)}; it has: {', '.join(names) or 'none'}{hint}")
    return profiles.profiles[chosen]
