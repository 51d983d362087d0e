"""The provenance of a run: `log/provenance.jsonl`, a hash chain of what a run used, and of what came of it.

One line is one entry, written by the coordinator alone, in the order in which it saw things: the job, each generation,
failure, rewind, checkpoint and score, and the end. Files are named by their SHA-256, so the chain says what they were,
also after they are deleted.

    {"kind":"checkpoint", …, "number":7, "previous":"<SHA-256 of line 6>", "signature":"<Ed25519, base64>"}

`previous` is the SHA-256 of the whole line before, without its line end; that of the first entry is all zeros. Nobody
can change, remove or insert an entry without changing all that follow, and the last hash, the *head*, stands for all of
them. The signature covers the line up to itself. Anyone who can write to the run directory can rewrite an unsigned
chain; to rewrite a signed one takes the key (docs/decisions/0063-provenance.md).

Verification works on bytes, not on fields: entries of kinds that only a newer version knows are verified, too.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from tandem.errors import UserError
from tandem.job.resource import DistributedTrainingJob
from tandem.model import AnyNumbers, PlainName, Text, WholeNumber
from tandem.rundir.checkpoint import Manifest
from tandem.rundir.durable import open_regular
from tandem.rundir.records import Kinds, Record
from tandem.wire.status import CheckpointRef

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

KEY = "TANDEM_SIGNING_KEY"
"""Variable of the coordinator: the path of an Ed25519 private key in PEM form. Without one, entries are not signed. A
path and not the key: variables reach the job's own processes, and SLURM stores them."""
START = "0" * 64
"""`previous` of the first entry."""
MAX_LINE_BYTES = 2**20
"""Maximum length of a line: the entry of a job holds the whole job."""
MAX_KEY_BYTES = 2**14
_SIGNATURE = b',"signature":"'
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class JobEntry(Record):
    """A coordinator starts with this job, and with these versions; written again after a change."""

    kind: Literal["job"] = "job"
    job: dict[str, Any]
    """The job, as in job.json."""
    versions: dict[str, str] = {}
    """Versions of the coordinator's software."""
    public_key: Text = None
    """The key of the signatures, this one's included: Ed25519, base64; absent if entries are not signed."""


class GenerationEntry(Record):
    """A group of ranks has recorded that it trains."""

    kind: Literal["generation"] = "generation"
    generation: WholeNumber
    digest: Sha256
    """SHA-256 of its record, `generations/NUMBER.json`."""


class RewindEntry(Record):
    """The loss became useless, and training went back."""

    kind: Literal["rewind"] = "rewind"
    rewind: WholeNumber
    """Its number."""
    digest: Sha256
    """SHA-256 of its record, `rewinds/NUMBER.json`."""


class CloseEntry(Record):
    """A generation ended before training did."""

    kind: Literal["close"] = "close"
    generation: WholeNumber
    reason: str
    """The reason, one CamelCase word."""
    message: Text = None
    """The reason, a sentence."""
    replica: Text = None
    """The replica that caused it, where one did."""


class CheckpointEntry(Record):
    """A checkpoint was committed."""

    kind: Literal["checkpoint"] = "checkpoint"
    name: PlainName
    step: WholeNumber
    generation: WholeNumber
    digest: Sha256
    """Digest of its manifest."""
    content: Sha256
    """SHA-256 of the sizes and checksums of all of its files: equal for the same weights and state, bit for bit."""
    weights: Text = None
    """A digest of its weights alone; absent without weights."""

    @property
    def reference(self) -> CheckpointRef:
        """The reference by which the lineage names it."""
        return CheckpointRef(name=self.name, step=self.step, generation=self.generation)


class ScoreEntry(Record):
    """The evaluation of a checkpoint is complete."""

    kind: Literal["score"] = "score"
    name: PlainName
    step: WholeNumber
    generation: WholeNumber
    digest: Sha256
    """SHA-256 of the file with its merged result."""
    metrics: AnyNumbers = None
    """Its scores on the test data."""

    @property
    def reference(self) -> CheckpointRef:
        """The reference by which the lineage names the checkpoint."""
        return CheckpointRef(name=self.name, step=self.step, generation=self.generation)


class EndEntry(Record):
    """Training has ended."""

    kind: Literal["end"] = "end"
    generation: WholeNumber
    """The newest generation."""
    failed: bool
    reason: str
    """The reason, one CamelCase word."""
    message: Text = None
    """The reason, a sentence."""


AnyEntry = JobEntry | GenerationEntry | RewindEntry | CloseEntry | CheckpointEntry | ScoreEntry | EndEntry
ENTRIES = Kinds[AnyEntry](AnyEntry)


