"""Run the operator until SIGTERM: `python -m tandem_operator`.

--operator-image, --trainer-image, --evaluator-image   images of jobs' pods
--pull-secret NAME                                     Secret to pull these images with (may be repeated)
--pull-policy POLICY, --tolerations JSON               pull policy of these images, and tolerations of all pods of jobs
--cluster-user                                         pods of jobs run as the user that the cluster assigns (OpenShift)
--package-index URL                                    package index for the requirements.txt of a job's code
--mlflow-uri URL                                       MLflow server of tracked jobs that name none
--storage-class NAME, --access-mode MODE, --volume-size SIZE    defaults of jobs' claims
--namespace NAME                                       namespace to reconcile (may be repeated); default: all
--key-secret NAMESPACE/NAME                            Secret with the key of the jobs' tokens; created if missing
--identity NAME, --lease-namespace NAME, --no-lease    leader election among operators (leader.py)
--template-field PATH[=VALUE]                          field that templates may set (may be repeated); default: all
--operator-from JSON, --metrics-from JSON              create a NetworkPolicy for each job: who else reaches its pods
--patience SECONDS                                     time until a job that cannot start backs off for another one
--port PORT                                            port of /metrics, /healthz and /readyz
"""

import argparse
import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kubernetes.aio.config import ConfigException
from pydantic import ValidationError

from tandem.job.resource import Storage
from tandem.processes.distribution import version
from tandem.processes.exitcode import ExitCode
from tandem_operator import bounded, leader
from tandem_operator.api import ApiServer, Unavailable
from tandem_operator.controller import Controller
from tandem_operator.coordinators import Coordinators
from tandem_operator.gang_deadlock import PATIENCE_SECONDS
from tandem_operator.informer import Cache, Informer
from tandem_operator.leader import Leases
from tandem_operator.objects import Peers, Volumes
from tandem_operator.operator_metrics import OperatorMetrics, serve_health
from tandem_operator.pods import Images
from tandem_operator.reconcile import DEFAULT_VOLUMES
from tandem_operator.tokens import NoKey, operator_key

KEY_SECRET = "tandem-operator-key"  # noqa: S105 - a name
"""Default name of the Secret."""
RETRY_SECONDS = 1.0
PEER_FIELDS = {"namespaceSelector", "podSelector", "ipBlock"}
"""Fields of an entry in the `from` of a NetworkPolicy."""

log = logging.getLogger("tandem.operator")


@dataclass(frozen=True)
class Options:
    """The command line."""

    images: Images
    volumes: Volumes
    namespaces: tuple[str, ...]
    port: int
    key_secret: tuple[str, str]
    """Namespace and name."""
    patience: float
    """Patience in seconds, see tandem_operator.gang_deadlock."""
    template_fields: tuple[str, ...] = ()
    """Fields that templates may set, see tandem_operator.pods."""
    peers: Peers | None = None
    """Peers, besides the job's own pods, that may reach its pods; None: no NetworkPolicies are created."""
    identity: str = ""
    """Holder identity in the Lease; empty: act without a Lease."""
    lease_namespace: str = leader.HOME
    names_jobs: bool = True
    """See tandem_operator.operator_metrics."""


def main() -> int:
    """Run the operator until SIGTERM. Returns the exit code."""
    options = _options()
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s level=%(levelname)s %(message)s")
    # kopf logs each watch a hundred times a minute.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    bounded.prepare()
    try:
        asyncio.run(_operate(options))
    except ConfigException as error:
        print(f"tandem_operator: no cluster to connect to: {error}; set KUBECONFIG", file=sys.stderr)
        return ExitCode.USAGE
    except NoKey as error:
        print(f"tandem_operator: {error}", file=sys.stderr)
        return ExitCode.USAGE
    return ExitCode.DONE


