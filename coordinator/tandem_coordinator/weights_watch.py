"""Watches for checkpoints whose weights are those of an earlier one although steps were taken.

Reasons are an optimizer that does not have the model's parameters, a learning rate of 0, a loss that does not reach the
weights, or an error in saving. Such a run looks healthy otherwise: steps are counted, checkpoints are written, and
scores repeat. Manifests have checksums of all files, so the comparison reads nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter

from tandem.formatting import count_noun, number
from tandem.rundir.checkpoint import Manifest
from tandem.wire.status import CheckpointRef

MAX_CHECKPOINTS = 100
"""Maximum number of checkpoints that are compared, the newest."""


@dataclass(frozen=True)
class Unchanged:
    """The newest checkpoints that all have the weights of the one before them."""

    count: int = 0
    """Number of these checkpoints."""
    message: str = ""
    """Description of them, a sentence; empty if there are none."""


class WeightsWatch:
    """Compares the weights of consecutive checkpoints of one run, also of those that are deleted by now."""

    def __init__(self) -> None:
        self._digests: dict[CheckpointRef, str] = {}

    def record(self, manifest: Manifest) -> None:
        """Record a checkpoint."""
        if digest := manifest.weights_digest:
            self._digests[manifest.reference] = digest
        if len(self._digests) > MAX_CHECKPOINTS:
            del self._digests[min(self._digests, key=attrgetter("age"))]

    def unchanged(self, counts: Callable[[CheckpointRef], bool]) -> Unchanged:
        """Return the newest checkpoints whose weights are those of the one before.

        Args:
            counts: whether a checkpoint is on the lineage; the others are passed over.
        """
        chain = sorted(filter(counts, self._digests), key=attrgetter("age"), reverse=True)
        same = list(takewhile(lambda reference: self._digests[reference] == self._digests[chain[0]], chain))
        if len(same) < 2:
            return Unchanged()
        newest, first, count = same[0], same[-1], len(same) - 1
        checkpoints = "the newest checkpoint has" if count == 1 else f"the newest {number(count)} checkpoints have"
        steps = count_noun(newest.step - first.step, "step")
        return Unchanged(
            count,
            f"{checkpoints} the weights of {first.name}, bit for bit, although {steps} were taken since: does the"
            " optimizer have the model's parameters, is the learning rate 0?",
        )
