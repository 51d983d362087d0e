"""Finds the checkpoints that a script writes in a way of its own (`evaluators.watch`), and tells when one is complete.

Nobody announces such a checkpoint, and one that is read too early is half of one. It counts as complete when

- its format says so: a safetensors file as long as its header tells, a zip file of torch.save with its directory at the
  end, a folder of torch.distributed.checkpoint with `.metadata`, one of the Hugging Face Trainer with its state, which
  are written last;
- or else when nothing in it was changed for `settleSeconds`, by the clock of its disk;
- or when training is over: nobody writes any more.

And always only if two looks have found it the same. Its files are linked then (tandem.rundir.watched), so that a script
may delete it, or rename the next one into its place, while it is evaluated. A script that writes into the same file
again changes what is evaluated: after the evaluation it is looked at once more, and what has changed has no result.
"""

import json
import struct
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tandem import tensor_header
from tandem.rundir import evaluations, lease
from tandem.rundir import watched as watched_files
from tandem.rundir.checkpoint import Manifest
from tandem.rundir.layout import RunDir
from tandem.rundir.watched import Watched, fingerprint, record, records, step_in
from tandem.status import CheckpointRef
from tandem_evaluator.evaluator_log import say
from tandem_evaluator.survey import Survey

TEMPORARY = (".tmp", ".part", ".incomplete")
"""Endings of names that nobody has finished with."""
MOST_FOUND = 2_000
"""Files and folders that a pattern may match; the newest steps count."""
OVERWRITTEN = "it was overwritten or deleted before its evaluation was complete"


class WatchSurvey(Survey):
    """Looks at one run directory whose checkpoints are the script's own.

    Args:
        pattern: of their paths in the run directory.
        settle_seconds: how long one rests before it counts, where its format does not say that it is complete.
    """

    def __init__(self, rundir: RunDir, shards: int, pattern: str, settle_seconds: float) -> None:
        super().__init__(rundir, shards)
        self._pattern, self._settle_seconds = pattern, settle_seconds
        self._seen: dict[str, str] = {}
        """Fingerprints at the last look, by path, of what is not recorded."""
        self._known: dict[str, Watched] = {}
        """Records by name."""
        watched_files.sweep(rundir)
        self._let_go: set[CheckpointRef] = set()
        """Those that nobody evaluates any more."""

    def open(self, reference: CheckpointRef) -> tuple[Path, Manifest | None]:
        """The script's file or folder.

        Raises:
            FileNotFoundError: it is gone, or another one by now.
        """
        watched = self._known.get(reference.name)
        if watched is None or not self._is_there(watched):
            raise FileNotFoundError(reference.name)
        return watched_files.content(self._rundir, watched), None

    def _references(self, ended: bool, final: CheckpointRef | None) -> list[CheckpointRef]:
        self.broken, self._unsure = {}, False
        self._learn()
        seen: dict[str, str] = {}
        for path in self._matching():
            with suppress(OSError):
                self._consider(path, ended, seen)
        self._seen = seen
        references = []
        for watched in self._known.values():
            reference = watched.reference
            if reference in self._let_go:
                references.append(reference)
            elif reference in self._merged or self._has_last_word(reference):
                watched_files.let_go(self._rundir, watched)
                self._let_go.add(reference)
                references.append(reference)
            elif self._is_there(watched):
                references.append(reference)
            else:
                evaluations.skip(self._rundir, reference, OVERWRITTEN)
        return references

    def _matching(self) -> Iterator[Path]:
        found = [path for path in self._rundir.path.glob(self._pattern) if not path.name.startswith(".")]
        found = [path for path in found if path.suffix not in TEMPORARY]
        found.sort(key=lambda path: (step_in(path.name) or 0, str(path)))
        yield from found[-MOST_FOUND:]

    def _consider(self, path: Path, ended: bool, seen: dict[str, str]) -> None:
        """Record a path if it is a complete checkpoint that is not recorded.

        Raises:
            OSError: it is gone, or cannot be read.
        """
        name = str(path.relative_to(self._rundir.path))
        step = step_in(name)
        own = [watched for watched in self._known.values() if watched.path == name]
        if step is not None and (own or any(watched.step == step for watched in self._known.values())):
            return
        looks = fingerprint(path)
        if looks is None or any(watched.fingerprint == looks[0] for watched in own):
            return
        seen[name], changed = looks
        is_same = self._seen.get(name) == seen[name]
        rests = lease.server_time(self._rundir.leases) - changed >= self._settle_seconds
        if not is_same or not (ended or rests or says_that_it_is_complete(path)):
            # Once training is over the next look decides.
            self._unsure = self._unsure or ended
            return
        if step is None:
            step = 1 + max((watched.step for watched in self._known.values()), default=0)
        watched = Watched(step=step, path=name, fingerprint=seen[name], at=changed)
        if record(self._rundir, watched):
            say("found", checkpoint=watched.reference.name, path=name)
        self._learn()

    def _learn(self) -> None:
        """Read the records that are new."""
        for found in records(self._rundir, known=self._known):
            self._known[found.reference.name] = found

    def _is_there(self, watched: Watched) -> bool:
        """Whether it is still what was recorded."""
        with suppress(FileNotFoundError, NotADirectoryError):
            looks = fingerprint(watched_files.content(self._rundir, watched))
            return looks is not None and looks[0] == watched.fingerprint
        return False


def says_that_it_is_complete(path: Path) -> bool:
    """Whether a checkpoint of a known format is there to its end.

    Raises:
        OSError: it cannot be read.
    """
    if path.is_dir():
        if (path / ".metadata").is_file():
            return True
        with suppress(FileNotFoundError, ValueError):
            return isinstance(json.loads((path / "trainer_state.json").read_bytes()), dict)
        return False
    if path.suffix == ".safetensors":
        return _is_whole_safetensors(path)
    return zipfile.is_zipfile(path)


def _is_whole_safetensors(path: Path) -> bool:
    size = path.stat().st_size
    with path.open("rb") as file:

        def read(start: int, length: int) -> bytes:
            file.seek(start)
            return file.read(length)

        try:
            found = tensor_header.tensors(read, size)
        except (ValueError, struct.error):
            return False
    return max((tensor.start + tensor.size for tensor in found.values()), default=size) == size
