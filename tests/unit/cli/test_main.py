"""The command line as a whole: its help, and what a wrong call is told."""

import sys

import pytest

from tandem_cli.main import COMMANDS, GROUPS, main


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


def test_options_of_a_script_without_the_dashes_are_told_where_they_go(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = said(monkeypatch, capsys, "run", "train.py", "--epochs", "3")
    assert code == 2
    assert "Arguments of a script follow --: tandem run train.py -- --epochs 3" in text
