"""`python -m tandem_operator`: the operator, until SIGTERM.

--operator-image, --trainer-image, --evaluator-image   what the pods of jobs run
--pull-secret NAME                                     what these are pulled with (may be repeated)
--pull-policy POLICY, --tolerations JSON               when these are pulled, and what all pods of jobs tolerate
--cluster-user                                         they run as the user that the cluster gives them (OpenShift)
--package-index URL                                    where pip finds what requirements.txt of a job's code lists
--mlflow-uri URL                                       the MLflow server of jobs that are tracked and name none
--storage-class NAME, --access-mode MODE, --volume-size SIZE    of claims whose job does not say
--namespace NAME                                       only there (may be repeated); default: everywhere
--key-secret NAMESPACE/NAME                            what the tokens of jobs follow from; made if it is not there
--identity NAME, --lease-namespace NAME, --no-lease    who it is to other operators: one of them acts (leader.py)
--template-field PATH[=VALUE]                          what templates may set (may be repeated); default: everything
--operator-from JSON, --metrics-from JSON              makes a NetworkPolicy for each job: who else reaches its pods
--patience SECONDS                                     until a job that cannot begin gives way to another
--port PORT                                            /metrics, /healthz and /readyz
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

from tandem.distribution import version
from tandem.exitcode import ExitCode
from tandem.job import Storage
from tandem_operator import bounded, leader
from tandem_operator.api import ApiServer, Unavailable
from tandem_operator.controller import Controller
from tandem_operator.coordinators import Coordinators
from tandem_operator.gang_deadlock import PATIENCE_SECONDS
from tandem_operator.informer import Cache, Watching
from tandem_operator.leader import Leases
from tandem_operator.objects import Peers, Volumes
from tandem_operator.operator_metrics import OperatorMetrics, serve_health
from tandem_operator.pods import Images
from tandem_operator.reconcile import ANY_VOLUMES
from tandem_operator.tokens import NoKey, operator_key

KEY_SECRET = "tandem-operator-key"  # noqa: S105 - a name
"""What the Secret is called where it is not said."""
RETRY_SECONDS = 1.0
PEER_FIELDS = {"namespaceSelector", "podSelector", "ipBlock"}
"""Of an entry of a NetworkPolicy's `from`."""

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
    """Seconds, see tandem_operator.gang_deadlock."""
    template_fields: tuple[str, ...] = ()
    """See tandem_operator.pods."""
    peers: Peers | None = None
    """Who reaches pods of jobs besides those; None: no NetworkPolicies are made."""
    identity: str = ""
    """Who it is to other operators; empty: there is no other one."""
    lease_namespace: str = leader.HOME
    names_jobs: bool = True
    """See tandem_operator.operator_metrics."""


def main() -> int:
    """Operate until SIGTERM. Returns the exit code."""
    options = _options()
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s level=%(levelname)s %(message)s")
    # What kopf says about each watch is said a hundred times a minute.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    bounded.prepare()
    try:
        asyncio.run(_operate(options))
    except ConfigException as error:
        print(f"tandem_operator: no cluster to operate in: {error}; set KUBECONFIG", file=sys.stderr)
        return ExitCode.USAGE
    except NoKey as error:
        print(f"tandem_operator: {error}", file=sys.stderr)
        return ExitCode.USAGE
    return ExitCode.DONE


