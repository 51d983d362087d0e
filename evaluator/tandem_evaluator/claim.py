"""The claim on one shard: a lease that its holder renews from a thread while it works.

The claim also keeps retention from deleting the checkpoint: retention spares a checkpoint with any active lease
`<verb>-<checkpoint>-…`. So it is held until the shard's result is published, and by the process that publishes the last
one until the checkpoint is merged and compared with the best. Releasing it as soon as the weights are in memory was
considered: with evaluations longer than `keepLast` checkpoints apart, every checkpoint would be deleted before its
score is known, and `keepBest` could never keep any. The price is a checkpoint or two more on the disk.

A process that dies leaves its claims behind. Others take them over when they expire; the same process releases them at
once when it is restarted, because a name belongs to one process at a time. If two processes of one name do overlap (a
pod deleted by force), a shard is evaluated twice and published once.
"""

import re
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tandem.rundir import lease
from tandem.rundir.durable import read_json_or_none
from tandem.rundir.layout import RunDir
from tandem.wire.status import CheckpointRef

ABANDONED_SECONDS = 3600.0
"""Time since its expiry after which a claim counts as abandoned."""
_CLAIM = re.compile(r"^evaluate-.+\.json$")


def claim_file(rundir: RunDir, reference: CheckpointRef, shard: int, shards: int) -> Path:
    """Path of the claim on a shard. It contains the number of shards, because each number is a different split."""
    name = f"evaluate-{reference.name}-g{reference.generation:06d}-shard-{shard}-of-{shards}.json"
    return rundir.leases / name


class Claim:
    """A claimed shard. Leaving the `with` block releases it."""

    def __init__(self, acquired: lease.Lease) -> None:
        self._lease = acquired
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="claim", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Release the claim."""
        self._released.set()
        self._thread.join()
        self._lease.release()

    def _renew(self) -> None:
        """Renew the lease until it is released or another process has it.

        Another process gets it if this one slept past the lease's expiry. The work is finished all the same: otherwise
        a machine slow enough for this would never finish anything, and a result published twice does no harm.
        """
        # A third of the lease's duration leaves room for two failed renewals.
        while not self._released.wait(self._lease.seconds / 3):
            content = read_json_or_none(self._lease.path)
            if isinstance(content, dict) and content.get("holder") != self._lease.holder:
                return
            with suppress(OSError):  # tried again in a moment; if the disk stays away, publishing reports it
                self._lease.renew()

    def __enter__(self) -> "Claim":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def claim(path: Path, holder: str, seconds: float | None = None) -> Claim | None:
    """Claim a shard; None if another process has it.

    Raises:
        OSError: the lease cannot be written, or the bucket does not answer.
    """
    acquired = lease.acquire(path, holder, lease.length() if seconds is None else seconds)
    if acquired is None:
        return None
    # Where pods share no disk, another one may have been first in the bucket.
    try:
        RunDir.refresh()
    except OSError:
        acquired.release()
        raise
    return Claim(acquired) if acquired.is_held() else None


def release_leftovers(rundir: RunDir, holder: str) -> None:
    """Remove the claims of an earlier process with this name, and those that expired long ago."""
    with suppress(FileNotFoundError):
        for path in [path for path in rundir.leases.iterdir() if _CLAIM.match(path.name)]:
            content = read_json_or_none(path)
            if not isinstance(content, dict):
                continue
            until = content.get("until")
            is_abandoned = (
                isinstance(until, int | float) and until < lease.server_time(rundir.leases) - ABANDONED_SECONDS
            )
            # A lease of the same name belongs to a process that is dead, since this one has its name now.
            if content.get("holder") == holder or is_abandoned:
                path.unlink(missing_ok=True)
