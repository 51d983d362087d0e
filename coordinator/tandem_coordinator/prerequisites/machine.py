"""The capacity of one machine: the memory and processes of a whole job, its GPUs, its ports, its disk; and whether
MLflow is installed.

Only what cannot work is refused. Ranks that share a core are slow, which is no mistake, so there is a warning.

The disk needs room for two checkpoints, because the previous one is deleted when the next one is complete. Their size
is known for the built-in models.
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

from tandem.errors import UnmetRequirement
from tandem.formatting import size
from tandem.job.architectures import element_count, shapes
from tandem.job.manifest.fields import LOOP, PARAMETERS
from tandem.job.resource import DistributedTrainingJob
from tandem.job.tasks import CLASSES, SYNTHETIC, SYNTHETIC_SIZE, Loop
from tandem.job.tracking import database, tracking_uri
from tandem.job.trainer import Trainer
from tandem.processes.distribution import install_command
from tandem.processes.limits import memory_limit, process_limit
from tandem_coordinator.prerequisites.dataset import training_data
from tandem_coordinator.prerequisites.site import Machine, Site, fault_of_folder, nearest_existing

AGENT_BYTES, RANK_BYTES, EVALUATOR_BYTES = 64 * 2**20, 28 * 2**20, 96 * 2**20
"""Minimum private memory of a process, in addition to what all share: an agent with its fork server, a rank, an
evaluator of the smallest built-in model (torch 2.15 on a CPU: 66, 29 and 360 MiB)."""
STARTER_BYTES = 24 * 2**20
"""Minimum private memory of an evaluator that starts a user's program, without the program: half of the measured 49
MiB."""
COLD_PROCESS_BYTES = 160 * 2**20
"""Minimum private memory of an agent or a rank that imports torch itself: half of what was measured (torch 2.15 for
CUDA on a CPU: 304 and 387 MiB), because builds of torch differ."""
FLOAT_BYTES = 4
"""Size of a float32, in bytes."""
MIN_OPEN_FILES = 32
"""Minimum number of files that a process may open: with 24, agents of two replicas cannot start their ranks."""
MIN_ADDRESS_SPACE = 3 * 2**30
"""Address space below which torch is probably not imported (torch 2.15 for CUDA on a CPU: between 3.1 and 4.1 GB). It
is a warning, because builds of torch differ."""
MAX_RANKS_PER_CORE = 4
"""Maximum number of ranks per core without a warning: more are probably a mistake."""
LOOPBACK = "127.0.0.1"
"""Address at which the workers of a run on one machine reach each other."""
MAX_PROBED_PORTS = 1_000
"""Maximum number of ports of a range that are probed."""


def this_machine(cores: int, gpus: Sequence[str] | None) -> Machine:
    """Determine the capacity of this machine.

    Args:
        cores: that the job may use.
        gpus: CUDA_VISIBLE_DEVICES of each replica; None: as it is.
    """
    has_gpu = None if gpus is None or any(gpus) else False
    if gpus is None and not _may_have_gpu():
        has_gpu = False
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Machine(
        cores,
        _memory(),
        _processes(),
        has_gpu,
        # A process may raise its own limit up to the hard one, and `tandem run` does.
        open_files=None if open_files == resource.RLIM_INFINITY else open_files,
        address_space=None if address_space == resource.RLIM_INFINITY else address_space,
    )


def machine(job: DistributedTrainingJob, site: Site) -> Iterator[UnmetRequirement]:
    """Check that this machine can run the whole job."""
    host = site.machine
    if host is None:
        return
    yield from _limits(host)
    yield from _load(job, host)
    yield from _task(job, host, site)
    yield from _store_ports(job)


def _limits(host: Machine) -> Iterator[UnmetRequirement]:
    """Check the limits of each process (ulimit) with which no process of a job starts."""
    if host.open_files is not None and host.open_files < MIN_OPEN_FILES:
        message = (
            f"a process may open {host.open_files:,} files, and needs {MIN_OPEN_FILES}; this is the hard limit "
            "(ulimit -Hn), which only root can raise"
        )
        yield UnmetRequirement((), message)
    if host.address_space is not None and host.address_space < MIN_ADDRESS_SPACE:
        message = (
            f"a process may use {size(host.address_space)} of address space, and torch alone needs about "
            f"{size(MIN_ADDRESS_SPACE)}; lift the limit with ulimit -v unlimited"
        )
        yield UnmetRequirement((), message, fails=False)


def _load(job: DistributedTrainingJob, host: Machine) -> Iterator[UnmetRequirement]:
    workers, evaluation = job.spec.workers, job.spec.evaluation
    ranks = workers.replicas * workers.processes
    field = ("spec", "workers", "replicas")
    load = f"{workers.replicas:,} replicas" + (f" of {workers.processes} processes" if workers.processes > 1 else "")
    if evaluation.processes > ranks:
        field = ("spec", "evaluators", "replicas")
        load = f"{evaluation.processes:,} evaluator processes"
    agent, rank = _training_bytes(job)
    evaluator = EVALUATOR_BYTES if evaluation.command is None else STARTER_BYTES
    needed = workers.replicas * agent + ranks * rank + evaluation.processes * evaluator
    processes = workers.replicas + ranks + evaluation.processes
    if host.memory is not None and needed > host.memory:
        message = f"{load} take {size(needed)} of memory at least, and this machine has "
        yield UnmetRequirement(field, f"{message}{size(host.memory)} on {_cores(host)}")
    elif host.processes is not None and processes > host.processes:
        message = f"{load} are {processes:,} processes, and there can be {host.processes:,} on this machine"
        yield UnmetRequirement(field, message)
    elif ranks > MAX_RANKS_PER_CORE * host.cores:
        yield UnmetRequirement(field, f"{ranks:,} training processes share {_cores(host)}; this is slow", fails=False)


def _training_bytes(job: DistributedTrainingJob) -> tuple[int, int]:
    """The minimum memory of an agent and of a rank, in bytes. An agent always imports torch; whether a user's own
    script does is unknown."""
    if job.spec.elasticity.warm_start:
        return AGENT_BYTES, RANK_BYTES
    return COLD_PROCESS_BYTES, RANK_BYTES if job.spec.trainer.task is None else COLD_PROCESS_BYTES


def _task(job: DistributedTrainingJob, host: Machine, site: Site) -> Iterator[UnmetRequirement]:
    if job.spec.trainer.task is None:
        return
    trainer = job.spec.trainer
    loop = trainer.settings_of_loop
    if loop.precision == "float16" and host.has_gpu is False:
        message = "float16 needs a GPU, but training runs on CPUs here; use bfloat16 or float32"
        yield UnmetRequirement((*LOOP, "precision"), message)
    if host.has_gpu is False:
        yield from _gpu_settings(loop)
    data = trainer.images.data if trainer.is_built_in else None
    if data is not None and data.name == "synthetic" and host.memory is not None:
        pixels = (data.image_size or SYNTHETIC_SIZE) ** 2
        dataset_bytes = (data.samples or SYNTHETIC) * pixels * FLOAT_BYTES
        ranks = job.spec.workers.replicas * job.spec.workers.processes
        if dataset_bytes * ranks > host.memory:
            amount = f"{size(dataset_bytes)}" + (f" in each of {ranks:,} training processes" if ranks > 1 else "")
            message = f"the data takes {amount}, and this machine has "
            field = (*PARAMETERS, "data", "samples" if data.samples else "imageSize")
            yield UnmetRequirement(field, f"{message}{size(host.memory)}")
    if loop.compile and host.has_gpu is False and not _has_compiler(site.variables or {}):
        message = "compile needs a C++ compiler (g++), and none is in the folders of PATH"
        yield UnmetRequirement((*LOOP, "compile"), message)


def _gpu_settings(loop: Loop) -> Iterator[UnmetRequirement]:
    """Find settings that have no effect on CPUs."""
    if loop.strategy in ("dp", "model"):
        message = f"{loop.strategy} is for several GPUs; training runs on CPUs here, as one rank with the whole model"
        yield UnmetRequirement((*LOOP, "strategy"), message, fails=False)
    if loop.fsdp is not None and loop.fsdp.cpu_offload:
        yield UnmetRequirement(
            (*LOOP, "fsdp", "cpuOffload"), "cpuOffload has no effect: training runs on CPUs here", fails=False
        )
    if loop.sync_batch_norm:
        yield UnmetRequirement(
            (*LOOP, "syncBatchNorm"), "syncBatchNorm has no effect: training runs on CPUs here", fails=False
        )


def _store_ports(job: DistributedTrainingJob) -> Iterator[UnmetRequirement]:
    ports = job.spec.workers.store_ports
    if ports is None or ports.last - ports.first >= MAX_PROBED_PORTS:
        return
    if not any(_is_free(port) for port in range(ports.first, ports.last + 1)):
        message = (
            f"none of the ports {ports.first} to {ports.last} is free on this machine; give others, or leave it out"
        )
        yield UnmetRequirement(("spec", "workers", "storePorts"), message)


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
    """Whether there is any sign of a GPU, of any vendor, that torch may find."""
    if sys.platform == "darwin":
        return False
    signs = ("nvidia0", "nvidiactl", "kfd", "dxg", "dri")
    return sys.platform != "linux" or any(Path("/dev", sign).exists() for sign in signs) or bool(_nvidia_smi())


def _nvidia_smi() -> str | None:
    return shutil.which("nvidia-smi")


def _memory() -> int:
    """Memory for all processes in bytes, swap included; a container's limit if it is smaller."""
    total = psutil.virtual_memory().total
    return min(total, memory_limit() or total) + psutil.swap_memory().total


