"""Each of more than a hundred bad manifests gets one message, at its place, in words that help."""

import re

import pytest

from tandem.errors import ManifestError
from tandem.job.manifest.reading import parse_job
from tandem.job.manifest.source import parse
from tests.support.bad_manifests import CASES, BadManifest


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bad_manifest_gets_one_message(case: BadManifest) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_job(parse(case.text, "job.yaml"))
    (problem,) = caught.value.problems
    assert re.search(case.words, problem.message), problem.message
    assert problem.field.startswith(case.field) if case.field else not problem.field, problem.field
    assert problem.place.startswith("job.yaml")
    if problem.line and case.field:
        assert problem.excerpt == case.text.decode().splitlines()[problem.line - 1]
    assert "\n" not in str(problem)
    assert len(problem.message) < 400


def test_there_are_enough_of_them() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 120
