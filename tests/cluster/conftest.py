"""What tests on a cluster share."""

import fcntl
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest

from tests.support.cluster import kueue
from tests.support.cluster.helm import Helm, program
from tests.support.cluster.images import Images, provide, provide_libraries, provide_mlflow
from tests.support.cluster.machine.places import CACHE
from tests.support.cluster.operated import Operator, kubectl, operated
from tests.support.cluster.pods import Namespace, restricted
from tests.support.cluster.prometheus_operator import Programs, programs

HERE = Path(__file__).parent
TURN = pytest.StashKey[TextIO]()
"""The lock that this worker holds while it runs a file."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """A file that is marked `alone` waits until the other worker has finished its file, and keeps it waiting meanwhile.

    A fixture would wait within the timeout of a test; this hook runs before that timeout starts.
    """
    if HERE not in item.path.parents:
        return (yield)
    stash = item.session.stash
    if TURN not in stash:
        CACHE.mkdir(parents=True, exist_ok=True)
        stash[TURN] = (CACHE / "tests.lock").open("w")
        fcntl.flock(stash[TURN], fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            stash[TURN].close()
            del stash[TURN]


@pytest.fixture(scope="session")
def images(request: pytest.FixtureRequest) -> Images:
    """Images of the present sources, where the nodes find them. Building takes minutes the first time, and says so."""
    with _aloud(request):
        return provide()


@pytest.fixture(scope="session")
def libraries(request: pytest.FixtureRequest, images: Images) -> str:
    """The trainer's image with what a user has added: Hugging Face's Trainer, TRL, Lightning, accelerate, debugpy."""
    with _aloud(request):
        return provide_libraries(images)


@pytest.fixture(scope="session")
def mlflow_image(request: pytest.FixtureRequest) -> str:
    """An image with MLflow's server. Building takes minutes the first time, and says so."""
    with _aloud(request):
        return provide_mlflow()


@pytest.fixture(scope="session")
def helm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm; compiling it takes two minutes the first time, and says so."""
    with _aloud(request):
        return Helm(program(), tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def kueue_programs(request: pytest.FixtureRequest) -> list[Path]:
    """Two versions of Kueue; compiling one takes some minutes the first time, and says so."""
    with _aloud(request):
        return kueue.programs()


@pytest.fixture(scope="session")
def monitoring_programs(request: pytest.FixtureRequest) -> Programs:
    """The Prometheus operator, and its Prometheus; compiling them takes some minutes the first time, and says so."""
    with _aloud(request):
        return programs()


@pytest.fixture(scope="module")
def namespace() -> Iterator[Namespace]:
    """A namespace of the module's own, in which pods have to be restricted."""
    with restricted() as found:
        yield found


@pytest.fixture(scope="module")
def system() -> Iterator[Namespace]:
    """Where releases of the chart are."""
    with restricted() as found:
        yield found


@pytest.fixture
def released(helm: Helm, system: Namespace) -> Iterator[None]:
    """No release is left behind."""
    yield
    helm("uninstall", "tandem", f"--namespace={system.name}", "--ignore-not-found")


@pytest.fixture(scope="module")
def operator(namespace: Namespace, images: Images, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """An operator that looks after the module's namespace."""
    with operated(namespace, images, tmp_path_factory.mktemp("operator")) as found:
        yield found


@pytest.fixture(scope="module")
def urgent(namespace: Namespace) -> Iterator[str]:
    """A priority class that takes the place of others."""
    name = f"{namespace.name}-urgent"
    whole = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": 1000}
    kubectl("create", "-f", "-", stdin=json.dumps(whole))
    yield name
    kubectl("delete", "priorityclass", name)


@contextmanager
def _aloud(request: pytest.FixtureRequest) -> Iterator[None]:
    """What is printed meanwhile is seen at once."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        print(flush=True)
        yield
