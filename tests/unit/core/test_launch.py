"""The commands and variables of a job's processes."""

from pathlib import Path
from typing import Any

import pytest

from tandem.job.resource import DistributedTrainingJob
from tandem.processes import launch
from tests.support import manifests


def job(trainer: dict[str, Any], **spec: Any) -> DistributedTrainingJob:
    return manifests.job("a", **({"trainer": trainer} | spec))


def agent(trainer: dict[str, Any], **spec: Any) -> list[str]:
    return launch.agent_command(job(trainer, **spec), "host:1", "10.0.0.1", python="PYTHON")


def program(trainer: dict[str, Any]) -> list[str]:
    command = agent(trainer)
    return command[command.index("--") + 1 :]


def test_an_agent_is_torchrun_with_our_rendezvous_over_the_elastic_range() -> None:
    command = agent(
        {"task": "image-classification"},
        workers={"replicas": 3, "minReplicas": 2, "maxReplicas": 4, "processesPerReplica": 2},
    )
    assert command[:5] == ["PYTHON", "-P", "-m", "tandem_trainer.agent", "--warm"]
    for option in (
        *("--nnodes=2:4", "--nproc-per-node=2", "--rdzv-backend=tandem", "--rdzv-endpoint=host:1"),
        *("--rdzv-id=a", "--local-addr=10.0.0.1"),
    ):
        assert option in command
    assert command[-4:] == ["PYTHON", "-P", "-m", "tandem_trainer"]


def test_ranks_start_cold_where_the_job_says_so() -> None:
    assert "--warm" not in agent({"task": "image-classification"}, elasticity={"warmStart": False})


def test_modules_are_imported_for_all_ranks_where_the_job_names_them() -> None:
    task = {"task": "image-classification"}
    assert "--preload=transformers.trainer,trl" in agent(task, elasticity={"preload": ["transformers.trainer", "trl"]})
    assert not [word for word in agent(task) if word.startswith("--preload")]
    for name in ("a b", "a,b", "--nnodes=7", "a..b", "1a", ""):
        with pytest.raises(ValueError, match="preload"):
            agent(task, elasticity={"preload": [name]})


def test_a_script_or_a_module_is_left_to_the_agent_and_its_python() -> None:
    expected = ["train.py", "--lr", "1"]
    assert program({"command": ["train.py"], "args": ["--lr", "1"]}) == expected
    assert program({"command": ["python", "train.py", "--lr", "1"]}) == expected
    assert program({"command": ["python3", "train.py"], "args": ["--lr", "1"]}) == expected
    assert program({"command": ["python", "-m", "train"]}) == ["-m", "train"]


def test_any_other_program_runs_as_it_is() -> None:
    assert program({"command": ["bash", "-c", "exec train"]}) == ["bash", "-c", "exec train"]
    assert program({"command": ["python", "-O", "train.py"]}) == ["PYTHON", "-O", "train.py"]


def test_the_users_variables_come_first_and_cannot_replace_ours() -> None:
    env = [{"name": "LEVEL", "value": "7"}, {"name": launch.RUN_DIR, "value": "elsewhere"}]
    read = job({"task": "image-classification", "env": env})
    variables = launch.environment(read, Path("runs/a"), "worker-0", token="secret", coordinator="host:1")
    assert variables["LEVEL"] == "7"
    assert variables[launch.RUN_DIR] == "runs/a"
    assert variables[launch.TOKEN] == "secret"


def test_evaluators_get_neither_token_nor_coordinator() -> None:
    variables = launch.environment(job({"task": "image-classification"}), Path("runs/a"), "evaluator-0")
    assert launch.TOKEN not in variables
    assert launch.COORDINATOR not in variables


def test_a_coordinator_writes_its_port_only_where_it_is_told_to() -> None:
    assert launch.coordinator_command("host", 0, Path("p"), "PYTHON")[-2:] == ["--port-file", "p"]
    assert "--port-file" not in launch.coordinator_command("host", 1)


@pytest.mark.parametrize("token", ["a", "0123456789abcde", "0123456789 abcdef", "0123456789abcdef\n", "\u00e4" * 16])
def test_a_token_that_could_be_guessed_or_not_be_sent_is_refused(token: str) -> None:
    assert "16 or more" in launch.token_weakness(token)


def test_a_token_of_sixteen_signs_is_taken() -> None:
    assert launch.token_weakness("0123456789-abcd/") == ""


def test_a_module_is_imported_from_where_it_is_installed() -> None:
    assert launch.module_command("a.b", "--c", python="PYTHON") == ["PYTHON", "-P", "-m", "a.b", "--c"]


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("$TANDEM_RUN_DIR", "/runs/a"),
        ("--out=${TANDEM_RUN_DIR}/model", "--out=/runs/a/model"),
        ("$(TANDEM_RUN_DIR)/$TANDEM_RUN_DIR", "/runs/a//runs/a"),
        ("$TANDEM_RUN_DIRS", "$TANDEM_RUN_DIRS"),
        ("$HOME", "$HOME"),
    ],
)
def test_the_run_directory_stands_in_a_command_without_a_shell(word: str, found: str) -> None:
    """Otherwise a script makes a folder that is called $TANDEM_RUN_DIR, and nobody finds its checkpoints."""
    assert launch.with_run_dir([word], {launch.RUN_DIR: "/runs/a"}) == [found]
    assert launch.with_run_dir([word], {}) == [word]
