"""Exported copies: what they are called, where they go, what they hold, and that nothing half is ever left."""

import errno
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tandem.errors import UserError
from tandem.job.resource import DistributedTrainingJob
from tandem.rundir.lineage import DatasetCommit, GenerationRecord
from tandem_cli.checkpoints import weights_export
from tandem_cli.checkpoints.inventory import take_inventory
from tandem_cli.checkpoints.selector import sound
from tandem_cli.checkpoints.weights_export import (
    Dtype,
    ExportOrder,
    Format,
    config,
    copy,
    fields,
    filled,
    refuse_to_overwrite,
    target,
)
from tandem_cli.commands import checkpoints as command
from tandem_trainer.export import CannotExport, cast, export
from tests.support.worlds.small_run import SmallRun

WEIGHTS = {"a": torch.randn(5, 3), "norm.count": torch.tensor(7), "half": torch.ones(2).bfloat16()}


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    made = SmallRun(tmp_path / "run")
    made.begin(1)
    made.save(100)
    made.save(250, weights=WEIGHTS, accuracy=0.98765)
    return made


class TestNames:
    def name(self, run: SmallRun, pattern: str, word: str = "latest") -> str:
        inventory = take_inventory(run.rundir)
        return filled(pattern, fields(*sound(inventory, word), inventory))

    @pytest.mark.parametrize(
        ("pattern", "name"),
        [
            ("plain", "plain"),
            ("{job}-{name}", "small-step-000000250"),
            ("qwen2_0.5B-epoch-{epoch}", "qwen2_0.5B-epoch-2"),
            ("{step:06d}_g{generation}", "000250_g1"),
            ("{accuracy}-{loss:.1e}", "0.9877-5.0e-01"),
            ("{{{step}}}", "{250}"),
        ],
    )
    def test_are_made_from_a_pattern(self, run: SmallRun, pattern: str, name: str) -> None:
        assert self.name(run, pattern) == name

    @pytest.mark.parametrize(
        ("pattern", "message"),
        [
            ("{shard}", "there is no field {shard}"),
            ("{start}-{end}", "{end} is unknown for this checkpoint"),
            ("{stp}", "Did you mean {step}? Available fields: {job}, {name}, {step}, {epoch}"),
            ("{job.__class__}", "there is no field {job.__class__}"),
            ("{job[0]}", "there is no field {job[0]}"),
            ("{job!r}", "there is no field {job}"),
            ("{0}", "there is no field {0}"),
            ("{}", "there is no field {}"),
            ("{step", "expected '}' before end of string"),
            ("{step:zz}", "{step} cannot be written as 'zz'"),
            ("{step:99999999999d}", "{step} cannot be written as"),
            ("a/{step}", "no slash"),
            ("..", "not a valid file name"),
            (".{step}", "not a valid file name"),
            ("", "not a valid file name"),
            ("a\n{step}", "not a valid file name"),
            ("{step:0300d}", "{step} cannot be written as '0300d': 200 characters are the most"),
            ("{step:.99999999999f}", "200 characters are the most"),
            ("{step:0200d}-", "a name of 201 characters"),
        ],
    )
    def test_that_cannot_be_are_refused_in_one_sentence(self, run: SmallRun, pattern: str, message: str) -> None:
        with pytest.raises(UserError) as error:
            self.name(run, pattern)
        assert message in str(error.value)

    def test_have_the_slice_of_the_data_that_the_run_learnt_from(self, run: SmallRun) -> None:
        body = run.rundir.read_job().dump()
        body["spec"]["trainer"]["parameters"]["data"] |= {"start": 200, "end": 900}
        run.rundir.write_job(DistributedTrainingJob.parse(body))
        assert self.name(run, "qwen2_0.5B_{start}-{end}-epoch-{epoch}") == "qwen2_0.5B_200-900-epoch-2"

    def test_have_the_slice_of_a_model_that_is_fine_tuned(self, run: SmallRun) -> None:
        body = run.rundir.read_job().dump()
        for data, name in (
            ({"path": "a.jsonl", "start": 200, "end": 900}, "200-900"),
            ({"path": "a.jsonl", "end": 900}, "0-900"),
        ):
            body["spec"]["trainer"] = {"task": "causal-lm", "parameters": {"pretrained": "model", "data": data}}
            run.rundir.write_job(DistributedTrainingJob.parse(body))
            assert self.name(run, "qwen2_0.5B_{start}-{end}-epoch-{epoch}") == f"qwen2_0.5B_{name}-epoch-2"
        body["spec"]["trainer"]["parameters"]["data"] = {"mixture": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]}
        run.rundir.write_job(DistributedTrainingJob.parse(body))
        with pytest.raises(UserError, match=r"\{start\} is unknown for this checkpoint"):
            self.name(run, "{start}")

    def test_a_score_that_is_not_known_is_refused_and_those_known_are_named(self, run: SmallRun) -> None:
        with pytest.raises(UserError) as error:
            self.name(run, "{accuracy}", "100")
        assert "{accuracy} is unknown for this checkpoint. Available fields: {job}, {name}" in str(error.value)
        assert "{loss}" not in str(error.value)


