"""Object stores for the tests of runs in buckets."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.buckets import CREDENTIALS, SERVERS, server_named


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server_named(request.param, tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def url(server: str, tmp_path: Path) -> str:
    return f"{server} {tmp_path.name}"
