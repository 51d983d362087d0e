"""Checkpoints: what is staged is what is read, nothing damaged is trusted, nothing old is ever the newest."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.rundir.checkpoint import WEIGHTS, DataPosition
from tandem.rundir.durable import create_json, read_json
from tandem.rundir.layout import RunDir
from tandem.rundir.lease import acquire
from tandem.wire.status import CheckpointRef
from tandem_trainer.checkpoint import writer
from tandem_trainer.checkpoint.file_names import OPTIMIZER
from tandem_trainer.checkpoint.reader import read_contents, read_weights
from tandem_trainer.checkpoint.restoring import Loaded, record_start, restore
from tandem_trainer.checkpoint.saving import Author, Outcome, Saver
from tandem_trainer.checkpoint.state import CheckpointMismatch, NamedOptimizer, OptimizerState, load_weights, weights
from tandem_trainer.checkpoint.train_state import Contents
from tandem_trainer.models import build
from tandem_trainer.process_group import Group
from tests.support import manifests
from tests.support.checkpoints import begin
from tests.support.waiting import SECONDS, until

POSITION = DataPosition(seed=0, epoch=0, cursor=0)


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    run.write_job(manifests.job("test", checkpoint={"keepLast": 2, "keepBest": 1}))
    return run


@pytest.fixture
def alone() -> Group:
    return Group(0, 1, 0, torch.device("cpu"))


class Writing:
    """A saver together with what became of each save."""

    def __init__(self, rundir: RunDir, generation: int, parent: str | None = None) -> None:
        self.outcomes: list[Outcome] = []
        self.saver = Saver(rundir, Author(generation, parent, 1), lambda: None, self.outcomes.append)

    def save(self, step: int, value: float = 0.0) -> Outcome:
        self.saver.save(step, POSITION, Contents({"w": torch.full((3,), value)}, {"w/step": torch.tensor(float(step))}))
        return self.saver.wait()


@pytest.fixture
def writing(rundir: RunDir) -> Iterator[Any]:
    made: list[Writing] = []

    def make(generation: int, parent: str | None = None) -> Writing:
        made.append(Writing(rundir, generation, parent))
        return made[-1]

    yield make
    for one in made:
        one.saver.close()


def trained(kind: type[torch.optim.Optimizer], steps: int = 3, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = build("baby-cnn", 1, 8, 10)
    optimizer = kind(model.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    images = torch.linspace(-1, 1, 2 * 64).reshape(2, 1, 8, 8)
    optimizer.zero_grad()
    model(images).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.Adam, {"fused": True}), (torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})],
)
def test_a_resumed_optimizer_takes_the_very_same_steps(kind: type[torch.optim.Optimizer], options: Any) -> None:
    model, optimizer = trained(kind, **options)
    flat = {name: tensor.clone() for name, tensor in NamedOptimizer(model, optimizer).state().tensors.items()}
    held = {name: tensor.clone() for name, tensor in weights(model).items()}
    fresh_model, fresh_optimizer = trained(kind, steps=0, **options)
    load_weights(fresh_model, held)
    NamedOptimizer(fresh_model, fresh_optimizer).load(OptimizerState(flat))
    for _ in range(2):
        step(model, optimizer)
        step(fresh_model, fresh_optimizer)
    for name, tensor in weights(model).items():
        assert torch.equal(tensor, weights(fresh_model)[name]), name


def test_state_of_another_model_is_refused() -> None:
    model, optimizer = trained(torch.optim.SGD, momentum=0.9)
    with pytest.raises(CheckpointMismatch, match=r"the script lacks nobody\.weight"):
        NamedOptimizer(model, optimizer).load(OptimizerState({"nobody.weight/momentum_buffer": torch.zeros(1)}))
    with pytest.raises(CheckpointMismatch, match="do not fit"):
        load_weights(model, {})


def test_a_save_is_read_back_whole(rundir: RunDir, writing: Any) -> None:
    begin(rundir, 1)
    assert writing(1).save(10, value=2.5)["committed"] == "step-000000010"
    (manifest,) = rundir.committed()
    folder = rundir.checkpoint(manifest.name)
    assert read_weights(folder, manifest)["w"].tolist() == [2.5] * 3
    assert read_contents(folder, manifest).optimizer["w/step"].item() == 10
    assert CheckpointRef.read(read_json(rundir.latest_file)) == manifest.reference


def test_a_state_that_grows_is_laid_out_anew(rundir: RunDir, writing: Any) -> None:
    begin(rundir, 1)
    saver = writing(1).saver
    for number, size in enumerate((3, 3000, 5), start=1):
        saver.save(number, POSITION, Contents({"w": torch.full((size,), float(number))}, {}))
        assert "committed" in saver.wait()
        manifest = rundir.manifest(f"step-{number:09d}")
        assert read_weights(rundir.checkpoint(manifest.name), manifest)["w"].tolist() == [float(number)] * size


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *((file, damage) for file in (WEIGHTS, OPTIMIZER) for damage in ("truncated", "flipped", "deleted", "longer")),
        *(("manifest.json", damage) for damage in ("truncated", "flipped", "deleted")),
    ],
)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(
    rundir: RunDir, writing: Any, alone: Group, file: str, damage: str
) -> None:
    begin(rundir, 1)
    saves = writing(1)
    saves.save(10, value=1.0)
    saves.save(20, value=2.0)
    path = rundir.checkpoint("step-000000020") / file
    content = bytearray(path.read_bytes())
    if damage == "deleted":
        path.unlink()
    else:
        if damage == "truncated":
            del content[-5:]
        elif damage == "longer":
            content += b" "
        else:
            content[len(content) // 2] ^= 0x01
        path.write_bytes(content)
    taken: list[Loaded] = []
    restored = restore(rundir, alone, taken.append)
    assert restored.loaded.manifest.step == 10
    assert list(restored.passed_over) == ["step-000000020"]
    assert (rundir.checkpoints / "step-000000020.bad").is_dir()
    assert "step-000000020" in json.loads((rundir.checkpoints / "step-000000020.bad.why.json").read_text())["why"]


def test_a_disk_that_does_not_answer_is_no_reason_to_start_over(
    rundir: RunDir, writing: Any, alone: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(rundir, 1)
    writing(1).save(10)

    def unreadable(*read: object) -> bool:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("tandem_trainer.checkpoint.node_memory.read_chunk", unreadable)
    with pytest.raises(OSError, match="cannot be read"):
        restore(rundir, alone, lambda loaded: None)
    assert rundir.checkpoint_names() == ["step-000000010"]


def test_a_superseded_generation_cannot_commit(rundir: RunDir, writing: Any) -> None:
    begin(rundir, 1)
    old = writing(1)
    old.save(10)
    begin(rundir, 2, CheckpointRef(name="step-000000010", step=10, generation=1))
    assert "superseded" in old.save(20)
    assert old.saver.superseded
    assert rundir.checkpoint_names() == ["step-000000010"]


def test_what_an_old_generation_committed_too_late_makes_way_for_the_new_one(rundir: RunDir, writing: Any) -> None:
    begin(rundir, 1)
    old = writing(1)
    old.save(10)
    old.save(20, value=1.0)
    # Generation 2 had listed the checkpoints before step 20 was committed.
    begin(rundir, 2, CheckpointRef(name="step-000000010", step=10, generation=1))
    assert [manifest.step for manifest in rundir.committed()] == [10]
    assert "committed" in writing(2, "step-000000010").save(20, value=2.0)
    newest = rundir.committed()[0]
    assert (newest.step, newest.generation) == (20, 2)
    assert read_weights(rundir.checkpoint(newest.name), newest)["w"].tolist() == [2.0] * 3
    assert (rundir.checkpoints / "step-000000020.stale").is_dir()


def test_a_generation_never_overwrites_its_own_checkpoint(rundir: RunDir, writing: Any) -> None:
    begin(rundir, 1)
    saves = writing(1)
    saves.save(10, value=1.0)
    assert "superseded" in saves.save(10, value=2.0)
    manifest = rundir.manifest("step-000000010")
    assert read_weights(rundir.checkpoint(manifest.name), manifest)["w"].tolist() == [1.0] * 3


def test_two_groups_of_the_same_generation_cannot_both_start(rundir: RunDir, alone: Group) -> None:
    record_start(rundir, alone, 3, [], None)
    with pytest.raises(writer.Superseded, match="already started"):
        record_start(rundir, alone, 3, [], None)
    with pytest.raises(writer.Superseded, match="generation 3 is already running"):
        record_start(rundir, alone, 2, [], None)


def test_a_killed_writer_costs_one_save_and_no_more(rundir: RunDir, writing: Any) -> None:
    begin(rundir, 1)
    saves = writing(1)
    saves.save(10)
    process = saves.saver._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert "failed" in saves.save(20)
    assert "committed" in saves.save(30)
    assert saves.saver.last.step == 30
    assert [outcome["step"] for outcome in saves.outcomes] == [10, 20, 30]


SAVES_AND_DIES = """
import os, sys, time
from pathlib import Path
import torch
from tandem.rundir.checkpoint import DataPosition
from tandem.rundir.layout import RunDir
from tandem_trainer.checkpoint.train_state import Contents
from tandem_trainer.checkpoint.saving import Author, Saver

