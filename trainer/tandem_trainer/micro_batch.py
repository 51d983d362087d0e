"""Micro-batches that do not fit into memory: the rank writes that down, and the next generation takes half.

A smaller micro-batch changes no gradient (tandem_trainer.train): the parts of a batch add up to the same. So to run out
of memory in a step is a reason to start again from the newest checkpoint, and no failure, until a forward pass is of
one sample. Ranks that share a step must cut their batches alike. So what generations before have learnt
(tandem.rundir.micro_batch) is read by rank 0 once, at the beginning, and told to all.

Only forward and backward pass count: what an optimizer or a checkpoint takes is the same however a batch is cut.

Rejected: to try the step again in the same process. Other ranks wait in collectives of a step that cannot be completed,
what they have averaged already is in their gradients, and what the allocator holds in fragments stays. To try sizes out
before the first step: memory also grows later, with longer samples or with a rank that shares its GPU.
"""

import logging
import re
from typing import NoReturn

import torch

from tandem.formatting import number, several, shortened
from tandem.job import DistributedTrainingJob
from tandem.rundir.micro_batch import Misfit, settings_of
from tandem_trainer.elastic_run import RankContext
from tandem_trainer.failure import DoesNotFit, MicroBatchHalved

log = logging.getLogger(__name__)

REFUSED = re.compile("DefaultCPUAllocator: (can't allocate memory|not enough memory)")
"""What torch says on a CPU, with a plain RuntimeError."""
MAX_WORDS = 160
"""Characters of what the allocator says that are shown."""
ADVICE = (
    "one sample is the least. Take strategy: fsdp, or activationCheckpointing: true, or a device with more memory; "
    "tandem plan says what each would take"
)


class PassDidNotFit(Exception):  # noqa: N818 - it says what happened
    """A forward or backward pass ran out of memory; carries how many samples it was of."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.samples = samples


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device, or the CPU, had no memory to give."""
    return isinstance(error, torch.OutOfMemoryError) or REFUSED.search(str(error)) is not None


class MicroBatch:
    """The size of a micro-batch in one generation. Collective.

    Raises:
        OSError: the run directory cannot be read.
    """

    def __init__(self, job: DistributedTrainingJob, context: RankContext) -> None:
        self._context, self._settings = context, settings_of(job)
        limit: int | None = None
        if context.group.rank == 0:
            limit = min(context.rundir.limits(job), default=None)
        self.learnt: int | None = context.group.tell({"limit": limit})["limit"]
        """Samples of it at the most, because more did not fit; None if nothing is known."""
        given = job.spec.trainer.settings_of_loop.micro_batch_size
        self.most = min((size for size in (given, self.learnt) if size is not None), default=None)
        """Samples of it at the most; None where a rank takes its share of the batch at once."""
        if context.group.rank == 0 and self.learnt is not None:
            log.info("micro-batch=%d at the most, because %d samples did not fit", self.most, 2 * self.learnt)

    def halve(self, failed: PassDidNotFit) -> NoReturn:
        """Leave what did not fit for the next generation.

        Raises:
            MicroBatchHalved: it will take half.
            DoesNotFit: it was one sample.
            OSError: the disk fails.
        """
        samples, said = failed.samples, _words(failed.__cause__)
        tried = f"{several(samples, 'sample')} in one forward pass did not fit into memory ({said})"
        if samples == 1:
            raise DoesNotFit(f"{tried}, and {ADVICE}") from failed.__cause__
        context = self._context
        misfit = Misfit(
            generation=context.generation,
            rank=context.group.rank,
            samples=samples,
            settings=self._settings,
            error=said,
        )
        context.rundir.record_misfit(misfit)
        raise MicroBatchHalved(f"{tried}; the next generation takes {number(misfit.limit)} at the most") from failed


def _words(error: BaseException | None) -> str:
    """The first sentences of what torch says; what follows is advice on its settings."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    # On a CPU it begins with a place in torch's source.
    line = line[found.start() :] if (found := REFUSED.search(line)) else line
    return shortened(line, MAX_WORDS)