def _processes() -> int | None:
    """Maximum number of processes; None if there is no limit."""
    limits = [] if (limit := process_limit()) is None else [limit]
    with suppress(OSError, ValueError):
        limits.append(int(Path("/proc/sys/kernel/pid_max").read_text()))
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() != 0 and soft_limit != resource.RLIM_INFINITY:
        limits.append(soft_limit)
    return min(limits, default=None)


def _cores(host: Machine) -> str:
    return f"{host.cores} core" + ("s" if host.cores > 1 else "")


OPTIMIZER_STATES = {"adam": 2, "adamw": 2, "adamw8bit": 0.5, "muon": 1, "sgd": 1}
"""Minimum number of float32 values that an optimizer keeps for each parameter."""


def disk(job: DistributedTrainingJob, site: Site) -> Iterator[UnmetRequirement]:
    """Check that the run directory can be written, and has room for checkpoints."""
    path = site.run_dir.path
    if fault := fault_of_folder(path):
        yield UnmetRequirement((), f"the run directory {path} cannot be written: {fault}")
        return
    if not job.spec.trainer.is_built_in or site.resumes:
        return
    pixels = training_data(job.spec.trainer.images, site).image_size
    if pixels is None:
        return
    needed = 2 * checkpoint_bytes(job.spec.trainer, pixels, job.spec.checkpoint.weights_precision == "bfloat16")
    try:
        free = shutil.disk_usage(nearest_existing(path)).free
    except OSError:
        return
    if free < needed:
        message = (
            f"two checkpoints need {size(needed)}, but only {size(free)} are free on the disk of the run directory "
            f"{path}; free some space, or use another folder"
        )
        yield UnmetRequirement((), message)


