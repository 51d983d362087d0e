"""Object stores for the tests of runs in buckets."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.buckets import ALL_SERVERS, CREDENTIALS, SERVERS, memory, server_named


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server_named(request.param, tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture(scope="module", params=["memory", *ALL_SERVERS])
def bucket_place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "memory":
        with memory() as endpoint:
            yield endpoint
    else:
        with server_named(request.param, tmp_path_factory.mktemp("server")) as url:
            yield url


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def url(bucket_place: str, tmp_path: Path) -> str:
    """A place in a bucket: in the memory of this process, and in the full tier on each server. What a server has to
    guarantee for that, test_store shows of it."""
    return f"{bucket_place} {tmp_path.name}"


@pytest.fixture
def served(server: str, tmp_path: Path) -> str:
    """A place in a bucket of a server, for requests that are disturbed on their way, or sent by other processes."""
    return f"{server} {tmp_path.name}"
