"""Copies of many results in a few objects of a bucket."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem.rundir.bundles import BundleWriter, bundled_contents
from tandem.rundir.store import Content, Store, StoreUnavailableError
from tests.support.buckets import a_run, bring, get_copy, store

pytestmark = pytest.mark.usefixtures("credentials")


class Results:
    """Objects as evaluators create them, and what a process that has them all knows of them."""

    def __init__(self, url: str) -> None:
        self.store, self.contents = store(url), dict[str, bytes]()
        self.versions: dict[str, Mapping[str, str]] = {}

    def add(self, count: int) -> None:
        for number in range(len(self.contents), len(self.contents) + count):
            name, content = f"evaluations/step-{number:09d}/g000001.json", f'{{"loss": {number}}}'.encode()
            version = self.store.create(name, content)
            assert version is not None
            self.contents[name], self.versions[name] = content, version

    def write(self, writer: BundleWriter) -> None:
        writer.write(self.versions, self.contents.get)


@pytest.fixture
def results(url: str) -> Results:
    return Results(url)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.rundir.bundles.MAX_FILES", 10)
    monkeypatch.setattr("tandem.rundir.bundles.STEP", 4)


def bundles(bucket: Store) -> dict[str, list[str]]:
    """The names in each bundle."""
    contents = {entry.name: bucket.read(entry.name) for entry in bucket.entries("bundles/")}
    return {name: [*json.loads(content.data)["files"]] for name, content in contents.items() if content is not None}


def received(bucket: Store) -> dict[str, bytes]:
    """What a process that has nothing gets out of bundles."""
    listing = {entry.name: entry for entry in bucket.entries()}
    contents = bundled_contents(bucket, listing, list(listing.values()))
    return {name: content.data for name, content in contents.items()}


def test_bundles_grow_and_full_ones_stay(results: Results) -> None:
    writer = BundleWriter(results.store)
    sizes = []
    for count in (3, 2, 3, 4, 25, 1):
        results.add(count)
        results.write(writer)
        sizes.append([len(names) for names in bundles(results.store).values()])
    assert sizes == [[], [5], [5], [10, 2], [10, 10, 10, 7], [10, 10, 10, 7]]
    before = results.store.requests.copy()
    results.write(writer)
    assert results.store.requests == before, "nothing new costs nothing"
    assert received(results.store) == {name: results.contents[name] for name in list(results.contents)[:37]}


def test_a_new_process_goes_on_with_the_last_bundle(results: Results) -> None:
    results.add(14)
    results.write(BundleWriter(results.store))
    results.add(4)
    results.write(BundleWriter(results.store))
    assert [len(names) for names in bundles(results.store).values()] == [10, 8]
    assert received(results.store) == results.contents


def test_what_was_deleted_or_replaced_does_not_come_back(results: Results) -> None:
    results.add(6)
    results.write(BundleWriter(results.store))
    deleted, replaced, *others = results.contents
    results.store.delete([deleted])
    results.store.put(replaced, b"another")
    assert received(results.store) == {name: results.contents[name] for name in others}


def test_a_file_that_has_changed_or_is_large_or_no_text_is_not_bundled(results: Results) -> None:
    results.add(8)
    changed, large, binary, *others = results.contents
    results.contents[large], results.contents[binary] = b"x" * 70_000, b"\xff"
    del results.contents[changed]
    results.write(BundleWriter(results.store))
    assert list(received(results.store)) == others


@pytest.mark.parametrize("content", [b"", b"[]", b'{"files": {"evaluations/a.json": {"content": 1}}}', b"\xff"])
def test_a_damaged_bundle_is_no_bundle_and_is_replaced(results: Results, content: bytes) -> None:
    results.add(6)
    results.write(BundleWriter(results.store))
    results.store.put("bundles/000000", content)
    assert received(results.store) == {}
    results.write(BundleWriter(results.store))
    assert received(results.store) == results.contents


def test_of_two_writers_the_late_one_adds_to_the_other(results: Results, url: str) -> None:
    early, late = BundleWriter(results.store), BundleWriter(store(url))
    for count, writer in ((4, early), (4, late), (4, late), (1, early), (4, early), (4, late)):
        results.add(count)
        results.write(writer)
    for writer in (early, late):
        results.write(writer)
    assert received(results.store) == results.contents


@pytest.mark.parametrize("arrives", [False, True])
def test_a_request_that_fails_is_repeated_by_the_next_call(
    results: Results, arrives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, replace = BundleWriter(results.store), results.store.replace
    results.add(25)

    def failing(*arguments: Any) -> Any:
        monkeypatch.setattr(results.store, "replace", replace)
        if arrives:
            replace(*arguments)
        raise StoreUnavailableError("played")

    for _ in range(3):
        monkeypatch.setattr(results.store, "replace", failing)
        with pytest.raises(StoreUnavailableError):
            results.write(writer)
        results.write(writer)
        assert received(results.store) == results.contents
        results.add(7)


def test_commands_that_read_a_bucket_use_them(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bring(url, a_run(tmp_path / "run", steps=()))
    results = Results(url)
    results.add(40)
    before = get_copy(url, tmp_path / "without")
    results.write(BundleWriter(results.store))
    read, reads = Store.read, list[str]()

    def noted(bucket: Store, name: str) -> Content | None:
        reads.append(name)
        return read(bucket, name)

    monkeypatch.setattr(Store, "read", noted)
    after = get_copy(url, tmp_path / "with")
    wanted = [f"bundles/{number:06d}" for number in range(4)]
    assert [name for name in reads if name.startswith(("evaluations/", "bundles/"))] == wanted
    names = sorted(path.relative_to(before.path) for path in before.path.rglob("*.json"))
    assert len(names) > 40
    assert names == sorted(path.relative_to(after.path) for path in after.path.rglob("*.json"))
    assert all((before.path / name).read_bytes() == (after.path / name).read_bytes() for name in names)
