"""The claim on one shard: a lease that its holder renews from a thread while it works.

The claim is also what keeps retention from deleting the checkpoint: retention spares a checkpoint for which any
`<verb>-<checkpoint>-…` lease runs. So it is held until the shard's result is published, and by whoever publishes the
last one until the checkpoint is merged and compared with the best. Giving the checkpoint back as soon as its weights
are in memory was considered: with evaluations longer than `keepLast` checkpoints apart, every checkpoint would be
deleted before its score is known, and `keepBest` could never keep any. The price is a checkpoint or two more on the
disk.

A process that dies leaves its claims behind. Others take them when their time is over; the same process started again
gives them back at once, because a name belongs to one process at a time. If two of one name do overlap (a pod deleted
by force), a shard is done twice and published once.
"""

import re
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tandem.rundir import lease
from tandem.rundir.durable import read_json_or_none
from tandem.rundir.layout import RunDir
from tandem.status import CheckpointRef

FORGOTTEN_SECONDS = 3600.0
"""Claims that ran out so long ago belong to nobody any more."""
_CLAIM = re.compile(r"^evaluate-.+\.json$")


def claim_file(rundir: RunDir, reference: CheckpointRef, shard: int, shards: int) -> Path:
    """Where the claim on a shard stands. With another number of shards it is another piece of work."""
    name = f"evaluate-{reference.name}-g{reference.generation:06d}-shard-{shard}-of-{shards}.json"
    return rundir.leases / name


class Claim:
    """A shard that is ours. Leaving the `with` block gives it back."""

    def __init__(self, held: lease.Lease) -> None:
        self._lease = held
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="claim", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give it back."""
        self._over.set()
        self._thread.join()
        self._lease.release()

    def _keep(self) -> None:
        """Renew until it is given back or another process has it.

        To be overtaken means to have slept past the lease's time. The work is finished all the same: given up, a
        machine slow enough for this would never finish anything, and a result published twice does no harm.
        """
        while not self._over.wait(self._lease.seconds / 3):
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


def claim(path: Path, holder: str, seconds: float = lease.SECONDS) -> Claim | None:
    """Claim a shard; None if another process has it.

    Raises:
        OSError: the disk does not take it.
    """
    held = lease.acquire(path, holder, seconds)
    return Claim(held) if held else None


def give_back_leftovers(rundir: RunDir, holder: str) -> None:
    """Remove the claims that an earlier process of our name died with, and those that ran out long ago."""
    with suppress(FileNotFoundError):
        for path in [path for path in rundir.leases.iterdir() if _CLAIM.match(path.name)]:
            content = read_json_or_none(path)
            if not isinstance(content, dict):
                continue
            until = content.get("until")
            forgotten = isinstance(until, int | float) and until < lease.server_time(rundir.leases) - FORGOTTEN_SECONDS
            if content.get("holder") == holder or forgotten:
                path.unlink(missing_ok=True)
