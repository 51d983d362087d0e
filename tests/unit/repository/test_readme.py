"""The README shows what is really there."""

import re

from tests.support import ROOT

README = (ROOT / "README.md").read_text()


def test_its_manifest_is_the_example_word_for_word() -> None:
    (manifest,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    assert manifest == (ROOT / "examples" / "digits.yaml").read_text()


def test_every_link_in_the_documentation_leads_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_its_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z-]+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
