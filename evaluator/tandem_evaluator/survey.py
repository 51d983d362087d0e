"""A survey of the run directory: which checkpoints exist, and how far the evaluation of each is.

A scan happens several times a second for hours, so what cannot change is remembered: a manifest belongs to a folder
that is never rewritten, a generation's record is written once, and a merged result is final. What remains is to list a
few folders and to read the claims on unfinished shards. The manifest of a checkpoint whose evaluation is complete is
checked again only now and then, and once there is a new generation: no other process writes a checkpoint of a step that
has one. Whether its folder exists is known from each listing.

Order matters: first whether training is over, then the checkpoints, then the lineage. They are written in the opposite
order, so a scan never sees a half: one that finds DONE also finds the final checkpoint.
"""

import random
import re
import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from tandem.rundir import lease
from tandem.rundir.checkpoint import FILE, Broken, Manifest, OtherFormat
from tandem.rundir.evaluations import BASE, failed_name, folder, merged_name, shard_name, skipped_name
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import Chain, chain, counts
from tandem.wire.status import CheckpointRef
from tandem_evaluator.choice import EvaluationState, View
from tandem_evaluator.claim import claim_file

DOUBT_SECONDS = 1.0
"""Time for which a manifest has to look damaged before it counts as broken: an NFS client may show an old state of a
folder."""
RECHECK_SECONDS = 30.0
"""Interval between two checks of the manifest of a checkpoint whose evaluation is complete."""
_RECORD = re.compile(r"^\d{6,}\.json$")


