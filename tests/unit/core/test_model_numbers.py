"""Numbers out of records that anybody may have written."""

import math

import pytest

from tandem.model import MAX_COUNT, amount, finite, whole_number

STRANGE = [None, "1", [], {}, True, math.nan, math.inf, -math.inf, 10**400]


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_what_is_no_number_is_none(value: object) -> None:
    assert (finite(value), amount(value), whole_number(value)) == (None, None, None)


def test_numbers_are_what_they_are() -> None:
    assert [finite(value) for value in (-1, 0, 2.5)] == [-1.0, 0.0, 2.5]
    assert [amount(value) for value in (-1, 0, 2.5)] == [None, 0.0, 2.5]
    assert [whole_number(value) for value in (-1, 0, 2.5, 7, MAX_COUNT, MAX_COUNT + 1)] == [
        None,
        0,
        None,
        7,
        MAX_COUNT,
        None,
    ]