async def _operate(options: Options) -> None:
    started = asyncio.Event()
    stop = asyncio.create_task(_wait_for_signal(started), name="stop")
    cache, metrics = Cache(), OperatorMetrics(options.names_jobs)
    # A connection of its own: renewals of the Lease must not queue behind hundreds of writes.
    async with (
        await ApiServer.connect() as api,
        await ApiServer.connect() as lease_api,
        Coordinators() as coordinators,
    ):
        key = await _key(api, options)
        leases = None
        if options.identity:
            lease_options = options.namespaces, options.lease_namespace, options.identity
            leases = Leases(lease_api, *lease_options, lambda namespace: _requeue_all(controller, cache, namespace))
            api.acts = leases.acts
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
        isolates = options.peers is not None
        informer = Informer(api, cache, controller.workqueue.add, options.namespaces, isolates)
        metrics.depth, metrics.requests = lambda: len(controller.workqueue), lambda: api.requests
        if leases is not None:
            metrics.leads = lambda: leases.is_held
        metrics.age, metrics.unreadable = lambda: informer.age, lambda: cache.unreadable.counts
        watch = asyncio.create_task(informer.watch(started), name="watch")
        tasks = [
            watch,
            asyncio.create_task(informer.follow(), name="follow"),
            asyncio.create_task(informer.sweep(), name="sweep"),
            asyncio.create_task(_control(informer, controller), name="control"),
            asyncio.create_task(controller.queueing.run(), name="queueing"),
            asyncio.create_task(
                serve_health(options.port, informer, metrics, lambda: leases.complaint if leases else ""), name="health"
            ),
            *([asyncio.create_task(leases.keep(), name="lease")] if leases else []),
        ]
        log.info("event=started version=%s namespaces=%s", version(), ",".join(options.namespaces) or "all")
        done, _ = await asyncio.wait([*tasks, stop], return_when=asyncio.FIRST_COMPLETED)
        for task in [*tasks, stop]:
            task.cancel()
        await asyncio.gather(*tasks, stop, return_exceptions=True)
        if leases is not None:
            await leases.release()
        for task in done - {stop}:
            error = None if task.cancelled() else task.exception()
            if task is watch and error is None:
                # The signal came while kopf started, and kopf handled it.
                continue
            # None of the tasks ends by itself. A restart is better than to continue with a part missing.
            raise RuntimeError(f"{task.get_name()} has ended") from error
    log.info("event=stopped")


async def _wait_for_signal(started: asyncio.Event) -> None:
    """Wait for SIGTERM or SIGINT.

    Args:
        started: set once kopf runs. kopf then installs its own signal handlers, which would cancel all tasks of the
            loop in its own order, so they are replaced again.
    """
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()

    def take() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)

    take()
    waits = {loop.create_task(started.wait()), loop.create_task(stopped.wait())}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    take()
    await stopped.wait()


async def _key(api: ApiServer, options: Options) -> bytes:
    while True:
        try:
            return await operator_key(api, *options.key_secret)
        except Unavailable as error:
            log.warning("event=no-key-yet error=%r", str(error))
            await asyncio.sleep(RETRY_SECONDS)


def _requeue_all(controller: Controller, cache: Cache, namespace: str) -> None:
    """Reconcile all jobs of a namespace, empty for all: this operator has started to act there, or has stopped."""
    for key in cache.job_keys():
        if namespace in ("", key[0]):
            controller.workqueue.add(key)


async def _control(informer: Informer, controller: Controller) -> None:
    await informer.synced.wait()
    log.info("event=listed")
    await controller.run()


