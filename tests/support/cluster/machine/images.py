"""The registry that the nodes pull from, and how images get there."""

import json
import shutil
import subprocess
from pathlib import Path

from tests.support.cluster.machine.network import INSIDE, listens
from tests.support.cluster.machine.places import CACHE, REGISTRY, STATE
from tests.support.cluster.machine.processes import Part, start, wait_until

PORT = int(REGISTRY.rpartition(":")[2])
PAUSE = f"{REGISTRY}/pause:1"
"""What holds a pod's namespaces."""


def start_registry() -> Part:
    """Start it; its layers outlive the cluster, so that only changed ones travel the next time.

    Raises:
        ClusterError: it does not come up.
    """
    configuration = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(CACHE / "registry")}, "delete": {"enabled": True}},
        "http": {"addr": f"127.0.0.1:{PORT}"},
        "log": {"accesslog": {"disabled": True}, "level": "warn"},
    }
    path = STATE / "registry.yml"
    path.write_text(json.dumps(configuration))
    part = start("registry", "docker-registry", "serve", path, entering=INSIDE)
    wait_until("the registry", lambda: listens(PORT), of=part)
    return part


def load(*images: str) -> None:
    """Push images that buildah has built.

    Raises:
        ValueError: an image's name does not lead to the cluster's registry.
        OSError: a push failed; the message says why.
    """
    for image in images:
        if not image.startswith(f"{REGISTRY}/"):
            raise ValueError(f"{image}: the nodes pull from {REGISTRY} alone; name the image {REGISTRY}/NAME:TAG")
        # Pushing to a registry always compresses. gzip would take minutes for torch, here and again in each node.
        fast = ("--compression-format=zstd", "--compression-level=1")
        _run(*INSIDE, "buildah", "push", "-q", *fast, "--tls-verify=false", image, f"docker://{image}")


def load_pause(binaries: Path) -> None:
    """Build the image of the pause program and push it."""
    context = STATE / "pause"
    context.mkdir()
    shutil.copy(binaries / "pause", context)
    (context / "Dockerfile").write_text('FROM scratch\nCOPY pause /pause\nENTRYPOINT ["/pause"]\n')
    _run("buildah", "bud", "-q", "-t", PAUSE, str(context))
    load(PAUSE)
    _run("buildah", "rmi", PAUSE)


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise OSError(f"{' '.join(command)}: {result.stderr.strip()}")
