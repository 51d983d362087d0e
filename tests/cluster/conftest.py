"""What tests on a cluster share."""

from collections.abc import Iterator

import pytest

from tests.cluster.images import Images, provide
from tests.cluster.operated import Operator, operated
from tests.cluster.pods import Namespace, restricted


@pytest.fixture(scope="session")
def images(request: pytest.FixtureRequest) -> Images:
    """Images of the present sources, where the nodes find them. Building takes minutes the first time, and says so."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        print(flush=True)
        return provide()


@pytest.fixture(scope="module")
def namespace() -> Iterator[Namespace]:
    """A namespace of the module's own, in which pods have to be restricted."""
    with restricted() as found:
        yield found


@pytest.fixture(scope="module")
def operator(namespace: Namespace, images: Images, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """An operator that looks after the module's namespace."""
    with operated(namespace, images, tmp_path_factory.mktemp("operator")) as found:
        yield found
