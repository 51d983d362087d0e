"""The README shows what is really there."""

import re
from pathlib import Path

import pytest

from tests.support import ROOT

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def text_of(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def sections(page: Path) -> dict[str, str]:
    """The text below each heading of a page up to the next one, by the anchor of the heading."""
    _, *parts = re.split(r"^#{1,6} (.+)$", text_of(page), flags=re.MULTILINE)
    found: dict[str, str] = {}
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        anchor = re.sub(r"[^\w\- ]", "", LINK.sub(r"\1", heading).lower()).strip().replace(" ", "-")
        again = sum(name == anchor or re.fullmatch(rf"{re.escape(anchor)}-\d+", name) is not None for name in found)
        found[f"{anchor}-{again}" if again else anchor] = text
    return found


def links(text: str, page: Path) -> list[tuple[Path, str]]:
    """The pages and anchors that a text of a page leads to."""
    return [
        ((page.parent / path).resolve() if path else page, anchor)
        for _, path, anchor in LINK.findall(text)
        if "://" not in path
    ]


def test_its_manifest_is_the_example_word_for_word() -> None:
    (manifest,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    assert manifest == (ROOT / "examples" / "digits.yaml").read_text()


def test_every_link_in_the_documentation_leads_somewhere() -> None:
    for page in PAGES:
        for target, anchor in links(text_of(page), page):
            assert target.exists(), f"{page.name} links to {target}"
            if anchor and target.suffix == ".md":
                assert anchor in sections(target), f"{page.name} links to {target.name}#{anchor}"


QUESTIONS = {
    "How do I install it into my environment?": ("environment.md", "venv", "the script's environment"),
    "How do I install it with conda?": ("environment.md", "conda", "pip of the environment"),
    "How do I train from a notebook?": ("environment.md", "a-notebook", "%%writefile"),
    "Does it log to W&B?": ("choosing.md", "not-here-and-what-to-use-instead", "wandb.init"),
    "Does it train by DPO?": ("adapters.md", "trainer-and-trl", "DPOTrainer"),
    "How do I rename a run?": ("commands.md", "ls-mv-rm-compare-stop-scale", "tandem mv RUN NEW"),
    "How do I delete a run?": ("commands.md", "ls-mv-rm-compare-stop-scale", "tandem rm RUN"),
    "How do I evaluate an old checkpoint again?": ("evaluation.md", "evaluate-once-more", "records nothing"),
    "Why does my script with mp.spawn wait?": ("guide.md", "when-something-is-wrong", "torch.multiprocessing"),
    "What if my laptop sleeps?": ("choosing.md", "not-here-and-what-to-use-instead", "a laptop that sleeps"),
}
"""What newcomers ask, and where it is answered: page, section and words."""


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_newcomers_ask_is_two_clicks_away(question: str) -> None:
    name, section, words = QUESTIONS[question]
    page = ROOT / "docs" / name
    assert words in sections(page)[section]
    one_click = links(README, ROOT / "README.md")
    sources = [target for target, _ in one_click if target.suffix == ".md"]
    two_clicks = [link for source in sources for link in links(text_of(source), source)]
    # A page of its own, or the section itself.
    assert page in [target for target, _ in one_click] or (page, section) in two_clicks


def test_it_is_no_longer_than_a_newcomer_reads() -> None:
    assert len(README.split()) <= 900


def test_its_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z-]+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
