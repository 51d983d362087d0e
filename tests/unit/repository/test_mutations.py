"""The rules whose mutations are played stand where the list says, and so do their tests."""

from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.mutations import MUTATIONS, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_the_rule_and_its_tests_are_there(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.before) == 1
    assert mutation.before != mutation.after
    files = [word for word in mutation.tests.split() if word.endswith(".py")]
    assert files
    assert all((ROOT / Path(word)).is_file() for word in files)


def test_each_mutation_has_a_name_of_its_own() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
