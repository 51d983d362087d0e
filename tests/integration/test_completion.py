"""A shell completes commands, their options, and the runs of this machine."""

import json
from pathlib import Path

import pytest

from tests.support.processes import tandem


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tandem sta", {"status"}),
        ("tandem run --fre", {"--fresh"}),
        ("tandem checkpoints l", {"ls"}),
        ("tandem status ", {"digits", "runs/digits"}),
        ("tandem checkpoints ls runs/d", {"runs/digits"}),
    ],
)
def test_what_is_typed_is_completed(tmp_path: Path, typed: str, offered: set[str]) -> None:
    run = tmp_path / "runs" / "digits"
    run.mkdir(parents=True)
    (run / "job.json").write_text(json.dumps({"metadata": {"name": "digits"}}))
    # As bash calls it: what is typed, and which word the cursor is at.
    words = typed.split(" ")
    shell = {"COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1), "_TYPER_COMPLETE_ARGS": typed}
    answer = tandem(cwd=tmp_path, variables={"_TANDEM_COMPLETE": "complete_bash", **shell})
    assert set(answer.stdout.split()) == offered, answer.stderr
