"""What a writer lets go of: bounded leftovers always, and on a full disk all that nothing depends on."""

import errno
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.rundir import evaluations
from tandem.rundir.checkpoint import Broken, DataPosition
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import GenerationRecord
from tandem.wire.status import CheckpointRef
from tandem_trainer.checkpoint import writer
from tandem_trainer.checkpoint.file_names import TREES
from tandem_trainer.checkpoint.reader import read_contents
from tandem_trainer.checkpoint.saving import Author, Outcome, Saver
from tandem_trainer.checkpoint.train_state import Contents
from tests.support import manifests
from tests.support.waiting import SECONDS

POSITION = DataPosition(seed=0, epoch=0, cursor=0)


def made(path: Path, **checkpoint: Any) -> RunDir:
    rundir = manifests.run_directory(path, manifests.job("test", checkpoint={"keepBest": 0} | checkpoint))
    assert rundir.record_generation(GenerationRecord(generation=1, world_size=1, started_at=0.0))
    return rundir


class Run:
    """Saves of one generation."""

    def __init__(self, rundir: RunDir, generation: int = 1, before: Any = lambda: None) -> None:
        self.outcomes: list[Outcome] = []
        self.saver = Saver(rundir, Author(generation, None, 1), before, self.outcomes.append)

    def save(self, step: int, loop: dict[str, Any] | None = None) -> Outcome:
        contents = Contents({"w": torch.full((3,), float(step))}, {}, loop=loop or {})
        self.saver.save(step, POSITION, contents)
        return self.saver.wait()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[RunDir, Run]]:
    # More than any test saves: what a writer deletes after a save, it deletes when it comes to it.
    rundir = made(tmp_path, keepLast=9)
    one = Run(rundir)
    yield rundir, one
    one.saver.close()


def request(step: int, generation: int) -> dict[str, Any]:
    return {"name": f"step-{step:09d}", "generation": generation, "number": 1, "part": 0, "facts": {}}


def test_of_what_was_set_aside_the_latest_two_stay(run: tuple[RunDir, Run]) -> None:
    rundir, saves = run
    for step in range(10, 60, 10):
        saves.save(step * 10)
        rundir.set_aside(f"step-{step * 10:09d}", why="for a test")
    saves.save(1000)
    saves.saver.close()
    assert rundir.set_aside_names() == ["step-000000400.bad", "step-000000500.bad"]
    names = {path.name for path in rundir.checkpoints.iterdir()}
    assert {name for name in names if name.endswith(".why.json")} == {
        f"step-000000{n}.bad.why.json" for n in (400, 500)
    }
    saves.saver = Run(rundir, 2).saver


