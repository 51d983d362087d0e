"""Pruning: which checkpoints of a run may be deleted, and their deletion during the run.

The decision is pure and follows `tandem.rundir.retention`, with the job's policy or the specified one. The deletion is
harder, because the run does not wait: between an inventory and a deletion a reader may take a lease, a new generation
may start, and a checkpoint that counts may get the name of one that does not. So the inventory is taken twice, what
both agree on is renamed to a temporary name, and what then turns out to be leased, or to be another checkpoint, is
renamed back. In that moment it is missing, which every reader treats as normal. A process killed between rename and
deletion leaves a temporary folder, which retention deletes after an hour.

**Old code.** A run that continues with other code leaves its earlier pack (tandem.rundir.code). A pack is needed as
long as a job of the run directory refers to it: the run's own, or one that was moved aside. Packs are deleted in the
same way, together with everything that does not count. A run that continues with earlier code records the job before it
checks that the pack exists; so reading the jobs after the rename finds it, and the pack is renamed back.

Rejected: a lock against the running job (NFS has no reliable one, and training must not wait for a person).
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import UserError
from tandem.formatting import count_noun
from tandem.job.resource import CheckpointSpec
from tandem.rundir.checkpoint import FILE, Broken, Manifest
from tandem.rundir.durable import read_json_or_none, temporary_beside
from tandem.rundir.layout import RunDir
from tandem.rundir.retention import RetentionInputs, retention_reasons
from tandem_cli.checkpoints.inventory import Entry, Inventory, needed_code, partly_evaluated, ranks_of

FORGOTTEN_SECONDS = 3600.0
"""Age above which a temporary name belongs to no process any more."""


@dataclass(frozen=True)
class Doomed:
    """File or folder that may be deleted."""

    name: str
    """The folder's name; for code, the start of its digest."""
    size: int
    """Bytes that are freed."""
    reason: str
    """Reason why it is not needed."""
    digest: str | None = None
    """Digest of its manifest, or of the code; None without a valid one."""
    is_code: bool = False
    """Whether it is a pack of code."""


@dataclass(frozen=True)
class Pruning:
    """Plan of what to delete."""

    doomed: tuple[Doomed, ...]
    """Files and folders to delete, oldest first."""
    retained: tuple[tuple[str, str], ...]
    """Checkpoints that count and stay, newest first, each with the rules that keep it."""
    unneeded: tuple[Doomed, ...]
    """Files and folders that do not count; only deleted with `everything`."""

    @property
    def size(self) -> int:
        """Bytes that are freed."""
        return sum(doomed.size for doomed in self.doomed)

    @property
    def what(self) -> str:
        """Summary of the deletions: `3 folders and 1 pack of code`."""
        packs = sum(doomed.is_code for doomed in self.doomed)
        folders = len(self.doomed) - packs
        parts = [count_noun(folders, "folder")] if folders or not packs else []
        return " and ".join([*parts, *([count_noun(packs, "pack of code", "packs of code")] if packs else [])])


def plan(inventory: Inventory, policy: CheckpointSpec, everything: bool = False) -> Pruning:
    """Decide what may be deleted.

    Args:
        policy: the job's policy, or a changed one.
        everything: also delete what does not count.

    Raises:
        UserError: the lineage or the job cannot be read, so it is unknown which checkpoints count or are kept.
    """
    if not inventory.has_lineage or inventory.job is None:
        raise UserError(f"nothing is deleted from {inventory.rundir.path}: {'; '.join(inventory.faults)}")
    counting = inventory.counting
    # The same rules as those of the trainer's own retention, so that pruning and saving never disagree.
    leased = {entry.name for entry in counting if entry.readers}
    references = [entry.manifest.reference for entry in counting if entry.manifest]
    keepers = RetentionInputs(
        ranks_of(counting), inventory.resumed_from, leased, inventory.reach, partly_evaluated(counting)
    )
    rules = retention_reasons(references, policy, inventory.job.spec.evaluation, keepers)
    doomed, retained = [], []
    for entry in counting:
        # The final checkpoint stays whatever the policy says.
        applied = rules[entry.name]
        keep_reasons = [*applied, *(["final"] if entry.is_final and "keepLast" not in applied else [])]
        if keep_reasons:
            retained.append((entry.name, ", ".join(keep_reasons)))
        else:
            doomed.append(_doomed(entry, "not kept by the policy"))
    unneeded = [*_useless(inventory), *_forgotten(inventory), *_old_code(inventory)]
    doomed.reverse()  # oldest first: a deletion that is interrupted leaves the newest
    return Pruning(
        tuple([*doomed, *unneeded] if everything else doomed), tuple(retained), () if everything else tuple(unneeded)
    )


