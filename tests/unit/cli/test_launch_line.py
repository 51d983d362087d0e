"""The line that starts a script elsewhere becomes a manifest that starts the same processes here."""

import shlex
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tandem.errors import UserError
from tandem.job.manifest.reading import parse_job, read_job
from tandem.job.manifest.source import parse
from tandem.job.resource import DistributedTrainingJob
from tandem_cli import launch_line
from tandem_cli.commands.run import Command
from tandem_cli.launch_line import LaunchLine
from tandem_cli.main import application


@pytest.fixture(autouse=True)
def _scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "src").mkdir()
    for name in ("train.py", "src/Train_GPT.py"):
        (tmp_path / name).touch()


def job(text: str) -> DistributedTrainingJob:
    words = shlex.split(text)
    return parse_job(parse(launch_line.read(words).manifest(words).encode(), "manifest"))


@pytest.mark.parametrize(
    ("line", "command", "args", "workers"),
    [
        ("train.py --epochs 3", ["python", "train.py"], ["--epochs", "3"], (1, 1, 1)),
        ("python -u train.py", ["python", "-u", "train.py"], [], (1, 1, 1)),
        ("python3.11 -X dev -m pkg.train -m x", ["python3.11", "-X", "dev", "-m", "pkg.train"], ["-m", "x"], (1, 1, 1)),
        ("torchrun --nproc-per-node=2 train.py --lr 0.1", ["python", "train.py"], ["--lr", "0.1"], (1, 1, 2)),
        ("torchrun --nproc_per_node gpu --standalone train.py", ["python", "train.py"], [], (1, 1, 4)),
        ("torchrun --nnodes 1:3 --rdzv-backend c10d -m pkg.train", ["python", "-m", "pkg.train"], [], (1, 3, 1)),
        ("torchrun --nnodes=2 --no-python ./run.sh -m", ["./run.sh"], ["-m"], (2, 2, 1)),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", ["python", "train.py"], [], (1, 1, 2)),
        ("accelerate launch --num_processes 4 --num_machines 2 train.py", ["python", "train.py"], [], (2, 2, 2)),
        ("accelerate launch train.py --cpu", ["python", "train.py"], ["--cpu"], (1, 1, 4)),
        ("accelerate launch --cpu -m pkg.train", ["python", "-m", "pkg.train"], [], (1, 1, 1)),
    ],
)
def test_a_line_is_read_as_its_launcher_reads_it(
    line: str, command: list[str], args: list[str], workers: tuple[int, int, int]
) -> None:
    spec = job(line).spec
    assert (spec.trainer.command, spec.trainer.args) == (command, args)
    found = spec.workers
    assert (found.min_replicas, found.replicas, found.processes) == workers


def test_variables_and_the_budget_are_kept() -> None:
    spec = job("OMP_NUM_THREADS=4 A='x y' torchrun --max-restarts 3 train.py").spec
    assert {one.name: one.value for one in spec.trainer.env} == {"OMP_NUM_THREADS": "4", "A": "x y"}
    assert spec.elasticity.max_restarts == 3
    spec = job("accelerate launch --mixed_precision bf16 train.py").spec
    assert {one.name: one.value for one in spec.trainer.env} == {"ACCELERATE_MIXED_PRECISION": "bf16"}


def test_a_line_may_be_one_word() -> None:
    assert launch_line.read(["torchrun --nproc-per-node 2 train.py 'a b'"]).args == ["a b"]


def test_a_script_whose_name_has_a_space_is_no_line(tmp_path: Path) -> None:
    (tmp_path / "my script.py").touch()
    assert job("'my script.py'").spec.trainer.command == ["python", "my script.py"]
    assert job("'my script.py' --epochs 3").spec.trainer.args == ["--epochs", "3"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("trian.py", "trian.py does not exist; did you mean train.py"),
        ("torchrun --nproc-per-node 0 train.py", "--nproc-per-node needs a number of at least 1, not 0"),
        ("torchrun --ncproc 2 train.py", "torchrun: unrecognized arguments: --ncproc"),
        ("accelerate launch --use_deepspeed train.py", "accelerate launch: unrecognized arguments: --use_deepspeed"),
        ("accelerate launch --num_processes 3 --num_machines 2 train.py", "no multiple of the 2"),
        ("accelerate config", "accelerate launch train.py"),
        ("python -u", "names no script"),
        ("deepspeed train.py", "deepspeed is not a known launcher"),
        ("A=1", "name a script"),
        ('"', "No closing quotation"),
    ],
)
def test_what_cannot_be_said_in_a_manifest_is_refused(line: str, said: str) -> None:
    words = [f"{line} "] if line == '"' else shlex.split(line)
    with pytest.raises(UserError, match=said):
        launch_line.read(words)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("python", "src/Train_GPT.py"), "train-gpt"),
        (("python", "-m", "pkg.sft"), "sft"),
        (("./run.sh",), "run"),
        (("python", "-c", "print(1)"), "script"),
        (("python", "ü.py"), "script"),
        (("python", f"{'long-' * 20}.py"), "long-long-long-long-long-long-long-long"),
    ],
)
def test_a_job_is_called_as_its_script_is(command: tuple[str, ...], name: str) -> None:
    assert LaunchLine(command).name == name


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@pytest.mark.property
@example([], {"N": "", "ON": "y"})
@given(st.lists(TEXTS, max_size=4), st.dictionaries(st.from_regex(r"\A[A-Z_]{1,5}\Z"), TEXTS, max_size=2))
def test_arguments_and_variables_are_the_same_in_the_job(args: list[str], variables: dict[str, str]) -> None:
    line = LaunchLine(("python", "train.py"), args, variables)
    found = parse_job(parse(line.manifest(["train.py", *args]).encode(), "manifest")).spec.trainer
    assert found.args == args
    assert {one.name: one.value for one in found.env} == variables


def test_what_accelerate_would_read_from_its_configuration_has_to_be_said(tmp_path: Path) -> None:
    """Otherwise the training would be another one: in another precision, on another number of processes."""
    (tmp_path / "hf" / "accelerate").mkdir(parents=True)
    (tmp_path / "hf" / "accelerate" / "default_config.yaml").write_text("mixed_precision: bf16\n")
    with pytest.raises(UserError, match=r"accelerate would read \S+default_config\.yaml, which Tandem does not"):
        job("accelerate launch --num_processes 2 train.py")
    assert job("accelerate launch --num_processes 2 --mixed_precision no train.py").spec.workers.processes == 2


def test_init_writes_what_run_prints_and_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train.py", "--epochs", "3"]
    done = CliRunner().invoke(application(["init"]), ["init", *words])
    assert done.exit_code == 0, done.output
    assert done.output == "wrote train.yaml; to run it: tandem run train.yaml\n"
    written = (tmp_path / "train.yaml").read_text()
    command = Command("train.py", (), None, 0, None, False, None, ("--epochs", "3"))
    assert parse_job(command.source()) == read_job("train.yaml")
    assert capsys.readouterr().out == f"{written}# To keep it: tandem init train.py --epochs 3\n"
    assert command.command_line("--fresh") == "tandem run train.py --fresh -- --epochs 3"
    again = CliRunner().invoke(application(["init"]), ["init", *words])
    assert isinstance(again.exception, UserError)
    assert "train.yaml already exists" in str(again.exception)


def test_a_manifest_takes_no_arguments_of_a_script() -> None:
    with pytest.raises(UserError, match=r"^--epochs 3: arguments are for a script, and job\.yaml is a manifest"):
        Command("job.yaml", (), None, 0, None, False, None, ("--epochs", "3")).source()
