"""CPU placement of the child processes: threads of ranks, and with `--pin` separate cores for trainers and evaluators.

Without `--pin` the kernel places all processes, and evaluators run in the idle class, on what ranks leave free.

With `--pin` (Linux) the cores this process may use are split once. Evaluators get one core for each of their processes
as long as every rank keeps at least one of its own, and never fewer than one; ranks share the rest evenly, and cores
that do not divide evenly stay free. Hardware threads of one core stay adjacent, so the two sides
share at most one physical core. The coordinator and `tandem run` itself move to the evaluators' cores.

    2 cores, 1 rank, 2 evaluators     the rank has core 0, both evaluators core 1
    8 cores, 2 ranks, 2 evaluators    each rank has 3, the evaluators have 2
"""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import UserError
from tandem.formatting import count_noun
from tandem.job.resource import DistributedTrainingJob

Cores = tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """CPU cores and thread counts of all children."""

    threads: int
    """Number of OpenMP threads of each rank."""
    workers: tuple[Cores, ...] = ()
    """Cores of each replica; empty where nothing is pinned."""
    shared: Cores = ()
    """Cores of evaluators, coordinator and `tandem run`; empty where nothing is pinned."""

    def of_worker(self, index: int) -> Cores:
        """Cores of one replica; empty: all."""
        return self.workers[index] if self.workers else ()


def place(cores: Sequence[int], workers: int, processes: int, evaluators: int, pin: bool) -> Placement:
    """Divide the cores among `workers` replicas of `processes` ranks each and all `evaluators` processes.

    Raises:
        UserError: there are too few cores to pin.
    """
    ranks = workers * processes
    if not pin:
        return Placement(threads=max(1, len(cores) // ranks))
    reserved = max(1, min(evaluators, len(cores) - ranks)) if evaluators else 0
    cores_per_rank = (len(cores) - reserved) // ranks
    if cores_per_rank < 1:
        requirement = f"a core for each of {ranks} ranks" + (" and one for the evaluators" if evaluators else "")
        raise UserError(
            f"--pin needs {requirement}, {ranks + reserved} in all; this process may use {len(cores)}. Omit --pin, or "
            "set spec.workers.replicas lower."
        )
    worker_cores = [
        tuple(cores[start : start + cores_per_rank * processes])
        for start in range(0, ranks * cores_per_rank, cores_per_rank * processes)
    ]
    other_cores = tuple(cores[-reserved:]) if reserved else ()
    return Placement(threads=cores_per_rank, workers=tuple(worker_cores), shared=other_cores)


def usable_cores() -> Cores:
    """Logical cores that this process may use; hyperthreads of one physical core are adjacent.

    A container's CPU quota counts where it is smaller than the number of its cores.
    """
    if sys.platform != "linux":
        return tuple(range(os.cpu_count() or 1))
    cores = sorted(os.sched_getaffinity(0), key=_topology)
    return tuple(cores[: _quota(Path("/sys/fs/cgroup/cpu.max")) or len(cores)])


def _topology(core: int) -> tuple[int, int, int]:
    folder = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    with suppress(OSError, ValueError):
        return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text()), core
    return 0, core, core


def _quota(file: Path) -> int | None:
    with suppress(OSError, ValueError):
        share, period = file.read_text().split()
        if share != "max":
            return max(1, math.ceil(int(share) / int(period)))
    return None


def refuse_unpinnable(platform: str = sys.platform) -> None:
    """Refuse `--pin` where processes cannot be pinned.

    Raises:
        UserError: this is not Linux.
    """
    if platform != "linux":
        raise UserError(f"--pin needs Linux; {platform} does not let a process choose its cores. Omit --pin.")


def visible_gpus(environment: dict[str, str]) -> list[str]:
    """Names of the GPUs that child processes would see, as CUDA_VISIBLE_DEVICES writes them."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    with suppress(OSError, subprocess.SubprocessError):
        output = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
        return [str(index) for index, line in enumerate(x for x in output.splitlines() if x.startswith("GPU "))]
    return []


def share_gpus(gpus: Sequence[str], job: DistributedTrainingJob) -> tuple[list[str] | None, str]:
    """CUDA_VISIBLE_DEVICES of each replica, None where this machine has no GPU; and a line for the user, or ''.

    Each replica sees only its own GPUs, as a pod does. NCCL needs one GPU per rank, so with too few all train on CPUs.
    """
    workers, processes = job.spec.workers.replicas, job.spec.workers.processes
    ranks = workers * processes
    is_requested = job.spec.workers.gpus > 0
    strategy = job.spec.trainer.settings_of_loop.strategy
    if gpus and strategy == "hogwild":
        return [""] * workers, ""
    if gpus and strategy in ("dp", "model"):
        # One process uses all GPUs, or as many as the job requests.
        return [",".join(gpus[: job.spec.workers.gpus or len(gpus)])], ""
    if not gpus:
        return None, "no GPU on this machine; training runs on CPUs" if is_requested else ""
    if len(gpus) < ranks:
        note = f"{len(gpus)} GPU for {ranks} ranks; each needs its own, so training runs on CPUs"
        if fits := len(gpus) // processes:
            note += f" (--set spec.workers.replicas={fits} would use the GPU)"
        return [""] * workers, note
    return [",".join(gpus[index * processes : (index + 1) * processes]) for index in range(workers)], ""


def share_evaluator_gpus(
    gpus: Sequence[str], of_workers: Sequence[str] | None, job: DistributedTrainingJob
) -> tuple[list[str], str]:
    """CUDA_VISIBLE_DEVICES of each replica of the evaluators, none where they compute on CPUs; and a line for the user.

    Args:
        gpus: names of this machine's GPUs.
        of_workers: what `share_gpus` gave to the workers.
    """
    replicas, count = job.spec.evaluation.replicas, job.spec.evaluator_gpus
    if not count or not replicas:
        return [], ""
    used = {name for share in of_workers or [] for name in share.split(",")}
    unused = [name for name in gpus if name not in used]
    if len(unused) < count * replicas:
        remaining = count_noun(len(unused), "GPU")
        return [], f"{remaining} left for evaluators, which ask for {count * replicas}; they compute on CPUs"
    return [",".join(unused[index * count : (index + 1) * count]) for index in range(replicas)], ""
