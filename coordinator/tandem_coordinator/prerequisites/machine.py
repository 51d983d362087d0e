"""The capacity of one machine: the memory and processes of a whole job, its GPUs, its ports; and whether it has MLflow.

Only what cannot work is refused. Ranks that share a core are slow and no mistake, so there is a warning.

Two, because the one before is deleted when the next one is whole. How large one is, is known of the built-in models.
"""

import os
import resource
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil

from tandem.architectures import elements, shapes
from tandem.distribution import install
from tandem.errors import Unmet
from tandem.formatting import size
from tandem.job import DistributedTrainingJob
from tandem.tasks import CLASSES, SYNTHETIC, SYNTHETIC_SIZE, ImageClassification, Loop
from tandem.tracking import database, tracking_uri
from tandem_coordinator.prerequisites.dataset import known
from tandem_coordinator.prerequisites.site import CONFIG, LOOP, Machine, Site, fault_of_folder, nearest_there

AGENT_BYTES, RANK_BYTES, EVALUATOR_BYTES = 64 * 2**20, 28 * 2**20, 96 * 2**20
"""What a process has for itself at least, beside what all share: an agent with its fork server, a rank, an evaluator of
the smallest built-in model (torch 2.15 on a CPU: 66, 29 and 360 MiB)."""
STARTER_BYTES = 24 * 2**20
"""Of an evaluator that starts a program of the user's, without the program: half of what was measured (49 MiB)."""
COLD_BYTES = 160 * 2**20
"""The same of an agent or a rank that imports torch by itself: half of what was measured (torch 2.15 for CUDA on a CPU:
304 and 387 MiB), for builds of torch differ."""
FLOAT = 4
"""Bytes."""
MAX_RANKS_ON_A_CORE = 4
"""More of them than this are probably not meant."""
LOOPBACK = "127.0.0.1"
"""Where the workers of a run on one machine reach each other."""
MAX_PORTS = 1_000
"""Of a range that are tried."""


def this_machine(cores: int, gpus: Sequence[str] | None) -> Machine:
    """What there is here.

    Args:
        cores: that the job may use.
        gpus: CUDA_VISIBLE_DEVICES of each replica; None: as it is.
    """
    has_gpu = None if gpus is None or any(gpus) else False
    if gpus is None and not _may_have_gpu():
        has_gpu = False
    return Machine(cores, _memory(), _processes(), has_gpu)


def machine(job: DistributedTrainingJob, site: Site) -> Iterator[Unmet]:
    """What this machine cannot carry of a job that is to run on it as a whole."""
    there = site.machine
    if there is None:
        return
    yield from _load(job, there)
    yield from _task(job, there, site)
    yield from _store_ports(job)


def _load(job: DistributedTrainingJob, there: Machine) -> Iterator[Unmet]:
    workers, evaluation = job.spec.workers, job.spec.evaluation
    ranks = workers.replicas * workers.processes
    field = ("spec", "workers", "replicas")
    what = f"{workers.replicas:,} replicas" + (f" of {workers.processes} processes" if workers.processes > 1 else "")
    if evaluation.processes > ranks:
        field = ("spec", "evaluators", "replicas")
        what = f"{evaluation.processes:,} evaluator processes"
    agent, rank = _training_bytes(job)
    evaluator = EVALUATOR_BYTES if evaluation.command is None else STARTER_BYTES
    needed = workers.replicas * agent + ranks * rank + evaluation.processes * evaluator
    processes = workers.replicas + ranks + evaluation.processes
    if there.memory is not None and needed > there.memory:
        message = f"{what} take {size(needed)} of memory at least, and this machine has "
        yield Unmet(field, f"{message}{size(there.memory)} on {_cores(there)}")
    elif there.processes is not None and processes > there.processes:
        message = f"{what} are {processes:,} processes, and there can be {there.processes:,} on this machine"
        yield Unmet(field, message)
    elif ranks > MAX_RANKS_ON_A_CORE * there.cores:
        yield Unmet(field, f"{ranks:,} training processes share {_cores(there)}; this is slow", fails=False)


def _training_bytes(job: DistributedTrainingJob) -> tuple[int, int]:
    """What an agent and a rank take at least. An agent always imports torch; whether a script of the user's own does is
    not known."""
    if job.spec.elasticity.warm_start:
        return AGENT_BYTES, RANK_BYTES
    return COLD_BYTES, RANK_BYTES if job.spec.trainer.task is None else COLD_BYTES


def _task(job: DistributedTrainingJob, there: Machine, site: Site) -> Iterator[Unmet]:
    if job.spec.trainer.task is None:
        return
    trainer = job.spec.trainer
    loop, place = trainer.settings_of_loop, CONFIG if trainer.is_built_in else LOOP
    if loop.precision == "float16" and there.has_gpu is False:
        message = "float16 needs a GPU, but training runs on CPUs here; use bfloat16 or float32"
        yield Unmet((*place, "precision"), message)
    if there.has_gpu is False:
        yield from _for_gpus(loop, place)
    data = trainer.settings.data
    if trainer.is_built_in and data.name == "synthetic" and there.memory is not None:
        pixels = (data.image_size or SYNTHETIC_SIZE) ** 2
        each = (data.samples or SYNTHETIC) * pixels * FLOAT
        ranks = job.spec.workers.replicas * job.spec.workers.processes
        if each * ranks > there.memory:
            much = f"{size(each)}" + (f" in each of {ranks:,} training processes" if ranks > 1 else "")
            message = f"the data takes {much}, and this machine has "
            field = (*CONFIG, "data", "samples" if data.samples else "imageSize")
            yield Unmet(field, f"{message}{size(there.memory)}")
    if loop.compile and there.has_gpu is False and not _has_compiler(site.variables or {}):
        message = "compile needs a C++ compiler (g++), and none is in the folders of PATH"
        yield Unmet((*place, "compile"), message)


