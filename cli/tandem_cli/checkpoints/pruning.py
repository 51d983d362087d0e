"""Pruning: which checkpoints of a run may be deleted, and their deletion during the run.

Deciding is pure and follows `tandem.rundir.retention`, with the job's policy or the one given. Deleting is harder,
because the run does not wait: between a look and a deletion a reader may take a lease, a new generation may begin, and
the name of a checkpoint that does not count may be given to one that does. So it is looked twice, what both looks agree
on is renamed to a temporary name, and what is then found to be leased, or not to be what was meant, is put back. In
that moment it is missing, which every reader takes for normal. A process killed between rename and deletion leaves a
temporary folder, which retention deletes after an hour.

**Old code.** A run that goes on with other code leaves the pack that it had before (tandem.code). A pack is needed as
long as a job of the run directory names it: the run's own, or one that was moved aside. It is deleted in the same way,
with everything that does not count. Who goes on with earlier code records the job before it looks whether the pack is
there; so a look at the jobs after the rename sees it, and the pack is put back.

Rejected: a lock against the running job (NFS has none that is reliable, and training must not wait for a person).
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import UserError
from tandem.formatting import several
from tandem.job import Checkpoint
from tandem.rundir.checkpoint import FILE, Broken, Manifest
from tandem.rundir.durable import read_json_or_none, temporary_beside
from tandem.rundir.layout import RunDir
from tandem.rundir.retention import Keepers, reasons
from tandem_cli.checkpoints.inventory import Entry, Inventory, begun_of, needed_code, ranks_of

FORGOTTEN_SECONDS = 3600.0
"""Temporary names older than this belong to nobody any more."""


@dataclass(frozen=True)
class Doomed:
    """Something that may be deleted."""

    name: str
    """Its folder's name; of code the begin of its digest."""
    size: int
    """Bytes that come free."""
    why: str
    """Why it is not needed."""
    digest: str | None = None
    """Of its manifest, or of the code; None for what has no sound one."""
    is_code: bool = False
    """Whether it is a pack of code."""


@dataclass(frozen=True)
class Pruning:
    """What would be done."""

    doomed: tuple[Doomed, ...]
    """To be deleted, oldest first."""
    kept: tuple[tuple[str, str], ...]
    """Checkpoints that count and stay, newest first, each with why."""
    others: tuple[Doomed, ...]
    """What does not count and is only deleted when everything is asked for."""

    @property
    def size(self) -> int:
        """Bytes that come free."""
        return sum(one.size for one in self.doomed)

    @property
    def what(self) -> str:
        """What will be deleted, as text: `3 folders and 1 pack of code`."""
        packs = sum(one.is_code for one in self.doomed)
        folders = len(self.doomed) - packs
        parts = [several(folders, "folder")] if folders or not packs else []
        return " and ".join([*parts, *([several(packs, "pack of code", "packs of code")] if packs else [])])


def plan(inventory: Inventory, policy: Checkpoint, everything: bool = False) -> Pruning:
    """What may be deleted.

    Args:
        policy: what to keep; the job's own, or changed.
        everything: also what does not count.

    Raises:
        UserError: nobody can tell which checkpoints count, or what the job keeps.
    """
    if not inventory.has_lineage or inventory.job is None:
        raise UserError(f"nothing is deleted from {inventory.rundir.path}: {'; '.join(inventory.faults)}")
    counting = inventory.counting
    leased = {entry.name for entry in counting if entry.readers}
    references = [entry.manifest.reference for entry in counting if entry.manifest]
    keepers = Keepers(ranks_of(counting), inventory.resumed_from, leased, inventory.reach, begun_of(counting))
    found = reasons(references, policy, inventory.job.spec.evaluation, keepers)
    doomed, kept = [], []
    for entry in counting:
        why = [*found[entry.name], *(["final"] if entry.is_final and "keepLast" not in found[entry.name] else [])]
        if why:
            kept.append((entry.name, ", ".join(why)))
        else:
            doomed.append(_doomed(entry, "not kept by the policy"))
    others = [*_useless(inventory), *_forgotten(inventory), *_old_code(inventory)]
    doomed.reverse()
    return Pruning(
        tuple([*doomed, *others] if everything else doomed), tuple(kept), () if everything else tuple(others)
    )


