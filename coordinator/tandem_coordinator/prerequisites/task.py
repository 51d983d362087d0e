"""Checks a user's own task, or `causal-lm`: whether its module exists, whether it has the class, and whether that
accepts its parameters.

The module is located without running anything. The rest only an import can tell. A separate process makes it
(tandem_trainer.task_check), which takes as long as torch and the task's imports do. If it comes to no answer, the ranks
will report the reason.
"""

import json
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec

from tandem.errors import UnmetRequirement
from tandem.job.resource import DistributedTrainingJob
from tandem.processes.distribution import install_command
from tandem.processes.launch import module_command
from tandem_coordinator.prerequisites.program import fault_of_module, module_folders
from tandem_coordinator.prerequisites.site import Site

FIELD = ("spec", "trainer", "task")
CHECK_SECONDS = 60.0
"""Maximum time of an import before it is left to the ranks, in seconds."""


def own_task(job: DistributedTrainingJob, site: Site) -> Iterator[UnmetRequirement]:
    """Check a task and its parameters. On a cluster nothing is reported: the image is not visible from here."""
    name = job.spec.trainer.own_task
    if name is None or not site.is_here or site.variables is None or site.installs:
        return
    module, _, class_name = name.partition(":")
    if class_name and (fault := fault_of_module(module, module_folders(site), is_run=False)):
        yield UnmetRequirement(FIELD, f"spec.trainer.task: {fault}")
        return
    try:
        completed = subprocess.run(
            module_command("tandem_trainer.task_check"),
            input=job.model_dump_json(exclude_none=True).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=site.folder,
            env=dict(site.variables),
            timeout=CHECK_SECONDS,
            check=False,
        )
        mistakes = json.loads(completed.stdout) if completed.returncode == 0 else []
    except (subprocess.SubprocessError, OSError, ValueError):
        return
    for mistake in mistakes:
        yield UnmetRequirement(tuple(mistake["path"]), mistake["message"])


def harness(job: DistributedTrainingJob, site: Site) -> Iterator[UnmetRequirement]:
    """Check that the package that runs the tasks of `evaluators.harness` is installed."""
    evaluators = job.spec.evaluation
    is_run = evaluators.harness is not None and evaluators.processes > 0
    if is_run and site.is_here and not site.installs and find_spec("lm_eval") is None:
        yield UnmetRequirement(
            ("spec", "evaluators", "harness"), f"lm_eval is not installed here ({install_command('lm-eval')})"
        )


def kernels(job: DistributedTrainingJob, site: Site) -> Iterator[UnmetRequirement]:
    """Check that the ranks can use the kernels that a fine-tuning asks for."""
    trainer = job.spec.trainer
    if not trainer.is_fine_tuning or (trainer.parameters or {}).get("kernels") != "liger" or site.machine is None:
        return
    field = ("spec", "trainer", "parameters", "kernels")
    if site.machine.has_gpu is False:
        yield UnmetRequirement(
            field, "kernels: liger is for GPUs, and the ranks train on processors here; leave it out"
        )
    elif not site.installs and find_spec("liger_kernel") is None:
        yield UnmetRequirement(field, f"liger-kernel is not installed here ({install_command('kernels')})")
