"""A survey of the run directory: which checkpoints exist, and how far the evaluation of each is.

A look happens several times a second for hours, so what cannot change is remembered: a manifest belongs to a folder
that is never written again, a generation's record is written once, and a merged result is the last word. What remains
is to list a few folders and to read the claims on unfinished shards. That the manifest of a checkpoint whose evaluation
is complete is still the same is looked at now and then only, and once there is a new generation: nobody else writes a
checkpoint of a step that has one. Whether its folder is there, the list of folders tells each time.

Order matters: first whether training is over, then the checkpoints, then the lineage. What is written the other way
round is then never half seen: a look that finds DONE also finds the final checkpoint.
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
from tandem.status import CheckpointRef
from tandem_evaluator.choice import Standing, View
from tandem_evaluator.claim import claim_file

SECOND_LOOK_SECONDS = 1.0
"""A manifest is called broken only when it still is after so long: an NFS client may see a folder's old self."""
SETTLED_SECONDS = 30.0
"""Between two looks at the manifest of a checkpoint whose evaluation is complete."""
_RECORD = re.compile(r"^\d{6,}\.json$")


class Survey:
    """Looks at one run directory."""

    def __init__(self, rundir: RunDir, shards: int, has_base: bool = False) -> None:
        """
        Args:
            has_base: whether the model that training begins with is evaluated, too.
        """
        self._rundir, self._shards, self._has_base = rundir, shards, has_base
        self._manifests: dict[tuple[str, int, int, int], CheckpointRef] = {}
        self._suspects: dict[str, float] = {}
        self._merged: set[CheckpointRef] = set()
        self._settled: dict[str, tuple[float, CheckpointRef]] = {}
        """By name: until when the manifest is not looked at, and what it says."""
        self._records: tuple[str, ...] = ()
        self._links: Chain = {}
        self.broken: dict[str, str] = {}
        """Checkpoints found broken by the last look, each with why."""
        self._unsure = False

    def look(self, unusable: Container[CheckpointRef] = ()) -> View:
        """See what is there.

        Args:
            unusable: checkpoints to leave out.

        Raises:
            OSError: the disk does not answer.
            ValueError: the lineage contradicts itself.
        """
        ended = self._rundir.ended()
        final = self._final() if ended else None
        while True:
            references, known = self._references(ended, final), self._records
            links = self._chain()
            if self._records == known:
                break
        order = {generation: index for index, generation in enumerate(links)}
        counted = [
            reference
            for reference in references
            if reference not in unusable and (counts(links, reference) or reference == final)
        ]
        counted.sort(key=lambda reference: (order.get(reference.generation, -1), -reference.step))
        base = self._standing(BASE) if self._has_base and BASE not in unusable else None
        return View(tuple(self._standing(reference) for reference in counted), ended, final, self._unsure, base)

    def open(self, reference: CheckpointRef) -> tuple[Path, Manifest | None]:
        """A checkpoint's folder and manifest.

        Raises:
            FileNotFoundError: it is gone, or its name is another one's by now.
            Broken: its manifest is damaged.
            OSError: the disk fails.
        """
        manifest = self._rundir.manifest(reference.name)
        if manifest.reference != reference:
            raise FileNotFoundError(reference.name)  # retention or a newer generation freed the name
        return self._rundir.checkpoint(reference.name), manifest

    def signature(self, view: View) -> object:
        """Changes whenever best.json may have to: with the lineage and with the merged results in view."""
        return (tuple(self._links.items()), frozenset(one.reference for one in view.standings if one.merged))

    def _final(self) -> CheckpointRef | None:
        done = self._rundir.done()
        try:
            return None if done is None else CheckpointRef.read(done.get("final"))
        except ValidationError:
            return None

    def _references(self, ended: bool, final: CheckpointRef | None) -> list[CheckpointRef]:
        """All committed checkpoints with a sound manifest. The final one is looked for by name too, should the listing
        be an old one, and counts as there when it is gone but its evaluation is complete."""
        self.broken, self._unsure = {}, False
        names = set(self._rundir.checkpoint_names())
        if final is not None:
            names.add(final.name)
        found = []
        for name in sorted(names):
            try:
                found.append(self._reference(name))
            except FileNotFoundError:
                self._suspects.pop(name, None)
            except OtherFormat:
                continue  # perhaps a sound one: it is for its own version to judge
            except Broken as error:
                if time.monotonic() - self._suspects.setdefault(name, time.monotonic()) >= SECOND_LOOK_SECONDS:
                    self.broken[name] = str(error)
                else:
                    self._unsure = True
            except OSError:
                # The next look may read it. Once training is over there is no next checkpoint to go on with instead.
                if ended:
                    raise
            else:
                self._suspects.pop(name, None)
        if final is not None and final not in found and self._has_last_word(final):
            found.append(final)
        return found

    def _reference(self, name: str) -> CheckpointRef:
        """
        Raises:
            FileNotFoundError: it is gone.
            Broken: its manifest is missing or damaged.
        """
        due, settled = self._settled.get(name, (0.0, None))
        if settled in self._merged and time.monotonic() < due:
            return settled
        try:
            status = (self._rundir.checkpoint(name) / FILE).stat()
        except FileNotFoundError:
            return Manifest.load(self._rundir.checkpoint(name)).reference
        key = (name, status.st_ino, status.st_mtime_ns, status.st_size)
        if key not in self._manifests:
            self._manifests[key] = self._rundir.manifest(name).reference
        # By chance, or all would be due at the same look.
        due = time.monotonic() + SETTLED_SECONDS * random.uniform(0.5, 1.0)  # noqa: S311
        self._settled[name] = due, self._manifests[key]
        return self._manifests[key]

    def _has_last_word(self, reference: CheckpointRef) -> bool:
        names = (merged_name(reference), failed_name(reference))
        return any((folder(self._rundir, reference) / name).exists() for name in names)

    def _chain(self) -> Chain:
        try:
            names = tuple(sorted(path.name for path in self._rundir.generations.iterdir() if _RECORD.match(path.name)))
        except FileNotFoundError:
            return {}
        if names != self._records:
            self._settled.clear()
            records = self._rundir.generation_records()
            if len(records) != len(names):
                # One was written since the listing: a chain with a hole must not be remembered.
                return chain(records)
            self._records, self._links = names, chain(records)
        return self._links

    def _standing(self, reference: CheckpointRef) -> Standing:
        if reference in self._merged:
            return Standing(reference, merged=True)
        names = _listed(folder(self._rundir, reference))
        if names & {merged_name(reference), failed_name(reference)}:
            self._merged.add(reference)
            return Standing(reference, merged=True)
        shards = range(self._shards)
        finished = frozenset(one for one in shards if shard_name(reference, one, self._shards) in names)
        return Standing(
            reference,
            finished,
            frozenset(
                one
                for one in shards
                if one not in finished and lease.is_held(claim_file(self._rundir, reference, one, self._shards))
            ),
            skipped=skipped_name(reference) in names,
        )


def _listed(path: Path) -> frozenset[str]:
    with suppress(FileNotFoundError):
        return frozenset(entry.name for entry in path.iterdir())
    return frozenset()
