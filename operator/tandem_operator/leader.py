"""Leader election: only the operator that holds the Lease acts.

An operator of the whole cluster holds one Lease. One that is confined to namespaces holds one in each, and acts in
those whose Lease it holds: whoever can write in a namespace can take that one Lease from it, and no other.

    without a holder              take it
    held by another operator      check every two seconds; the Lease has expired if nothing in it has changed for as
    long
                                  as it says, by the operator's own clock: clocks of nodes may differ
    held by this operator         renew it every three seconds; without a renewal for fourteen, stop acting, which is
                                  before another operator may take it
    SIGTERM                       release it, once nothing is written any more: the next one acts within two seconds

The holder is the pod, not the process: a container that its kubelet has restarted continues at once.

Rejected: kopf's peering. It needs a CRD, or annotations on an object that all operators may write, and it pauses kopf's
own handlers, of which none act here (docs/decisions/0027-one-operator.md).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from tandem_operator import kinds
from tandem_operator.api import ApiServer, RequestRefused, Unavailable

NAME = "tandem-operator"
"""Name of every Lease, whatever a release is called: two releases have to find each other."""
HOME = "kube-system"
"""Namespace of the Lease of an operator of the whole cluster, where tenants cannot write it."""
DURATION_SECONDS = 20
"""Time without a renewal after which another operator may take the Lease."""
MAX_SECONDS = 60.0
"""Longest duration that is accepted from another holder."""
DEADLINE_SECONDS = 14.0
"""Time without a renewal after which the holder stops acting."""
RENEW_SECONDS = 3.0
RETRY_SECONDS = 2.0
RELEASE_SECONDS = 5.0
"""Timeout for the release of all Leases."""
CONFLICT = 409
MAX_ERROR_LENGTH = 200

log = logging.getLogger("tandem.operator")


class LeaderLease:
    """One Lease.

    Args:
        namespace: its namespace.
        identity: the holder identity of this operator.
    """

    def __init__(self, api: ApiServer, namespace: str, identity: str) -> None:
        self._api, self._namespace, self._identity = api, namespace, identity
        self._renewed: float | None = None
        self._last_spec: tuple[object, float] | None = None
        self.holder = ""
        """The last known holder."""
        self.trouble = ""
        """The reason why the holder is not known."""

    @property
    def is_held(self) -> bool:
        """Whether this operator holds it."""
        return self._renewed is not None and _now() - self._renewed < DEADLINE_SECONDS

    @property
    def complaint(self) -> str:
        """The reason why this operator does not hold it."""
        lease = f"the Lease {self._namespace}/{NAME}"
        if self.trouble:
            return f"{lease} could not be had: {self.trouble}"
        return f"{self.holder[:MAX_ERROR_LENGTH] or 'nobody'} holds {lease}; this operator waits"

    async def renew(self) -> float:
        """Take the Lease, or renew it, if possible; returns the delay until the next attempt in seconds."""
        started_at = _now()
        try:
            is_leader = await self._take(started_at)
        except (Unavailable, RequestRefused) as error:
            if not self.trouble:
                log.warning("event=no-lease namespace=%s error=%r", self._namespace, str(error))
            # A held Lease stays held until its deadline: the API server may be away for moments.
            self.trouble = str(error)[:MAX_ERROR_LENGTH]
            return RETRY_SECONDS
        self.trouble = ""
        self._renewed = started_at if is_leader else None
        return RENEW_SECONDS if is_leader else RETRY_SECONDS

    async def release(self) -> None:
        """Release it, so that the next operator can take it at once."""
        if self._renewed is None:
            return
        self._renewed = None
        try:
            lease = await self._api.get(kinds.LEASE, self._namespace, NAME)
            if lease is not None and _holder(lease) == self._identity:
                await self._api.replace(kinds.LEASE, {**lease, "spec": {**lease["spec"], "holderIdentity": ""}})
        except (Unavailable, RequestRefused) as error:
            log.warning("event=lease-kept namespace=%s error=%r", self._namespace, str(error))

    async def _take(self, now: float) -> bool:
        """Take or renew the Lease; returns whether this operator holds it now."""
        lease = await self._api.get(kinds.LEASE, self._namespace, NAME)
        try:
            if lease is None:
                metadata = {"name": NAME, "namespace": self._namespace}
                manifest = {"apiVersion": kinds.LEASE.api, "kind": kinds.LEASE.name, "metadata": metadata}
                await self._api.create(kinds.LEASE, {**manifest, "spec": self._spec(None)})
            else:
                self.holder = _holder(lease)
                if self.holder not in ("", self._identity) and not self._has_run_out(lease["spec"], now):
                    return False
                # The resource version makes this fail if another operator takes it meanwhile.
                await self._api.replace(kinds.LEASE, {**lease, "spec": self._spec(lease)})
        except RequestRefused as error:
            if error.code == CONFLICT:
                return False
            raise
        self.holder = self._identity
        return True

    def _has_run_out(self, spec: Any, now: float) -> bool:
        if self._last_spec is None or self._last_spec[0] != spec:
            self._last_spec = spec, now
        duration = spec.get("leaseDurationSeconds")
        lifetime = min(float(duration), MAX_SECONDS) if isinstance(duration, int) else MAX_SECONDS
        return now - self._last_spec[1] >= lifetime

    def _spec(self, before: Any) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old = (before or {}).get("spec") or {}
        if old.get("holderIdentity") == self._identity:
            return {**old, "leaseDurationSeconds": DURATION_SECONDS, "renewTime": now}
        changes = old.get("leaseTransitions")
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": DURATION_SECONDS,
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": min(changes, 2**31 - 2) + 1 if isinstance(changes, int) else 0,
        }


class Leases:
    """All Leases that an operator has to hold.

    Args:
        namespaces: the only namespaces that it reconciles; none for all.
        home: namespace of the single Lease in that case.
        identity: the holder identity of this operator.
        changed: called with a namespace, empty for all, when this operator starts to act there, and when it stops.
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
        """Whether this operator is the one that acts in a namespace."""
        lease = self._leases.get(namespace) or self._leases.get("")
        return lease is not None and lease.is_held

    @property
    def is_held(self) -> dict[str, bool]:
        """Whether this operator holds the Lease, by namespace, empty for all."""
        return {namespace: lease.is_held for namespace, lease in self._leases.items()}

    @property
    def complaint(self) -> str:
        """The reason why this operator acts nowhere, empty if it acts somewhere: somebody who takes one Lease cannot
        make the operator unready."""
        if any(lease.is_held for lease in self._leases.values()):
            return ""
        return "; ".join(lease.complaint for lease in self._leases.values())[: 10 * MAX_ERROR_LENGTH]

    async def keep(self) -> None:
        """Take and renew all Leases, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for namespace in self._leases:
                tasks.create_task(self._keep(namespace))

    async def release(self) -> None:
        """Release all Leases."""
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await asyncio.gather(*(lease.release() for lease in self._leases.values()))
        except TimeoutError:
            log.warning("event=lease-kept error='the API server does not answer'")

    async def _keep(self, namespace: str) -> None:
        lease = self._leases[namespace]
        while True:
            # A request that is not answered must not hide that the deadline has passed.
            renewal = asyncio.ensure_future(lease.renew())
            try:
                while not (await asyncio.wait({renewal}, timeout=RETRY_SECONDS))[0]:
                    self._notify(namespace)
                delay = renewal.result()
            finally:
                renewal.cancel()
            self._notify(namespace)
            await asyncio.sleep(delay)

    def _notify(self, namespace: str) -> None:
        lease = self._leases[namespace]
        if lease.is_held != self._acted[namespace]:
            self._acted[namespace] = lease.is_held
            transition = "leads" if lease.is_held else "follows"
            log.info("event=%s namespace=%s holder=%r", transition, namespace or "all", lease.holder[:MAX_ERROR_LENGTH])
            self._changed(namespace)


def _holder(lease: Any) -> str:
    return str((lease.get("spec") or {}).get("holderIdentity") or "")


def _now() -> float:
    return asyncio.get_running_loop().time()