def checkpoint_bytes(trainer: Trainer, image_size: int, has_bfloat16_copy: bool) -> int:
    """The minimum size of a checkpoint of an image classifier, in bytes.

    Args:
        has_bfloat16_copy: whether weights are written once more as bfloat16.
    """
    loop = trainer.settings_of_loop
    count = element_count(shapes(trainer.images.model, 1, image_size, CLASSES))
    states = OPTIMIZER_STATES[loop.optimizer.name] if loop.optimizer.name != "sgd" or loop.optimizer.momentum else 0
    averages = 1 if loop.ema_decay is not None else 0
    return int(count * (FLOAT_BYTES * (1 + states + averages) + (FLOAT_BYTES // 2 if has_bfloat16_copy else 0)))


def tracking(job: DistributedTrainingJob, site: Site) -> Iterator[UnmetRequirement]:
    """Check that this machine can send to a job's server or store. The server itself is not probed: it may answer
    later."""
    mlflow = job.spec.tracking.mlflow
    if mlflow is None or not site.is_here:
        return
    uri = tracking_uri(mlflow, site.run_dir.path, os.environ)
    is_local = uri is not None and database(uri) is not None
    if find_spec("mlflow") is None or (is_local and find_spec("sqlalchemy") is None):
        yield UnmetRequirement(
            ("spec", "tracking", "mlflow"), f"mlflow is not installed here ({install_command('mlflow')})"
        )
