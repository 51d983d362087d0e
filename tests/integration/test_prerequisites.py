"""A job that cannot run here is refused by the real command line: at once, in one message, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.bad_surroundings import CASES, BadSurroundings
from tests.support.processes import tandem
from tests.support.rights import AS_ANY_USER

FULL = pytest.mark.full("core", "cli")
SHOWN = [
    case
    for case in CASES
    if case.name
    in (
        "script-missing",
        "script-unreadable",
        "module-missing",
        "program-not-executable",
        "label-out-of-range",
        "test-data-missing",
        "weights-of-torch-save",
        "ten-thousand-replicas",
        "run-directory-below-a-file",
    )
]


@pytest.mark.parametrize("case", SHOWN, ids=lambda case: case.name)
@pytest.mark.parametrize("command", [["run"], pytest.param(["validate", "--here"], marks=FULL)], ids=" ".join)
def test_it_ends_with_2_and_one_message(case: BadSurroundings, command: list[str], tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(case.job(tmp_path)))
    result = tandem(*command, "job.json", cwd=tmp_path, in_front=AS_ANY_USER)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("error:") == 1
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "runs/case").exists()


@pytest.mark.parametrize("command", [["run"], ["validate"], ["submit"]], ids=" ".join)
def test_a_manifest_that_may_not_be_read_is_told_in_one_line(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text((ROOT / "examples/digits.yaml").read_text())
    (tmp_path / "job.yaml").chmod(0)
    result = tandem(*command, "job.yaml", cwd=tmp_path, in_front=AS_ANY_USER)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: job.yaml cannot be read: Permission denied\n"


def test_the_example_that_lacks_nothing_passes() -> None:
    result = tandem("validate", "--here", "examples/own-script.yaml")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("command", [["run"], ["validate", "--here"]], ids=" ".join)
def test_torch_is_not_imported_to_find_out(command: list[str], tmp_path: Path) -> None:
    code = "import sys; from tandem_cli.main import main; sys.exit(main() or 0)"
    words = [sys.executable, "-X", "importtime", "-c", code, *command, str(ROOT / "examples/digits.yaml")]
    words += ["--set", "trainer.loop.initialWeights=gone"] if command == ["run"] else []
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "tandem" in imported
    assert not imported & {"torch", "numpy", "safetensors", "torchvision", "matplotlib", "tandem_trainer"}
