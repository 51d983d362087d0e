"""The operator as kopf runs it: its settings, login, start, events of jobs, and clean-up.

    startup    configure kopf; connect; start the background tasks, which run until the clean-up
    login      like the official client, with answers that have bounds (tandem_operator.bounded)
    event      a job was created, changed or deleted: update the cache, which queues the job for the controller
    cleanup    end the background tasks, release the Lease, disconnect

The controller (tandem_operator.controller) is level-triggered: it compares a job with its objects, whatever event came.
So there is one handler of events, and none for `create`, `update`, `delete`, `resume`, for single fields or on timers.

Four parts of kopf are replaced, for the reasons in docs/decisions/0009-the-operator.md: the watches of objects other
than jobs (tandem_operator.informer), peering (tandem_operator.leader), the server of probes
(tandem_operator.operator_metrics), and the storage of what was last handled (`NoDiffBase`).
"""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import kopf
from kubernetes.aio.config import ConfigException

from tandem.processes.distribution import version
from tandem_operator import kinds
from tandem_operator.api import ApiServer, Unavailable
from tandem_operator.bounded import Login
from tandem_operator.controller import Controller
from tandem_operator.coordinators import Coordinators
from tandem_operator.informer import Cache, Informer
from tandem_operator.leader import Leases
from tandem_operator.operator_metrics import OperatorMetrics, serve_health
from tandem_operator.options import Options
from tandem_operator.tokens import NoKey, operator_key

RETRY_SECONDS = 1.0
PAGE_SIZE = 25
"""Objects in one page of kopf's lists, which together may cost as much as one (tandem_operator.bounded)."""

log = logging.getLogger("tandem.operator")


class NoDiffBase(kopf.DiffBaseStorage):
    """Stores nothing of an object for kopf's diffs, which nobody reads. Otherwise kopf copies each object of its watch
    twice as a whole. A megabyte of small lists took it four seconds, and it fails at deeply nested ones."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: Any) -> None:
        pass


@kopf.on.startup()
def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
    """Configure kopf."""
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = NoDiffBase()
    # With scanning, kopf would need rights on CRDs and namespaces. All kinds exist before the operator starts.
    settings.scanning.disabled = True
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = PAGE_SIZE


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def start(memo: kopf.Memo, **_: Any) -> None:
    """Connect, and start the background tasks; tried again while the API server is away.

    Raises:
        kopf.PermanentError: there is no cluster to connect to, or no key.
    """
    options: Options = memo.options
    async with AsyncExitStack() as connections:
        try:
            api = await connections.enter_async_context(await ApiServer.connect())
            # A connection of its own: renewals of the Lease must not queue behind hundreds of writes.
            lease_api = await connections.enter_async_context(await ApiServer.connect())
            coordinators = await connections.enter_async_context(Coordinators())
            key = await operator_key(api, *options.key_secret)
        except Unavailable as error:
            raise kopf.TemporaryError(f"no key of the jobs' tokens yet: {error}", delay=RETRY_SECONDS) from error
        except ConfigException as error:
            raise kopf.PermanentError(f"no cluster to connect to: {error}; set KUBECONFIG") from error
        except NoKey as error:
            raise kopf.PermanentError(str(error)) from error
        cache, metrics = Cache(), OperatorMetrics(options.names_jobs)
        controller = Controller(
            api,
            coordinators,
            cache,
            options.images,
            metrics,
            key,
            options.volumes,
            options.patience,
            options.template_fields,
            options.peers,
        )
        requeue = controller.workqueue.add
        informer = Informer(api, cache, requeue, options.namespaces, isolates=options.peers is not None)
        leases = None
        if options.identity:

            def requeue_namespace(namespace: str) -> None:
                """Reconcile all jobs of a namespace, empty for all: acting there has begun, or has ended."""
                for job in cache.job_keys():
                    if namespace in ("", job[0]):
                        requeue(job)

            leases = Leases(lease_api, options.namespaces, options.lease_namespace, options.identity, requeue_namespace)
            api.acts = leases.acts
            metrics.leads = lambda: leases.is_held
        metrics.depth, metrics.requests = lambda: len(controller.workqueue), lambda: api.requests
        metrics.age, metrics.unreadable = lambda: informer.age, lambda: cache.unreadable.counts
        memo.informer, memo.leases = informer, leases
        run_task(memo, "follow", informer.follow())
        run_task(memo, "sweep", informer.sweep())
        run_task(memo, "control", _control(informer, controller))
        run_task(memo, "queueing", controller.queueing.run())
        run_task(memo, "queue-usage", controller.queue_usage.run())
        complaint = (lambda: leases.complaint) if leases else lambda: ""
        run_task(memo, "health", serve_health(options.port, informer, metrics, complaint))
        if leases:
            run_task(memo, "lease", leases.keep())
        memo.connections = connections.pop_all()
    log.info("event=started version=%s namespaces=%s", version(), ",".join(options.namespaces) or "all")


@kopf.on.login()
async def login(memo: kopf.Memo, **options: Any) -> kopf.AiohttpSession | None:
    """Return a session with credentials, at the start and when they are refused."""
    session: Login = memo.setdefault("login", Login())
    return await session.session(memo=memo, **options)


@kopf.on.event(kinds.JOB.group, kinds.JOB.version, kinds.JOB.plural)
async def on_job_event(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
    """Update the cache with a job that was created, changed or deleted, which queues it for the controller."""
    memo.informer.handle(kinds.JOB, event["type"], event["object"])


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """End the background tasks, release the Lease once nothing is written any more, and disconnect."""
    for task in memo.tasks:
        task.cancel()
    await asyncio.gather(*memo.tasks, return_exceptions=True)
    if memo.leases is not None:
        await memo.leases.release()
    await memo.connections.aclose()
    log.info("event=stopped")


async def _control(informer: Informer, controller: Controller) -> None:
    await informer.synced.wait()
    log.info("event=listed")
    await controller.run()


def run_task(memo: kopf.Memo, name: str, work: Coroutine[Any, Any, None]) -> None:
    """Run a background task. None of them ends by itself: if one does, the operator stops."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            memo.ended = task
            memo.stop_flag.set()

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    memo.tasks.append(task)


async def run(memo: kopf.Memo, registry: kopf.OperatorRegistry | None = None, **options: Any) -> None:
    """Have kopf call the handlers until a signal.

    Args:
        memo: passed to all handlers.
        registry: the handlers; None for those of this module.
        **options: see `kopf.operator`.

    Raises:
        RuntimeError: a background task has ended. A restart is better than to continue with a part missing.
    """
    memo.tasks, memo.ended, memo.stop_flag = [], None, asyncio.Event()
    await kopf.operator(memo=memo, registry=registry, stop_flag=memo.stop_flag, standalone=True, **options)
    if memo.ended is not None:
        raise RuntimeError(f"{memo.ended.get_name()} has ended") from memo.ended.exception()