rundir = RunDir(Path(sys.argv[1]))
saver = Saver(rundir, Author(1, None, 1), lambda: None, lambda outcome: None)
saver.save(10, DataPosition(seed=0, epoch=0, cursor=0), Contents({"w": torch.zeros(4_000_000)}, {}))
while not list(rundir.checkpoints.iterdir()):
    time.sleep(0.001)
os._exit(0)
"""


def test_a_writer_finishes_the_save_that_its_rank_died_in(rundir: RunDir) -> None:
    begin(rundir, 1)
    subprocess.run([sys.executable, "-c", SAVES_AND_DIES, str(rundir.path)], check=True, timeout=120)
    until(rundir.checkpoint_names, "a checkpoint")
    assert rundir.committed()[0].step == 10


def test_a_full_disk_fails_the_save_and_leaves_nothing_behind(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(rundir, 1)
    written: list[int] = []

    def full(descriptor: int, content: memoryview, at: int) -> int:
        written.append(len(content))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    request = {"name": "step-000000010", "generation": 1, "number": 1, "part": 0, "parts": 1, "stallSeconds": 0.0}
    request["files"] = {WEIGHTS: 8, OPTIMIZER: 8}
    request["regions"] = [
        {"path": WEIGHTS, "start": 0, "size": 8, "offset": 0},
        {"path": OPTIMIZER, "start": 0, "size": 8, "offset": 8},
    ]
    with pytest.raises(OSError, match="No space left"):
        writer.commit(rundir, request, memoryview(bytes(16)))
    assert written
    assert list(rundir.checkpoints.iterdir()) == []


def test_retention_keeps_the_newest_the_best_the_leased_and_the_parent(rundir: RunDir, writing: Any) -> None:
    begin(rundir, 1)
    saves = writing(1, "step-000000001")
    for number in (1, 2, 3):
        saves.save(number)
    create_score(rundir, 2, 0.9)
    assert acquire(rundir.leases / "read-step-000000003-somebody.json") is not None
    for number in (4, 5, 6, 7):
        create_score(rundir, number, 0.1 * number)
        saves.save(number)
    saves.saver.close()
    assert rundir.checkpoint_names() == [f"step-{number:09d}" for number in (1, 2, 3, 6, 7)]
    assert not list(rundir.checkpoints.glob(".tmp-*"))
    saves.saver = Saver(rundir, Author(1, None, 1), lambda: None, saves.outcomes.append)


def create_score(rundir: RunDir, number: int, accuracy: float, loss: float | None = 1.0) -> None:
    folder = rundir.evaluations / f"step-{number:09d}"
    folder.mkdir()
    create_json(folder / "g000001.json", {"metrics": {"accuracy": accuracy, "loss": loss}})


def test_retention_does_not_keep_what_lost_its_mind_as_the_best(rundir: RunDir, writing: Any) -> None:
    begin(rundir, 1)
    saves = writing(1)
    saves.save(1)
    create_score(rundir, 1, 0.5)
    saves.save(2)
    create_score(rundir, 2, 0.9, loss=None)
    for number in (3, 4):
        saves.save(number)
    saves.saver.close()
    assert rundir.checkpoint_names() == [f"step-{number:09d}" for number in (1, 3, 4)]
    saves.saver = Saver(rundir, Author(1, None, 1), lambda: None, saves.outcomes.append)


def test_saving_does_not_wait_for_the_disk(rundir: RunDir) -> None:
    begin(rundir, 1)
    goes_on = threading.Event()
    saver = Saver(rundir, Author(1, None, 1), lambda: assert_true(goes_on.wait(SECONDS)), lambda outcome: None)
    state = {"w": torch.zeros(8_000_000)}
    saver.save(1, POSITION, Contents(state, {}))
    assert saver.busy
    state["w"].fill_(5.0)  # training goes on at once
    goes_on.set()
    saver.close()
    manifest = rundir.manifest("step-000000001")
    assert read_weights(rundir.checkpoint(manifest.name), manifest)["w"].abs().max() == 0


def test_outcomes_are_reported_from_another_thread(rundir: RunDir) -> None:
    begin(rundir, 1)
    names: list[str] = []

    def note(*_: object) -> None:
        names.append(threading.current_thread().name)

    saver = Saver(rundir, Author(1, None, 1), lambda: None, note)
    saver.save(1, POSITION, Contents({"w": torch.zeros(1)}, {}))
    saver.close()
    assert names
    assert names[0] != threading.main_thread().name


def assert_true(value: bool) -> None:
    assert value


def test_nothing_is_committed_before_its_log_is_written_and_training_does_not_wait_for_that(
    rundir: RunDir, tmp_path: Path
) -> None:
    other = manifests.run_directory(tmp_path / "other", manifests.job())
    for run in (rundir, other):
        begin(run, 1)
    written, contents = threading.Event(), Contents({"w": torch.zeros(1)}, {})
    outcomes: list[Outcome] = []
    saver = Saver(rundir, Author(1, None, 1), lambda: assert_true(written.wait(SECONDS)), outcomes.append)
    whose_log_is_written = Saver(other, Author(1, None, 1), lambda: None, outcomes.append)
    for one in (saver, whose_log_is_written):
        one.save(1, POSITION, contents)
    assert "committed" in whose_log_is_written.wait(), "so long a save takes that need not wait"
    whose_log_is_written.close()
    assert saver.busy
    assert not list(rundir.checkpoints.iterdir())
    written.set()
    assert "committed" in saver.wait()
    saver.close()