async def _operate(options: Options) -> None:
    begun = asyncio.Event()
    stop = asyncio.create_task(_told_to_stop(begun), name="stop")
    cache, metrics = Cache(), OperatorMetrics(options.names_jobs)
    # Renewals of the Lease do not queue behind all that is made.
    async with (
        await ApiServer.connect() as api,
        await ApiServer.connect() as apart,
        Coordinators() as coordinators,
    ):
        key = await _key(api, options)
        leases = None
        if options.identity:
            names = options.namespaces, options.lease_namespace, options.identity
            leases = Leases(apart, *names, lambda namespace: _look_again(controller, cache, namespace))
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
        watching = Watching(api, cache, controller.workqueue.add, options.namespaces, isolates)
        metrics.depth, metrics.requests = lambda: len(controller.workqueue), lambda: api.requests
        if leases is not None:
            metrics.leads = lambda: leases.held
        metrics.age, metrics.unreadable = lambda: watching.age, lambda: cache.unreadable.counts
        watch = asyncio.create_task(watching.watch(begun), name="watch")
        tasks = [
            watch,
            asyncio.create_task(watching.follow(), name="follow"),
            asyncio.create_task(watching.sweep(), name="sweep"),
            asyncio.create_task(_control(watching, controller), name="control"),
            asyncio.create_task(
                serve_health(options.port, watching, metrics, lambda: leases.complaint if leases else ""), name="health"
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
                # The signal came while kopf began, and kopf took it.
                continue
            # None of them ends by itself. Better to start anew than to go on with a part missing.
            raise RuntimeError(f"{task.get_name()} has ended") from error
    log.info("event=stopped")


async def _told_to_stop(begun: asyncio.Event) -> None:
    """Return after a signal.

    Args:
        begun: kopf has. It takes the signals for itself then, and on one would end the tasks of the whole loop in its
            own order, so they are taken back.
    """
    loop, told = asyncio.get_running_loop(), asyncio.Event()

    def take() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, told.set)

    take()
    waits = {loop.create_task(begun.wait()), loop.create_task(told.wait())}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    take()
    await told.wait()


async def _key(api: ApiServer, options: Options) -> bytes:
    while True:
        try:
            return await operator_key(api, *options.key_secret)
        except Unavailable as error:
            log.warning("event=no-key-yet error=%r", str(error))
            await asyncio.sleep(RETRY_SECONDS)


def _look_again(controller: Controller, cache: Cache, namespace: str) -> None:
    """Look at all jobs of a namespace, empty for all: we have begun to act there, or have ceased to."""
    for key in cache.everyone():
        if namespace in ("", key[0]):
            controller.workqueue.add(key)


async def _control(watching: Watching, controller: Controller) -> None:
    await watching.listed.wait()
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
        "--pull-secret", action="append", default=[], help="a secret that these are pulled with; may be repeated"
    )
    parser.add_argument(
        "--cluster-user",
        action="store_true",
        help="pods of jobs run as the user and group that the cluster gives them, as OpenShift wants it",
    )
    parser.add_argument(
        "--pull-policy", default="", choices=("Always", "IfNotPresent", "Never"), help="of the images of jobs' pods"
    )
    parser.add_argument(
        "--tolerations", default=(), type=_objects, metavar="JSON", help="of all pods of jobs, as a pod has them"
    )
    parser.add_argument(
        "--package-index",
        default="",
        type=_index,
        metavar="URL",
        help="where pip finds what the requirements.txt of a job's code lists (default: as the image is configured)",
    )
    parser.add_argument(
        "--mlflow-uri",
        default="",
        metavar="URL",
        help="the MLflow server of jobs that are tracked and name none (default: there is none)",
    )
    parser.add_argument("--storage-class", default="", help="of claims whose job names none (default: the cluster's)")
    parser.add_argument(
        "--access-mode",
        action="append",
        choices=("ReadWriteMany", "ReadWriteOnce"),
        help="of claims whose job names none; may be repeated (default: ReadWriteMany)",
    )
    parser.add_argument(
        "--volume-size",
        default=ANY_VOLUMES.size,
        type=_size,
        metavar="SIZE",
        help=f"of claims whose job says none, such as 500Mi or 1Ti (default: {ANY_VOLUMES.size})",
    )
    parser.add_argument("--namespace", action="append", default=[], help="operate only there; may be repeated")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_SECONDS,
        metavar="SECONDS",
        help="for which a job that holds some of its workers and cannot begin keeps them from another; longer than an"
        f" autoscaler takes for a node (default: {PATIENCE_SECONDS:g})",
    )
    parser.add_argument(
        "--template-field",
        action="append",
        default=[],
        metavar="PATH[=VALUE]",
        help="what templates of jobs may set, such as spec.nodeSelector; may be repeated (default: everything)",
    )
    parser.add_argument(
        "--operator-from",
        default=(),
        type=_peers,
        metavar="JSON",
        help="make a NetworkPolicy for each job, which lets its pods be reached by each other alone, and their"
        " coordinator by these: the operator, as a policy's `from` has it",
    )
    parser.add_argument(
        "--metrics-from",
        default=(),
        type=_peers,
        metavar="JSON",
        help="who may read the numbers of jobs then, as a policy's `from` has it (default: nobody)",
    )
    parser.add_argument("--port", type=int, default=8080, help="for /metrics, /healthz, /readyz (default: 8080)")
    parser.add_argument(
        "--key-secret",
        metavar="NAMESPACE/NAME",
        type=_place,
        help=f"with what the tokens of jobs follow from (default: {KEY_SECRET} in the first --namespace, or `default`)",
    )
    parser.add_argument(
        "--identity",
        default=f"{socket.gethostname()}_{secrets.token_hex(4)}",
        metavar="NAME",
        help="who it is to other operators, of which one acts; the same for each start of one pod (default: by chance)",
    )
    parser.add_argument(
        "--lease-namespace",
        default=leader.HOME,
        metavar="NAME",
        help="where the Lease of operators of the whole cluster is; with --namespace it is there"
        f" (default: {leader.HOME})",
    )
    parser.add_argument(
        "--no-lease", action="store_true", help="act without asking whether another operator does: there is none"
    )
    parser.add_argument(
        "--no-job-metrics",
        action="store_true",
        help="leave jobs and their namespaces out of /metrics, which anyone who can reach the port can read",
    )
    given = parser.parse_args(arguments)
    if given.metrics_from and not given.operator_from:
        parser.error("--metrics-from needs --operator-from: without, no NetworkPolicies are made")
    images = Images(
        operator=given.operator_image,
        trainer=given.trainer_image,
        evaluator=given.evaluator_image,
        pull_secrets=tuple(given.pull_secret),
        own_user=not given.cluster_user,
        pull_policy=given.pull_policy,
        tolerations=given.tolerations,
        package_index=given.package_index,
        mlflow_uri=given.mlflow_uri,
    )
    modes = tuple(given.access_mode or ANY_VOLUMES.access_modes)
    volumes = Volumes(given.storage_class, modes, given.volume_size)
    key_secret = given.key_secret or (next(iter(given.namespace), "default"), KEY_SECRET)
    return Options(
        images,
        volumes,
        tuple(given.namespace),
        given.port,
        key_secret,
        given.patience,
        tuple(given.template_field),
        Peers(given.operator_from, given.metrics_from) if given.operator_from else None,
        "" if given.no_lease else given.identity,
        given.lease_namespace,
        not given.no_job_metrics,
    )


def _peers(text: str) -> tuple[dict[str, Any], ...]:
    found = _objects(text)
    for one in found:
        if not one or not one.keys() <= PEER_FIELDS:
            raise argparse.ArgumentTypeError(
                f"{json.dumps(one)} is no peer of a policy: {', '.join(sorted(PEER_FIELDS))}"
            )
    return found


def _objects(text: str) -> tuple[dict[str, Any], ...]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise argparse.ArgumentTypeError("not a list of objects")
    return tuple(found)


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
        raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 500Mi or 1Ti") from None
    return text


def _place(text: str) -> tuple[str, str]:
    namespace, _, name = text.partition("/")
    if not namespace or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE/NAME")
    return namespace, name


if __name__ == "__main__":
    sys.exit(main())
