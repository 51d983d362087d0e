"""A checkpoint that is damaged on the disk of one pod, in a job without a volume: the bucket has it whole."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tandem.rundir.checkpoint import FILE, WEIGHTS
from tandem_trainer.checkpoint.file_names import OPTIMIZER
from tandem_trainer.checkpoint.restoring import restore
from tandem_trainer.process_group import Group
from tests.support.buckets import memory, pod_of, store
from tests.support.faults.scene import CHUNK, Findings, Save, Scene, Server, small_chunks

NEWEST, BEFORE = Save(40, 2), Save(30, 2)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    server = Server()
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            small_chunks(monkeypatch)
            for module in ("upload", "download"):
                monkeypatch.setattr(f"tandem.rundir.{module}.CHUNK_BYTES", CHUNK)
            yield Scene(server, tmp_path_factory.mktemp("damage"))
    finally:
        server.close()


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with memory() as url:
        yield url


@contextmanager
def pod(scene: Scene, url: str, folder: Path) -> Iterator[None]:
    """A pod that has read the newest checkpoint before."""
    scene.reset()
    with pod_of(url, scene.rundir, folder) as exchange:
        exchange.fetch(NEWEST.name, scene.rundir.manifest(NEWEST.name).digest)
        yield


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, cut])
@pytest.mark.parametrize("file", [WEIGHTS, OPTIMIZER, FILE])
def test_it_is_received_again_and_the_run_goes_on_from_it(
    scene: Scene, bucket: str, tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    findings = Findings()
    with pod(scene, f"{bucket} {tmp_path.name}", tmp_path):
        damage(scene.rundir.checkpoint(NEWEST.name) / file)
        scene.expect_restored(findings, NEWEST, passed_over=[])
    assert findings.wrong == []
    assert scene.rundir.set_aside_names() == []


def test_one_that_is_damaged_in_the_bucket_too_is_set_aside(scene: Scene, bucket: str, tmp_path: Path) -> None:
    findings, url = Findings(), f"{bucket} {tmp_path.name}"
    with pod(scene, url, tmp_path):
        parts = store(url).entries(f"parts/{scene.rundir.manifest(NEWEST.name).digest[:32]}/")
        for part in [entry for entry in parts if WEIGHTS in entry.name]:
            store(url).put(part.name, bytes(part.size))
        flip(scene.rundir.checkpoint(NEWEST.name) / WEIGHTS)
        scene.expect_restored(findings, BEFORE, passed_over=[NEWEST.name])
    assert findings.wrong == []
    assert scene.rundir.set_aside_names() == [f"{NEWEST.name}.bad"]


def test_while_the_bucket_is_away_nothing_is_set_aside(
    scene: Scene, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pod(scene, f"{bucket} {tmp_path.name}", tmp_path):
        flip(scene.rundir.checkpoint(NEWEST.name) / WEIGHTS)

        def repair(name: str, paths: object = None) -> bool:
            raise OSError("it does not answer")

        monkeypatch.setattr("tandem.rundir.sync_client.repair", repair)
        with pytest.raises(OSError, match="cannot be read: it does not answer"):
            restore(scene.rundir, Group(0, 1, 0, torch.device("cpu")), lambda loaded: None)
    assert scene.rundir.set_aside_names() == []


def test_a_disk_that_changes_what_was_received_is_no_damaged_checkpoint(
    scene: Scene, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pod(scene, f"{bucket} {tmp_path.name}", tmp_path):
        flip(scene.rundir.checkpoint(NEWEST.name) / WEIGHTS)
        monkeypatch.setattr("tandem.rundir.sync_client.repair", lambda name, paths=None: True)
        with pytest.raises(OSError, match="although the bucket has it whole"):
            restore(scene.rundir, Group(0, 1, 0, torch.device("cpu")), lambda loaded: None)
    assert scene.rundir.set_aside_names() == []
