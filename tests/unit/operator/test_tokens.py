"""The operator's key and the tokens that follow from it."""

import base64
from typing import Any

import pytest

from tandem_operator import kinds
from tandem_operator.api import RequestRefused
from tandem_operator.tokens import FIELD, NoKey, operator_key, token
from tests.support.worlds.operator_world import NAMESPACE, Cluster

NAME = "tandem-operator-key"


def test_a_token_is_the_same_again_and_another_one_for_each_job_and_key() -> None:
    assert token(b"k" * 32, "a") == token(b"k" * 32, "a")
    assert len({token(b"k" * 32, "a"), token(b"k" * 32, "b"), token(b"l" * 32, "a")}) == 3
    assert len(token(b"k" * 32, "a")) == 43


async def test_the_key_is_made_once_and_read_from_then_on() -> None:
    api: Any = Cluster()
    first = await operator_key(api, NAMESPACE, NAME)
    assert len(first) == 32
    assert await operator_key(api, NAMESPACE, NAME) == first


async def test_of_two_operators_that_start_together_both_have_the_key_of_the_faster_one() -> None:
    class Slow(Cluster):
        """Somebody else makes the Secret between our look and our write."""

        async def create(self, kind: kinds.Kind, manifest: dict[str, Any]) -> dict[str, Any]:
            await super().create(kind, {**manifest, "data": {FIELD: base64.b64encode(b"t" * 32).decode()}})
            return await super().create(kind, manifest)

    api: Any = Slow()
    assert await operator_key(api, NAMESPACE, NAME) == b"t" * 32


@pytest.mark.parametrize("data", [{}, {FIELD: "c2hvcnQ="}, {FIELD: "*"}, None], ids=str)
async def test_a_secret_without_a_key_is_said_and_left_alone(data: dict[str, str] | None) -> None:
    cluster = Cluster()
    cluster.put(kinds.SECRET, {"metadata": {"name": NAME}, "data": data})
    api: Any = cluster
    with pytest.raises(NoKey, match="delete it"):
        await operator_key(api, NAMESPACE, NAME)


async def test_rights_that_are_missing_are_said() -> None:
    class Strict(Cluster):
        async def get(self, kind: kinds.Kind, namespace: str, name: str) -> dict[str, Any] | None:
            raise RequestRefused(403, "Forbidden", "cannot get resource")

    api: Any = Strict()
    with pytest.raises(NoKey, match="cannot get"):
        await operator_key(api, NAMESPACE, NAME)
