"""What the coordinators of all jobs are asked and told, and how they have answered.

A coordinator is asked where the job's own pod is, and by that pod's owner alone it is known to be the job's: whoever
makes a pod with the labels of somebody's coordinator is not asked, and is not given the token.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.job import DistributedTrainingJob
from tandem.listening import endpoint
from tandem.snapshot import Snapshot
from tandem_operator import pods, tokens
from tandem_operator.cache import Key
from tandem_operator.coordinators import LEAST_PATIENCE, Coordinators, Unreached, UnreadableAnswer
from tandem_operator.lifecycle import Idle, idle
from tandem_operator.liveness import Liveness
from tandem_operator.observed import Pod


@dataclass
class _Partner:
    """The coordinator of one job. All of it can be lost."""

    uid: str
    """Of the job."""
    endpoint: str = ""
    waited: float = 0.0
    """Seconds for the last answer."""
    is_unreadable: bool = False
    """So was the last answer."""
    idle: Idle | None = None


class Questions:
    """Asks and tells them.

    Args:
        key: what the tokens of jobs follow from.
    """

    def __init__(self, coordinators: Coordinators, key: bytes) -> None:
        self._coordinators, self._key = coordinators, key
        self._partners: dict[Key, _Partner] = {}
        self._liveness: Liveness[Key] = Liveness(lambda key: key[0])

    async def ask(self, key: Key, job: DistributedTrainingJob, uid: str, own: Sequence[Pod]) -> Snapshot | None:
        """What the job's coordinator says, None if it says nothing or there is none.

        Args:
            uid: the job's.
            own: the pods of its coordinators, oldest first; those that are its own alone.
        """
        partner = self._partners.get(key)
        if partner is None or partner.uid != uid:
            partner = self._partners[key] = _Partner(uid)
        heard = await self._ask(key, job, partner, [pod for pod in own if pod.live and pod.address])
        partner.idle = idle(partner.idle, heard, time.time())
        return heard

    async def _ask(
        self, key: Key, job: DistributedTrainingJob, partner: _Partner, own: Sequence[Pod]
    ) -> Snapshot | None:
        over = job.status is not None and job.status.phase in ("Succeeded", "Failed")
        partner.waited, partner.is_unreadable = 0.0, False
        if over or not own:
            self._liveness.forget(key)
            return None
        pod = own[-1]
        partner.endpoint = endpoint(pod.address, pods.PORT)
        asked = time.monotonic()
        heard, reached = None, True
        try:
            heard = await self._coordinators.ask(partner.endpoint, tokens.token(self._key, partner.uid))
        except Unreached:
            reached = False
        except UnreadableAnswer:
            partner.is_unreadable = True
        partner.waited = time.monotonic() - asked
        self._liveness.note(key, pod.uid, asked, heard is not None, reached)
        return heard

    async def tell(self, key: Key, replicas: int) -> None:
        """Tell the coordinator that was asked last how many replicas are wished for."""
        if (partner := self._partners.get(key)) is not None:
            await self._coordinators.tell(partner.endpoint, tokens.token(self._key, partner.uid), replicas)

    def idle(self, key: Key) -> Idle | None:
        """Since when the job's coordinator has said that nobody trains."""
        partner = self._partners.get(key)
        return None if partner is None else partner.idle

    def is_slow(self, key: Key) -> bool:
        """Whether it took long to answer, or did not."""
        partner = self._partners.get(key)
        return partner is not None and partner.waited >= LEAST_PATIENCE

    def fallen(self, key: Key) -> str | None:
        """The UID of the coordinator's pod if that has stopped answering (tandem_operator.liveness)."""
        return self._liveness.fallen(key, time.monotonic())

    def in_doubt(self, key: Key) -> bool:
        """Whether to ask its coordinator again at once: it answered before, and says nothing now. One that says what
        nobody can read is there."""
        partner = self._partners.get(key)
        unreadable = partner is not None and partner.is_unreadable
        return not unreadable and self._liveness.in_doubt(key, time.monotonic())

    @property
    def answering(self) -> int:
        """How many coordinators have answered, whether they still do or not."""
        return len(self._liveness)

    def forget(self, key: Key) -> None:
        """There is no such job any more."""
        self._partners.pop(key, None)
        self._liveness.forget(key)