def _for_gpus(loop: Loop, place: tuple[str, ...]) -> Iterator[Unmet]:
    """What has no effect on CPUs."""
    if loop.strategy in ("dp", "model"):
        message = f"{loop.strategy} is for several GPUs; training runs on CPUs here, as one rank with the whole model"
        yield Unmet((*place, "strategy"), message, fails=False)
    if loop.fsdp is not None and loop.fsdp.cpu_offload:
        yield Unmet((*place, "fsdp", "cpuOffload"), "cpuOffload has no effect: training runs on CPUs here", fails=False)
    if loop.sync_batch_norm:
        yield Unmet((*place, "syncBatchNorm"), "syncBatchNorm has no effect: training runs on CPUs here", fails=False)


def _store_ports(job: DistributedTrainingJob) -> Iterator[Unmet]:
    ports = job.spec.workers.store_ports
    if ports is None or ports.last - ports.first >= MAX_PORTS:
        return
    if not any(_is_free(port) for port in range(ports.first, ports.last + 1)):
        message = (
            f"none of the ports {ports.first} to {ports.last} is free on this machine; give others, or leave it out"
        )
        yield Unmet(("spec", "workers", "storePorts"), message)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _has_compiler(variables: Mapping[str, str]) -> bool:
    if variables.get("CXX"):
        return True
    return any(shutil.which(name, path=variables.get("PATH")) for name in ("g++", "c++", "clang++", "cl"))


def _may_have_gpu() -> bool:
    """Whether there is any sign of a GPU that torch may find, of any vendor."""
    if sys.platform == "darwin":
        return False
    signs = ("nvidia0", "nvidiactl", "kfd", "dxg", "dri")
    return sys.platform != "linux" or any(Path("/dev", sign).exists() for sign in signs) or bool(_nvidia_smi())


def _nvidia_smi() -> str | None:
    return shutil.which("nvidia-smi")


def _memory() -> int:
    """Bytes for all processes, swap included; a container's limit where it is smaller."""
    whole = psutil.virtual_memory().total
    limits = [whole]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limits.append(int(Path("/sys/fs/cgroup", name).read_text()))
    return min(limits) + psutil.swap_memory().total


def _processes() -> int | None:
    """How many processes there may be; None where nothing says it."""
    limits = []
    for path in ("/proc/sys/kernel/pid_max", "/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"):
        with suppress(OSError, ValueError):
            limits.append(int(Path(path).read_text()))
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() != 0 and most != resource.RLIM_INFINITY:
        limits.append(most)
    return min(limits, default=None)


def _cores(there: Machine) -> str:
    return f"{there.cores} core" + ("s" if there.cores > 1 else "")


STATES = {"adam": 2, "adamw": 2, "adamw8bit": 0.5, "muon": 1, "sgd": 1}
"""Numbers of four bytes that an optimizer keeps for each parameter, at least."""


def disk(job: DistributedTrainingJob, site: Site) -> Iterator[Unmet]:
    """What keeps the run directory from being written."""
    path = site.run_dir.path
    if fault := fault_of_folder(path):
        yield Unmet((), f"the run directory {path} cannot be written: {fault}")
        return
    if not job.spec.trainer.is_built_in or site.resumes:
        return
    pixels = known(job.spec.trainer.settings, site).image_size
    if pixels is None:
        return
    needed = 2 * checkpoint_bytes(
        job.spec.trainer.settings, pixels, job.spec.checkpoint.weights_precision == "bfloat16"
    )
    try:
        free = shutil.disk_usage(nearest_there(path)).free
    except OSError:
        return
    if free < needed:
        message = (
            f"two checkpoints need {size(needed)}, but only {size(free)} are free on the disk of the run directory "
            f"{path}; free some space, or use another folder"
        )
        yield Unmet((), message)


def checkpoint_bytes(settings: ImageClassification, image_size: int, halves: bool) -> int:
    """How large a checkpoint gets, at least.

    Args:
        halves: whether weights are written once more as bfloat16.
    """
    count = elements(shapes(settings.model, 1, image_size, CLASSES))
    states = STATES[settings.optimizer.name] if settings.optimizer.name != "sgd" or settings.optimizer.momentum else 0
    averages = 1 if settings.ema_decay is not None else 0
    return int(count * (FLOAT * (1 + states + averages) + (FLOAT // 2 if halves else 0)))


def tracking(job: DistributedTrainingJob, site: Site) -> Iterator[Unmet]:
    """Whether this machine can send to a job's server or store. Whether a server answers is not asked: it may later."""
    mlflow = job.spec.tracking.mlflow
    if mlflow is None or not site.is_here:
        return
    uri = tracking_uri(mlflow, site.run_dir.path, os.environ)
    is_local = uri is not None and database(uri) is not None
    if find_spec("mlflow") is None or (is_local and find_spec("sqlalchemy") is None):
        yield Unmet(("spec", "tracking", "mlflow"), f"mlflow is not installed here ({install('mlflow')})")
