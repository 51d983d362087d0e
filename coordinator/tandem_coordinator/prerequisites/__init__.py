"""The prerequisites of a job on the machine where it runs, checked before torch is imported and anything starts.

A manifest can be right and the job still unable to run: its script is not there, its data has no test images, its
weights are those of another model, its replicas do not fit into the memory. Each of these is found here in milliseconds
and reported with its line of the manifest; a rank would find it after seconds, and log it once for each attempt.

The checks of each command:

    tandem validate FILE          the manifest alone (tandem.job.manifest.reading)
    tandem validate --here FILE   and this machine, as tandem run does
    tandem run FILE               and this machine, before the run directory is made
    coordinator on a cluster      the contents of the job's volume, before a worker trains (`site.pod`)

A finding is an error only if the job cannot run; all else is a warning. Nothing is reported that cannot be known. So a
check reads what the ranks would read, in the same way, and stops where it would have to import or run something. Only a
user's own task is imported, by a separate process (`task`).
"""

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from tandem.errors import UnmetRequirement
from tandem.job.resource import DistributedTrainingJob
from tandem.rundir.layout import RunDir
from tandem_coordinator.prerequisites.dataset import dataset, weights
from tandem_coordinator.prerequisites.language import language
from tandem_coordinator.prerequisites.machine import disk, machine, this_machine, tracking
from tandem_coordinator.prerequisites.program import program
from tandem_coordinator.prerequisites.site import Site, pod, variables
from tandem_coordinator.prerequisites.task import harness, kernels, own_task

__all__ = ["Site", "UnmetRequirement", "local_site", "pod", "unmet"]

CHECKS = (variables, program, language, own_task, kernels, harness, dataset, weights, machine, disk, tracking)


def unmet(job: DistributedTrainingJob, site: Site) -> list[UnmetRequirement]:
    """Find everything that keeps a job from running at a site, or makes it run differently than expected."""
    return list(chain.from_iterable(_guarded(check(job, site)) for check in CHECKS))


def local_site(
    job: DistributedTrainingJob,
    run_dir: RunDir,
    cores: int,
    gpus: Sequence[str] | None,
    is_fresh: bool = False,
    code: Path | None = None,
) -> Site:
    """The site of a job that is to run on this machine as a whole.

    Args:
        cores: that it may use.
        gpus: CUDA_VISIBLE_DEVICES of each replica; None: as it is.
        is_fresh: whether an earlier run is moved aside first.
        code: the folder that is packed for them.
    """
    return Site(run_dir, this_machine(cores, gpus), _inherited(job), is_fresh=is_fresh, code=code)


def on_shared_disk(
    job: DistributedTrainingJob,
    run_dir: RunDir,
    is_fresh: bool = False,
    code: Path | None = None,
    awaited: Path | None = None,
) -> Site:
    """The site of a job on other machines that share all of this one's disk: the nodes of a SLURM cluster. See
    `local_site`.

    Args:
        awaited: the run directory that the job waits for.
    """
    variables = _inherited(job)
    return Site(run_dir, variables=variables, is_fresh=is_fresh, code=code, awaited=awaited)


def _inherited(job: DistributedTrainingJob) -> dict[str, str]:
    """The variables of the training processes whose values are known."""
    return {
        **os.environ,
        **{variable.name: variable.value for variable in job.spec.trainer.env if variable.value_from is None},
    }


def _guarded(findings: Iterator[UnmetRequirement]) -> Iterator[UnmetRequirement]:
    """Stop a check that fails on a file, a folder or a disk, without a finding: the ranks will report it."""
    try:
        yield from findings
    except (OSError, ValueError, RecursionError):
        return
