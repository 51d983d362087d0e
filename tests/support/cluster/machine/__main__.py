"""The cluster by hand: `make cluster`, then `eval "$(make cluster ARGS=env)"`; `make cluster ARGS=down` ends it."""

import argparse
import os
import sys

from tests.support.cluster.machine import ClusterError, cluster, images
from tests.support.cluster.machine.binaries import build
from tests.support.cluster.machine.node import Node
from tests.support.cluster.machine.places import KUBECONFIG, REGISTRY, STATE


def main() -> int:
    """Carry out one command; exit code 1 with a message if it cannot be done."""
    parser = argparse.ArgumentParser(prog="make cluster ARGS=…", description="A Kubernetes on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("up", help="start a new cluster, and wait until every node is Ready")
    start.add_argument("--nodes", type=int, default=2)
    start.add_argument("--gpus", type=int, default=4, help="nvidia.com/gpu that each node advertises")
    load = commands.add_parser("load", help=f"push images that buildah built as {REGISTRY}/NAME:TAG")
    load.add_argument("images", nargs="+")
    for name, what in {"kill-node": "end a node, as a power cut would", "start-node": "bring it back"}.items():
        commands.add_parser(name, help=what).add_argument("name")
    commands.add_parser("env", help="print what a shell needs to reach the cluster")
    commands.add_parser("down", help="remove the cluster")
    options = parser.parse_args()
    try:
        _carry_out(options)
    except (ClusterError, ValueError, OSError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


def _carry_out(options: argparse.Namespace) -> None:
    match options.command:
        case "up":
            with cluster.held():
                cluster.up(cluster.programs(), options.nodes, options.gpus)
        case "load":
            images.load(*options.images)
        case "kill-node":
            _known(options.name).kill()
        case "start-node":
            _known(options.name).start(build())
        case "env":
            print(f"export KUBECONFIG={KUBECONFIG} PATH={build()}{os.pathsep}$PATH")
        case "down":
            with cluster.held():
                cluster.down()


def _known(name: str) -> Node:
    node = Node(name)
    if not (STATE / name).is_dir():
        raise ClusterError(f"the cluster has no {name}; `up` starts one")
    return node


if __name__ == "__main__":
    sys.exit(main())