def sha256(content: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        OSError, ValueError: it cannot be read, or is no file.
    """
    with open_regular(path) as file:
        return sha256(file.read())


def job_entry(job: DistributedTrainingJob, versions: dict[str, str], public_key: str | None, now: float) -> JobEntry:
    """The entry of a job."""
    return JobEntry(time=now, job=job.dump_brief(), versions=versions, public_key=public_key)


def content_digest(manifest: Manifest) -> str:
    """Digest of the files of a checkpoint. It does not depend on the writer or on the time."""
    files = sorted([entry.path, entry.size, entry.xxh3] for entry in manifest.files)
    return sha256(json.dumps(files, separators=(",", ":")).encode())


def checkpoint_entry(manifest: Manifest, now: float) -> CheckpointEntry:
    """The entry of a checkpoint."""
    return CheckpointEntry(
        time=now,
        name=manifest.name,
        step=manifest.step,
        generation=manifest.generation,
        digest=manifest.digest,
        content=content_digest(manifest),
        weights=manifest.weights_digest or None,
    )


def chained(entry: Record, number: int, previous: str, key: "Ed25519PrivateKey | None" = None) -> bytes:
    """The line of an entry, without its line end.

    Args:
        number: number of the entry, from 1.
        previous: SHA-256 of the line before.
        key: key to sign it with; None: it is not signed.
    """
    line = entry.line()[:-1] + f',"number":{number},"previous":"{previous}"}}'.encode()
    if key is None:
        return line
    return line[:-1] + _SIGNATURE + base64.b64encode(key.sign(line)) + b'"}'


def _unsigned(line: bytes) -> tuple[bytes, bytes | None]:
    """Split a line into what was signed, and the signature; None if there is none."""
    body, separator, signature = line.rpartition(_SIGNATURE)
    if not separator:
        return line, None
    return body + b"}", signature.removesuffix(b'"}')


@dataclass(frozen=True)
class ProvenanceChain:
    """A chain as it was read."""

    entries: Sequence[AnyEntry] = ()
    """The entries of known kinds, in order."""
    count: int = 0
    """Number of lines."""
    head: str = START
    """SHA-256 of the last line."""
    signers: Sequence[str] = ()
    """The public keys of valid signatures, each once, base64."""
    unsigned: int = 0
    """Number of entries without a signature."""
    problems: Sequence[str] = ()
    """Faults, one sentence each; empty if there are none."""


def lines(path: Path) -> Iterator[bytes]:
    """The complete lines of a chain; none if there is no such file. An incomplete last line is being written.

    Raises:
        OSError, ValueError: it cannot be read, or a line is longer than MAX_LINE_BYTES.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            if not line.endswith(b"\n"):
                if len(line) > MAX_LINE_BYTES:
                    raise ValueError(f"{path} has a line of more than {MAX_LINE_BYTES} bytes")
                return
            yield line[:-1]


def read_chain(path: Path, trusted: str | None = None, expected: str = "") -> ProvenanceChain:
    """Read and verify a chain.

    Args:
        trusted: the public key, base64, with which every entry has to be signed; None: any key.
        expected: SHA-256 of a line that it has to have; empty: of none.

    Raises:
        OSError, ValueError: see `lines`.
    """
    entries: list[AnyEntry] = []
    problems: list[str] = []
    signers: list[str] = []
    count, unsigned, previous, public_key, has_expected = 0, 0, START, trusted, not expected
    for count, line in enumerate(lines(path), 1):
        body, signature = _unsigned(line)
        entry: AnyEntry | None = None
        try:
            fields = json.loads(line)
            entry = ENTRIES.parse(line)
        except (ValueError, RecursionError):
            problems.append(f"entry {count} is damaged")
        else:
            if not isinstance(fields, dict) or fields.get("number") != count or fields.get("previous") != previous:
                problems.append(f"entry {count} does not follow the one before: an entry was changed, removed or added")
        previous = sha256(line)
        has_expected = has_expected or previous == expected
        if isinstance(entry, JobEntry) and trusted is None:
            public_key = entry.public_key
        if signature is None:
            unsigned += 1
            if public_key is not None:
                problems.append(f"entry {count} is not signed")
        elif public_key is None or not _is_valid(body, signature, public_key):
            problems.append(f"entry {count} is not signed with {'the given key' if trusted else 'the key of its run'}")
        elif public_key not in signers:
            signers.append(public_key)
        if entry is not None:
            entries.append(entry)
    if not has_expected:
        problems.append(
            f"no entry has the digest {expected}: entries were removed, or this is the record of another run"
        )
    return ProvenanceChain(tuple(entries), count, previous, tuple(signers), unsigned, tuple(problems))


def _is_valid(body: bytes, signature: bytes, public_key: str) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        _public_key(public_key).verify(base64.b64decode(signature, validate=True), body)
    except (InvalidSignature, ValueError):
        return False
    return True


def _public_key(text: str) -> "Ed25519PublicKey":
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(base64.b64decode(text, validate=True))


def read_private_key(path: Path) -> "Ed25519PrivateKey":
    """The private key in a file in PEM form.

    Raises:
        UserError: it cannot be read, or is not an Ed25519 private key without a password.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_pem(path), password=None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(
            f"{path} ({KEY}) is not an Ed25519 private key in PEM form without a password; "
            "`openssl genpkey -algorithm ed25519` creates one"
        )
    return key


def public_key_of(key: "Ed25519PrivateKey") -> str:
    """The public key of a private one, base64."""
    return base64.b64encode(key.public_key().public_bytes_raw()).decode()


def read_public_key(path: Path) -> str:
    """The public key in a file in PEM form, base64.

    Raises:
        UserError: it cannot be read, or is not an Ed25519 public key.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(_pem(path))
    except ValueError:
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise UserError(
            f"{path} is not an Ed25519 public key in PEM form; `openssl pkey -in KEY -pubout` writes that of a key"
        )
    return base64.b64encode(key.public_bytes_raw()).decode()


def _pem(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(MAX_KEY_BYTES)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(str(error)) from error
