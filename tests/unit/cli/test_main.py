"""The command line as a whole: its help, and what a wrong call is told."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tandem_cli.main import COMMANDS, GROUPS, application, main
from tests.support import ROOT


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str]:
    monkeypatch.setattr(sys, "argv", ["tandem", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    return ended.value.code, output.out + output.err


def test_help_groups_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(monkeypatch, capsys, "--help")
    assert code == 0
    assert [text.count(f"─ {group} ─") for group in GROUPS] == [1] * len(GROUPS)
    assert "<bool>" not in text


@pytest.mark.parametrize("words", [*((name,) for name in COMMANDS), ("checkpoints", "export"), ("render", "slurm")])
def test_a_flag_takes_no_value_and_shows_no_type(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = said(monkeypatch, capsys, *words, "--help")
    assert (code, "--help" in text, "<bool>" in text) == (0, True, False)


def test_the_documentation_names_each_option_for_output_with_the_commands_that_take_it() -> None:
    page = (ROOT / "docs/commands.md").read_text("utf-8")
    (sentences,) = re.findall(r"\*\*Output\.\*\* (.*?)`tandem --install-completion`", page, re.DOTALL)
    groups = re.findall(
        r"((?:`[a-z ]+`,? (?:and )?)+)(?:take )?`(-o json|--to PATH|--out|--html)", sentences.replace("\n", " ")
    )
    told = {option.split()[0]: {*re.findall(r"`([a-z ]+)`", names)} for names, option in groups}
    options = {name: {option for parameter in command.params for option in parameter.opts} for name, command in _all()}
    for option in ("-o", "--to", "--out", "--html"):
        assert told[option] == {name for name, taken in options.items() if option in taken}, option


def _all() -> Iterator[tuple[str, Any]]:
    """All commands with their names, without groups of commands."""
    for name in COMMANDS:
        group = typer.main.get_command(application([name]))
        command = group.commands[name]  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        yield from ((f"{name} {word}", part) for word, part in inner.items()) if inner else [(name, command)]


def test_mistakes_in_several_files_are_all_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("a.yaml", "b.yaml")]
    for file in files:
        file.write_text("kind: Deployment\n")
    code, text = said(monkeypatch, capsys, "submit", *map(str, files))
    assert (code, text.count("error: this is a Deployment")) == (2, 2)
    assert [str(file) in text for file in files] == [True, True]


def test_options_of_a_script_without_the_dashes_are_told_where_they_go(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = said(monkeypatch, capsys, "run", "train.py", "--epochs", "3")
    assert code == 2
    assert "Arguments of a script follow --: tandem run train.py -- --epochs 3" in text
