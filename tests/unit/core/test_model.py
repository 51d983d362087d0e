"""The common ground of the models: camelCase only, strict types, frozen values, rules that are all told."""

import json
from typing import ClassVar

import pytest
from pydantic import ValidationError

from tandem.formatting import REPLACEMENT
from tandem.model import MessageText, Model, Rule, RuleBroken


class Span(Model):
    first_step: int = 0
    last_step: int | None = None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(lambda s: s.first_step >= 0, "self.firstStep >= 0", "firstStep is negative", "firstStep"),
        Rule(lambda s: s.last_step is None or s.last_step < 100, "…", "lastStep is too late", "lastStep"),
    )


def test_a_manifest_uses_camel_case_alone() -> None:
    assert Span.parse({"firstStep": 3}).first_step == 3
    with pytest.raises(ValidationError, match="first_step"):
        Span.parse({"first_step": 3})


def test_python_uses_snake_case() -> None:
    assert Span(first_step=3) == Span.parse({"firstStep": 3})


@pytest.mark.parametrize("value", ["3", 3.5, True, None, [3]])
def test_a_value_of_another_type_is_not_bent_into_shape(value: object) -> None:
    with pytest.raises(ValidationError):
        Span.parse({"firstStep": value})


def test_models_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Span().first_step = 1  # type: ignore[misc]


def test_every_broken_rule_is_told_not_only_the_first() -> None:
    with pytest.raises(ValidationError) as caught:
        Span(first_step=-1, last_step=100)
    broken = caught.value.errors()[0]["ctx"]["error"]
    assert isinstance(broken, RuleBroken)
    assert [rule.field for rule in broken.broken] == ["firstStep", "lastStep"]


def test_the_dump_leaves_out_what_is_unset_and_reads_back_equal() -> None:
    span = Span(first_step=2)
    assert span.dump() == {"firstStep": 2}
    assert Span.parse(span.dump()) == span


def test_what_another_version_wrote_is_read_without_the_fields_that_are_new() -> None:
    class Book(Model):
        title: str
        spans: list[Span] = []

    newer = {"title": "a", "spans": [{"firstStep": 3, "thirdStep": 5}], "pages": {"count": 7}}
    known = Book(title="a", spans=[Span(first_step=3)])
    assert Book.read(newer) == known
    assert Book.read_json(json.dumps(newer)) == known
    with pytest.raises(ValidationError, match="thirdStep"):
        Book.parse(newer)


@pytest.mark.parametrize("damaged", [{"firstStep": "3"}, {"first_step": 3}, {"firstStep": -1}, [], None])
def test_reading_forgives_nothing_else(damaged: object) -> None:
    if damaged == {"first_step": 3}:
        assert Span.read(damaged) == Span()  # an unknown name like any other
    else:
        with pytest.raises(ValidationError):
            Span.read(damaged)


def test_a_brief_dump_says_what_is_no_default_and_reads_as_the_same() -> None:
    assert Span(first_step=0, last_step=9).dump_brief() == {"lastStep": 9}
    assert Span.read({"lastStep": 9}) == Span(last_step=9)


def test_words_are_cut_and_steer_no_terminal() -> None:
    class Said(Model):
        text: MessageText

    assert Said.parse({"text": "x" * 3_000}).text == "x" * 2_000
    assert Said.parse({"text": "\x1b[2Jgone\nand\u202eback"}).text == f"{REPLACEMENT}[2Jgone\nand{REPLACEMENT}back"
