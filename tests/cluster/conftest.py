"""What tests on a cluster share."""

import pytest

from tests.cluster.images import Images, provide


@pytest.fixture(scope="session")
def images(request: pytest.FixtureRequest) -> Images:
    """Images of the present sources, where the nodes find them. Building takes minutes the first time, and says so."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        print(flush=True)
        return provide()
