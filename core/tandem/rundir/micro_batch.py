"""Micro-batches that did not fit into memory: what a generation leaves for the next one to take smaller ones.

A rank that runs out of memory in a step writes down how many samples it had tried in one forward pass, and leaves. The
next generation takes half as many at the most. One record a generation is enough, that of the first rank: all ranks of
a generation take the same number.

A record counts for jobs whose steps take as much memory. Any change of the trainer or of its pods' resources may mean
that more fits now: then nothing is known, and what does not fit is learnt again.
"""

import hashlib
import json
from typing import Annotated

from pydantic import Field

from tandem.job import DistributedTrainingJob
from tandem.model import Model, Whole, Words

MAX_BYTES = 2**16
"""Of a record."""
INDIFFERENT = (
    "epochs",
    "maxSteps",
    "schedule",
    "seed",
    "rewindOn",
    "initialWeights",
    "initialOptimizer",
    "loaderWorkers",
)
"""Settings of the loop that change nothing about the memory of a step."""


class Misfit(Model):
    """A micro-batch that did not fit."""

    generation: Annotated[int, Field(ge=1, le=2**53)]
    """Which tried it."""
    rank: Whole
    """The rank of it that ran out of memory first, as far as the disk knows."""
    samples: Annotated[int, Field(ge=2, le=2**53)]
    """In the forward pass. One that is a single sample cannot be halved, and is not recorded."""
    settings: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Of the job that it was, as `settings_of` gives them."""
    error: Words = ""
    """What the allocator said."""

    @property
    def limit(self) -> int:
        """Samples of a micro-batch that later generations take at the most."""
        return self.samples // 2


def settings_of(job: DistributedTrainingJob) -> str:
    """A digest of what decides how much memory a step takes, and how much there is."""
    trainer = job.spec.trainer.dump()
    for part in ("loop", "config"):
        if part in trainer:
            trainer[part] = {name: value for name, value in trainer[part].items() if name not in INDIFFERENT}
    workers = job.spec.workers
    content = [trainer, workers.processes, workers.asked]
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
