"""The stage of a fault: a run directory with a history, a save that goes wrong, and the judge of what is left.

The history has everything that a save and its retention may meet. Generation 1 saved 10 and 20; generation 2 resumed
from 20 and saved 30 and 40; then a writer of generation 1 woke up and committed 50, which does not count; and a save of
its that was cut off is still lying about. Now generation 2 saves 50. When all goes well, the stale 50 makes way, 10 and
30 are deleted (`keepLast: 2`, and 20 is what the generation resumed from), and the leftover too. The clock runs
backwards: what is saved later says that it was made earlier.

The judge knows the bytes of every checkpoint. It asks nothing of the product about what it should find.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.rundir import checkpoint
from tandem.rundir.checkpoint import WEIGHTS
from tandem.rundir.durable import read_json_or_none
from tandem.rundir.layout import RunDir, checkpoint_name
from tandem.rundir.lineage import GenerationRecord
from tandem.wire.status import CheckpointRef
from tandem_trainer.checkpoint import node_memory, staging, writer
from tandem_trainer.checkpoint.file_names import OPTIMIZER
from tandem_trainer.checkpoint.restoring import Loaded, Restored, restore
from tandem_trainer.checkpoint.staging import FileLayout, Staging, shared_memory
from tandem_trainer.process_group import Group
from tests.support import manifests

CHUNK = 2048
"""Small, so that a small state has many chunks and three parts."""
BLOCK = 512
"""Smaller than a chunk, so that chunks are written past the page cache; what disks ask for at least."""
SECONDS = 20.0
"""A writer that takes longer is killed; it has milliseconds of work."""
PATIENCE = {"PARTS_SECONDS": 0.05, "ORPHAN_SECONDS": 0.05, "REFRESH_SECONDS": 0.01, "POLL_SECONDS": 0.001}
"""Part 0 waits for nobody: in these tests nobody is only slow."""
FORGETFUL = {"FORGOTTEN_SECONDS": -1.0}
"""An hour has passed since the fault."""

CORRUPTION = "SILENT CORRUPTION"

State = dict[str, dict[str, Tensor]]
Tree = dict[str, bytes]


class Save(NamedTuple):
    """One save of the story."""

    step: int
    generation: int
    twin: int = 0
    """Not 0: another save of the same step by the same generation, which should not be."""

    @property
    def name(self) -> str:
        return checkpoint_name(self.step)


def state_of(save: Save) -> State:
    """What is saved: like nothing else that is."""
    random = torch.Generator().manual_seed(hash(save))
    weights = {"a": torch.randn(31, 33, generator=random), "b": torch.randn(7, generator=random).double()}
    optimizer = {f"{name}/exp_avg": torch.randn(tensor.shape, generator=random) for name, tensor in weights.items()}
    return {WEIGHTS: weights, OPTIMIZER: optimizer | {"a/step": torch.tensor(float(save.step))}}


def tree_of(folder: Path) -> Tree:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class Server:
    """The process that forks writers. Leaving the `with` block ends it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.support.faults.server", str(CHUNK), str(BLOCK)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def play(self, writers: Sequence[Mapping[str, Any]], turns: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Run writers; see tests.support.faults.server. What became of each: `points`, `answers`, `error`, `code`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"writers": writers, "turns": turns, "seconds": SECONDS}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        # It answers in time, because each writer has an alarm.
        reports: list[dict[str, Any]] = json.loads(self._process.stdout.readline())
        for report in reports:
            assert not report["error"], f"a writer died of what it should have reported:\n{report['error']}"
        return reports

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)


@dataclass
class Findings:
    """What one fault did that it should not have; empty if all is well."""

    wrong: list[str] = field(default_factory=list)

    def expect(self, truth: object, otherwise: str) -> None:
        """Note what is wrong unless something holds."""
        if not truth:
            self.wrong.append(otherwise)


