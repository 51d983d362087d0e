"""A chain of entries verifies, and whatever is done to it shows: to a line, to its order, to its signatures."""

import json
import re
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tandem.errors import UserError
from tandem.rundir.provenance import (
    MAX_LINE_BYTES,
    START,
    CheckpointEntry,
    CloseEntry,
    ProvenanceChain,
    chained,
    job_entry,
    public_key_of,
    read_chain,
    read_private_key,
    read_public_key,
    sha256,
)
from tandem.rundir.records import Record
from tests.support import manifests

KEY, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()


def entries(key: Ed25519PrivateKey | None) -> list[Record]:
    return [
        job_entry(manifests.job(), {"tandem": "1"}, None if key is None else public_key_of(key), 1.0),
        CloseEntry(time=2.0, generation=1, reason="Hung", message="rank 1 hung for 300 s"),
        *(
            CheckpointEntry(
                time=3.0, name=f"step-{step:09d}", step=step, generation=1, digest="a" * 64, content="b" * 64
            )
            for step in (100, 200, 300)
        ),
    ]


def lines(key: Ed25519PrivateKey | None = None, of: list[Record] | None = None) -> list[bytes]:
    made: list[bytes] = []
    for number, entry in enumerate(of or entries(key), 1):
        made.append(chained(entry, number, sha256(made[-1]) if made else START, key))
    return made


def read(folder: Path, made: list[bytes], *args: str | None) -> ProvenanceChain:
    path = folder / "provenance.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in made))
    return read_chain(path, *args)


@pytest.mark.parametrize("key", [None, KEY], ids=["unsigned", "signed"])
def test_a_chain_verifies_and_its_head_is_the_digest_of_its_last_line(
    tmp_path: Path, key: Ed25519PrivateKey | None
) -> None:
    made = lines(key)
    chain = read(tmp_path, made)
    assert (list(chain.problems), chain.count, chain.head) == ([], 5, sha256(made[-1]))
    assert list(chain.entries) == entries(key)
    assert list(chain.signers) == ([] if key is None else [public_key_of(key)])


def test_a_run_without_one_has_an_empty_chain(tmp_path: Path) -> None:
    assert read_chain(tmp_path / "provenance.jsonl") == ProvenanceChain()


CHANGES = {
    "a digit": (lambda made: [*made[:3], made[3].replace(b'"step":200', b'"step":201'), *made[4:]], 5),
    "a line less": (lambda made: [*made[:2], *made[3:]], 3),
    "a line twice": (lambda made: [*made[:3], *made[2:]], 4),
    "two lines in the other order": (lambda made: [*made[:2], made[3], made[2], *made[4:]], 3),
    "another beginning": (lambda made: made[1:], 1),
}


@pytest.mark.parametrize(("change", "number"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_named_with_the_first_entry_that_does_not_follow(
    tmp_path: Path, change: object, number: int
) -> None:
    assert callable(change)
    problems = read(tmp_path, change(lines())).problems
    assert problems[0].startswith(f"entry {number} does not follow the one before")


def test_removed_last_entries_show_beside_a_head_that_was_noted_elsewhere(tmp_path: Path) -> None:
    made = lines()
    head = sha256(made[-1])
    assert not read(tmp_path, made, None, head).problems
    # The chain goes on after it.
    assert not read(tmp_path, made, None, sha256(made[2])).problems
    (problem,) = read(tmp_path, made[:-1], None, head).problems
    assert problem.startswith(f"no entry has the digest {head}")


def test_a_line_that_is_being_written_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "provenance.jsonl"
    path.write_bytes(b"\n".join(lines()))
    chain = read_chain(path)
    assert (chain.count, list(chain.problems)) == (4, [])


def test_entries_of_a_newer_version_are_verified_without_being_understood(tmp_path: Path) -> None:
    made = lines(KEY)
    unknown = json.dumps({"kind": "later", "number": 6, "previous": sha256(made[-1])}, separators=(",", ":")).encode()
    signed = chained(CloseEntry(time=1.0, generation=1, reason="x"), 6, sha256(made[-1]), KEY)
    chain = read(tmp_path, [*made, unknown])
    assert [chain.count, len(chain.entries), list(chain.problems)] == [6, 5, ["entry 6 is not signed"]]
    assert not read(tmp_path, [*made, signed]).problems


@pytest.mark.parametrize("line", [b"{", b"[]", b"5", b"\xff\xfe", b"", b"[" * 100_000], ids=repr)
def test_garbage_is_a_damaged_entry(tmp_path: Path, line: bytes) -> None:
    made = lines()
    problems = read(tmp_path, [*made[:4], line, made[4]]).problems
    assert re.match("entry 5 (is damaged|does not follow)", problems[0])


def test_a_line_of_any_length_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has a line of more than"):
        read(tmp_path, [b"x" * (MAX_LINE_BYTES + 1)])


def test_who_writes_it_anew_without_the_key_is_named(tmp_path: Path) -> None:
    trusted = public_key_of(KEY)
    assert not read(tmp_path, lines(KEY), trusted).problems
    # Another key, none at all, and one entry that was added by somebody else.
    assert len(read(tmp_path, lines(OTHER), trusted).problems) == 5
    assert list(read(tmp_path, lines(), trusted).problems) == [
        f"entry {number} is not signed" for number in range(1, 6)
    ]
    made = lines(KEY)
    added = chained(entries(KEY)[-1], 6, sha256(made[-1]), OTHER)
    (problem,) = read(tmp_path, [*made, added]).problems
    assert problem == "entry 6 is not signed with the key of its run"


@pytest.mark.parametrize("signature", ["", "AAAA", "not base64!", "A" * 88], ids=repr)
def test_a_false_signature_is_named(tmp_path: Path, signature: str) -> None:
    made = lines(KEY)
    made[-1] = re.sub(rb'"signature":"[^"]*"', b'"signature":"' + signature.encode() + b'"', made[-1])
    (problem,) = read(tmp_path, made).problems
    assert problem == "entry 5 is not signed with the key of its run"


def pem(key: object) -> bytes:
    assert hasattr(key, "private_bytes")
    return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def test_keys_are_read_from_the_files_that_openssl_writes(tmp_path: Path) -> None:
    private, public = tmp_path / "key.pem", tmp_path / "public.pem"
    private.write_bytes(pem(KEY))
    public.write_bytes(KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    assert public_key_of(read_private_key(private)) == read_public_key(public) == public_key_of(KEY)
    # Each refuses the other's file.
    with pytest.raises(UserError, match="is not an Ed25519 private key"):
        read_private_key(public)
    with pytest.raises(UserError, match=r"is not an Ed25519 public key.*openssl pkey -in KEY -pubout"):
        read_public_key(private)


def test_other_files_are_no_keys(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_private_key(path)
    for content in (b"", b"garbage", pem(generate_private_key(SECP256R1()))):
        path.write_bytes(content)
        with pytest.raises(UserError, match="openssl genpkey -algorithm ed25519"):
            read_private_key(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_private_key(path)
