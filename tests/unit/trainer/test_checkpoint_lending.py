"""Evaluators of a node read the weights of a checkpoint once, and none can change what the others have."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.rundir import checkpoint as manifests_of
from tandem.rundir.checkpoint import WEIGHTS, Broken, DataPosition, Manifest
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import GenerationRecord
from tandem_trainer.checkpoint import lending
from tandem_trainer.checkpoint.lending import Library
from tandem_trainer.checkpoint.saving import Author, Saver
from tandem_trainer.checkpoint.train_state import Contents
from tests.support import manifests


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    found = manifests.run_directory(tmp_path, manifests.job("test"))
    assert found.record_generation(GenerationRecord(generation=1, world_size=1, started_at=0.0))
    saver = Saver(found, Author(1, None, 1), lambda: None, lambda outcome: None)
    for step in (10, 20):
        saver.save(step, DataPosition(seed=0, epoch=0, cursor=0), Contents({"w": torch.full((5,), float(step))}, {}))
        assert "committed" in saver.wait()
    saver.close()
    return found


@pytest.fixture
def libraries() -> Iterator[list[Library]]:
    found = [Library() for _ in range(3)]
    yield found
    for library in found:
        library.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that were read and checked, each time."""
    found: list[str] = []
    real = lending.verified_bytes

    def counted(folder: Path, entry: manifests_of.FileEntry, place: memoryview | None = None) -> memoryview:
        found.append(f"{folder.name}/{entry.path}")
        return real(folder, entry, place)

    monkeypatch.setattr(lending, "verified_bytes", counted)
    return found


def asked(rundir: RunDir, step: int) -> tuple[Path, Manifest]:
    name = f"step-{step:09d}"
    return rundir.checkpoint(name), rundir.manifest(name)


def test_all_of_a_node_have_the_weights_and_one_has_read_them(
    rundir: RunDir, libraries: list[Library], reads: list[str]
) -> None:
    found = [library.weights(*asked(rundir, 10))["w"] for library in libraries]
    assert [one.tolist() for one in found] == [[10.0] * 5] * 3
    assert reads == [f"step-000000010/{WEIGHTS}"]


def test_who_comes_while_they_are_read_waits_for_them(
    rundir: RunDir, libraries: list[Library], reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    real = lending.verified_bytes

    def slow(*given: object) -> memoryview:
        reading.set()
        assert go_on.wait(30)
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(lending, "verified_bytes", slow)
    found: list[list[float]] = []
    threads = [
        threading.Thread(target=lambda one=one: found.append(one.weights(*asked(rundir, 10))["w"].tolist()))
        for one in libraries
    ]
    threads[0].start()
    assert reading.wait(30)
    for thread in threads[1:]:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert found == [[10.0] * 5] * 3
    assert len(reads) == 1


def test_what_one_changes_is_its_own(rundir: RunDir, libraries: list[Library]) -> None:
    found = [library.weights(*asked(rundir, 10))["w"] for library in libraries]
    found[0] += 1
    found[1] += 2
    assert [one[0].item() for one in found] == [11.0, 12.0, 10.0]
    assert libraries[0].weights(*asked(rundir, 10))["w"][0].item() == 10.0


def test_weights_outlive_their_lender_and_another_becomes_it(
    rundir: RunDir, libraries: list[Library], reads: list[str]
) -> None:
    first, second, third = libraries
    kept = [first.weights(*asked(rundir, 10))["w"], second.weights(*asked(rundir, 10))["w"]]
    assert first.weights(*asked(rundir, 20))["w"].tolist() == [20.0] * 5
    assert [one.tolist() for one in kept] == [[10.0] * 5] * 2
    assert third.weights(*asked(rundir, 10))["w"].tolist() == [10.0] * 5
    assert reads == [f"step-0000000{step}/{WEIGHTS}" for step in (10, 20, 10)]


LENDER = """
import sys, time
from pathlib import Path
from tandem.rundir.layout import RunDir
from tandem_trainer.checkpoint import lending
real = lending.verified_bytes
def slow(*given):
    print("reading", flush=True)
    time.sleep(60)
lending.verified_bytes = slow
rundir = RunDir(sys.argv[1])
lending.Library().weights(rundir.checkpoint("step-000000010"), rundir.manifest("step-000000010"))
"""


def test_a_lender_that_is_killed_while_it_reads_keeps_nobody_waiting(rundir: RunDir, libraries: list[Library]) -> None:
    command = [sys.executable, "-c", LENDER, str(rundir.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as lender:
        assert lender.stdout.readline() == "reading\n"
        found: list[list[float]] = []
        borrower = threading.Thread(target=lambda: found.append(libraries[0].weights(*asked(rundir, 10))["w"].tolist()))
        borrower.start()
        os.kill(lender.pid, signal.SIGKILL)
        borrower.join(30)
    assert found == [[10.0] * 5]


def test_a_damaged_file_is_damaged_for_everybody_and_is_not_lent(rundir: RunDir, libraries: list[Library]) -> None:
    path = rundir.checkpoint("step-000000010") / WEIGHTS
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for library in libraries:
        with pytest.raises(Broken, match="does not match its checksum"):
            library.weights(*asked(rundir, 10))


def test_where_nothing_can_be_lent_everybody_reads_for_itself(
    rundir: RunDir, libraries: list[Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "node_of_this_process", lambda: "")
    assert [library.weights(*asked(rundir, 10))["w"][0].item() for library in libraries] == [10.0] * 3


def test_a_lender_that_is_of_another_user_is_not_believed(
    rundir: RunDir, libraries: list[Library], reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries[0].weights(*asked(rundir, 10))
    monkeypatch.setattr(lending, "user_of", lambda peer: os.getuid() + 1)
    assert libraries[1].weights(*asked(rundir, 10))["w"].tolist() == [10.0] * 5
    assert len(reads) == 2, "it reads by itself"


def test_lenders_leave_no_thread_and_no_descriptor(rundir: RunDir) -> None:
    def descriptors() -> set[str]:
        return {path.name for path in Path("/proc/self/fd").iterdir()}

    def lenders() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "tandem-lender"}

    library = Library()
    before, others = descriptors(), lenders()
    library.weights(*asked(rundir, 10))
    assert len(lenders() - others) == 1
    library.close()
    assert not lenders() - others
    assert not descriptors() - before
