"""The evaluation files of a run: shards, merged results, skipped checkpoints, the best one.

Every file but best.json is created once and never replaced, so whoever is second finds the work done and changes
nothing. A merged result is a pure function of its shards, and best.json one of all merged results and the lineage:
both can be made again by anybody at any time, and a process that dies between two files leaves nothing that the next
does not complete.
"""

from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tandem.job import Evaluators
from tandem.rundir import evaluations
from tandem.rundir.durable import create_json, read_json, read_json_or_none, replace_json, sync_folder
from tandem.rundir.evaluations import (
    METRICS,
    VALIDATION,
    Goal,
    deciding,
    folder,
    last_word,
    merged_file,
    rank,
    shard_name,
)
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import Chain, counts
from tandem.status import CheckpointRef
from tandem_evaluator.evaluator_log import say
from tandem_evaluator.result import Merged, Shard
from tandem_evaluator.scoring import Scoring, Work


class Publication:
    """Writes the evaluation files."""

    def __init__(self, rundir: RunDir, evaluators: Evaluators, scoring: Scoring) -> None:
        """
        Args:
            scoring: says what a shard's result has to hold, and puts shards together.
        """
        self._rundir, self._evaluators, self._scoring = rundir, evaluators, scoring
        self._known: dict[Path, Merged] = {}

    def publish(self, result: Shard) -> bool:
        """Publish a shard. False if it is there already."""
        target = folder(self._rundir, result.reference)
        target.mkdir(parents=True, exist_ok=True)
        sync_folder(target.parent)
        return create_json(target / shard_name(result.reference, result.shard, result.shards), result.to_json())

    def merge(self, reference: CheckpointRef) -> Merged | None:
        """Publish the merged result if all shards are there. None if they are not, or another process was first."""
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
            results.append(result)
        merged = self._scoring.merge(results)
        published = create_json(merged_file(self._rundir, reference), merged.to_json())
        return merged if published else None

    def fail(self, reference: CheckpointRef, why: str) -> bool:
        """Record that the user's program cannot evaluate a checkpoint. False if that is recorded already."""
        return evaluations.fail(self._rundir, reference, why)

    def skip(self, reference: CheckpointRef, why: str) -> bool:
        """Record that a checkpoint is passed over. False if that is recorded already."""
        return evaluations.skip(self._rundir, reference, why)

    def update_best(self) -> None:
        """Make best.json what the merged results say.

        Two processes that do this at once may have seen different results, and the one that saw less may write last. So
        each looks again after it has written, until what it finds is what it would write: whoever writes last has then
        looked after every result that was there.
        """
        while True:
            metric, goal = self._evaluators.metric, self._evaluators.direction
            wanted = best(self._merged(), self._rundir.chain(), metric, goal)
            if wanted is None:
                self._rundir.best_file.unlink(missing_ok=True)
                return
            if read_json_or_none(self._rundir.best_file) == wanted:
                return
            replace_json(self._rundir.best_file, wanted)

    def _merged(self) -> list[Merged]:
        """All merged results, of checkpoints that are deleted too. Each file is read once in this process's life."""
        for path in self._rundir.evaluations.glob("step-*/g*.json"):
            if path not in self._known and (word := last_word(path)) and not word.is_note:
                try:
                    self._known[path] = self._scoring.read_merged(read_json(path))
                except (ValueError, ValidationError) as error:
                    _discard(path, error)
        return list(self._known.values())


def _discard(path: Path, error: ValueError) -> None:
    """Remove a file that does not say what it must, so that the work is done again."""
    say("discarded", file=f"{path.parent.name}/{path.name}", why=error)
    path.unlink(missing_ok=True)


def best(results: Iterable[Merged], links: Chain, metric: str, goal: Goal) -> dict[str, Any] | None:
    """The content of best.json; None if no checkpoint qualifies.

    Only checkpoints on the chain count. Its value is that on the test data, whatever has decided.
    """
    ranked = []
    for result in results:
        scores = deciding(result.model_dump(by_alias=True, include={METRICS, VALIDATION}))
        place = rank(scores, metric, goal, result.step, result.generation)
        if place is not None and counts(links, result.reference):
            ranked.append((place, result))
    if not ranked:
        return None
    _, winner = min(ranked, key=itemgetter(0))
    return winner.reference.dump() | {"metric": metric, "value": winner.to_json()[METRICS][metric]}
