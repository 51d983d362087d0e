"""Handling of micro-batches that do not fit into memory: the rank records the size, and the next generation takes half.

A smaller micro-batch changes no gradient (tandem_trainer.train): the parts of a batch add up to the same. So running
out of memory in a step restarts the group from the newest checkpoint, and is no failure, until a forward pass has one
sample. Ranks that share a step must cut their batches alike. So rank 0 reads the limits that earlier generations
recorded (tandem.rundir.micro_batch) once, at the start, and sends them to all ranks.

Only forward and backward pass count: what an optimizer or a checkpoint takes is the same however a batch is cut.

Rejected: to try the step again in the same process. Other ranks wait in collectives of a step that cannot be completed,
what they have averaged already is in their gradients, and what the allocator holds in fragments stays. To try sizes out
before the first step: memory also grows later, with longer samples or with a rank that shares its GPU.
"""

import logging
import re
from typing import NoReturn

import torch

from tandem.formatting import count_noun, number, truncate_end
from tandem.job.resource import DistributedTrainingJob
from tandem.rundir.micro_batch import OutOfMemoryRecord, memory_settings_digest
from tandem_trainer.failure import MicroBatchHalved, SampleTooLarge
from tandem_trainer.rank_context import RankContext

log = logging.getLogger(__name__)

NO_MEMORY = re.compile("DefaultCPUAllocator: (can't allocate memory|not enough memory)")
"""Message of torch's CPU allocator, which raises a plain RuntimeError."""
MAX_CAUSE_LENGTH = 160
"""Maximum length of the quoted allocator message, in characters."""
ADVICE = (
    "one sample is the minimum. Use strategy: fsdp, or activationCheckpointing: true, or a device with more memory; "
    "tandem plan says what each would take"
)


class PassDidNotFit(Exception):  # noqa: N818 - it says what happened
    """A forward or backward pass ran out of memory; carries its number of samples."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.samples = samples


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that a device, or the CPU, is out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or NO_MEMORY.search(str(error)) is not None


class MicroBatch:
    """The size of a micro-batch in one generation. Collective.

    Raises:
        OSError: the run directory cannot be read.
    """

    def __init__(self, job: DistributedTrainingJob, context: RankContext) -> None:
        self._context, self._settings = context, memory_settings_digest(job)
        limit: int | None = None
        if context.group.rank == 0:
            limit = min(context.rundir.limits(job), default=None)
        self.proven_limit: int | None = context.group.tell({"limit": limit})["limit"]
        """Maximum samples of a micro-batch, because more did not fit; None if nothing is known."""
        configured = job.spec.trainer.settings_of_loop.micro_batch_size
        self.max_samples = min((size for size in (configured, self.proven_limit) if size is not None), default=None)
        """Maximum samples of a micro-batch; None where a rank takes its share of the batch at once."""
        if context.group.rank == 0 and self.proven_limit is not None:
            log.info(
                "micro-batch=%d at the most, because %d samples did not fit", self.max_samples, 2 * self.proven_limit
            )

    def halve(self, failed: PassDidNotFit) -> NoReturn:
        """Record what did not fit, and end this generation.

        Raises:
            MicroBatchHalved: the next generation takes half.
            SampleTooLarge: the pass had one sample.
            OSError: the disk fails.
        """
        samples, cause = failed.samples, _allocator_message(failed.__cause__)
        tried = f"{count_noun(samples, 'sample')} in one forward pass did not fit into memory ({cause})"
        if samples == 1:
            raise SampleTooLarge(f"{tried}, and {ADVICE}") from failed.__cause__
        context = self._context
        misfit = OutOfMemoryRecord(
            generation=context.generation,
            rank=context.group.rank,
            samples=samples,
            settings=self._settings,
            error=cause,
        )
        context.rundir.record_misfit(misfit)
        raise MicroBatchHalved(f"{tried}; the next generation takes {number(misfit.limit)} at the most") from failed


def _allocator_message(error: BaseException | None) -> str:
    """Return the first sentences of an allocation error; what follows is advice on torch's settings."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    # On a CPU it begins with a location in torch's source.
    line = line[match.start() :] if (match := NO_MEMORY.search(line)) else line
    return truncate_end(line, MAX_CAUSE_LENGTH)
