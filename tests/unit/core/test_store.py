"""The operations on an object store, and the sentences that its errors become."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.rundir.durable import is_transient
from tandem.rundir.store import Location, Stale, Store, StoreAccessError, StoreUnavailableError, _credentials_file
from tests.support.buckets import (
    BUCKET,
    CREDENTIALS,
    SERVERS,
    Disturbance,
    answering,
    disturbed,
    moto,
    place,
    server_named,
)
from tests.support.ports import reserved_port


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server_named(request.param, tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


def test_of_many_that_create_an_object_one_succeeds(server: str) -> None:
    stores = [place(server, "created") for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(lambda index: stores[index].create("object", str(index).encode()), range(8)))
    winners = [index for index, version in enumerate(versions) if version is not None]
    assert len(winners) == 1
    found = stores[0].read("object")
    assert found is not None
    assert found.data == str(winners[0]).encode()


def test_an_object_is_replaced_only_in_the_version_that_the_caller_knows(server: str) -> None:
    mine, other = place(server, "replaced"), place(server, "replaced")
    first = mine.create("object", b"1")
    second = other.replace("object", b"2", first)
    with pytest.raises(Stale, match="written by another process"):
        mine.replace("object", b"3", first)
    with pytest.raises(Stale):
        mine.replace("object", b"3", None)
    other.delete(["object", "object"])
    with pytest.raises(Stale, match="deleted"):
        mine.replace("object", b"3", second)


def test_ranges_listings_and_objects_that_are_missing(server: str) -> None:
    store = place(server, "listed")
    store.put("a/1", b"0123456789")
    store.put("a/b/2", b"")
    store.put("c", memoryview(b"x"))
    assert store.read_range("a/1", 3, 4) == b"3456"
    assert store.read_range("a/1", 8, 10) == b"89"
    assert store.read_range("missing", 0, 1) is None
    assert store.read("missing") is None
    assert {entry.name: entry.size for entry in store.entries()} == {"a/1": 10, "a/b/2": 0, "c": 1}
    assert [entry.name for entry in store.entries("a")] == ["a/1", "a/b/2"]
    # Another prefix that begins in the same way is another place.
    assert list(place(server, "list").entries()) == []


def test_more_than_a_thousand_objects_are_listed(server: str) -> None:
    store = place(server, "many")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: store.put(f"{number:05d}", b""), range(1005)))
    assert [entry.name for entry in store.entries()] == [f"{number:05d}" for number in range(1005)]


@pytest.mark.parametrize("operation", ["create", "replace"])
def test_a_write_whose_response_is_lost_counts_as_written(server: str, operation: str) -> None:
    direct = place(server, f"lost-{operation}")
    version = None if operation == "create" else direct.create("object", b"0")
    first = iter(["lose"])
    disturbance = Disturbance(lambda number, method, path: next(first, None) if method == "PUT" else None)
    with disturbed(server, disturbance) as url:
        place(url, f"lost-{operation}").replace("object", b"1", version)
    found = direct.read("object")
    assert found is not None
    assert (found.data, disturbance.played) == (b"1", 1)


def test_a_write_that_arrived_although_it_seemed_to_fail_is_the_writers_own(server: str) -> None:
    """All responses to it are lost, so that it fails; the next write must not take it for another process's."""
    direct = place(server, "failed")
    version = direct.create("object", b"0")
    is_away = True
    disturbance = Disturbance(lambda number, method, path: "lose" if is_away else None)
    with disturbed(server, disturbance) as url:
        store = place(url, "failed", patience=1.0)
        with pytest.raises(StoreUnavailableError):
            store.replace("object", b"1", version)
        is_away = False
        store.replace("object", b"2", version)
    found = direct.read("object")
    assert found is not None
    assert found.data == b"2"


@pytest.mark.parametrize("fault", ["refuse", "lose", "cut"])
def test_what_fails_now_and_then_succeeds_in_the_end(server: str, fault: str) -> None:
    content = bytes(range(256)) * 400
    with disturbed(server, Disturbance(lambda number, method, path: fault if number % 3 == 0 else None)) as url:
        store = place(url, f"now-and-then-{fault}", patience=20.0)
        for number in range(6):
            store.put(str(number), content)
            assert store.read_range(str(number), 0, len(content)) == content


def test_the_probe_accepts_a_server_that_writes_conditionally_and_leaves_nothing(server: str) -> None:
    store = place(server, "probed")
    store.probe()
    assert list(store.entries()) == []


