"""The one builder of jobs: as a manifest, as the model of it, as a run directory that holds one."""

from pathlib import Path
from typing import Any

from tandem.job.resource import API_VERSION, KIND, DistributedTrainingJob
from tandem.rundir.layout import RunDir

Manifest = dict[str, Any]
TASK: Manifest = {"task": "image-classification"}
"""What a test's job trains, unless it says something else."""


def images(settings: Manifest) -> Manifest:
    """A trainer of images, with each setting in its group."""
    parameters = {name: value for name, value in settings.items() if name in ("model", "data")}
    loop = {name: value for name, value in settings.items() if name not in parameters}
    return TASK | {"parameters": parameters, "loop": loop}


def manifest(name: str = "digits", namespace: str = "", status: Manifest | None = None, **spec: Any) -> Manifest:
    """A job as somebody would write it; `spec` in the manifest's own words."""
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    whole = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": {"trainer": TASK, **spec}}
    return whole | ({"status": status} if status else {})


def job(
    name: str = "digits", namespace: str = "", status: Manifest | None = None, **spec: Any
) -> DistributedTrainingJob:
    """The same, read."""
    return DistributedTrainingJob.parse(manifest(name, namespace, status, **spec))


def run_directory(path: Path, of: DistributedTrainingJob) -> RunDir:
    """A run directory with a job in it, and nothing else yet."""
    found = RunDir(path)
    found.create()
    found.write_job(of)
    return found