class Survey:
    """The survey of one run directory."""

    def __init__(self, rundir: RunDir, shards: int, has_base: bool = False) -> None:
        """
        Args:
            has_base: whether the base model of a fine-tuning is evaluated, too.
        """
        self._rundir, self._shards, self._has_base = rundir, shards, has_base
        self._manifests: dict[tuple[str, int, int, int], CheckpointRef] = {}
        self._suspects: dict[str, float] = {}
        self._merged: set[CheckpointRef] = set()
        self._checked: dict[str, tuple[float, CheckpointRef]] = {}
        """Time of the next check of a manifest, and its content, by name."""
        self._records: tuple[str, ...] = ()
        self._links: Chain = {}
        self.broken: dict[str, str] = {}
        """Checkpoints that the last scan found broken, each with the reason."""
        self._unsure = False

    def scan(self, unusable: Container[CheckpointRef] = ()) -> View:
        """Scan the run directory.

        Args:
            unusable: checkpoints to leave out.

        Raises:
            OSError: the disk does not answer.
            ValueError: the lineage contradicts itself.
        """
        ended = self._rundir.ended()
        final = self._final() if ended else None
        # A generation that is recorded during the scan changes which checkpoints count, so the scan is repeated then.
        while True:
            references, records_before = self._references(ended, final), self._records
            links = self._chain()
            if self._records == records_before:
                break
        order = {generation: index for index, generation in enumerate(links)}
        valid_references = [
            reference
            for reference in references
            if reference not in unusable and (counts(links, reference) or reference == final)
        ]
        valid_references.sort(key=lambda reference: (order.get(reference.generation, -1), -reference.step))
        base = self._state(BASE) if self._has_base and BASE not in unusable else None
        return View(tuple(self._state(reference) for reference in valid_references), ended, final, self._unsure, base)

    def open(self, reference: CheckpointRef) -> tuple[Path, Manifest | None]:
        """Folder and manifest of a checkpoint.

        Raises:
            FileNotFoundError: it is gone, or another checkpoint has its name by now.
            Broken: its manifest is damaged.
            OSError: the disk fails.
        """
        manifest = self._rundir.manifest(reference.name)
        if manifest.reference != reference:
            raise FileNotFoundError(reference.name)  # retention or a newer generation freed the name
        return self._rundir.checkpoint(reference.name), manifest

    def signature(self, view: View) -> object:
        """A value that changes whenever best.json may have to: with the lineage and with the merged results in view."""
        return (tuple(self._links.items()), frozenset(state.reference for state in view.states if state.merged))

    def _final(self) -> CheckpointRef | None:
        done = self._rundir.done()
        try:
            return None if done is None else CheckpointRef.read(done.get("final"))
        except ValidationError:
            return None

    def _references(self, ended: bool, final: CheckpointRef | None) -> list[CheckpointRef]:
        """All committed checkpoints with a sound manifest. The final one is also looked up by name, in case the listing
        is outdated, and counts as existing if it is gone but its evaluation is complete."""
        self.broken, self._unsure = {}, False
        names = set(self._rundir.checkpoint_names())
        if final is not None:
            names.add(final.name)
        references = []
        for name in sorted(names):
            try:
                references.append(self._reference(name))
            except FileNotFoundError:
                self._suspects.pop(name, None)
            except OtherFormat:
                continue  # perhaps a sound one: it is for its own version to judge
            except Broken as error:
                if time.monotonic() - self._suspects.setdefault(name, time.monotonic()) >= DOUBT_SECONDS:
                    self.broken[name] = str(error)
                else:
                    self._unsure = True
            except OSError:
                # The next scan may be able to read it. Once training is over there is no later checkpoint to continue
                # with.
                if ended:
                    raise
            else:
                self._suspects.pop(name, None)
        if final is not None and final not in references and self._has_final_result(final):
            references.append(final)
        return references

    def _reference(self, name: str) -> CheckpointRef:
        """
        Raises:
            FileNotFoundError: it is gone.
            Broken: its manifest is missing or damaged.
        """
        due, checked = self._checked.get(name, (0.0, None))
        if checked in self._merged and time.monotonic() < due:
            return checked
        try:
            status = (self._rundir.checkpoint(name) / FILE).stat()
        except FileNotFoundError:
            return Manifest.load(self._rundir.checkpoint(name)).reference
        key = (name, status.st_ino, status.st_mtime_ns, status.st_size)
        if key not in self._manifests:
            self._manifests[key] = self._rundir.manifest(name).reference
        # Random, or all would be due in the same scan.
        due = time.monotonic() + RECHECK_SECONDS * random.uniform(0.5, 1.0)  # noqa: S311
        self._checked[name] = due, self._manifests[key]
        return self._manifests[key]

    def _has_final_result(self, reference: CheckpointRef) -> bool:
        names = (merged_name(reference), failed_name(reference))
        return any((folder(self._rundir, reference) / name).exists() for name in names)

    def _chain(self) -> Chain:
        try:
            names = tuple(sorted(path.name for path in self._rundir.generations.iterdir() if _RECORD.match(path.name)))
        except FileNotFoundError:
            return {}
        if names != self._records:
            self._checked.clear()
            records = self._rundir.generation_records()
            if len(records) != len(names):
                # A record was written since the listing: a chain with a hole must not be remembered.
                return chain(records)
            self._records, self._links = names, chain(records)
        return self._links

    def _state(self, reference: CheckpointRef) -> EvaluationState:
        if reference in self._merged:
            return EvaluationState(reference, merged=True)
        names = _entries(folder(self._rundir, reference))
        if names & {merged_name(reference), failed_name(reference)}:
            self._merged.add(reference)
            return EvaluationState(reference, merged=True)
        shards = range(self._shards)
        finished = frozenset(shard for shard in shards if shard_name(reference, shard, self._shards) in names)
        return EvaluationState(
            reference,
            finished,
            frozenset(
                shard
                for shard in shards
                if shard not in finished and lease.is_held(claim_file(self._rundir, reference, shard, self._shards))
            ),
            skipped=skipped_name(reference) in names,
        )


def _entries(path: Path) -> frozenset[str]:
    with suppress(FileNotFoundError):
        return frozenset(entry.name for entry in path.iterdir())
    return frozenset()
