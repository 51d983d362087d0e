"""Packages of a job's requirements.txt, installed by a real pip without a network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.processes import requirements
from tandem.processes.requirements import with_packages
from tandem.rundir.code import CodeError, JobEnded
from tandem.rundir.layout import RunDir
from tandem.rundir.lease import acquire
from tests.support import coded

DIGEST, OTHER = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    found.create()
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return coded.write(tmp_path / "code")


class Said(list[str]):
    """Events that were said."""

    def __call__(self, event: str, **_: object) -> None:
        self.append(event)


def imports(places: list[str], module: str) -> str:
    command = [sys.executable, "-c", f"import {module}; print({module}.__file__)"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout.strip()


def test_they_are_installed_once_into_the_run_directory_and_what_is_there_stays(run_dir: RunDir, folder: Path) -> None:
    for name in ("logging.py", "tempfile.py", "pip.py"):
        (folder / name).write_text("raise SystemExit('imported in the place of what pip needs')\n")
    said = Said()
    found = with_packages(run_dir, folder, DIGEST, said)
    assert said == ["install", "installed"]
    for name in ("logging.py", "tempfile.py", "pip.py"):
        (folder / name).unlink()
    assert Path(imports(found.places, "tiny_thing")).is_relative_to(run_dir.code)
    assert not Path(imports(found.places, "numpy")).is_relative_to(run_dir.code), "numpy>=1 was there already"
    assert with_packages(run_dir, folder, DIGEST, said) == found
    assert said == ["install", "installed"]
    assert [path.name for path in run_dir.code.iterdir() if path.name.startswith(".tmp-")] == []


def test_other_requirements_and_other_files_that_they_name_are_installed_again(run_dir: RunDir, folder: Path) -> None:
    first = with_packages(run_dir, folder, DIGEST, Said())
    assert with_packages(run_dir, folder, OTHER, Said()) != first, "the wheel of the folder may be another one"
    (folder / "requirements.txt").write_text("numpy>=1\n")
    by_name = with_packages(run_dir, folder, DIGEST, Said())
    assert with_packages(run_dir, folder, OTHER, said := Said()) == by_name
    assert said == [], "an edited line of code installs nothing again"


def test_without_requirements_nothing_is_installed(run_dir: RunDir, folder: Path) -> None:
    (folder / "requirements.txt").unlink()
    assert with_packages(run_dir, folder, DIGEST, Said()).places == [str(folder)]
    assert not run_dir.code.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("--no-index\nno-such-package==9\n", "No matching distribution found for no-such-package==9"),
        ("--no-index\nnumpy==1.0\n", "cannot change: numpy=="),
    ],
)
def test_what_cannot_be_installed_is_told_in_pips_words_and_leaves_nothing(
    run_dir: RunDir, folder: Path, content: str, words: str
) -> None:
    (folder / "requirements.txt").write_text(content)
    with pytest.raises(CodeError, match=r"^requirements.txt cannot be installed: ") as error:
        with_packages(run_dir, folder, DIGEST, Said())
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert list(run_dir.code.iterdir()) == []


def test_passwords_of_an_index_are_shown_nowhere(
    run_dir: RunDir, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "requirements.txt").write_text("no-such-package @ file://user:hunter2@nowhere/x.whl\n")
    with pytest.raises(CodeError) as error:
        with_packages(run_dir, folder, DIGEST, Said())
    shown = capfd.readouterr()
    assert "hunter2" not in shown.out + shown.err + str(error.value)


def test_others_wait_while_one_installs_and_stop_when_the_job_has_failed(
    run_dir: RunDir, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = requirements._key((folder / "requirements.txt").read_bytes(), requirements._installed(), DIGEST)
    run_dir.code.mkdir()
    held = acquire(run_dir.packages(key).with_suffix(".lease"), "another pod")
    assert held is not None
    monkeypatch.setattr(requirements, "MESSAGE_SECONDS", 0.0)

    def say(event: str, **_: object) -> None:
        assert event == "waits-for-packages"
        run_dir.mark_failed("Tried", "the other one has failed", 78)

    with pytest.raises(JobEnded):
        with_packages(run_dir, folder, DIGEST, say)


def test_a_python_without_pip_is_told(run_dir: RunDir, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CodeError, match="needs pip, and the Python of this image has none"):
        with_packages(run_dir, folder, DIGEST, Said())
