"""A task of the user's own, or `causal-lm`: whether its module is there, whether it has the class, and whether that
takes what it is given.

Where a module is, is looked up without running anything. The rest only an import can tell. A process of its own makes
it (tandem_trainer.task_check), which takes as long as torch and the task's imports do. If it comes to no answer, the
ranks will say why.
"""

import json
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec

from tandem.distribution import install
from tandem.errors import Unmet
from tandem.job import DistributedTrainingJob
from tandem.launch import module_command
from tandem_coordinator.prerequisites.program import fault_of_module, module_folders
from tandem_coordinator.prerequisites.site import Site

FIELD = ("spec", "trainer", "task")
CHECK_SECONDS = 60.0
"""What an import may take before it is left to the ranks."""


def own_task(job: DistributedTrainingJob, site: Site) -> Iterator[Unmet]:
    """What is wrong with a task and its parameters. On a cluster nothing is said: its image is not seen from here."""
    name = job.spec.trainer.own_task
    if name is None or not site.is_here or site.variables is None or site.installs:
        return
    module, _, own_class = name.partition(":")
    if own_class and (fault := fault_of_module(module, module_folders(site), is_run=False)):
        yield Unmet(FIELD, f"spec.trainer.task: {fault}")
        return
    try:
        checked = subprocess.run(
            module_command("tandem_trainer.task_check"),
            input=job.model_dump_json(exclude_none=True).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=site.folder,
            env=dict(site.variables),
            timeout=CHECK_SECONDS,
            check=False,
        )
        mistakes = json.loads(checked.stdout) if checked.returncode == 0 else []
    except (subprocess.SubprocessError, OSError, ValueError):
        return
    for mistake in mistakes:
        yield Unmet(tuple(mistake["path"]), mistake["message"])


def harness(job: DistributedTrainingJob, site: Site) -> Iterator[Unmet]:
    """Whether evaluators find what runs the tasks of `evaluators.harness`."""
    evaluators = job.spec.evaluation
    is_run = evaluators.harness is not None and evaluators.processes > 0
    if is_run and site.is_here and not site.installs and find_spec("lm_eval") is None:
        yield Unmet(("spec", "evaluators", "harness"), f"lm_eval is not installed here ({install('lm-eval')})")


def kernels(job: DistributedTrainingJob, site: Site) -> Iterator[Unmet]:
    """Whether the ranks can use the kernels that a fine-tuning asks for."""
    trainer = job.spec.trainer
    if not trainer.is_fine_tuning or (trainer.parameters or {}).get("kernels") != "liger" or site.machine is None:
        return
    field = ("spec", "trainer", "parameters", "kernels")
    if site.machine.has_gpu is False:
        yield Unmet(field, "kernels: liger is for GPUs, and the ranks train on processors here; leave it out")
    elif not site.installs and find_spec("liger_kernel") is None:
        yield Unmet(field, f"liger-kernel is not installed here ({install('kernels')})")
