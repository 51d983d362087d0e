"""Helm for the tests: the one in PATH, or else one that is compiled from a pinned Go module and kept."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support import ROOT
from tests.support.cluster.images import Images
from tests.support.cluster.machine.binaries import version
from tests.support.cluster.pinned import Pinned
from tests.support.cluster.pods import Manifest

CHART = ROOT / "charts" / "tandem"
HELM = Pinned(Path(__file__).parent / "module", "helm.sh/helm/v3")
SECONDS = 240.0


def of(objects: Sequence[Manifest], kind: str, name: str = "") -> Manifest:
    """The only object of a kind, or the one of that name."""
    (found,) = (one for one in objects if one["kind"] == kind and name in ("", one["metadata"]["name"]))
    return found


def kinds(objects: Sequence[Manifest]) -> set[str]:
    return {one["kind"] for one in objects}


def container(objects: Sequence[Manifest]) -> Manifest:
    """The operator's."""
    found: Manifest = of(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    return found


class Helm:
    """Runs it, with files of its own."""

    def __init__(self, program: Path, folder: Path) -> None:
        kinds = ("CACHE", "CONFIG", "DATA")
        self._program = program
        self._environment = {**os.environ, **{f"HELM_{kind}_HOME": str(folder / kind) for kind in kinds}}
        self._values = folder / "values.yaml"

    def __call__(self, *arguments: str | Path, values: Mapping[str, Any] | None = None) -> str:
        """What a command prints."""
        result = self._run(arguments, values)
        assert result.returncode == 0, f"helm {' '.join(map(str, arguments))}: {result.stderr}"
        return result.stdout

    def refusal(self, *arguments: str | Path, values: Mapping[str, Any] | None = None) -> str:
        """What it says of something that it does not do."""
        result = self._run(arguments, values)
        assert result.returncode != 0, f"helm {' '.join(map(str, arguments))} should have failed: {result.stdout}"
        return result.stderr

    def rendered(self, namespace: str = "tandem-system", **values: Any) -> list[Manifest]:
        """The objects of a release `tandem`."""
        text = self("template", "tandem", CHART, f"--namespace={namespace}", values=values)
        return [one for one in yaml.safe_load_all(text) if one]

    def _run(
        self, arguments: Sequence[str | Path], values: Mapping[str, Any] | None
    ) -> subprocess.CompletedProcess[str]:
        command = [self._program, *arguments]
        if values is not None:
            self._values.write_text(yaml.safe_dump(dict(values)))
            command += [f"--values={self._values}"]
        return subprocess.run(
            command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )


def program() -> Path:
    """Where helm is; compiled now if there is none yet (2 minutes on two cores).

    Raises:
        ClusterError: there is neither a helm nor Go, or it does not compile.
    """
    if there := shutil.which("helm"):
        return Path(there)
    return HELM.program("helm", "cmd/helm", _flags())


def _flags() -> str:
    stamps = {f"{HELM.path}/internal/version.version": f"v{HELM.version}"}
    # Without a cluster, helm takes a Kubernetes of this version for granted; not stamped, it would be 1.20.
    major, minor, _ = version().split(".", 2)
    for place in ("pkg/chartutil", "pkg/lint/rules"):
        stamps |= {f"{HELM.path}/{place}.k8sVersionMajor": major, f"{HELM.path}/{place}.k8sVersionMinor": minor}
    return " ".join(["-s -w", *(f"-X {name}={is_}" for name, is_ in stamps.items())])


def image_values(images: Images) -> dict[str, Any]:
    """The images as the chart's values name them."""
    found: dict[str, Any] = {}
    for name in ("operator", "trainer", "evaluator"):
        registry, _, rest = getattr(images, name).rpartition("/")
        repository, _, tag = rest.rpartition(":")
        found[name] = {"registry": registry, "repository": repository, "tag": tag}
    return {"images": found}