def carry_out(rundir: RunDir, agreed: Pruning, again: Pruning) -> Iterator[tuple[Doomed, str]]:
    """Delete what two plans have in common: each with "", or with why it is spared.

    Args:
        agreed: what was shown.
        again: what a later look says, made just before.

    Raises:
        UserError: the disk refuses; what was yielded before is deleted.
    """
    still = {(one.name, one.digest) for one in again.doomed}
    for one in agreed.doomed:
        if (one.name, one.digest) not in still:
            yield one, "it is needed, or gone, by now"
            continue
        try:
            yield one, _delete_code(rundir, one) if one.is_code else _delete(rundir, one)
        except OSError as error:
            path = rundir.path / one.name if one.is_code else rundir.checkpoint(one.name)
            raise UserError(f"{path} cannot be deleted: {error.strerror or error}") from error


def _useless(inventory: Inventory) -> Iterator[Doomed]:
    newest = max((record.generation for record in inventory.records), default=0)
    for entry in reversed(inventory.entries):
        if entry.readers or entry.is_final:
            continue
        match entry.state:
            case "off" if entry.generation is not None and entry.generation > newest:
                # Its generation's record may be on its way: an NFS client lists two folders at two times.
                continue
            case "off" | "rewound":
                yield _doomed(entry, f"does not count: {entry.why}")
            case "bad" | "stale" | "damaged":
                yield _doomed(entry, f"{entry.state}{f': {entry.why}' if entry.why else ''}")


def _forgotten(inventory: Inventory) -> Iterator[Doomed]:
    for left in inventory.leftovers:
        if left.age > FORGOTTEN_SECONDS:
            yield Doomed(left.name, left.size, f"a temporary name, forgotten {left.age / 3600:.0f} h ago")


def _old_code(inventory: Inventory) -> Iterator[Doomed]:
    for old in inventory.old_code:
        # Its job may be on its way: an NFS client sees two files at two times.
        if old.age > FORGOTTEN_SECONDS:
            name = f"{inventory.rundir.code.name}/{old.digest.removeprefix('sha256:')[:12]}…"
            yield Doomed(name, old.size, "code that the run had before", old.digest, is_code=True)


def _doomed(entry: Entry, why: str) -> Doomed:
    return Doomed(entry.name, entry.size or 0, why, entry.manifest.digest if entry.manifest else None)


def _delete(rundir: RunDir, one: Doomed) -> str:
    """Delete it through a rename. Returns why it was spared, "" if it was not."""
    folder = rundir.checkpoint(one.name)
    if one.name in rundir.readers():
        return "it is being read"
    aside = temporary_beside(folder)
    before = _digest(folder)
    try:
        if _sound_digest(folder) != one.digest:
            return "it is another one meanwhile"
        # A temporary folder's age says whether it is forgotten: while we may put it back, it must not look so.
        os.utime(folder)
        folder.rename(aside)
    except FileNotFoundError:
        return "it is gone"
    if _digest(aside) != before or one.name in rundir.readers():
        _put_back(aside, folder)
        return "somebody began to read it, or it was written anew"
    if aside.is_dir():
        shutil.rmtree(aside)
    else:
        aside.unlink(missing_ok=True)
    folder.with_name(f"{folder.name}.why.json").unlink(missing_ok=True)
    return ""


def _delete_code(rundir: RunDir, one: Doomed) -> str:
    """Delete a pack through a rename. Returns why it was spared, "" if it was not."""
    assert one.digest is not None
    pack = rundir.pack(one.digest)
    aside = temporary_beside(pack)
    try:
        pack.rename(aside)
    except FileNotFoundError:
        return "it is gone"
    try:
        needed = needed_code(rundir)
        if needed is not None and one.digest not in needed:
            aside.unlink()
            return ""
    finally:
        # Restore a pack that is, or may be, in use. If it was uploaded again meanwhile, both have the same content.
        with suppress(FileNotFoundError):
            aside.rename(pack)
    return "the run goes on with it"


def _sound_digest(folder: Path) -> str | None:
    """The digest by which a plan knows a checkpoint; None for what is none, as .bad, or has no sound manifest.

    Raises:
        FileNotFoundError: it is gone.
    """
    try:
        return Manifest.load(folder).digest
    except Broken:
        return None


def _put_back(aside: Path, folder: Path) -> None:
    try:
        aside.rename(folder)
    except OSError:
        # Its name may belong to an even newer one already, beside which ours does not count.
        if not folder.exists():
            raise


def _digest(folder: Path) -> str | None:
    """What the manifest in a folder calls itself."""
    body = read_json_or_none(folder / FILE)
    digest = body.get("digest") if isinstance(body, dict) else None
    return digest if isinstance(digest, str) else None
