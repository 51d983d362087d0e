"""The operator's command line."""

import argparse
import json
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tandem.job.resource import Storage
from tandem_operator import leader
from tandem_operator.gang_deadlock import PATIENCE_SECONDS
from tandem_operator.objects import Peers, Volumes
from tandem_operator.pods import Images
from tandem_operator.reconcile import DEFAULT_VOLUMES

KEY_SECRET = "tandem-operator-key"  # noqa: S105 - a name
"""Default name of the Secret."""
PEER_FIELDS = {"namespaceSelector", "podSelector", "ipBlock"}
"""Fields of an entry in the `from` of a NetworkPolicy."""


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


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; without `arguments`, that of this process. Ends the process if they are wrong."""
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
        "--otlp-endpoint",
        default="",
        metavar="URL",
        help="OTLP collector to which coordinators send traces, such as http://collector.observability:4318"
        " (default: none)",
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
        otlp_endpoint=options.otlp_endpoint,
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
