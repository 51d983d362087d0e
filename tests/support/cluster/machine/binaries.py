"""The cluster's own programs, compiled once from pinned Go modules and kept by the hash of their sources."""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections import deque
from pathlib import Path

from tests.support.cluster.machine import ClusterError
from tests.support.cluster.machine.places import CACHE, MODULES

PROGRAMS = ("pause", "coredns", "kubernetes")
COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl")
"""Names of the one program `kubernetes`: it is the component it is called as. Seven programs would be linked seven
times."""
PROGRESS_SECONDS = 15.0


def build() -> Path:
    """The folder with the programs; compiled now if that has not happened yet (7 to 9 minutes on two cores).

    Raises:
        ClusterError: Go could not compile one of them.
    """
    ready = CACHE / "bin" / digest()
    if ready.is_dir():
        return ready
    ready.parent.mkdir(parents=True, exist_ok=True)
    # Renamed as a whole at the end: a folder of that name is complete, whoever stopped a build half-way.
    unfinished = Path(tempfile.mkdtemp(dir=ready.parent, prefix="unfinished-"))
    try:
        for name in PROGRAMS:
            compile_program(MODULES / name, unfinished / name, _flags())
        for name in COMPONENTS:
            (unfinished / name).symlink_to("kubernetes")
        unfinished.chmod(0o755)
        unfinished.rename(ready)
    except BaseException:
        shutil.rmtree(unfinished)
        raise
    return ready


def digest() -> str:
    """Changes with the sources, the pins and the way of building."""
    return _digest(repr((_flags(), PROGRAMS, COMPONENTS)), MODULES)


def version() -> str:
    """Of Kubernetes, as pinned: `1.35.4`."""
    pins = (MODULES / "kubernetes" / "go.mod").read_text()
    found = re.search(r"^\s*(?:require )?k8s\.io/kubernetes v(\S+)", pins, re.MULTILINE)
    assert found, "the module pins no k8s.io/kubernetes"
    return found[1]


def kept_program(module: Path, name: str, flags: str, package: str, tags: str = "") -> Path:
    """A program of a module of its own, compiled now if that has not happened yet with these sources and flags.

    Args:
        tags: for the build, separated by commas.

    Raises:
        ClusterError: Go could not compile it.
    """
    ready = CACHE / name / _digest(f"{flags}{tags}", module) / name
    if ready.exists():
        return ready
    ready.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ready.parent, prefix="unfinished-") as folder:
        unfinished = Path(folder, name)
        compile_program(module, unfinished, flags, package, tags)
        unfinished.rename(ready)
    return ready


def compile_program(module: Path, target: Path, flags: str, package: str = ".", tags: str = "") -> None:
    """Compile a package of a Go module, with progress on standard output.

    Args:
        flags: for the linker.
        tags: for the build, separated by commas.

    Raises:
        ClusterError: Go could not; the message ends with what it said last.
    """
    name = target.name
    # -v names each package as it is compiled: the only progress that Go shows.
    command = ["go", "build", "-v", "-trimpath", "-buildvcs=false", "-ldflags", flags, "-o", str(target)]
    command += [*(["-tags", tags] if tags else []), package]
    environment = {**os.environ, "CGO_ENABLED": "0"}
    started = shown = time.monotonic()
    compiled, last = 0, deque[str](maxlen=20)
    print(f"building {name} (only once)", flush=True)
    with subprocess.Popen(
        command, cwd=module, env=environment, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    ) as process:
        assert process.stderr
        for line in process.stderr:
            last.append(line)
            compiled += not line.startswith("go: ")
            if time.monotonic() - shown >= PROGRESS_SECONDS:
                shown = time.monotonic()
                print(f"building {name}: {compiled} packages after {shown - started:.0f} s", flush=True)
    if process.returncode != 0:
        raise ClusterError(f"go build of {name} failed ({process.returncode}):\n{''.join(last)}")
    print(f"built {name} in {time.monotonic() - started:.0f} s", flush=True)


def _digest(way: str, folder: Path) -> str:
    """Of a way of building and all files of a folder."""
    found = hashlib.sha256(way.encode())
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _flags() -> str:
    major, minor, _ = version().split(".", 2)
    stamps = {"gitVersion": f"v{version()}", "gitMajor": major, "gitMinor": minor}
    return " ".join(["-s -w", *(f"-X k8s.io/component-base/version.{name}={is_}" for name, is_ in stamps.items())])
