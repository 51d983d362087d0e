"""Tandem's operator for the measurement: a process of this machine with the rights of its service account."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.operators.subject import NOBODY, Object, Running, Subject
from tandem_operator import kinds, names
from tests.support.cluster.images import Images
from tests.support.cluster.operated import Operator, install, kubeconfig
from tests.support.cluster.pods import Namespace

WORKERS = 2


@contextmanager
def _running(namespace: Namespace, folder: Path, proxy: int) -> Iterator[Running]:
    install(namespace)
    nothing = Images(operator="bench", trainer="bench", evaluator="bench")
    config = kubeconfig(namespace, folder, f"http://127.0.0.1:{proxy}")
    with Operator(namespace, nothing, config, folder / "operator.log") as operator:
        operator.start()
        yield operator


def _manifest(index: int) -> Object:
    """Manifest of a job. Its volume is never provided: nothing would be written to it."""
    task = {
        "task": "image-classification",
        "parameters": {"model": "cnn", "data": {"name": "digits"}},
        "loop": {"epochs": 100},
    }
    return {
        "apiVersion": kinds.JOB.api,
        "kind": kinds.JOB.name,
        "metadata": {"name": f"job-{index:05d}"},
        "spec": {
            "trainer": task,
            "workers": {"replicas": WORKERS},
            "evaluators": {"policy": "Latest"},
            "checkpoint": {"storage": {"size": "1Gi", "storageClassName": "", "retain": False}},
            "runPolicy": {"schedulerName": NOBODY},
        },
    }


def _phase(status: Object) -> str:
    return str(status.get("phase", ""))


def _step(status: Object) -> int | None:
    step: int | None = (status.get("progress") or {}).get("step")
    return step


TANDEM = Subject(
    title="Tandem",
    kind=kinds.JOB,
    running=_running,
    manifest=_manifest,
    pods=WORKERS + 2,  # A coordinator and an evaluator.
    job=names.JOB,
    role=names.ROLE,
    ending=frozenset({names.WORKER, names.EVALUATOR}),
    container=lambda role: role,
    phase=_phase,
    right=lambda status: _phase(status) == "Running" and _step(status) is not None,
    step=_step,
    belongings=(*kinds.WATCHED, kinds.SECRET),
    failed_look="event=look-",
)
