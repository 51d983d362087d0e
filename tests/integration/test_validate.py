"""`tandem validate` as a user calls it: what it prints where, how it ends, and that it does not keep one waiting."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.errors import UserError
from tandem.job.manifest.reading import read_job
from tandem_cli.commands.validate import _fixed
from tests.support import ROOT
from tests.support.bad_manifests import REFUSED
from tests.support.processes import TANDEM, tandem

EXAMPLES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*.yaml"))


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files of bad manifests."""
    folder = tmp_path_factory.mktemp("bad")
    for case in REFUSED:
        (folder / f"{case.name}.yaml").write_bytes(case.text)
    return sorted(map(str, folder.iterdir()))


def test_good_manifests_get_one_line_each() -> None:
    result = tandem("validate", *EXAMPLES)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert len(lines) == len(EXAMPLES)
    epochs = read_job(ROOT / "examples/digits.yaml").spec.trainer.settings_of_loop.epochs
    assert lines[EXAMPLES.index("examples/digits.yaml")] == (
        f"OK examples/digits.yaml: digits: image-classification, cnn on digits, {epochs} epochs; "
        "2 workers (1 to 2); 2 evaluator processes"
    )


def test_a_manifest_of_the_version_before_is_read_with_a_warning_and_rewritten(tmp_path: Path) -> None:
    text = (ROOT / "examples/digits.yaml").read_text().replace("parameters:", "config:").replace("    loop:\n", "")
    (tmp_path / "old.yaml").write_text(text)
    read = tandem("validate", "old.yaml", cwd=tmp_path)
    assert read.returncode == 0
    assert "old.yaml: spec.trainer.config is deprecated" in read.stderr
    short = ("--set", "trainer.loop.maxSteps=1", "--set", "trainer.config.seed=3", "--set", "evaluators.replicas=0")
    trained = tandem("run", "old.yaml", *short, cwd=tmp_path)
    assert trained.returncode == 0
    assert "spec.trainer.config is deprecated" in trained.stdout + trained.stderr
    result = tandem("validate", "--fix", "old.yaml", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == read.stdout
    assert (tmp_path / "old.yaml").read_text() == (ROOT / "examples/digits.yaml").read_text()
    assert "cannot rewrite standard input" in tandem("validate", "--fix", "-", stdin=text.encode()).stderr


def test_a_rewritten_file_is_replaced_in_one_step_and_keeps_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "examples/digits.yaml").read_text().replace("parameters:", "config:").replace("    loop:\n", "")
    old, link = tmp_path / "old.yaml", tmp_path / "link.yaml"
    old.write_text(text)
    old.chmod(0o640)
    link.symlink_to(old.name)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", _no_space)
        with pytest.raises(UserError, match="No space left"):
            _fixed(str(link))
    assert old.read_text() == text
    _fixed(str(link))
    assert old.read_text() == (ROOT / "examples/digits.yaml").read_text()
    assert (old.stat().st_mode & 0o777, link.is_symlink()) == (0o640, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.yaml", "old.yaml"]


def _no_space(path: Path, target: Path) -> Path:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_bad_manifests_end_with_2_and_never_with_a_stack_trace(bad: list[str]) -> None:
    result = tandem("validate", *bad)
    assert (result.returncode, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
    assert all(f"{name}:" in result.stderr for name in bad)


def test_a_script_is_checked_as_tandem_run_would_run_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def work(rank): print(rank)\n")
    result = tandem("validate", "--here", "train.py", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("OK train.py: train: ")
    missing = tandem("validate", "nothing.py", cwd=tmp_path)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "nothing.py" in missing.stderr


def test_a_mistake_looks_like_a_compilers() -> None:
    text = b"""\
apiVersion: tandem.dev/v1alpha1
kind: DistributedTrainingJob
metadata: {name: a}
spec:
  trainer: {task: image-classification}
  workers:
    min_replicas: 2
"""
    result = tandem("validate", "-", stdin=text)
    assert result.returncode == 2
    assert result.stderr.splitlines()[:5] == [
        "<stdin>:7:5: error: unknown field min_replicas in spec.workers",
        "   │",
        " 7 │     min_replicas: 2",
        "   │     ^^^^^^^^^^^^",
        "   = did you mean minReplicas?",
    ]


def test_good_and_bad_ones_together_are_all_told(bad: list[str]) -> None:
    result = tandem("validate", bad[0], EXAMPLES[0], "no-such-file.yaml")
    assert result.returncode == 2
    assert f"OK {EXAMPLES[0]}" in result.stdout
    assert f"{bad[0]}:" in result.stderr
    assert "error: no-such-file.yaml does not exist" in result.stderr


def test_json_is_for_machines(bad: list[str]) -> None:
    result = tandem("validate", "--output", "json", bad[0], EXAMPLES[0])
    assert (result.returncode, result.stderr) == (2, "")
    wrong, good = json.loads(result.stdout)
    assert (good["valid"], good["problems"]) == (True, [])
    assert wrong["valid"] is False
    assert wrong["problems"][0]["line"] > 0
    assert set(wrong["problems"][0]) >= {"file", "line", "column", "field", "message", "given", "allowed", "suggestion"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"a: 1\n---\na: 2\n", "a file holds one job"),
        (bytes(range(256)), "not UTF-8"),
    ],
)
def test_what_is_no_manifest_gets_one_clear_message(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    result = tandem("validate", str(path))
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("error:") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["validate"], "Missing argument"),
        (["validat"], "No such command"),
        (["validate", "--outptu", "json"], "No such option"),
        (["validate", "-o", "xml", "-"], "xml"),
        (["validate", str(ROOT)], "is a folder"),
    ],
)
def test_a_wrong_command_line_ends_with_2(arguments: list[str], message: str) -> None:
    result = tandem(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_control_characters_of_a_manifest_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text('spec: "\\e[2J"\nkind: "\\e]0;owned\\a"\n')
    assert "\x1b" not in tandem("validate", str(path)).stderr


def test_colours_are_for_terminals_alone(bad: list[str]) -> None:
    assert "\x1b" not in tandem("validate", bad[0]).stderr
    assert "\x1b" in tandem("validate", bad[0], variables={"FORCE_COLOR": "1"}).stderr


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"'{TANDEM}' validate {' '.join(EXAMPLES * 20)} | head -n 1"
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.startswith("OK ")
    assert "Traceback" not in result.stderr


def test_version_and_help() -> None:
    assert tandem("--version").stdout.startswith("tandem ")
    help_text = tandem("--help").stdout
    assert all(name in help_text for name in ("run", "validate", "report"))
    assert tandem("validate", "-h").returncode == 0


def test_validating_imports_nothing_that_keeps_one_waiting() -> None:
    """torch alone would take three seconds."""
    code = "import sys; from tandem_cli.main import main; sys.exit(main() or 0)"
    command = [sys.executable, "-X", "importtime", "-c", code, "validate", EXAMPLES[0]]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert {"pydantic", "typer", "yaml", "tandem"} <= imported
    heavy = {"torch", "numpy", "transformers", "matplotlib", "kubernetes_asyncio", "kubernetes", "kopf", "aiohttp"}
    assert not imported & (heavy | {"tandem_trainer", "tandem_evaluator", "tandem_coordinator", "tandem_operator"})
