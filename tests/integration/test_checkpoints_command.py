"""`tandem checkpoints` as a user starts it: on a real run that goes on, and with the mistakes people make."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.processes.distribution import install_command
from tandem.rundir.layout import RunDir
from tandem_trainer.models import build
from tests.support import ROOT
from tests.support.local_run import LocalRun
from tests.support.processes import TANDEM, tandem
from tests.support.waiting import until
from tests.support.worlds.small_run import SmallRun, messy

pytestmark = pytest.mark.timeout(300)
FULL = pytest.mark.full("cli")

NAME = "step-000000600"
STYLES = re.compile(r"\x1b\[[0-9;]*m")


def checkpoints(
    *words: str | Path, cwd: Path = ROOT, file_bytes: int | None = None
) -> subprocess.CompletedProcess[str]:
    """One call of `tandem checkpoints`."""
    return tandem("checkpoints", *words, cwd=cwd, file_bytes=file_bytes)


def on_a_terminal(width: int, answer: str, *words: str | Path) -> tuple[int, str]:
    """One call in a terminal of that width, with an answer typed when the command asks: exit code and output."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": str(width), "TERM": "xterm"}
    process = subprocess.Popen(
        [TANDEM, "checkpoints", *words], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    output, deadline = b"", time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            ready, _, _ = select.select([ours], [], [], 0.1)
            if ready:
                try:
                    part = os.read(ours, 65536)
                except OSError:  # the other side is closed
                    break
                if not part:
                    break
                output += part
                if answer and output.endswith(b"[y/N]: "):
                    os.write(ours, answer.encode())
                    answer = ""
        return process.wait(30), STYLES.sub("", output.decode()).replace("\r\n", "\n")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    return messy(tmp_path / "run")


@pytest.fixture(scope="module")
def going(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    """A run that goes on until it is interrupted, and saves several times a second."""
    settings = {"trainer.loop.epochs": 100_000, "checkpoint.everySteps": 20, "checkpoint.keepLast": 8}
    words = [word for field, value in settings.items() for word in ("--set", f"{field}={value}")]
    with LocalRun(tmp_path_factory.mktemp("checkpoints"), *words) as run:
        until(lambda: len(run.run_dir.checkpoint_names()) >= 4, "some checkpoints")
        yield run


@pytest.fixture(scope="module")
def over(going: LocalRun) -> RunDir:
    """The same run after Ctrl-C."""
    if going.process.poll() is None:
        going.interrupt()
    going.ends()
    return going.run_dir


@pytest.mark.full("core", "cli", "trainer")
class TestARunThatGoesOn:
    def test_is_listed_verified_exported_and_pruned_and_does_not_mind(self, going: LocalRun, tmp_path: Path) -> None:
        listed = checkpoints("ls", going.path)
        assert listed.returncode == 0, listed.stderr
        assert "latest" in listed.stdout

        verified = checkpoints("verify", going.path)
        assert verified.returncode == 0, verified.stdout + verified.stderr

        exported = checkpoints("export", going.path, "latest", "--to", tmp_path / "early.safetensors")
        assert exported.returncode == 0, exported.stderr

        for _ in range(3):
            pruned = checkpoints("prune", going.path, "--keep-last", "1", "--keep-best", "0", "--all", "--yes")
            assert pruned.returncode == 0, pruned.stdout + pruned.stderr
        newest = max(going.run_dir.checkpoint_names())
        until(lambda: max(going.run_dir.checkpoint_names()) > newest, "a checkpoint after all that")

    def test_has_only_sound_checkpoints_in_the_end_and_never_began_again(self, going: LocalRun, over: RunDir) -> None:
        assert checkpoints("verify", over.path).returncode == 0
        listed = json.loads(checkpoints("ls", over.path, "-o", "json").stdout)
        assert {one["state"] for one in listed["checkpoints"]} == {"counts"}
        assert len(over.generation_records()) == 1

    def test_is_exported_to_what_everybody_loads(self, over: RunDir, tmp_path: Path) -> None:
        plain = tmp_path / "plain.pt"
        assert checkpoints("export", over.path, "latest", "--to", plain, "--format", "state-dict").returncode == 0
        words = ("--format", "folder", "--name", "{job}-{step}", "--dtype", "bfloat16")
        answer = checkpoints("export", over.path, "latest", "--to", tmp_path / "models", *words)
        assert answer.returncode == 0, answer.stderr
        cast = tmp_path / "models" / f"digits-{over.committed()[0].step}"
        assert f"exported  {cast}" in answer.stdout

        weights = torch.load(plain, weights_only=True)
        build("cnn", channels=1, image_size=8, classes=10).load_state_dict(weights)
        halved = load_file(cast / "model.safetensors")
        assert all(torch.equal(halved[name], tensor.bfloat16()) for name, tensor in weights.items())
        found = json.loads((cast / "config.json").read_text())
        assert (found["job"], found["model"], found["torch_dtype"]) == ("digits", "cnn", "bfloat16")
        assert oct((cast / "model.safetensors").stat().st_mode) == oct((cast / "config.json").stat().st_mode)

    def test_everything_a_real_manifest_says_is_shown(self, over: RunDir) -> None:
        shown = checkpoints("show", over.path, "latest").stdout
        for said in ("complete", "with 2 ranks", "from the beginning", "evaluated", "keepLast", "torch 2."):
            assert said in shown
        body = json.loads(checkpoints("show", over.path, "latest", "-o", "json").stdout)
        assert body["manifest"]["step"] == body["step"] == over.committed()[0].step


class TestVerify:
    def test_damage_ends_with_1_and_a_line_for_each(self, run: SmallRun) -> None:
        run.damage("step-000000400")
        answer = checkpoints("verify", run.rundir.path)
        assert answer.returncode == 1
        lines = answer.stdout.splitlines()
        assert len(lines) == 8
        assert [line.split()[:2] for line in lines if " sound " not in line] == [
            ["step-000000400", "damaged"],
            ["step-000000700", "damaged"],
        ]

    def test_those_that_are_named_are_read_and_no_others(self, run: SmallRun) -> None:
        answer = checkpoints("verify", run.rundir.path, "best", "600", "600", "-o", "json")
        assert answer.returncode == 0
        found = json.loads(answer.stdout)
        assert [(one["name"], one["outcome"]) for one in found] == [("step-000000200", "sound"), (NAME, "sound")]


class TestPrune:
    def test_without_yes_nothing_is_deleted(self, run: SmallRun) -> None:
        before = run.names()
        answer = checkpoints("prune", run.rundir.path, "--all")
        assert (answer.returncode, run.names()) == (0, before)
        assert "nothing was deleted; --yes deletes them" in answer.stdout

    def test_with_yes_only_what_was_named_is(self, run: SmallRun) -> None:
        answer = checkpoints("prune", run.rundir.path, "--keep-last", "1", "--yes")
        assert answer.returncode == 0
        left = [name for name in run.names() if name in {f"step-000000{step}" for step in range(100, 700, 100)}]
        # Training goes on, and a rewind would go back to 500.
        assert left == ["step-000000200", "step-000000300", "step-000000500", NAME]
        assert "step-000000150.bad" in run.names()
        assert answer.stdout.endswith("deleted; 528 B freed\n")

    def test_a_terminal_is_asked(self, run: SmallRun) -> None:
        before = run.names()
        code, output = on_a_terminal(80, "n\n", "prune", run.rundir.path)
        assert (code, run.names()) == (0, before)
        assert "Delete 2 folders and free 528 B? [y/N]: n" in output
        code, output = on_a_terminal(80, "y\n", "prune", run.rundir.path)
        assert code == 0
        assert "528 B freed" in output
        assert "step-000000400" not in run.names()


class TestWhatItLooksLike:
    @pytest.mark.parametrize("width", [60, pytest.param(80, marks=FULL), pytest.param(160, marks=FULL)])
    def test_no_line_is_wider_than_the_terminal(self, run: SmallRun, width: int) -> None:
        for words in (["ls"], ["show", "400"], ["diff", "300", "400"], ["prune", "--all"], ["verify"]):
            code, output = on_a_terminal(width, "n\n", words[0], run.rundir.path, *words[1:])
            assert code == (1 if words == ["verify"] else 0)
            assert max(len(line) for line in output.splitlines()) <= width

    def test_colours_are_for_terminals_alone(self, run: SmallRun) -> None:
        assert "\x1b" not in checkpoints("ls", run.rundir.path).stdout

    def test_the_list_costs_little_more_than_starting_python(self, run: SmallRun) -> None:
        loaded = "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
        code = f"import sys; from tandem_cli.commands import checkpoints; {loaded}"
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert answer.stdout == "[]\n"

    def test_help_names_every_subcommand(self) -> None:
        text = checkpoints("--help").stdout
        assert all(f" {name} " in text for name in ("ls", "show", "verify", "diff", "export", "push", "prune"))
        code = "from tandem_cli.main import main; main()"
        command = [sys.executable, "-c", code, "--help"]
        whole = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        assert "checkpoints" in whole
        assert checkpoints("export", "-h").returncode == 0


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_an_export_that_is_ended_leaves_nothing_behind(run: SmallRun, tmp_path: Path, ending: signal.Signals) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen([TANDEM, "checkpoints", "export", str(run.rundir.path), "best", "--to", str(out / "x")])
    try:
        until(lambda: out.exists() and list(run.rundir.leases.iterdir()), "the copy has begun")
        process.send_signal(ending)
        assert process.wait(60) != 0
    finally:
        process.kill()
        process.wait()
    assert list(out.iterdir()) == []
    assert list(run.rundir.leases.iterdir()) == []


class TestMistakes:
    def refused(self, *words: str | Path, cwd: Path = ROOT, file_bytes: int | None = None) -> str:
        answer = checkpoints(*words, cwd=cwd, file_bytes=file_bytes)
        assert answer.returncode == 2, answer.stdout + answer.stderr
        assert answer.stderr.startswith("error: ")
        assert answer.stderr.count("\n") == 1
        return answer.stderr

    def test_a_run_that_is_not_there(self, tmp_path: Path) -> None:
        SmallRun(tmp_path / "runs" / "digits")
        assert "runs/digits/checkpoints" in checkpoints("ls", "digits", cwd=tmp_path).stdout, "by its name"
        assert "Runs here: runs/digits" in self.refused("verify", "runs/digit", cwd=tmp_path)
        (tmp_path / "file").touch()
        assert "is a file; a run is a folder" in self.refused("prune", "file", cwd=tmp_path)

    def test_a_checkpoint_that_is_not_there(self, run: SmallRun, tmp_path: Path) -> None:
        path = run.rundir.path
        assert "Did you mean latest?" in self.refused("show", path, "lastest")
        assert "The nearest: step-000000600, step-000000700" in self.refused("verify", path, "650")
        assert "was set aside: weights" in self.refused("diff", path, "600", "step-000000150.bad")
        assert "no final checkpoint" in self.refused("export", path, "final", "--to", tmp_path / "x")

    @pytest.mark.parametrize(
        ("lacking", "extra", "words"),
        [("numpy", "report", ["diff", "300", "400"]), ("torch", "trainer", ["export", "best", "--to", "x"])],
    )
    def test_an_extra_that_is_not_installed(self, run: SmallRun, lacking: str, extra: str, words: list[str]) -> None:
        code = f"import sys; sys.modules[{lacking!r}] = None; from tandem_cli.main import main; main()"
        command = [sys.executable, "-c", code, "checkpoints", words[0], str(run.rundir.path), *words[1:]]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert answer.returncode == 2
        expected = f"error: tandem checkpoints {words[0]} needs {lacking}; install it with: {install_command(extra)}\n"
        assert answer.stderr == expected

    def test_a_run_without_checkpoints(self, tmp_path: Path) -> None:
        path = SmallRun(tmp_path / "run").rundir.path
        for words in (["verify"], ["show", "latest"], ["diff", "1", "2"]):
            assert "has no checkpoints" in self.refused(words[0], path, *words[1:])
        assert checkpoints("ls", path).returncode == checkpoints("prune", path).returncode == 0

    def test_a_name_with_fields_that_are_not_there(self, run: SmallRun, tmp_path: Path) -> None:
        words = ("export", run.rundir.path, "best", "--to", tmp_path, "--name", "qwen2_{first}-{end}-epoch-{epoch}")
        message = self.refused(*words)
        assert "there is no field {first}" in message
        assert "{job}, {name}, {step}, {epoch}, {generation}" in message

    @pytest.mark.parametrize(
        "form", ["safetensors", pytest.param("state-dict", marks=FULL), pytest.param("folder", marks=FULL)]
    )
    def test_a_full_disk_leaves_nothing_behind(self, tmp_path: Path, form: str) -> None:
        run = SmallRun(tmp_path / "run")
        run.begin(1)
        run.save(100, weights={"a": torch.zeros(100_000)})
        out = tmp_path / "out"
        message = self.refused(
            "export", run.rundir.path, "100", "--to", out / "x", "--format", form, file_bytes=100_000
        )
        assert "does not take the copy" in message
        assert list(out.iterdir()) == []
        assert list(run.rundir.leases.iterdir()) == []

    def test_a_damaged_checkpoint_is_not_exported(self, run: SmallRun, tmp_path: Path) -> None:
        run.damage(NAME)
        message = self.refused("export", run.rundir.path, "latest", "--to", tmp_path / "x")
        assert "is damaged and was not exported" in message
        assert not (tmp_path / "x").exists()
        assert "`tandem checkpoints verify` says more" in self.refused("diff", run.rundir.path, "500", "600")

    def test_a_lineage_that_cannot_be_read(self, run: SmallRun) -> None:
        (RunDir(run.rundir.path).generations / "000002.json").write_text("{")
        before = run.names()
        assert "000002.json is damaged" in self.refused("prune", run.rundir.path, "--yes", "--all")
        assert run.names() == before
        assert "lineage unknown" in checkpoints("ls", run.rundir.path).stdout


def test_checkpoints_of_two_runs_can_be_compared(run: SmallRun, tmp_path: Path) -> None:
    other = SmallRun(tmp_path / "other")
    other.begin(1)
    other.save(600, weights={"layer.weight": torch.full((4, 3), 600.0)})
    answer = checkpoints("diff", run.rundir.path, "600", f"{other.rundir.path}:latest")
    assert answer.returncode == 0, answer.stderr
    assert "weights.safetensors  equal" in answer.stdout
    assert checkpoints("diff", run.rundir.path, "600", "latest").stdout == "A and B are equal to the bit\n"
