"""Every byte of a checkpoint is compared with its checksum, a piece at a time, and nothing is changed."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from tandem.rundir import checkpoint
from tandem.rundir.checkpoint import FILE, WEIGHTS, Broken
from tandem_cli.checkpoints import description, verification
from tandem_cli.checkpoints.verification import ChunkedFile, verify
from tandem_trainer.checkpoint.train_state import OPTIMIZER
from tests.support.worlds.small_run import SmallRun

NAME = "step-000000100"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallRun:
    """With chunks so small that small files have many."""
    for module in (checkpoint, verification):
        monkeypatch.setattr(module, "CHUNK_BYTES", 64)
    made = SmallRun(tmp_path / "run")
    made.begin(1)
    made.save(100, weights={"a": torch.arange(300, dtype=torch.float32)})
    return made


def snapshot(path: Path) -> dict[str, tuple[int, int]]:
    return {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in path.rglob("*")}


class TestVerify:
    def test_a_sound_one_is_read_whole_and_left_as_it_is(self, run: SmallRun) -> None:
        before, read = snapshot(run.rundir.path), []
        verdict = verify(run.rundir, NAME, read.append)
        size = run.rundir.manifest(NAME).size
        assert (verdict.outcome, verdict.files, verdict.size, sum(read)) == ("sound", 2, size, size)
        assert max(read) == 64
        assert snapshot(run.rundir.path) == before

    def test_every_single_flipped_bit_is_found(self, run: SmallRun) -> None:
        size = (run.rundir.checkpoint(NAME) / WEIGHTS).stat().st_size
        for at in range(0, size, 37):
            run.damage(NAME, WEIGHTS, at)
            verdict = verify(run.rundir, NAME)
            assert verdict.outcome == "damaged"
            assert f"in bytes {at // 64 * 64:,} to" in verdict.faults[0]
            run.damage(NAME, WEIGHTS, at)
        assert verify(run.rundir, NAME).outcome == "sound"

    def test_all_damaged_files_are_named(self, run: SmallRun) -> None:
        run.damage(NAME, WEIGHTS, 10)
        run.damage(NAME, WEIGHTS, 500)
        (run.rundir.checkpoint(NAME) / OPTIMIZER).unlink()
        verdict = verify(run.rundir, NAME)
        assert verdict.outcome == "damaged"
        assert "weights.safetensors: 2 of" in verdict.faults[0]
        assert verdict.faults[1] == f"{NAME} lacks {OPTIMIZER}"
        lines = [line.plain for line in description.verdict(verdict, None)]
        assert [line.split()[0] for line in lines] == [NAME, NAME]
        assert all("damaged" in line for line in lines[:1])

    def test_a_file_of_another_size_is_damaged(self, run: SmallRun) -> None:
        path = run.rundir.checkpoint(NAME) / WEIGHTS
        size = path.stat().st_size
        os.truncate(path, size - 1)
        assert verify(run.rundir, NAME).faults == (f"{NAME}/{WEIGHTS} has {size - 1:,} bytes instead of {size:,}",)

    def test_a_folder_in_place_of_a_file_is_damaged(self, run: SmallRun) -> None:
        path = run.rundir.checkpoint(NAME) / WEIGHTS
        path.unlink()
        path.mkdir()
        assert verify(run.rundir, NAME).outcome == "damaged"

    def test_a_damaged_manifest_is_damage(self, run: SmallRun) -> None:
        (run.rundir.checkpoint(NAME) / FILE).write_text("{}")
        assert verify(run.rundir, NAME).outcome == "damaged"

    def test_one_that_is_deleted_meanwhile_is_no_fault(self, run: SmallRun) -> None:
        def delete(count: int) -> None:
            shutil.rmtree(run.rundir.checkpoint(NAME), ignore_errors=True)

        verdict = verify(run.rundir, NAME, delete)
        assert (verdict.outcome, verdict.is_good) == ("vanished", True)
        assert verify(run.rundir, NAME).outcome == "vanished"

    def test_a_name_that_is_given_to_another_meanwhile_is_no_fault(self, run: SmallRun) -> None:
        def replace(count: int) -> None:
            if not (run.rundir.checkpoints / f"{NAME}.stale").exists():
                run.rundir.set_aside(NAME, ".stale")
                run.save(100, generation=2)
                run.damage(NAME, OPTIMIZER)

        assert verify(run.rundir, NAME, replace).outcome == "vanished"

    def test_a_disk_that_does_not_answer_is_told_apart_from_damage(
        self, run: SmallRun, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: object) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr("tandem_cli.checkpoints.verification.os.pread", broken)
        verdict = verify(run.rundir, NAME)
        assert (verdict.outcome, verdict.is_good) == ("unreadable", False)
        assert verdict.faults == (f"{NAME} cannot be read: Input/output error",)


class TestReadingInPieces:
    def test_any_range_is_what_the_file_holds(self, run: SmallRun) -> None:
        folder, entry = run.rundir.checkpoint(NAME), run.rundir.manifest(NAME).entry(WEIGHTS)
        content = (folder / WEIGHTS).read_bytes()
        with ChunkedFile(folder, entry) as file:
            for start in range(0, len(content), 61):
                for size in (0, 1, 63, 64, 65, 200):
                    end = min(start + size, len(content))
                    assert file.read(start, end - start) == content[start:end]
            with pytest.raises(Broken):
                file.read(len(content) - 1, 2)

    def test_a_range_in_a_damaged_chunk_is_refused_and_others_are_not(self, run: SmallRun) -> None:
        folder, entry = run.rundir.checkpoint(NAME), run.rundir.manifest(NAME).entry(WEIGHTS)
        run.damage(NAME, WEIGHTS, 130)
        with ChunkedFile(folder, entry) as file:
            assert len(file.read(0, 128)) == 128
            with pytest.raises(Broken, match="does not match its checksum at byte 128"):
                file.read(191, 1)
            assert len(file.read(192, 64)) == 64
