"""The disk of the run directory: whether something may be written there, and whether two checkpoints have room.

Two, because the one before is deleted when the next one is whole. How large one is, is known of the built-in models.
"""

import shutil
from collections.abc import Iterator

from tandem.architectures import elements, shapes
from tandem.formatting import size
from tandem.job import DistributedTrainingJob
from tandem.prerequisites.dataset import known
from tandem.prerequisites.folder import fault_of_folder, nearest_there
from tandem.prerequisites.site import Site
from tandem.tasks import CLASSES, ImageClassification
from tandem.unmet import Unmet

FLOAT = 4
"""Bytes."""
STATES = {"adam": 2, "adamw": 2, "sgd": 1}
"""Numbers that an optimizer keeps for each parameter."""


def disk(job: DistributedTrainingJob, site: Site) -> Iterator[Unmet]:
    """What keeps the run directory from being written."""
    path = site.run_dir.path
    if fault := fault_of_folder(path):
        yield Unmet((), f"the run directory {path} cannot be written: {fault}")
        return
    if job.spec.trainer.task is None or site.resumes:
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
            f"two checkpoints take {size(needed)}, and {size(free)} are free where the run directory {path} lies; "
            "make room, or take another folder"
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
    return count * (FLOAT * (1 + states + averages) + (FLOAT // 2 if halves else 0))
