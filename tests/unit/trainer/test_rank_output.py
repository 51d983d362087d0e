"""Lines of several ranks, labelled: however the pipe has cut them."""

import pytest

from tandem_trainer.agent.rank_output import MAX_LINE_LENGTH, RankStream


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"one\ntwo\n"], b"[rank 1] one\n[rank 1] two\n"),
        ([b"o", b"ne", b"\n"], b"[rank 1] one\n"),
        ([b"one\r\ntwo\r\n"], b"[rank 1] one\n[rank 1] two\n"),
        ([b"one\r", b"\ntwo\n"], b"[rank 1] one\n[rank 1] two\n"),
        ([b"1 %\r2 %\r", b"3 %"], b"[rank 1] 1 %\r[rank 1] 2 %\r[rank 1] 3 %\n"),
        ([b"1 %\r"], b"[rank 1] 1 %\n"),
        ([b"x" * (MAX_LINE_LENGTH + 1)], b"[rank 1] " + b"x" * (MAX_LINE_LENGTH + 1) + b"\n"),
        ([b""], b""),
    ],
)
def test_every_line_has_its_rank(pieces: list[bytes], expected: bytes) -> None:
    stream = RankStream(b"[rank 1] ", 1)
    assert b"".join(stream.lines(piece) for piece in pieces) + stream.remainder() == expected