class Scene:
    """A run directory with the history above.

    Args:
        folder: an empty place; several scenes may share a template there.
    """

    GENERATIONS: tuple[tuple[int, Save | None], ...] = ((1, None), (2, Save(20, 1)))
    """Each with what it resumed from."""
    SAVED = (Save(10, 1), Save(20, 1), Save(30, 2), Save(40, 2), Save(50, 1))
    TO_COME: tuple[Save, ...] = (Save(50, 2), Save(50, 2, twin=1), Save(60, 2))
    KEEP_LAST = 2
    NEWEST, NEW = Save(40, 2), Save(50, 2)
    PARENT = 20
    KEPT = (20, 40)
    """Steps that no retention may touch."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._memories: dict[tuple[Save, int, int], tuple[Path, list[dict[str, Any]], FileLayout]] = {}
        self._counter = 0
        self.trees: dict[Save, Tree] = {}
        self.template = folder / "template"
        self.rundir = RunDir(self.template)
        self._prepare()

    def writer(
        self,
        saves: Sequence[dict[str, Any]],
        fault: Mapping[str, Any] | None = None,
        knobs: Mapping[str, float] = PATIENCE,
        **more: Any,
    ) -> dict[str, Any]:
        """A writer for the server, of this scene's run directory."""
        fault = None if fault is None else {"number": 0, "refused": []} | dict(fault)
        return {"root": str(self.rundir.path), "saves": saves, "fault": fault, "knobs": dict(knobs), **more}

    def parts(
        self, save: Save = NEW, parts: int = 1, number: int = 3, parent: int | None = PARENT
    ) -> list[dict[str, Any]]:
        """The requests that save a checkpoint, part 0 last."""
        return [self._request(save, part, parts, number, parent) for part in reversed(range(parts))]

    def reset(self, where: Path | None = None) -> None:
        """The history as it was, at a new place: beside the template, or in another folder."""
        if self.rundir.path != self.template:
            shutil.rmtree(self.rundir.path, ignore_errors=True)
        self._counter += 1
        self.rundir = RunDir((where or self._folder) / f"run-{self._counter}")
        shutil.copytree(self.template, self.rundir.path)

    def begin(self, generation: int, parent: Save | None) -> GenerationRecord:
        """The record of a generation, not yet written."""
        reference = None
        if parent is not None:
            reference = CheckpointRef(name=parent.name, step=parent.step, generation=parent.generation)
        return GenerationRecord(generation=generation, resumed_from=reference, world_size=1, started_at=0.0)

    # The judge

    def present(self, findings: Findings) -> dict[int, Save]:
        """By step the checkpoints that have their names; each must be whole."""
        found = {}
        for path in self.rundir.checkpoints.glob("step-*"):
            if not path.name.removeprefix("step-").isdigit():
                continue
            step, tree = int(path.name.removeprefix("step-")), tree_of(path)
            whole = [save for save, known in self.trees.items() if save.step == step and known == tree]
            findings.expect(whole, f"{path.name} is not what was saved: it has {list(tree)}")
            if whole:
                found[step] = whole[0]
        return found

    def judge(self, answers: Sequence[Mapping[str, Any]], committed: bool | None = None) -> Findings:
        """What is wrong after a save of NEW, after a fresh start from what is there, and after the next save.

        Args:
            answers: what the writer said.
            committed: whether the new checkpoint must be there; None: if the writer said so it must, else it may.
        """
        findings = Findings()
        there = self.present(findings)
        said = any("committed" in answer for answer in answers)
        is_new = there.get(self.NEW.step) == self.NEW
        findings.expect(is_new or not said, "the writer said that it had committed, and it is not there")
        findings.expect(committed is None or is_new == committed, f"the new checkpoint is there: {is_new}")
        for step in self.KEPT:
            findings.expect(step in there, f"step {step} is gone")
        findings.expect(is_new or 30 in there, "step 30 was deleted before there was a newer one")
        expected = self.NEW if is_new else self.NEWEST
        self.expect_continued(findings, expected)
        return findings

    def expect_continued(self, findings: Findings, expected: Save | None) -> None:
        """Start afresh from exactly this checkpoint; if nothing was wrong so far, go on from it."""
        self.expect_restored(findings, expected, passed_over=[])
        if expected is not None and not findings.wrong:
            self.go_on(findings, expected)

    def expect_restored(
        self, findings: Findings, expected: Save | None, passed_over: Sequence[str] | None
    ) -> Restored | None:
        """Start afresh; exactly this checkpoint must be taken, bit for bit."""
        try:
            restored = restore(self.rundir, Group(0, 1, 0, torch.device("cpu")), lambda loaded: None)
        except Exception as error:
            findings.wrong.append(f"restore fails: {error!r}")
            return None
        if passed_over is not None:
            findings.expect(sorted(restored.passed_over) == sorted(passed_over), f"passed {restored.passed_over}")
        restored.release()
        taken = restored.loaded
        if taken is None or expected is None:
            findings.expect(taken is expected, f"{taken and taken.manifest.reference} was taken instead of {expected}")
            return restored
        reference = taken.manifest.reference
        right = (reference.step, reference.generation) == (expected.step, expected.generation)
        findings.expect(right, f"{reference} was taken, not {expected}")
        findings.expect(
            not right or is_state(taken, expected), "SILENT CORRUPTION: what was loaded is not what was saved"
        )
        return restored

    def go_on(self, findings: Findings, resumed: Save) -> None:
        """A new generation starts and saves; all must be as if nothing had happened, and nothing may be left."""
        findings.expect(self.rundir.record_generation(self.begin(3, resumed)), "generation 3 cannot start")
        following = Save(resumed.step + 10, 3)
        requests = self.parts(following, number=1, parent=resumed.step)
        (report,) = self._server.play([self.writer(requests, knobs=PATIENCE | FORGETFUL)])
        findings.expect("committed" in report["answers"][0], f"the next save failed: {report['answers']}")
        self.expect_restored(findings, following, passed_over=[])
        names = {path.name for path in self.rundir.checkpoints.iterdir()}
        wanted = {resumed.name, following.name}
        findings.expect(wanted <= names, f"of {wanted} there are {names}")
        # What does not count makes way when its step comes again; what was broken is for people to look at.
        off_lineage = {save.name for save in self.SAVED if save.step > following.step}
        left = {name for name in names - wanted - off_lineage if ".stale" not in name and ".bad" not in name}
        left |= {path.name for path in self.rundir.path.rglob("*") if path.name.startswith(".tmp-")}
        findings.expect(not left, f"left behind: {left}")
        hint = read_json_or_none(self.rundir.latest_file)
        findings.expect(hint is not None and hint["name"] == following.name, f"the hint says {hint}")

    # Making the history

    def _prepare(self) -> None:
        self.rundir.create()
        self.rundir.write_job(manifests.job("faults", checkpoint={"keepLast": self.KEEP_LAST}))
        other = Path(self._folder / "elsewhere")
        for save in (*self.SAVED, *self.TO_COME):
            self.trees[save] = self._saved_alone(other, save)
        for save in self.SAVED:
            put(self.rundir.checkpoint(save.name), self.trees[save])
        for generation, parent in self.GENERATIONS:
            self.rundir.record_generation(self.begin(generation, parent))
        cut_off = writer.temporary_folder(self.rundir, checkpoint_name(50), 1, 6)
        put(cut_off, {WEIGHTS: b"half", ".tmp-part-0000.json-1-aaaa": b"{"})

    def _saved_alone(self, place: Path, save: Save) -> Tree:
        """The bytes of a checkpoint that was saved undisturbed, in a run directory of its own."""
        run = RunDir(place)
        run.create()
        run.write_job(self.rundir.read_job())
        for generation in range(1, save.generation + 1):
            run.record_generation(self.begin(generation, None))
        parent = None if save.generation == 1 else self.PARENT
        job = {"root": str(place), "saves": self.parts(save, parent=parent), "fault": None, "knobs": PATIENCE}
        (report,) = self._server.play([job])
        assert "committed" in report["answers"][0], report
        tree = tree_of(run.checkpoint(save.name))
        shutil.rmtree(place)
        return tree

    def _request(self, save: Save, part: int, parts: int, number: int, parent: int | None) -> dict[str, Any]:
        memory, regions, found = self._memory(save, part, parts)
        facts = {
            "name": save.name,
            "step": save.step,
            "generation": save.generation,
            "createdAt": 2e9 - 1e6 * save.step,
            "worldSize": parts,
            "loop": {},
        } | ({"parent": checkpoint_name(parent)} if parent else {})
        request = {
            "name": save.name,
            "generation": save.generation,
            "number": number,
            "part": part,
            "parts": parts,
            "files": found.sizes,
            "regions": regions,
            "stallSeconds": 0.0,
            # The same manifest whoever writes it, so that the judge can compare bytes.
            "facts": facts | {"worldSize": 1} if part == 0 else {},
        }
        return {"request": request, "memory": str(memory)}

    def _memory(self, save: Save, part: int, parts: int) -> tuple[Path, list[dict[str, Any]], FileLayout]:
        """What a rank has staged, in a file that writers map."""
        key = (save, part, parts)
        if key not in self._memories:
            files = state_of(save)
            found = FileLayout.from_files(files, parts)
            assert found.parts == parts
            descriptor = shared_memory()
            staging = Staging(descriptor, files, found, part)
            staging.copy(files)
            path = self._folder / f"memory-{save.step}-{save.generation}-{save.twin}-{part}-of-{parts}"
            path.write_bytes(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
            os.close(descriptor)
            self._memories[key] = path, [vars(region) for region in staging.regions], found
        return self._memories[key]


def is_state(loaded: Loaded, save: Save) -> bool:
    """Whether this is what was saved, bit for bit."""
    saved = state_of(save)
    return all(
        read.keys() == known.keys() and all(same(read[name], tensor) for name, tensor in known.items())
        for read, known in ((loaded.contents.weights, saved[WEIGHTS]), (loaded.contents.optimizer, saved[OPTIMIZER]))
    )


def same(one: Tensor, other: Tensor) -> bool:
    """Equal in type, shape and every bit."""
    return one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()


def put(folder: Path, tree: Tree) -> None:
    for path, content in tree.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def small_chunks(monkeypatch: Any) -> None:
    """Chunks of this process as small as those of the server."""
    for module in (checkpoint, staging, node_memory, writer):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    for module in (writer, staging):
        monkeypatch.setattr(module, "BLOCK", BLOCK)
    monkeypatch.setattr(staging, "MIN_PART", CHUNK)
