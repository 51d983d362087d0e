"""A peer that refuses unknown fields is sent the fields that it knows; any other is sent everything."""

from typing import Any

import pytest
from pydantic import create_model

from tandem.model import Model
from tandem.wire import protocol
from tandem.wire.protocol import (
    FIRST_FIELDS,
    FIRST_PROTOCOL,
    HEADER,
    PROTOCOL,
    PROTOCOL_HEADERS,
    Answer,
    Member,
    Membership,
    RankReport,
    Sync,
    encode_for,
    peer_protocol,
)
from tandem.wire.status import Condition, MemberView, Progress, RankView, Snapshot, Status


def of_the_first(model: type[Model]) -> Any:
    """The model as the first protocol had it, as far as names go: it refuses all others."""
    fields = dict.fromkeys(FIRST_FIELDS[model].split(), (Any, None))
    return create_model(f"First{model.__name__}", __base__=Model, **fields)


SYNC = Sync(
    replica="worker-0",
    incarnation="one",
    address="10.0.0.1",
    port=4000,
    processes=2,
    state="running",
    generation=3,
    ranks=[RankReport(rank=0, step=5, pauses=True), RankReport(rank=1, step=5, finishing=True, loss=0.5)],
)


def test_a_heartbeat_leaves_out_what_an_older_coordinator_would_refuse() -> None:
    first = encode_for(SYNC, FIRST_PROTOCOL)
    assert of_the_first(Sync).parse(first)
    for rank in first["ranks"]:
        assert of_the_first(RankReport).parse(rank)
    assert "pauses" not in first["ranks"][0]
    assert Sync.read(first).ranks[1] == RankReport(rank=1, step=5, loss=0.5)


def test_a_coordinator_that_reads_all_is_told_all() -> None:
    assert encode_for(SYNC, PROTOCOL) == SYNC.dump()
    assert encode_for(SYNC, PROTOCOL + 7) == SYNC.dump()


def test_an_answer_is_the_same_for_all_as_long_as_it_has_no_new_field() -> None:
    member = Member(replica="a", incarnation="b", address="c", port=1, processes=1)
    answer = Answer(order="run", membership=Membership(generation=1, members=[member], reason="Started"))
    assert encode_for(answer, FIRST_PROTOCOL) == encode_for(answer, PROTOCOL)


def test_a_field_that_comes_later_is_not_sent_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Newer(Answer):
        hint: str = "more"

    monkeypatch.setattr(protocol, "FIRST_FIELDS", {**FIRST_FIELDS, Newer: FIRST_FIELDS[Answer]})
    assert encode_for(Newer(order="wait"), PROTOCOL)["hint"] == "more"
    assert "hint" not in encode_for(Newer(order="wait"), FIRST_PROTOCOL)


def test_a_snapshot_for_an_older_operator_has_every_part_that_it_knows() -> None:
    whole = Snapshot(
        job="digits",
        time=1.0,
        status=Status(
            phase="Running",
            conditions=[Condition(type="Running", status="True")],
            progress=Progress(step=5, total_steps=9),
        ),
        members=[
            MemberView(replica="a", address="b", state="running", silent_seconds=0.1, ranks=[RankView(rank=0, step=5)])
        ],
    )
    first = encode_for(whole, FIRST_PROTOCOL)
    assert Snapshot.read(first).status.progress == Progress(step=5, total_steps=9)
    assert of_the_first(Snapshot).parse(first)
    assert of_the_first(Status).parse(first["status"])
    assert of_the_first(MemberView).parse(first["members"][0])


@pytest.mark.parametrize(
    ("headers", "known"),
    [
        ({}, FIRST_PROTOCOL),
        (PROTOCOL_HEADERS, PROTOCOL),
        ({HEADER: "7"}, 7),
        ({HEADER: "x"}, FIRST_PROTOCOL),
        ({HEADER: "9" * 5000}, FIRST_PROTOCOL),
    ],
)
def test_a_peer_that_does_not_say_reads_the_first(headers: dict[str, str], known: int) -> None:
    assert peer_protocol(headers) == known


def test_a_reason_that_an_older_coordinator_does_not_know_is_told_in_its_words() -> None:
    wish = Sync(
        replica="a",
        incarnation="b",
        address="c",
        port=4000,
        processes=1,
        state="joining",
        generation=3,
        reason="StoreUnreachable",
        node="node-1",
    )
    assert encode_for(wish, PROTOCOL)["reason"] == "StoreUnreachable"
    first = encode_for(wish, FIRST_PROTOCOL)
    assert first["reason"] == "MembershipChanged"
    assert of_the_first(Sync).parse(first)
