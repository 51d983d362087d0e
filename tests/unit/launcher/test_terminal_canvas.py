"""A picture on a terminal: nothing of it, and nothing beside it, is left or moved."""

import os
import signal
from collections.abc import Iterator

import pytest
from rich.text import Text

from tandem_launcher.terminal.canvas import Canvas, PrintableConsole
from tests.support.terminal import Terminal
from tests.support.waiting import until

PICTURE = Text("\n".join(["title", *(f"row {index}" for index in range(10)), "foot"]))


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal(40, 12)
    yield made
    made.close()


@pytest.fixture
def canvas(terminal: Terminal) -> Iterator[Canvas]:
    with terminal.open() as file:
        file.write("before\r\n")
        file.flush()
        made = Canvas(PrintableConsole(file=file, force_terminal=True, color_system=None))
        yield made
        made.close()


def test_it_fills_the_terminal_and_is_gone_when_it_is_closed(terminal: Terminal, canvas: Canvas) -> None:
    canvas.draw(PICTURE)
    assert terminal.look() == PICTURE.plain.split("\n")
    canvas.close()
    assert terminal.all_lines() == ["before"]
    assert terminal.is_as_before


def test_a_key_that_is_echoed_moves_nothing(terminal: Terminal, canvas: Canvas) -> None:
    canvas.draw(PICTURE)
    terminal.press(b"x")
    # The kernel echoes when it has the time.
    until(lambda: terminal.look()[0] == "xitle", "the key")
    assert terminal.look()[1:] == PICTURE.plain.split("\n")[1:]
    canvas.draw(PICTURE)
    assert terminal.look() == PICTURE.plain.split("\n")


def test_of_one_that_is_too_long_the_last_line_stays(terminal: Terminal, canvas: Canvas) -> None:
    canvas.draw(PICTURE)
    terminal.resize(40, 5)
    assert canvas.is_resized
    canvas.draw(PICTURE)
    assert terminal.look() == ["title", "row 0", "row 1", "row 2", "foot"]


def test_a_shorter_one_leaves_nothing_of_the_longer(terminal: Terminal, canvas: Canvas) -> None:
    canvas.draw(PICTURE)
    canvas.draw(Text("one"))
    assert [line for line in terminal.look() if line] == ["one"]


def test_ctrl_z_means_what_it_did_when_it_is_closed(canvas: Canvas) -> None:
    before = signal.getsignal(signal.SIGTSTP)
    canvas.draw(PICTURE)
    assert signal.getsignal(signal.SIGTSTP) != before
    canvas.close()
    assert signal.getsignal(signal.SIGTSTP) == before


def test_ctrl_z_gives_the_terminal_back_until_it_goes_on(
    terminal: Terminal, canvas: Canvas, monkeypatch: pytest.MonkeyPatch
) -> None:
    canvas.draw(PICTURE)
    seen: list[list[str]] = []
    monkeypatch.setattr(os, "kill", lambda *_: seen.append(terminal.all_lines()))
    signal.raise_signal(signal.SIGTSTP)
    assert seen == [["before"]]
    assert terminal.look()[0] == "", "it goes on, on a screen of its own"
    assert not terminal.is_as_before