def test_a_full_disk_lets_go_of_what_nothing_depends_on_and_says_so(
    run: tuple[RunDir, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir, saves = run
    for step in (100, 200, 300, 400, 500):
        saves.save(step)
    rundir.set_aside("step-000000300", why="for a test")
    # Generation 2 went on from 400, so 500 does not count any more.
    parent = CheckpointRef(name="step-000000400", step=400, generation=1)
    assert rundir.record_generation(GenerationRecord(generation=2, resumed_from=parent, world_size=1, started_at=0.0))

    def full(*wanted: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "write_pieces", full)
    asked = request(600, 2) | {"regions": [], "files": {"f": 1}, "parts": 1, "stallSeconds": 0.0}
    # Room for two is there at once: the least useful goes, and nothing else.
    answer = writer._answer(rundir, rundir.read_job(), asked, memoryview(b""))
    assert answer["failed"].endswith("No space left on device; deleted to make room: step-000000300.bad")
    assert rundir.checkpoint_names() == ["step-000000100", "step-000000200", "step-000000400", "step-000000500"]
    asked["files"]["f"] = 10**9
    answer = writer._answer(rundir, rundir.read_job(), asked, memoryview(b""))
    assert answer["failed"].endswith("deleted to make room: step-000000500, step-000000100")
    assert rundir.checkpoint_names() == ["step-000000200", "step-000000400"]
    again = writer._answer(rundir, rundir.read_job(), asked, memoryview(b""))
    assert "nothing can be deleted to make room" in again["failed"]
    assert rundir.checkpoint_names() == ["step-000000200", "step-000000400"]


def test_large_state_that_is_no_tensor_gets_a_file_of_its_own(run: tuple[RunDir, Run]) -> None:
    rundir, saves = run
    counts = {str(number): number for number in range(60_000)}
    loop = {"health": {}, "others": {"counts": {"dict": counts}}}
    assert "committed" in saves.save(100, loop)
    manifest = rundir.manifest("step-000000100")
    assert (rundir.checkpoint(manifest.name) / "manifest.json").stat().st_size < 10_000
    assert manifest.loop == {"health": {}}
    assert read_contents(rundir.checkpoint(manifest.name), manifest).loop == loop
    path = rundir.checkpoint(manifest.name) / TREES
    path.write_bytes(path.read_bytes().replace(b"777", b"778", 1))
    with pytest.raises(Broken, match=r"state/trees\.json does not match its checksum"):
        read_contents(rundir.checkpoint(manifest.name), manifest)


def test_a_manifest_that_nobody_could_read_is_not_committed(
    run: tuple[RunDir, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir, _ = run
    monkeypatch.setattr(writer, "MAX_JSON_BYTES", 500)
    facts = {"name": "step-000000100", "step": 100, "generation": 1, "createdAt": 0.0, "worldSize": 1, "loop": {}}
    asked = request(100, 1) | {"regions": [], "files": {}, "parts": 1, "stallSeconds": 0.0, "facts": facts}
    facts["versions"] = {"more": "x" * 600}
    answer = writer._answer(rundir, rundir.read_job(), json.loads(json.dumps(asked)), memoryview(b""))
    assert "more than readers accept" in answer["failed"]
    assert rundir.checkpoint_names() == []


def test_a_writer_whose_rank_was_killed_commits_and_ends_without_a_word(tmp_path: Path) -> None:
    rundir = made(tmp_path)
    facts = {"name": "step-000000100", "step": 100, "generation": 1, "createdAt": 0.0, "worldSize": 1, "loop": {}}
    asked = request(100, 1) | {"regions": [], "files": {}, "parts": 1, "stallSeconds": 0.0, "facts": facts}
    command = [sys.executable, "-m", "tandem_trainer.checkpoint.writer", "--run-dir", str(rundir.path)]
    with tempfile.TemporaryFile() as memory:
        memory.truncate(4096)
        descriptor = memory.fileno()
        with subprocess.Popen(
            [*command, "--descriptor", str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[descriptor],
        ) as process:
            process.stdout.close()
            process.stdout = None
            _, errors = process.communicate(json.dumps(asked).encode() + b"\n", SECONDS)
    assert (process.returncode, errors) == (0, b"")
    assert rundir.checkpoint_names() == ["step-000000100"]


def test_an_unforeseen_error_costs_one_save_and_no_more(tmp_path: Path) -> None:
    rundir = made(tmp_path)
    fails = [True]

    def before() -> None:
        if fails:
            fails.clear()
            raise ValueError("the journal is closed")

    saves = Run(rundir, before=before)
    assert saves.save(100)["failed"] == "ValueError('the journal is closed')"
    assert "committed" in saves.save(200)
    saves.saver.close()


def test_a_half_evaluated_checkpoint_stays_and_one_that_goes_unevaluated_leaves_a_note(tmp_path: Path) -> None:
    rundir = manifests.run_directory(
        tmp_path,
        manifests.job("test", checkpoint={"keepBest": 0, "keepLast": 1}, evaluators={"processesPerReplica": 2}),
    )
    assert rundir.record_generation(GenerationRecord(generation=1, world_size=1, started_at=0.0))
    steps = (1, 3000, 6000, 9000)
    references = {step: CheckpointRef(name=f"step-{step:09d}", step=step, generation=1) for step in steps}
    saves = Run(rundir)
    begun = evaluations.folder(rundir, references[1]) / evaluations.shard_name(references[1], 0, 2)
    begun.parent.mkdir(parents=True)
    begun.write_text("{}")
    for step in steps:
        saves.save(step)
    saves.saver.close()
    there = {step: (rundir.checkpoints / reference.name).exists() for step, reference in references.items()}
    assert there[1], "its other part is still to come"
    assert evaluations.evaluation_progress(rundir, references[1]) == "begun"
    gone = [step for step, is_there in there.items() if not is_there]
    assert gone == [3000]
    assert evaluations.evaluation_progress(rundir, references[3000]) == "skipped"