class TestPlaces:
    def test_a_path_is_taken_as_it_is(self, tmp_path: Path) -> None:
        assert target(tmp_path / "x.bin", Format.SAFETENSORS, None, "d", tmp_path / "r") == tmp_path / "x.bin"
        assert target(tmp_path, Format.FOLDER, None, "d", tmp_path / "r") == tmp_path

    def test_a_file_goes_into_a_folder_that_is_there(self, tmp_path: Path) -> None:
        assert target(tmp_path, Format.STATE_DICT, None, "digits", tmp_path / "r") == tmp_path / "digits.pt"

    def test_a_name_gets_the_suffix_it_lacks(self, tmp_path: Path) -> None:
        for name in ("x", "x.safetensors"):
            found = target(tmp_path / "out", Format.SAFETENSORS, name, "d", tmp_path / "r")
            assert found == tmp_path / "out" / "x.safetensors"
        assert target(tmp_path, Format.FOLDER, "x", "d", tmp_path / "r") == tmp_path / "x"

    def test_the_runs_own_folders_are_refused(self, run: SmallRun) -> None:
        path = run.rundir.path
        with pytest.raises(UserError, match="is among the run's own files"):
            target(path / "checkpoints" / "x", Format.FOLDER, None, "d", path)
        assert target(path / "model", Format.FOLDER, None, "d", path) == path / "model"

    def test_a_file_is_no_folder_for_a_name(self, tmp_path: Path) -> None:
        (tmp_path / "x").touch()
        with pytest.raises(UserError, match="is a file; with --name it is the folder"):
            target(tmp_path / "x", Format.FOLDER, "y", "d", tmp_path / "r")

    def test_nothing_is_replaced_that_was_not_exported(self, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.tex").touch()
        with pytest.raises(UserError, match="is no exported folder"):
            refuse_to_overwrite(ExportOrder(tmp_path / "mine", Format.FOLDER, force=True))
        with pytest.raises(UserError, match="is not a file"):
            refuse_to_overwrite(ExportOrder(tmp_path / "mine", force=True))
        with pytest.raises(UserError, match="--force replaces it"):
            refuse_to_overwrite(ExportOrder(tmp_path / "mine", Format.FOLDER))


class TestWeights:
    def exported(self, run: SmallRun, to: Path, form: str = "safetensors", dtype: torch.dtype | None = None) -> None:
        manifest = run.rundir.manifest("step-000000250")
        export(run.rundir.checkpoint(manifest.name), manifest.digest, to, form, dtype)

    def test_a_safetensors_file_holds_them_and_says_its_framework(self, run: SmallRun, tmp_path: Path) -> None:
        self.exported(run, tmp_path / "x")
        found = load_file(tmp_path / "x")
        assert found.keys() == WEIGHTS.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items())
        with safe_open(tmp_path / "x", "pt") as file:
            assert file.metadata() == {"format": "pt"}

    def test_a_state_dict_is_loaded_without_unpickling_anything(self, run: SmallRun, tmp_path: Path) -> None:
        self.exported(run, tmp_path / "x", "state-dict")
        found = torch.load(tmp_path / "x", weights_only=True)
        assert type(found) is dict
        assert all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items())
        assert (tmp_path / "x").stat().st_size < 10_000

    def test_only_floating_point_tensors_are_cast(self, run: SmallRun, tmp_path: Path) -> None:
        self.exported(run, tmp_path / "x", dtype=torch.bfloat16)
        found = load_file(tmp_path / "x")
        assert torch.equal(found["a"], WEIGHTS["a"].bfloat16())
        assert found["norm.count"].dtype == torch.int64

    @pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float32])
    def test_are_those_in_full_precision_only_where_the_type_holds_them(
        self, tmp_path: Path, dtype: torch.dtype | None
    ) -> None:
        run, full = SmallRun(tmp_path / "run"), torch.randn(40)
        run.begin(1)
        run.save(250, weights={"a": full.bfloat16()}, full={"a": full})
        self.exported(run, tmp_path / "x", dtype=dtype)
        assert torch.equal(load_file(tmp_path / "x")["a"], full.to(dtype or torch.bfloat16))

    def test_a_value_that_does_not_fit_is_refused(self) -> None:
        with pytest.raises(CannotExport, match=r"a holds 7e\+04, which float16 cannot; use bfloat16"):
            cast("a", torch.tensor([1.0, 70000.0]), torch.float16)
        assert cast("a", torch.tensor([float("nan"), float("inf")]), torch.float16).isnan()[0]

    def test_damage_and_another_checkpoint_of_that_name_are_refused(self, run: SmallRun, tmp_path: Path) -> None:
        manifest = run.rundir.manifest("step-000000250")
        folder = run.rundir.checkpoint(manifest.name)
        with pytest.raises(CannotExport, match="was replaced by another checkpoint meanwhile"):
            export(folder, "0" * 64, tmp_path / "x", "safetensors", None)
        run.damage(manifest.name)
        with pytest.raises(CannotExport, match=r"is damaged and was not exported: .* does not match its checksum"):
            self.exported(run, tmp_path / "x")
        with pytest.raises(CannotExport, match="was deleted while it was read"):
            export(folder.with_name("step-000000999"), manifest.digest, tmp_path / "x", "safetensors", None)
        assert not (tmp_path / "x").exists()