def carry_out(rundir: RunDir, agreed: Pruning, latest: Pruning) -> Iterator[tuple[Doomed, str]]:
    """Delete what two plans have in common: yields each with "", or with the reason why it is spared.

    Args:
        agreed: plan that the user has seen.
        latest: plan of a later inventory, taken just before.

    Raises:
        UserError: the disk refuses; everything yielded before is deleted.
    """
    still = {(doomed.name, doomed.digest) for doomed in latest.doomed}
    for doomed in agreed.doomed:
        if (doomed.name, doomed.digest) not in still:
            yield doomed, "it is needed, or gone, by now"
            continue
        try:
            yield doomed, _delete_code(rundir, doomed) if doomed.is_code else _delete(rundir, doomed)
        except OSError as error:
            path = rundir.path / doomed.name if doomed.is_code else rundir.checkpoint(doomed.name)
            raise UserError(f"{path} cannot be deleted: {error.strerror or error}") from error


def _useless(inventory: Inventory) -> Iterator[Doomed]:
    """Generate the checkpoints that do not count, oldest first."""
    newest = max((record.generation for record in inventory.records), default=0)
    for entry in reversed(inventory.entries):
        # A reader may hold a checkpoint that was rewound meanwhile.
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
    """Generate the temporary names that no process uses any more."""
    for leftover in inventory.leftovers:
        if leftover.age > FORGOTTEN_SECONDS:
            yield Doomed(leftover.name, leftover.size, f"a temporary name, forgotten {leftover.age / 3600:.0f} h ago")


def _old_code(inventory: Inventory) -> Iterator[Doomed]:
    """Generate the packs of code that no job refers to."""
    for old in inventory.old_code:
        # Its job may be on its way: an NFS client sees two files at two times.
        if old.age > FORGOTTEN_SECONDS:
            name = f"{inventory.rundir.code.name}/{old.digest.removeprefix('sha256:')[:12]}…"
            yield Doomed(name, old.size, "earlier code of the run", old.digest, is_code=True)


def _doomed(entry: Entry, reason: str) -> Doomed:
    return Doomed(entry.name, entry.size or 0, reason, entry.manifest.digest if entry.manifest else None)


def _delete(rundir: RunDir, doomed: Doomed) -> str:
    """Delete it through a rename. Return the reason why it was spared, or ""."""
    folder = rundir.checkpoint(doomed.name)
    if doomed.name in rundir.readers():
        return "it is being read"
    temporary = temporary_beside(folder)
    # The manifest's own word, for a folder without a valid manifest, too: it must not change until after the rename.
    before = _digest(folder)
    try:
        if _sound_digest(folder) != doomed.digest:
            return "it has been replaced meanwhile"
        # A temporary folder's age says whether it is forgotten: while we may put it back, it must not look so.
        os.utime(folder)
        folder.rename(temporary)
    except FileNotFoundError:
        return "it is gone"
    if _digest(temporary) != before or doomed.name in rundir.readers():
        _restore(temporary, folder)
        return "it is being read now, or it was written again"
    if temporary.is_dir():
        shutil.rmtree(temporary)
    else:
        temporary.unlink(missing_ok=True)
    folder.with_name(f"{folder.name}.why.json").unlink(missing_ok=True)
    return ""


def _delete_code(rundir: RunDir, doomed: Doomed) -> str:
    """Delete a pack through a rename. Return the reason why it was spared, or ""."""
    assert doomed.digest is not None
    pack = rundir.pack(doomed.digest)
    temporary = temporary_beside(pack)
    try:
        pack.rename(temporary)
    except FileNotFoundError:
        return "it is gone"
    try:
        # The jobs are read after the rename: a run that takes the pack up again has recorded its job by now.
        needed = needed_code(rundir)
        if needed is not None and doomed.digest not in needed:
            temporary.unlink()
            return ""
    finally:
        # Restore a pack that is, or may be, in use. If it was uploaded again meanwhile, both have the same content.
        with suppress(FileNotFoundError):
            temporary.rename(pack)
    return "the run uses it"


def _sound_digest(folder: Path) -> str | None:
    """Compute the digest by which a plan identifies a checkpoint; None for a folder without a valid manifest, such as
    .bad.

    Raises:
        FileNotFoundError: the folder is gone.
    """
    try:
        return Manifest.load(folder).digest
    except Broken:
        return None


def _restore(temporary: Path, folder: Path) -> None:
    """Rename a checkpoint back to its name."""
    try:
        temporary.rename(folder)
    except OSError:
        # The name may belong to a newer checkpoint already; then this one does not count any more.
        if not folder.exists():
            raise


def _digest(folder: Path) -> str | None:
    """Read the digest that the manifest in a folder states, valid or not."""
    body = read_json_or_none(folder / FILE)
    digest = body.get("digest") if isinstance(body, dict) else None
    return digest if isinstance(digest, str) else None
