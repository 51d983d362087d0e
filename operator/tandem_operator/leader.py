"""Leader election: only the operator that holds the Lease acts.

An operator of the whole cluster holds one Lease. One that is confined to namespaces holds one in each, and acts in
those whose Lease it holds: whoever writes in a namespace can take that one Lease from it, and no other.

    nobody holds it               take it
    another one holds it          look again every two seconds; its Lease has run out when nothing of it has changed
                                  for as long as it says, by our own clock: clocks of nodes may differ
    held                          renewed every three seconds; not renewed for fourteen, do not act any more, which
                                  is before another one may
    SIGTERM                       let go of it, once nothing is done any more: the next one acts within two seconds

The holder is the pod, not the process: a container that its kubelet has started again goes on at once.

Rejected: kopf's peering. It needs a CRD, or annotations on an object that all operators may write, and it pauses kopf's
own handlers, of which we have none that act (docs/decisions/0027-one-operator.md).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from tandem_operator import kinds
from tandem_operator.api import ApiServer, RequestRefused, Unavailable

NAME = "tandem-operator"
"""Of each Lease, whatever a release is called: two releases have to find each other."""
HOME = "kube-system"
"""Where the one Lease of an operator of the whole cluster is, so that tenants cannot write it."""
DURATION_SECONDS = 20
"""Without news of its holder for so long, another one may take it."""
MAX_SECONDS = 60.0
"""What another one may say there."""
DEADLINE_SECONDS = 14.0
"""Without a renewal for so long, the holder does not act any more."""
RENEW_SECONDS = 3.0
RETRY_SECONDS = 2.0
RELEASE_SECONDS = 5.0
"""For letting go of all of them."""
CONFLICT = 409
MAX_WORDS = 200

log = logging.getLogger("tandem.operator")


class LeaderLease:
    """One Lease.

    Args:
        namespace: where it is.
        identity: who we are.
    """

    def __init__(self, api: ApiServer, namespace: str, identity: str) -> None:
        self._api, self._namespace, self._identity = api, namespace, identity
        self._renewed: float | None = None
        self._seen: tuple[object, float] | None = None
        self.holder = ""
        """Who holds it, as it was seen last."""
        self.trouble = ""
        """Why nobody knows."""

    @property
    def held(self) -> bool:
        """Whether we hold it."""
        return self._renewed is not None and _now() - self._renewed < DEADLINE_SECONDS

    @property
    def complaint(self) -> str:
        """Why we do not hold it."""
        where = f"the Lease {self._namespace}/{NAME}"
        if self.trouble:
            return f"{where} could not be had: {self.trouble}"
        return f"{self.holder[:MAX_WORDS] or 'nobody'} holds {where}; this operator waits"

    async def look(self) -> float:
        """Take it, or renew it, if that can be. Returns in how many seconds to look again."""
        began = _now()
        try:
            mine = await self._take(began)
        except (Unavailable, RequestRefused) as error:
            if not self.trouble:
                log.warning("event=no-lease namespace=%s error=%r", self._namespace, str(error))
            # What was held stays so until its deadline: the API server may be away for moments.
            self.trouble = str(error)[:MAX_WORDS]
            return RETRY_SECONDS
        self.trouble = ""
        self._renewed = began if mine else None
        return RENEW_SECONDS if mine else RETRY_SECONDS

    async def release(self) -> None:
        """Let go of it, for the next one to take at once."""
        if self._renewed is None:
            return
        self._renewed = None
        try:
            found = await self._api.get(kinds.LEASE, self._namespace, NAME)
            if found is not None and _holder(found) == self._identity:
                await self._api.replace(kinds.LEASE, {**found, "spec": {**found["spec"], "holderIdentity": ""}})
        except (Unavailable, RequestRefused) as error:
            log.warning("event=lease-kept namespace=%s error=%r", self._namespace, str(error))

    async def _take(self, began: float) -> bool:
        """Whether it is ours now."""
        found = await self._api.get(kinds.LEASE, self._namespace, NAME)
        try:
            if found is None:
                metadata = {"name": NAME, "namespace": self._namespace}
                whole = {"apiVersion": kinds.LEASE.api, "kind": kinds.LEASE.name, "metadata": metadata}
                await self._api.create(kinds.LEASE, {**whole, "spec": self._spec(None)})
            else:
                self.holder = _holder(found)
                if self.holder not in ("", self._identity) and not self._has_run_out(found["spec"], began):
                    return False
                # By its resource version, another one that takes it meanwhile is seen.
                await self._api.replace(kinds.LEASE, {**found, "spec": self._spec(found)})
        except RequestRefused as error:
            if error.code == CONFLICT:
                return False
            raise
        self.holder = self._identity
        return True

    def _has_run_out(self, spec: Any, now: float) -> bool:
        if self._seen is None or self._seen[0] != spec:
            self._seen = spec, now
        said = spec.get("leaseDurationSeconds")
        lasts = min(float(said), MAX_SECONDS) if isinstance(said, int) else MAX_SECONDS
        return now - self._seen[1] >= lasts

    def _spec(self, before: Any) -> dict[str, Any]:
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old = (before or {}).get("spec") or {}
        if old.get("holderIdentity") == self._identity:
            return {**old, "leaseDurationSeconds": DURATION_SECONDS, "renewTime": at}
        changes = old.get("leaseTransitions")
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": DURATION_SECONDS,
            "acquireTime": at,
            "renewTime": at,
            "leaseTransitions": min(changes, 2**31 - 2) + 1 if isinstance(changes, int) else 0,
        }


class Leases:
    """All that an operator has to hold.

    Args:
        namespaces: the only ones it looks after; none for all.
        home: where the one Lease is then.
        identity: who we are.
        changed: called with a namespace, empty for all, when we begin to act there, and when we cease to.
    """

    def __init__(
        self, api: ApiServer, namespaces: Sequence[str], home: str, identity: str, changed: Callable[[str], None]
    ) -> None:
        self._leases = {
            namespace: LeaderLease(api, namespace or home, identity) for namespace in dict.fromkeys(namespaces or ("",))
        }
        self._changed = changed
        self._acted: dict[str, bool] = dict.fromkeys(self._leases, False)

    def acts(self, namespace: str) -> bool:
        """Whether we are the one who acts in a namespace."""
        lease = self._leases.get(namespace) or self._leases.get("")
        return lease is not None and lease.held

    @property
    def held(self) -> dict[str, bool]:
        """By namespace, empty for all."""
        return {namespace: lease.held for namespace, lease in self._leases.items()}

    @property
    def complaint(self) -> str:
        """Why we act nowhere, empty if we do somewhere: who takes one Lease makes no operator unready."""
        if any(lease.held for lease in self._leases.values()):
            return ""
        return "; ".join(lease.complaint for lease in self._leases.values())[: 10 * MAX_WORDS]

    async def keep(self) -> None:
        """Take them and renew them, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for namespace in self._leases:
                tasks.create_task(self._keep(namespace))

    async def release(self) -> None:
        """Let go of all of them."""
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await asyncio.gather(*(lease.release() for lease in self._leases.values()))
        except TimeoutError:
            log.warning("event=lease-kept error='the API server does not answer'")

    async def _keep(self, namespace: str) -> None:
        lease = self._leases[namespace]
        while True:
            # A question that is not answered must not hide that the deadline has passed.
            look = asyncio.ensure_future(lease.look())
            try:
                while not (await asyncio.wait({look}, timeout=RETRY_SECONDS))[0]:
                    self._tell(namespace)
                again_in = look.result()
            finally:
                look.cancel()
            self._tell(namespace)
            await asyncio.sleep(again_in)

    def _tell(self, namespace: str) -> None:
        lease = self._leases[namespace]
        if lease.held != self._acted[namespace]:
            self._acted[namespace] = lease.held
            what = "leads" if lease.held else "follows"
            log.info("event=%s namespace=%s holder=%r", what, namespace or "all", lease.holder[:MAX_WORDS])
            self._changed(namespace)


def _holder(found: Any) -> str:
    return str((found.get("spec") or {}).get("holderIdentity") or "")


def _now() -> float:
    return asyncio.get_running_loop().time()