def test_config_says_what_it_takes_to_find_and_build_it_again(run: SmallRun) -> None:
    inventory = take_inventory(run.rundir)
    entry, manifest = sound(inventory, "250")
    found = config(entry, manifest, inventory.job, run.rundir.path)
    assert found["model_type"] == "tandem"
    assert (found["architectures"], found["model"], found["data"]) == (["cnn"], "cnn", {"name": "digits"})
    assert (found["checkpoint"], found["step"], found["epoch"], found["num_labels"]) == ("step-000000250", 250, 2, 2)
    assert found["metrics"]["accuracy"] == 0.98765
    assert json.dumps(config(entry, manifest, None, run.rundir.path))
    assert "datasets" not in found
    read = DatasetCommit(id="org/talk", revision="v1", commit="1" * 40)
    record = GenerationRecord(generation=manifest.generation, world_size=2, started_at=1.0, datasets=[read])
    found = config(entry, manifest, inventory.job, run.rundir.path, [record])
    assert found["datasets"] == [{"id": "org/talk", "revision": "v1", "commit": "1" * 40}]


PROGRAM = "import sys, json; sys.argv[0] = ''; to = sys.argv[sys.argv.index('--to') + 1]; "
WRITES = PROGRAM + (
    "open(to, 'wb').write(b'weights'); print(json.dumps({'tensors': 1, 'parameters': 2, 'dtypes': ['float32']}))"
)


