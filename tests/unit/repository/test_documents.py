"""Every command and manifest that the documentation shows is one that is taken; some are run, too, see
tests/integration/test_documents.py."""

from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.bad_manifests import CASES as MANIFESTS
from tests.support.bad_surroundings import CASES as SURROUNDINGS
from tests.support.documents import PAGES, blocks, blocks_of, command_problem, inline_commands, plain, problems

PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@PAGE
def test_all_blocks_are_right(page: Path) -> None:
    assert not [f"{block}: {wrong}" for block in blocks(page) for wrong in problems(block)]


@PAGE
def test_all_commands_in_sentences_exist(page: Path) -> None:
    found = [(line, command_problem(plain(text), in_a_sentence=True)) for line, text in inline_commands(page)]
    assert not [f"{page.name}:{line}: {wrong}" for line, wrong in found if wrong]


def test_every_decision_is_listed_once_and_in_order() -> None:
    folder = ROOT / "docs" / "decisions"
    pages = sorted(folder.glob("[0-9]*.md"))
    found = [f"| [{page.name[:4]}]({page.name}) |" for page in pages]
    rows = [line for line in (folder / "README.md").read_text("utf-8").splitlines() if line.startswith("| [")]
    assert [row[: len(begin)] for row, begin in zip(rows, found, strict=True)] == found


@pytest.mark.parametrize("page", ["development/testing.md", "prerequisites.md"])
def test_the_mistakes_that_are_timed_are_counted_right(page: str) -> None:
    told = f"{len(MANIFESTS)} bad manifests and {len(SURROUNDINGS)} jobs"
    assert told in (ROOT / "docs" / page).read_text("utf-8")


@pytest.mark.parametrize(
    ("language", "text", "wrong"),
    [
        ("sh", "tandem run examples/digits.yaml --frsh", "No such option: --frsh"),
        ("sh", "tandem validat examples/digits.yaml", "tandem has no command validat"),
        ("sh", "tandem checkpoints ls runs/digits | tandem logs", "Missing argument"),
        ("sh", "cd x && make rnu", "make has no target rnu"),
        ("sh", "kubectl gett pods", "kubectl gett"),
        ("sh", "kubeclt get pods", "kubeclt: not a command"),
        ("python", "from tandem_trainer.session import Sesion", "has no Sesion"),
        ("python", "def f(:", "invalid syntax"),
        ("yaml", "elasticity: {hangSecond: 3}", "hangSecond"),
        ("yaml", "jobs: {networkPolcy: {enabled: true}}", "the chart has no value jobs.networkPolcy"),
        ("yaml", "kind: DistributedTrainingJob\nspec: {}", "spec.trainer"),
    ],
)
def test_what_is_wrong_is_found(language: str, text: str, wrong: str) -> None:
    (block,) = blocks_of(f"```{language}\n{text}\n```\n")
    assert any(wrong in one for one in problems(block)), problems(block)


def test_a_comment_before_a_block_says_how_it_is_meant() -> None:
    text = "<!-- not run: needs a GPU -->\n```sh\nmake gpu\n```\n\nwords\n\n```\n$ tandem ls\nnothing\n```\n"
    first, second = blocks_of(text)
    assert (first.not_run, first.language, first.line) == ("needs a GPU", "sh", 2)
    assert (second.not_run, second.language, second.text) == ("", "sh", "tandem ls\n")
