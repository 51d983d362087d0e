"""Micro-batches that did not fit into memory: records by which the next generation takes smaller ones.

A rank that runs out of memory in a step records the number of samples in its forward pass, and exits. The next
generation takes at most half as many. One record per generation is enough, that of the first rank: all ranks of a
generation take the same number.

A record applies to jobs whose steps take as much memory. After any change of the trainer or of its pods' resources more
may fit: then the records do not apply, and the limit is found again.
"""

import hashlib
import json
from typing import Annotated

from pydantic import Field

from tandem.job.resource import DistributedTrainingJob
from tandem.model import MessageText, Model, WholeNumber

MAX_BYTES = 2**16
"""Maximum size of a record in bytes."""
MEMORY_NEUTRAL_SETTINGS = (
    "epochs",
    "maxSteps",
    "schedule",
    "seed",
    "rewindOn",
    "initialWeights",
    "initialOptimizer",
    "loaderWorkers",
)
"""Settings of the loop that do not change the memory of a step."""


class OutOfMemoryRecord(Model):
    """A micro-batch that did not fit into memory."""

    generation: Annotated[int, Field(ge=1, le=2**53)]
    """The generation that tried it."""
    rank: WholeNumber
    """The rank that ran out of memory first, as far as the disk shows."""
    samples: Annotated[int, Field(ge=2, le=2**53)]
    """Samples in the forward pass. A single sample cannot be halved, and is not recorded."""
    settings: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Digest of the job's settings (`memory_settings_digest`)."""
    error: MessageText = ""
    """The allocator's error message."""

    @property
    def limit(self) -> int:
        """Maximum number of samples in a micro-batch of later generations."""
        return self.samples // 2


def memory_settings_digest(job: DistributedTrainingJob) -> str:
    """A digest of the settings that decide how much memory a step takes, and how much there is."""
    trainer = job.spec.trainer.dump()
    if "config" in trainer:
        del trainer["config"]["tensorParallel"]  # always 1; the version before, whose digests count, lacks the field
    for part in ("loop", "config"):
        if part in trainer:
            trainer[part] = {
                name: value for name, value in trainer[part].items() if name not in MEMORY_NEUTRAL_SETTINGS
            }
    workers = job.spec.workers
    content = [trainer, workers.processes, workers.asked]
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
