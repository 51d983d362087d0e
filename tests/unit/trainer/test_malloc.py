"""Freed memory is kept: the pages of one step are there for the next one."""

import subprocess
import sys

import pytest

from tests.support import SCRIPTS

SMALL, LARGE = [1] * 60, [60, 70, 40]
"""MiB: blocks that glibc takes from the heap once it knows them, and blocks that it always maps."""
PAGES = 256
"""In a MiB."""
STEPS = 5
"""Of the script."""
FEW = 200
"""Pages that Python asks for meanwhile; seen: none to 3."""


def new_pages(who_sets_it: str, sizes: list[int]) -> int:
    """How many pages the steps after the first one had to ask for."""
    command = [sys.executable, SCRIPTS / "page_faults.py", who_sets_it, *map(str, sizes)]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small blocks", "large blocks"])
def test_a_step_finds_the_pages_of_the_one_before(sizes: list[int]) -> None:
    assert new_pages("setting", sizes) < FEW
    whole = STEPS * sum(sizes) * PAGES
    assert new_pages("nobody", sizes) > 0.9 * whole, "glibc keeps them by itself, and this test shows nothing"


def test_a_trainer_keeps_them_without_being_asked() -> None:
    assert new_pages("trainer", [*SMALL, *LARGE]) < FEW


def test_under_fsdp_large_blocks_of_a_large_model_return_to_the_system() -> None:
    assert new_pages("large", [2] * 30) > 0.9 * STEPS * 60 * PAGES
    assert new_pages("small", [2] * 30) < FEW


@pytest.mark.parametrize("who", ["adapted", "evaluator"])
def test_a_script_and_an_evaluator_keep_a_little_and_give_the_rest_back(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert new_pages(who, SMALL) < FEW
    assert new_pages(who, [2] * 60) > 0.9 * STEPS * 120 * PAGES
    assert new_pages(who, LARGE) > 0.9 * STEPS * sum(LARGE) * PAGES
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(2**20))
    assert new_pages(who, SMALL) > 0.9 * STEPS * 60 * PAGES, "the environment counts"
