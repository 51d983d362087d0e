"""What a SLURM cluster wants of every job, from the user's configuration: `~/.config/tandem/slurm.yaml`.

    default: gpu
    profiles:
      gpu:
        partition: gpu
        account: ml-group
        time: "24:00:00"
        modules: [cuda/12.4]
        venv: ~/envs/tandem

A profile is the user's own, so its options for sbatch are passed on. Each is one line all the same, and all that
reaches a shell is quoted.
"""

import os
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, ValidationError

from tandem.errors import UserError
from tandem.formatting import printable
from tandem.manifest.fields import nearest
from tandem.model import Model

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.,:=@+/%*\[\]()&|!-]+$", max_length=256)]
"""A value of an option of sbatch: no spaces, quotes or other signs of a shell."""
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=1024)]
"""One line of text."""
Limit = Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d{1,2}){0,2}$")]
"""A time as SLURM writes it: minutes, `HH:MM:SS`, or `D-HH:MM:SS`."""
Memory = Annotated[str, Field(pattern=r"^\d+[KMGT]?$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
SbatchOption = Annotated[str, Field(pattern=r"^--[a-z][^\x00-\x1f\x7f]*$", max_length=1024)]
Names = Annotated[list[Word], Field(max_length=64)]


class EvaluatorProfile(Model):
    """Where the evaluators run."""

    partition: Word | None = None
    """Partition of CPU nodes. The evaluators are then a job of their own there. Default: they run beside the training,
    on its nodes."""
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
    """What one SLURM cluster, or one part of it, wants of a job."""

    partition: Word | None = None
    """Partition of the training nodes. Default: the cluster's."""
    account: Word | None = None
    """Account that is charged."""
    qos: Word | None = None
    """Quality of service."""
    time: Limit | None = None
    """Time limit, for instance `24:00:00`. A job that reaches it saves, and waits in the queue again. Default: the
    partition's."""
    warn_seconds: Annotated[int, Field(ge=30, le=3600)] = 120
    """How long before the time limit, and before a preemption that announces itself, the job begins to save. A save may
    take 30 s; beyond 120 it gets the seconds that are more."""
    gpus: Annotated[int, Field(ge=0, le=64)] | None = None
    """GPUs of each node, where the manifest requests none in `workers.resources`. One rank uses each."""
    gpu_type: Word | None = None
    """Type of the GPUs as SLURM calls it, for instance `a100`."""
    cpus: Annotated[int, Field(ge=1)] | None = None
    """CPU cores of each node. Default: all ranks and the evaluators beside them get one each."""
    memory: Memory | None = None
    """Memory of each node, for instance `64G`. Default: the partition's."""
    modules: Names = []
    """Environment modules to load, in this order."""
    venv: Line | None = None
    """Folder of the virtual environment with Tandem, on the shared file system. Default: the one that submits."""
    container: Annotated[list[Line], Field(max_length=64)] = []
    """Words before the Python of agents and evaluators that put it into a container, for instance
    `[apptainer, exec, --nv, /shared/tandem.sif]`. Tandem without torch is needed outside of it, too."""
    env: Annotated[dict[VariableName, Line], Field(max_length=256)] = {}
    """Environment variables of all processes, for instance `NCCL_SOCKET_IFNAME`."""
    metrics_targets: Line | None = None
    """Folder in which Prometheus looks for files with targets (`file_sd_configs`). While the job runs, it has one
    there, and its metrics are served without a token. Default: none."""
    replace_nodes: bool = True
    """Whether a running job asks for a node in place of one that failed, and for those that `tandem scale` adds: by a
    job of its own with one node, which ends with it."""
    sbatch: Annotated[list[SbatchOption], Field(max_length=64)] = []
    """Further options of sbatch for the training, one each, for instance `--constraint=a100`."""
    evaluators: EvaluatorProfile = EvaluatorProfile()
    """Where the evaluators run."""


class Profiles(Model):
    """The file."""

    default: str | None = None
    """The profile that is used where none is named. Default: the only one."""
    profiles: dict[str, Profile] = {}


def file() -> Path:
    """Where the profiles are; the file need not be there."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "tandem" / "slurm.yaml"


def profile(name: str = "") -> Profile:
    """The profile of a name, or the default one; without a file the cluster's defaults.

    Raises:
        UserError: there is none of that name, or the file is wrong.
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
        found = Profiles.model_validate(content if content is not None else {})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {printable(place)}: {printable(first['msg'])}") from None
    names = list(found.profiles)
    wanted = name or found.default or (names[0] if len(names) == 1 else "")
    if not wanted and not names:
        return Profile()
    if not wanted:
        raise UserError(f"{path} has several profiles and no default; choose one with --profile: {', '.join(names)}")
    if wanted not in found.profiles:
        hint = f"; did you mean {near}?" if (near := nearest(wanted, names)) else ""
        raise UserError(f"{path} has no profile {printable(wanted)}; it has: {', '.join(names) or 'none'}{hint}")
    return found.profiles[wanted]