@pytest.mark.parametrize("condition", ["If-None-Match", "If-Match"])
def test_a_server_that_ignores_conditions_is_refused_by_name(condition: str) -> None:
    # versitygw rejects a signed request that lost a header; moto checks no signatures.
    with (
        moto() as server,
        disturbed(server, Disturbance(lambda number, method, path: None), without_header=condition) as url,
        pytest.raises(StoreAccessError, match=rf"{url} ignores conditional writes \({condition}\)"),
    ):
        place(url, "unconditional").probe()


ERRORS = [
    (404, "NoSuchBucket", "there is no bucket s3://bucket at http"),
    (403, "InvalidAccessKeyId", "does not know the access key for s3://bucket"),
    (403, "SignatureDoesNotMatch", "rejects the secret key for s3://bucket"),
    (400, "ExpiredToken", "the credentials for s3://bucket have expired"),
    (403, "RequestTimeTooSkewed", "the clock of this machine is wrong"),
    (400, "AuthorizationHeaderMalformed", "s3://bucket is not in region"),
    (403, "AccessDenied", "the credentials may not list objects below s3://bucket/refused"),
    (501, "NotImplemented", "does not know conditional writes"),
]


@pytest.mark.parametrize(("status", "code", "sentence"), ERRORS)
def test_what_a_person_has_to_mend_is_one_sentence(status: int, code: str, sentence: str) -> None:
    with answering(status, code) as url, pytest.raises(StoreAccessError, match=re.escape(sentence)) as caught:
        place(url, "refused").probe()
    assert "\n" not in str(caught.value)
    assert not is_transient(caught.value)


@pytest.mark.parametrize(("operation", "word"), [("put", "write"), ("read", "read"), ("delete", "delete")])
def test_a_missing_right_is_named(operation: str, word: str) -> None:
    with answering(403, "AccessDenied") as url, pytest.raises(StoreAccessError, match=f"may not {word} objects"):
        store = place(url, "forbidden")
        {"put": lambda: store.put("a", b""), "read": lambda: store.read("a"), "delete": lambda: store.delete(["a"])}[
            operation
        ]()


def test_a_server_that_is_away_may_come_back() -> None:
    store = place(f"http://127.0.0.1:{reserved_port()}", "away")
    with pytest.raises(StoreUnavailableError, match=r"^http://127.0.0.1:\d+ does not answer") as caught:
        store.ping()
    assert is_transient(caught.value)
    with answering(503, "SlowDown") as url, pytest.raises(StoreUnavailableError, match="answers 503 SlowDown"):
        place(url, "away").ping()


def test_without_credentials_the_message_names_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{reserved_port()}/169.254.169.254")
    with pytest.raises(StoreAccessError, match=r"no credentials for s3://bucket were found .*AWS_ACCESS_KEY_ID"):
        place("http://127.0.0.1:1", "nobody").ping()


def test_the_credentials_file_is_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "training")
    assert _credentials_file() is None
    file.write_text("[training]\naws_access_key_id = one\naws_secret_access_key = s%cret\n")
    read = _credentials_file()
    assert read is not None
    assert (read()["access_key_id"], read()["secret_access_key"]) == ("one", "s%cret")
    file.write_text("[training]\naws_access_key_id = two\naws_secret_access_key = x\naws_session_token = t\n")
    assert (read()["access_key_id"], read()["token"]) == ("two", "t")


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("s3://bucket/a/b", Location("s3", "bucket", "a/b")),
        ("gs://bucket/a/", Location("gs", "bucket", "a")),
        # pathlib writes one slash.
        ("az:/container/a", Location("az", "container", "a")),
    ],
)
def test_urls_of_buckets(url: str, location: Location) -> None:
    assert Location.parse(url) == location


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///tmp", "not the URL of a bucket"),
        ("s3://", "not the name of a bucket"),
        ("s3://bucket", "add a prefix"),
        ("s3://bucket/", "add a prefix"),
        ("s3://key:secret@bucket/a", "no credentials"),
        ("s3://bucket:9000/a", "ports"),
        ("s3://bucket/a//b", "empty part"),
        ("s3://bucket/a/../b", "characters other than"),
        ("s3://bucket/a?versionId=1", "characters other than"),
        ("s3://bucket/" + "a" * 600, "not the URL of a bucket"),
    ],
)
def test_other_urls_are_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        Location.parse(url)
    assert "secret" not in str(caught.value)


def test_the_bucket_is_that_of_the_url(server: str) -> None:
    store = place(server, "named")
    assert str(store.location) == f"s3://{BUCKET}/named"
    assert isinstance(store, Store)
