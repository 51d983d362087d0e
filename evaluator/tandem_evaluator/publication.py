"""The evaluation files of a run: shards, merged results, skipped checkpoints, the best one.

Every file but best.json is created once and never replaced, so whoever is second finds the work done and changes
nothing. A merged result is a pure function of its shards, and best.json one of all merged results and the lineage:
both can be made again by anybody at any time, and a process that dies between two files leaves nothing that the next
does not complete.
"""

import base64
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F

from tandem.job import Evaluators
from tandem.rundir import evaluations
from tandem.rundir.durable import create_json, read_json, read_json_or_none, replace_json, sync_folder
from tandem.rundir.evaluations import (
    METRICS,
    VALIDATION,
    Best,
    Goal,
    deciding,
    folder,
    last_word,
    merged_name,
    rank,
    shard_name,
)
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import Chain, counts
from tandem.status import CheckpointRef
from tandem.wrong_samples import LARGEST, MOST, MOST_BYTES, Gallery, WrongPicture, shows
from tandem_evaluator.evaluator_log import say
from tandem_evaluator.result import MergedResult, ShardResult, WrongSample, merge, shard_samples


class Publication:
    """Writes the evaluation files."""

    def __init__(self, rundir: RunDir, evaluators: Evaluators, total: int, classes: int, held_out: int = 0) -> None:
        """
        Args:
            total: samples of the test data.
            classes: their classes.
            held_out: samples of the validation data.
        """
        self._rundir, self._evaluators, self._total, self._classes = rundir, evaluators, total, classes
        self._held_out = held_out
        self._known: dict[Path, MergedResult] = {}

    def publish(self, result: ShardResult) -> bool:
        """Publish a shard. False if it is there already."""
        target = folder(self._rundir, result.reference)
        target.mkdir(parents=True, exist_ok=True)
        sync_folder(target.parent)
        return create_json(target / shard_name(result.reference, result.shard, result.shards), result.to_json())

    def merge(self, reference: CheckpointRef) -> MergedResult | None:
        """Publish the merged result if all shards are there. None if they are not, or another process was first."""
        shards = self._evaluators.processes
        results = []
        for shard in range(shards):
            path = folder(self._rundir, reference) / shard_name(reference, shard, shards)
            try:
                result = ShardResult.read(read_json(path))
                self._check(result, reference, shard)
            except FileNotFoundError:
                return None
            except (ValueError, ValidationError) as error:
                _discard(path, error)
                return None
            results.append(result)
        merged = merge(results)
        published = create_json(folder(self._rundir, reference) / merged_name(reference), merged.to_json())
        return merged if published else None

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

    def _merged(self) -> list[MergedResult]:
        """All merged results, of checkpoints that are deleted too. Each file is read once in this process's life."""
        for path in self._rundir.evaluations.glob("step-*/g*.json"):
            if path not in self._known and (word := last_word(path)) and not word.is_note:
                try:
                    self._known[path] = MergedResult.read(read_json(path))
                except (ValueError, ValidationError) as error:
                    _discard(path, error)
        return list(self._known.values())

    def _check(self, result: ShardResult, reference: CheckpointRef, shard: int) -> None:
        """
        Raises:
            ValueError: it is not the result of this shard of our data, for instance because the data set was
                another one when it was made.
        """
        if (result.reference, result.shard, result.shards) != (reference, shard, self._evaluators.processes):
            raise ValueError("it is the result of another shard")
        if (result.validation is None) != (self._held_out == 0):
            raise ValueError("it is of a job that holds out other validation data")
        for part, total in ((result, self._total), (result.validation, self._held_out)):
            if part is None:
                continue
            if part.samples != shard_samples(total, shard, result.shards):
                raise ValueError(f"it has {part.samples} samples, which is not this shard of {total}")
            if [len(row) for row in part.confusion] != [self._classes] * self._classes:
                raise ValueError(f"its confusion matrix is not that of {self._classes} classes")
            if sum(map(sum, part.confusion)) != part.samples:
                raise ValueError("its confusion matrix does not count its samples")


def _discard(path: Path, error: ValueError) -> None:
    """Remove a file that does not say what it must, so that the work is done again."""
    say("discarded", file=f"{path.parent.name}/{path.name}", why=error)
    path.unlink(missing_ok=True)


Metric = Literal["loss", "accuracy", "macroF1"]


def best(results: Iterable[MergedResult], links: Chain, metric: Metric, goal: Goal) -> dict[str, Any] | None:
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
    return winner.reference.dump() | {"metric": metric, "value": winner.metrics.dump().get(metric)}


def update(rundir: RunDir, images: Tensor, names: Sequence[str]) -> None:
    """Make wrong.json what best.json and the merged result that it names say.

    As with best.json, whoever has written looks again: the last one to write has then seen the newest best.

    Args:
        images: [N, channels, size, size], of the test data.
        names: of the classes.

    Raises:
        OSError: the run directory cannot be read or written.
    """
    while True:
        best = evaluations.best(rundir)
        if best is None or (result := _result(rundir, best)) is None:
            rundir.wrong_file.unlink(missing_ok=True)
            return
        try:
            if shows(Gallery.read(read_json_or_none(rundir.wrong_file, MOST_BYTES)), best):
                return
        except ValidationError:
            pass
        replace_json(rundir.wrong_file, made(result, images, names).dump(), durable=False)


def made(result: MergedResult, images: Tensor, names: Sequence[str]) -> Gallery:
    """The pictures of one result's wrong samples."""
    wrong = [sample for sample in result.wrong[:MOST] if sample.index < len(images)]
    small = _small(images[[sample.index for sample in wrong]])
    return Gallery(
        name=result.checkpoint,
        step=result.step,
        generation=result.generation,
        height=small.shape[1],
        width=small.shape[2],
        pictures=[_picture(sample, pixels, names) for sample, pixels in zip(wrong, small, strict=True)],
    )


def _picture(sample: WrongSample, pixels: Tensor, names: Sequence[str]) -> WrongPicture:
    label, prediction = (
        names[which] if which < len(names) else str(which) for which in (sample.label, sample.prediction)
    )
    return WrongPicture(
        index=sample.index,
        label=label,
        prediction=prediction,
        confidence=sample.confidence,
        pixels=base64.b64encode(bytes(pixels.flatten().tolist())).decode(),
    )


def _small(images: Tensor) -> Tensor:
    """[N, height, width], bytes: each image from its darkest to its brightest, of all channels the mean."""
    grey = images.float().mean(dim=1, keepdim=True)
    if max(grey.shape[2:]) > LARGEST:
        grey = F.interpolate(grey, size=[min(LARGEST, size) for size in grey.shape[2:]], mode="area")
    low, high = grey.amin(dim=(1, 2, 3), keepdim=True), grey.amax(dim=(1, 2, 3), keepdim=True)
    return ((grey - low) / (high - low).clamp_min(1e-9) * 255).nan_to_num().round().byte()[:, 0]


def _result(rundir: RunDir, best: Best) -> MergedResult | None:
    try:
        reference = CheckpointRef.read(best.dump())
        return MergedResult.read(read_json_or_none(folder(rundir, reference) / merged_name(reference)))
    except ValidationError:
        return None