class TestCopying:
    """The process that writes the weights is played by a line of Python: torch takes seconds to import."""

    @pytest.fixture
    def program(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        words = [WRITES]
        real = weights_export.subprocess.Popen

        def popen(command: list[str], **options: object) -> object:
            assert command[1:4] == ["-P", "-m", "tandem_trainer.export"]
            return real([sys.executable, "-c", words[0], *command[3:]], **options)

        monkeypatch.setattr(weights_export.subprocess, "Popen", popen)
        return words

    def copied(self, run: SmallRun, path: Path, form: Format = Format.SAFETENSORS, force: bool = False) -> Path:
        inventory = take_inventory(run.rundir)
        return copy(inventory, *sound(inventory, "250"), ExportOrder(path, form, Dtype.BFLOAT16, force)).path

    def test_makes_folders_leaves_nothing_beside_and_gives_the_lease_back(
        self, run: SmallRun, tmp_path: Path, program: list[str]
    ) -> None:
        path = tmp_path / "new" / "x.safetensors"
        assert self.copied(run, path).read_bytes() == b"weights"
        assert list(path.parent.iterdir()) == [path]
        assert list(run.rundir.leases.iterdir()) == []

    def test_the_checkpoint_is_leased_meanwhile(self, run: SmallRun, tmp_path: Path, program: list[str]) -> None:
        program[0] = WRITES.replace("b'weights'", f"str(__import__('os').listdir({str(run.rundir.leases)!r})).encode()")
        name = self.copied(run, tmp_path / "x").read_text()
        assert name.startswith("['export-step-000000250-")
        # Retention goes by that name.
        assert "step-000000250" in name.split("-", 1)[1]

    def test_the_lease_is_renewed_however_long_it_takes(
        self, run: SmallRun, tmp_path: Path, program: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(weights_export.lease, "LEASE_LENGTH_SECONDS", 0.3)
        renewals = []
        real = weights_export.lease.Lease.renew
        monkeypatch.setattr(weights_export.lease.Lease, "renew", lambda held: renewals.append(1) or real(held))
        program[0] = "import time; time.sleep(0.5); " + WRITES
        self.copied(run, tmp_path / "x")
        assert len(renewals) >= 2

    def test_without_a_lease_it_goes_on_and_says_so(
        self, run: SmallRun, tmp_path: Path, program: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(path: Path) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(weights_export.lease, "acquire", refuse)
        inventory = take_inventory(run.rundir)
        done = copy(inventory, *sound(inventory, "250"), ExportOrder(tmp_path / "x"))
        assert "no lease could be taken" in done.note

    def test_a_folder_has_weights_and_config(self, run: SmallRun, tmp_path: Path, program: list[str]) -> None:
        path = self.copied(run, tmp_path / "x", Format.FOLDER)
        assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"]
        assert json.loads((path / "config.json").read_text())["torch_dtype"] == "float32"

    def test_all_that_count_are_copied_if_the_pattern_tells_them_apart(
        self, run: SmallRun, tmp_path: Path, program: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(command.signal, "signal", lambda *_: None)

        def export_all(pattern: str | None) -> None:
            command.export(run.rundir.path, "all", tmp_path / "out", pattern=pattern)

        export_all("{job}-epoch-{epoch}")
        assert {path.name for path in (tmp_path / "out").iterdir()} == {f"small-epoch-{n}.safetensors" for n in (1, 2)}
        for pattern, message in (
            ("{job}-epoch-{epoch}", "small-epoch-1.safetensors is already there"),
            ("{job}", "gives small.safetensors for step-000000100 and step-000000250; add {step} to it"),
            (None, "export all needs --name"),
        ):
            with pytest.raises(UserError, match=re.escape(message)):
                export_all(pattern)

    def test_a_dry_run_lists_what_would_be_pushed_and_asks_no_hub(
        self,
        run: SmallRun,
        program: list[str],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(command.signal, "signal", lambda *_: None)
        monkeypatch.setattr(command.hub, "push", lambda *_: pytest.fail("it was pushed"))
        command.push(run.rundir.path, "best", "me/digits", dry_run=True)
        first, *files, last = capsys.readouterr().out.splitlines()
        assert first == "would push to me/digits, the branch main"
        assert [line.split()[-1] for line in files] == ["config.json", "model.safetensors"]
        assert "step-000000250: 2 files" in last

    @pytest.mark.parametrize("form", [Format.SAFETENSORS, Format.FOLDER])
    def test_an_earlier_copy_is_replaced_only_by_force(
        self, run: SmallRun, tmp_path: Path, program: list[str], form: Format
    ) -> None:
        path = self.copied(run, tmp_path / "x", form)
        with pytest.raises(UserError, match="is already there; --force replaces it"):
            self.copied(run, path, form)
        program[0] = WRITES.replace("b'weights'", "b'newer'")
        self.copied(run, path, form, force=True)
        assert (path / "model.safetensors" if form is Format.FOLDER else path).read_bytes() == b"newer"
        assert sorted(file.name for file in tmp_path.iterdir()) == ["run", "x"]

    @pytest.mark.parametrize(
        ("behaviour", "message"),
        [
            ('print(\'{"refused": "it is damaged"}\')', "it is damaged"),
            ("raise SystemExit('out of luck')", "could not be written: out of luck"),
            ("import os; os.kill(os.getpid(), 9)", "was killed, perhaps for lack of memory"),
            ("pass", "could not be written: exit code 0"),
        ],
    )
    def test_a_failure_is_one_sentence_and_leaves_what_was_there(
        self, run: SmallRun, tmp_path: Path, program: list[str], behaviour: str, message: str
    ) -> None:
        path = self.copied(run, tmp_path / "x", Format.FOLDER)
        program[0] = PROGRAM + f"open(to, 'wb').write(b'half'); {behaviour}"
        with pytest.raises(UserError, match=message) as error:
            self.copied(run, path, Format.FOLDER, force=True)
        assert "\n" not in str(error.value)
        assert (path / "model.safetensors").read_bytes() == b"weights"
        assert sorted(file.name for file in tmp_path.iterdir()) == ["run", "x"]
        assert run.rundir.readers() == {}

    def test_a_disk_without_room_is_refused_before(
        self, run: SmallRun, tmp_path: Path, program: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(weights_export.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 5})())
        with pytest.raises(UserError, match=r"needs up to 1\.0 MB, and the disk has 5 B free"):
            self.copied(run, tmp_path / "x")

    def test_a_target_that_cannot_be_written_is_named(self, run: SmallRun, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match="file/x cannot be written: "):
            self.copied(run, tmp_path / "file" / "x")
