"""The evaluation files of a run: shards, merged results, skipped checkpoints, the best one.

Every file but best.json is created once and never replaced, so a second process finds the work done and changes
nothing. A merged result is a pure function of its shards, and best.json one of all merged results and the lineage: any
process can create both again at any time, and a process that dies between two files leaves nothing that the next one
does not complete.
"""

from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tandem.confidence import count_tied
from tandem.job.resource import Evaluators
from tandem.rundir import evaluations
from tandem.rundir.durable import create_json, read_json, read_json_or_none, replace_json, sync_folder
from tandem.rundir.evaluations import (
    INTERVALS,
    METRICS,
    VALIDATION,
    Goal,
    deciding_estimates,
    folder,
    merged_file,
    parse_final_file,
    rank,
    shard_name,
)
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import Chain, counts
from tandem.wire.status import CheckpointRef
from tandem_evaluator.evaluator_log import log_event
from tandem_evaluator.result import Merged, Shard
from tandem_evaluator.scoring import Scoring, Work


class OtherWeights(Exception):  # noqa: N818 - it is what is the case
    """A shard was scored with other weights than those of its checkpoint; carries the result."""

    def __init__(self, result: Shard) -> None:
        super().__init__(
            f"{result.evaluator} scored shard {result.shard} of {result.checkpoint} with other weights than those of "
            "that checkpoint"
        )
        self.result = result

    @classmethod
    def check(cls, result: Shard, weights: str) -> None:
        """Compare the weights that were scored with those of the checkpoint.

        Args:
            weights: digest of the checkpoint's weights; empty if it is not known.

        Raises:
            OtherWeights: they differ.
        """
        if weights and result.weights not in ("", weights):
            raise cls(result)


class Publication:
    """Writes the evaluation files."""

    def __init__(self, rundir: RunDir, evaluators: Evaluators, scoring: Scoring) -> None:
        """
        Args:
            scoring: parses the results of shards, and merges them.
        """
        self._rundir, self._evaluators, self._scoring = rundir, evaluators, scoring
        self._results: dict[Path, Merged] = {}

    def publish(self, result: Shard) -> bool:
        """Publish a shard. False if it is published already."""
        target = folder(self._rundir, result.reference)
        target.mkdir(parents=True, exist_ok=True)
        sync_folder(target.parent)
        return create_json(target / shard_name(result.reference, result.shard, result.shards), result.to_json())

    def merge(self, reference: CheckpointRef, weights: str = "") -> Merged | None:
        """Publish the merged result if all shards are published. None if they are not, or another process was first.

        Args:
            weights: digest of the checkpoint's weights; empty if it is not known.

        Raises:
            OtherWeights: a shard was scored with other weights; it is removed.
        """
        shards = self._evaluators.processes
        results = []
        for shard in range(shards):
            path = folder(self._rundir, reference) / shard_name(reference, shard, shards)
            try:
                result = self._scoring.read_shard(read_json(path), Work(reference, shard, shards))
            except FileNotFoundError:
                return None
            except (ValueError, ValidationError) as error:
                _discard(path, error)
                return None
            try:
                OtherWeights.check(result, weights)
            except OtherWeights as error:
                _discard(path, error)
                raise
            results.append(result)
        # Any process that sees all shards may merge; `create_json` lets only the first one publish.
        merged = self._scoring.merge(results)
        published = create_json(merged_file(self._rundir, reference), merged.to_json())
        return merged if published else None

    def fail(self, reference: CheckpointRef, reason: str) -> bool:
        """Record that the user's program cannot evaluate a checkpoint. False if it is recorded already."""
        return evaluations.record_failed_evaluation(self._rundir, reference, reason)

    def skip(self, reference: CheckpointRef, reason: str) -> bool:
        """Record that a checkpoint is skipped. False if it is recorded already."""
        return evaluations.record_skipped_evaluation(self._rundir, reference, reason)

    def update_best(self) -> None:
        """Update best.json from the merged results.

        Two processes that do this at once may have seen different results, and the one that saw less may write last. So
        each reads again after it has written, until the file is what it would write: whoever writes last has then
        seen every published result.
        """
        while True:
            metric, goal = self._evaluators.metric, self._evaluators.direction
            content = best(self._merged(), self._rundir.chain(), metric, goal)
            if content is None:
                self._rundir.best_file.unlink(missing_ok=True)
                return
            if read_json_or_none(self._rundir.best_file) == content:
                return
            replace_json(self._rundir.best_file, content)

    def _merged(self) -> list[Merged]:
        """All merged results, of checkpoints that are deleted too. Each file is read once in this process's life."""
        for path in self._rundir.evaluations.glob("step-*/g*.json"):
            if path not in self._results and (word := parse_final_file(path)) and not word.is_note:
                try:
                    self._results[path] = self._scoring.read_merged(read_json(path))
                except (ValueError, ValidationError) as error:
                    _discard(path, error)
        return list(self._results.values())


def _discard(path: Path, error: Exception) -> None:
    """Remove an invalid file, so that its work is done again."""
    log_event("discarded", file=f"{path.parent.name}/{path.name}", why=error)
    path.unlink(missing_ok=True)


def best(results: Iterable[Merged], links: Chain, metric: str, goal: Goal) -> dict[str, Any] | None:
    """The content of best.json; None if no checkpoint qualifies.

    Only checkpoints on the chain count. The value is that on the test data, whichever data has decided.
    """
    ranked = []
    for result in results:
        estimates = deciding_estimates(result.model_dump(by_alias=True, include={METRICS, INTERVALS, VALIDATION}))
        scores = {name: estimate.value for name, estimate in estimates.items()}
        rank_key = rank(scores, metric, goal, result.step, result.generation)
        if rank_key is not None and counts(links, result.reference):
            ranked.append((rank_key, result, estimates[metric]))
    if not ranked:
        return None
    first = min(ranked, key=itemgetter(0))
    _, winner, estimate = first
    body = winner.to_json()
    content = winner.reference.dump() | {"metric": metric, "value": body[METRICS][metric]}
    if (interval := evaluations.intervals(body).get(metric)) is not None:
        content |= interval._asdict()
    tied = count_tied(estimate, (entry[-1] for entry in ranked if entry is not first))
    return content | ({} if tied is None else {"tied": tied})