def _options(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m tandem_operator", description="Operate DistributedTrainingJobs.")
    for role in ("operator", "trainer", "evaluator"):
        variable = f"TANDEM_{role.upper()}_IMAGE"
        default = os.environ.get(variable) or None
        parser.add_argument(
            f"--{role}-image", default=default, required=default is None, help=f"default: the variable {variable}"
        )
    parser.add_argument(
        "--pull-secret",
        action="append",
        default=[],
        help="Secret to pull the images of jobs' pods with; may be repeated",
    )
    parser.add_argument(
        "--cluster-user",
        action="store_true",
        help="run pods of jobs as the user and group that the cluster assigns, as OpenShift requires",
    )
    parser.add_argument(
        "--pull-policy",
        default="",
        choices=("Always", "IfNotPresent", "Never"),
        help="pull policy of the images of jobs' pods",
    )
    parser.add_argument(
        "--tolerations",
        default=(),
        type=_objects,
        metavar="JSON",
        help="tolerations of all pods of jobs, as in a pod's spec",
    )
    parser.add_argument(
        "--package-index",
        default="",
        type=_index,
        metavar="URL",
        help="package index for the requirements.txt of a job's code (default: as the image is configured)",
    )
    parser.add_argument(
        "--mlflow-uri",
        default="",
        metavar="URL",
        help="MLflow server of tracked jobs that name none (default: none)",
    )
    parser.add_argument(
        "--storage-class", default="", help="storage class of claims whose job names none (default: the cluster's)"
    )
    parser.add_argument(
        "--access-mode",
        action="append",
        choices=("ReadWriteMany", "ReadWriteOnce"),
        help="access mode of claims whose job names none; may be repeated (default: ReadWriteMany)",
    )
    parser.add_argument(
        "--volume-size",
        default=DEFAULT_VOLUMES.size,
        type=_size,
        metavar="SIZE",
        help=f"size of claims whose job names none, such as 500Mi or 1Ti (default: {DEFAULT_VOLUMES.size})",
    )
    parser.add_argument(
        "--namespace", action="append", default=[], help="namespace to reconcile; may be repeated (default: all)"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_SECONDS,
        metavar="SECONDS",
        help="time for which a job that holds some of its workers and cannot start keeps them; longer than an"
        f" autoscaler takes for a node (default: {PATIENCE_SECONDS:g})",
    )
    parser.add_argument(
        "--template-field",
        action="append",
        default=[],
        metavar="PATH[=VALUE]",
        help="field that templates of jobs may set, such as spec.nodeSelector; may be repeated (default: all)",
    )
    parser.add_argument(
        "--operator-from",
        default=(),
        type=_peers,
        metavar="JSON",
        help="create a NetworkPolicy for each job, which allows its pods to reach each other, and these peers to reach"
        " its coordinator: the operator, as in a policy's `from`",
    )
    parser.add_argument(
        "--metrics-from",
        default=(),
        type=_peers,
        metavar="JSON",
        help="peers that may scrape the metrics of jobs then, as in a policy's `from` (default: none)",
    )
    parser.add_argument("--port", type=int, default=8080, help="port of /metrics, /healthz, /readyz (default: 8080)")
    parser.add_argument(
        "--key-secret",
        metavar="NAMESPACE/NAME",
        type=_place,
        help="Secret with the key that the tokens of jobs are derived from (default:"
        f" {KEY_SECRET} in the first --namespace, or `default`)",
    )
    parser.add_argument(
        "--identity",
        default=f"{socket.gethostname()}_{secrets.token_hex(4)}",
        metavar="NAME",
        help="holder identity in the Lease; the same for each start of one pod (default: random)",
    )
    parser.add_argument(
        "--lease-namespace",
        default=leader.HOME,
        metavar="NAME",
        help="namespace of the Lease of an operator of the whole cluster; with --namespace, Leases are in those"
        f" (default: {leader.HOME})",
    )
    parser.add_argument("--no-lease", action="store_true", help="act without a Lease: there is no other operator")
    parser.add_argument(
        "--no-job-metrics",
        action="store_true",
        help="leave single jobs and their namespaces out of /metrics, which everybody who reaches the port can read",
    )
    options = parser.parse_args(arguments)
    if options.metrics_from and not options.operator_from:
        parser.error("--metrics-from needs --operator-from: without it, no NetworkPolicies are created")
    images = Images(
        operator=options.operator_image,
        trainer=options.trainer_image,
        evaluator=options.evaluator_image,
        pull_secrets=tuple(options.pull_secret),
        own_user=not options.cluster_user,
        pull_policy=options.pull_policy,
        tolerations=options.tolerations,
        package_index=options.package_index,
        mlflow_uri=options.mlflow_uri,
    )
    modes = tuple(options.access_mode or DEFAULT_VOLUMES.access_modes)
    volumes = Volumes(options.storage_class, modes, options.volume_size)
    key_secret = options.key_secret or (next(iter(options.namespace), "default"), KEY_SECRET)
    return Options(
        images,
        volumes,
        tuple(options.namespace),
        options.port,
        key_secret,
        options.patience,
        tuple(options.template_field),
        Peers(options.operator_from, options.metrics_from) if options.operator_from else None,
        "" if options.no_lease else options.identity,
        options.lease_namespace,
        not options.no_job_metrics,
    )


def _peers(text: str) -> tuple[dict[str, Any], ...]:
    peers = _objects(text)
    for peer in peers:
        if not peer or not peer.keys() <= PEER_FIELDS:
            raise argparse.ArgumentTypeError(
                f"{json.dumps(peer)} is not a peer of a NetworkPolicy: {', '.join(sorted(PEER_FIELDS))}"
            )
    return peers


def _objects(text: str) -> tuple[dict[str, Any], ...]:
    try:
        objects = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(objects, list) or not all(isinstance(entry, dict) for entry in objects):
        raise argparse.ArgumentTypeError("not a list of objects")
    return tuple(objects)


def _index(text: str) -> str:
    if text and (not text.startswith(("https://", "http://")) or "@" in text or " " in text):
        raise argparse.ArgumentTypeError(
            "not https://… without a user and a password: who may see pods would read them; a job that needs a "
            "password takes PIP_INDEX_URL from a Secret (trainer.env)"
        )
    return text


def _size(text: str) -> str:
    try:
        Storage(size=text)
    except ValidationError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500Mi or 1Ti") from None
    return text


def _place(text: str) -> tuple[str, str]:
    namespace, _, name = text.partition("/")
    if not namespace or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE/NAME")
    return namespace, name


if __name__ == "__main__":
    sys.exit(main())
