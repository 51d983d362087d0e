"""What differs between two checkpoints, and by how much: without torch, checked against torch."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.rundir import checkpoint
from tandem.rundir.checkpoint import FILE, Broken
from tandem_cli.checkpoints import manifest_diff, tensor_diff, verification
from tandem_cli.checkpoints.manifest_diff import Contrast, FileDifference, TensorDifference, facts
from tandem_cli.checkpoints.tensor_diff import compare
from tests.support.checkpoints import hash_file
from tests.support.worlds.small_run import SmallRun


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    made = SmallRun(tmp_path / "run")
    made.begin(1)
    return made


def differences(run: SmallRun, before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, TensorDifference]:
    run.save(100, weights=before)
    run.save(200, weights=after)
    return {one.name: one for one in files(run)[0].tensors}


def files(run: SmallRun) -> list[FileDifference]:
    sides = [(run.rundir.checkpoint(name), run.rundir.manifest(name)) for name in ("step-000000100", "step-000000200")]
    return compare(sides[0], sides[1])


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


class TestValues:
    @pytest.mark.parametrize("dtype", DTYPES + WHOLE, ids=str)
    def test_measures_agree_with_torch(self, run: SmallRun, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        before, after = ((10 * torch.randn(37, 11)).abs().to(dtype) for _ in range(2))
        found = differences(run, {"a": before}, {"a": after})["a"]
        apart = after.double() - before.double()
        assert found.change == "different"
        assert found.largest == pytest.approx(apart.abs().max().item())
        assert found.relative == pytest.approx((apart.norm() / before.double().norm()).item())

    def test_are_the_same_however_small_the_pieces(self, run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (checkpoint, verification):
            monkeypatch.setattr(module, "CHUNK_BYTES", 64)
        monkeypatch.setattr(tensor_diff, "WINDOW", 7)
        torch.manual_seed(0)
        weights = {"a": torch.randn(10, 10), "b": torch.randn(33).bfloat16(), "empty": torch.empty(0, 3)}
        moved = {name: tensor + 1 for name, tensor in weights.items()}
        found = differences(run, weights, moved)
        assert found["a"].largest == pytest.approx((moved["a"] - weights["a"]).abs().max().item())
        assert found["a"].relative == pytest.approx((10 / weights["a"].norm()).item(), rel=1e-5)
        assert found["empty"].change == "equal"

    def test_equal_means_equal_to_the_bit(self, run: SmallRun) -> None:
        nan = torch.tensor([1.0, float("nan")])
        found = differences(
            run,
            {"nan": nan, "zero": torch.tensor([0.0, 1.0]), "flag": torch.tensor([True, False])},
            {"nan": nan, "zero": torch.tensor([-0.0, 1.0]), "flag": torch.tensor([True, True])},
        )
        assert (found["nan"].change, found["nan"].not_finite) == ("equal", (1, 1))
        assert (found["zero"].change, found["zero"].largest, found["zero"].relative) == ("different", 0.0, 0.0)
        assert (found["flag"].change, found["flag"].largest) == ("different", 1.0)

    def test_what_is_not_finite_is_counted_and_left_out(self, run: SmallRun) -> None:
        before = torch.tensor([1.0, 2.0, float("inf"), 4.0])
        after = torch.tensor([1.5, float("nan"), float("inf"), 4.0])
        found = differences(run, {"a": before}, {"a": after})["a"]
        assert (found.largest, found.not_finite) == (0.5, (1, 2))

    def test_of_nothing_but_zeros_there_is_no_relative_difference(self, run: SmallRun) -> None:
        found = differences(run, {"a": torch.zeros(3)}, {"a": torch.ones(3)})["a"]
        assert (found.largest, found.relative) == (1.0, None)


class TestTensors:
    def test_added_removed_reshaped_and_retyped_are_told_apart(self, run: SmallRun) -> None:
        found = differences(
            run,
            {"gone": torch.ones(2), "shape": torch.ones(2, 3), "type": torch.full((2,), 1.001), "same": torch.ones(1)},
            {
                **{"new": torch.ones(2), "shape": torch.ones(3, 2), "same": torch.ones(1)},
                "type": torch.full((2,), 1.001).bfloat16(),
            },
        )
        assert {name: one.change for name, one in found.items()} == {
            "gone": "removed",
            "new": "added",
            "shape": "reshaped",
            "type": "retyped",
            "same": "equal",
        }
        assert (found["shape"].before, found["shape"].after) == ("F32 [2, 3]", "F32 [3, 2]")
        assert found["type"].largest == pytest.approx(0.001, rel=0.01)

    def test_files_with_the_same_checksums_are_not_read(self, run: SmallRun) -> None:
        run.save(100, weights={"a": torch.ones(3)})
        run.save(200, weights={"a": torch.ones(3)})
        for name in ("step-000000100", "step-000000200"):
            (run.rundir.checkpoint(name) / "weights.safetensors").unlink()
        assert [file.change for file in files(run)] == ["equal", "equal"]

    def test_a_damaged_file_is_never_compared(self, run: SmallRun) -> None:
        run.save(100, weights={"a": torch.ones(3)})
        run.save(200, weights={"a": torch.zeros(3)})
        run.damage("step-000000200")
        with pytest.raises(Broken, match=r"step-000000200/weights\.safetensors does not match its checksum"):
            files(run)

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"\xff" * 16,
            (8).to_bytes(8, "little") + b'{"a": 1}',
            (2).to_bytes(8, "little") + b"[]",
            (70).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(70) + b"1234",
            (70).to_bytes(8, "little") + b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}'.ljust(70) + b"1234",
        ],
    )
    def test_what_is_no_safetensors_file_is_called_broken(self, run: SmallRun, content: bytes) -> None:
        run.save(100)
        run.save(200)
        folder = run.rundir.checkpoint("step-000000200")
        (folder / "weights.safetensors").write_bytes(content)
        known = run.rundir.manifest("step-000000200")
        entry = hash_file(folder / "weights.safetensors")
        changed = known.model_copy(update={"files": [entry, *known.files[1:]]})
        (folder / FILE).write_text(json.dumps(changed.sealed()))
        with pytest.raises(Broken, match="is not a safetensors file"):
            files(run)


class TestWhatIsTold:
    def told(self, run: SmallRun, width: int | None = None, most: int = 20, with_state: bool = False) -> str:
        one, other = (run.rundir.manifest(name) for name in ("step-000000100", "step-000000200"))
        found = Contrast(one.name, other.name, tuple(facts(one, other)), tuple(files(run)))
        json.dumps(manifest_diff.as_json(found), allow_nan=False)
        return "\n".join(line.plain for line in manifest_diff.lines(found, most, with_state, width))

    def test_facts_that_differ_and_tensors_that_differ_most_first(self, run: SmallRun) -> None:
        run.save(100, weights={"little": torch.ones(4), "much": torch.ones(4), "same": torch.ones(4)})
        run.save(
            200, generation=2, weights={"little": torch.full((4,), 1.1), "much": torch.zeros(4), "same": torch.ones(4)}
        )
        lines = self.told(run).splitlines()
        assert lines[2].split() == ["step", "100", "200"]
        assert lines[3].split() == ["generation", "1", "2"]
        assert any("3 tensors: 2 different, 1 equal" in line for line in lines)
        order = [line.split()[0] for line in lines if line.split()[:1] in (["little"], ["much"], ["same"])]
        assert order == ["much", "little"]
        assert lines[-1].startswith("state/optimizer.safetensors  equal")

    def test_more_than_were_asked_for_are_counted(self, run: SmallRun) -> None:
        run.save(100, weights={f"layer.{index}": torch.ones(2) for index in range(9)})
        run.save(200, weights={f"layer.{index}": torch.full((2,), 1.0 + index) for index in range(9)})
        told = self.told(run, width=80, most=3)
        assert "and 5 more; --most lists more" in told
        assert "layer.8" in told
        assert "layer.1" not in told

    @pytest.mark.parametrize("width", [60, 80, 160])
    def test_no_line_is_wider_than_the_terminal(self, run: SmallRun, width: int) -> None:
        run.save(100, weights={"features.0.weight": torch.ones(2, 3, 4)})
        run.save(200, weights={"features.0.weight": torch.zeros(2, 3, 4)})
        assert max(len(line) for line in self.told(run, width).splitlines() if "TENSOR" in line) <= width
