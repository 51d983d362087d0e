"""An object store: the operations that a run in a bucket needs, and what each of them guarantees.

    create     of several processes that create one object, exactly one succeeds
    replace    succeeds only place the object is still the version that the caller has read or written
    read       sees every create, replace and delete that has returned, from any machine
    list       likewise; at most a thousand objects a request
    put        atomic, but the last one wins: for names that only one content can have
    delete     of an object that is missing: succeeds

S3, Google Cloud Storage and Azure Blob Storage are strongly consistent for reads and listings, and write conditionally
(`If-None-Match: *`, `If-Match`, generations, ETags): sources in docs/decisions/0053-buckets.md. A server that ignores
these conditions would let two processes write one run, so `probe` tries them once, and refuses such a server by name.

**A response that is lost.** A client that gets no response sends its request again, and then finds its own object. So
`create` stores a random value beside the object, and compares it, as `create_json` compares inodes on NFS. `replace`
recognises all writes of its process: one that seemed to fail may have arrived.

**Errors** are OSErrors with one sentence, so that `durable.is_transient` tells those that may pass from those that a
person has to mend.

Rejected: boto3 and one library for each provider (three sets of errors, retries and credentials); fsspec (no
conditional writes); a bucket mounted as a disk (lacks hard links and renames, see `durable.unsupported_operation`).
"""

import configparser
import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.formatting import one_line
from tandem.wire.ledger import BucketUsage

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "az")
"""Schemes of the URLs: Amazon S3 and servers that speak its protocol, Google Cloud Storage, Azure Blob Storage."""
_URL = re.compile(rf"^({'|'.join(SCHEMES)}):/{{1,2}}([^/]*)(?:/(.*))?$")
_BUCKET = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{1,254}$")
_PREFIX_PART = re.compile(r"^[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]*$")
MAX_URL_LENGTH = 512
RETRIES = 6
"""Repetitions of a request that failed by 429, 5xx or the network, with exponential back-off and jitter."""
RETRY_SECONDS = 600.0
"""Time within which a request is repeated, in seconds."""
REQUEST_SECONDS, CONNECT_SECONDS = 300.0, 5.0
"""Timeouts of one request and of its connection in seconds: four parts of 64 MiB at once take so long at 1 MiB/s."""
PROBE_SECONDS = 2.0
"""Timeout of a store that is asked for the first time, in seconds: a user waits."""
CREDENTIALS_SECONDS = 300.0
"""Interval at which a credentials file is read again, in seconds: keys are rotated."""
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
PAGE = 1000
"""Objects in one response to a listing, as all providers limit it."""
NONCE = "tandemnonce"
"""Name of the metadata with the random value of a write. Azure takes no hyphens."""
MAX_OBJECT_BYTES = 64 * 2**20
"""Maximum size of an object that is read whole."""

_CODE = re.compile(r"<Code>(\w+)</Code>|\"code\":\s*(\d+)|x-ms-error-code: (\w+)")
_STATUS = re.compile(r"status code: (\d{3})")
_METADATA_SERVERS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")


class StoreAccessError(PermissionError):
    """The store refuses a request, or the bucket is not there: somebody has to mend it."""


class StoreUnavailableError(OSError):
    """The store does not answer, or has no capacity: it may pass."""


class Stale(Exception):  # noqa: N818 - a state of the object
    """Another process has written or deleted the object meanwhile."""

    def __init__(self, message: str, is_gone: bool) -> None:
        super().__init__(message)
        self.is_gone = is_gone
        """Whether the object does not exist."""


@dataclass(frozen=True)
class Location:
    """A place in a bucket: all objects whose names begin with a prefix."""

    scheme: str
    bucket: str
    prefix: str
    """Begins and ends without a slash."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}"

    @classmethod
    def parse(cls, url: str) -> "Location":
        """Parse `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`.

        Raises:
            ValueError: it is not one; the message says why.
        """
        match = _URL.match(url)
        if match is None or len(url) > MAX_URL_LENGTH:
            raise ValueError(
                "not the URL of a bucket; write s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
            )
        scheme, bucket, prefix = match[1], match[2], (match[3] or "").strip("/")
        if "@" in bucket or ":" in bucket:
            raise ValueError(
                "a URL holds no credentials, user names or ports; set endpoint, and keys in the environment"
            )
        if not _BUCKET.match(bucket):
            raise ValueError(f"{bucket!r} is not the name of a bucket")
        if not prefix:
            raise ValueError(
                f"add a prefix for this run, such as {scheme}://{bucket}/runs/NAME: a bucket holds many runs"
            )
        if not all(_PREFIX_PART.match(part) for part in prefix.split("/")):
            raise ValueError(
                f"the prefix {prefix!r} has an empty part, or characters other than letters, digits and ._=+@-"
            )
        return cls(scheme, bucket, prefix)


def is_url(text: str) -> bool:
    """Whether a text is meant as the URL of a bucket."""
    return text.startswith(tuple(f"{scheme}:/" for scheme in SCHEMES))


@dataclass(frozen=True)
class ListedObject:
    """An object in a listing."""

    name: str
    size: int
    """Bytes."""
    version: Mapping[str, str]
    """Its version, for `replace`."""


@dataclass(frozen=True)
class Content:
    """An object that was read."""

    data: bytes
    version: Mapping[str, str]
    """Its version, for `replace`."""
    nonce: str
    """The random value of its creator; empty if it has none."""


@dataclass
class Store:
    """The objects below a location.

    Args:
        endpoint: URL of the server, for stores other than the provider's own; empty: from the environment, or theirs.
        region: of the bucket; empty: from the environment, or the provider's default.
        patience: seconds for one operation with its retries.
    """

    location: Location
    endpoint: str = ""
    region: str = ""
    patience: float = RETRY_SECONDS
    requests: Counter[str] = field(default_factory=Counter)
    """Operations by kind: `write`, `read`, `list` and `delete`. Retries are not counted."""
    sent: int = 0
    """Bytes of objects that were written."""
    received: int = 0
    """Bytes of objects that were read."""

    def __post_init__(self) -> None:
        if not self.endpoint and self.location.scheme == "s3":
            self.endpoint = next((value for name in ENDPOINT_VARIABLES if (value := os.environ.get(name))), "")
        self._store = _open(self)
        self._process = secrets.token_hex(8)
        self._counting = threading.Lock()

    def create(self, name: str, data: bytes) -> Mapping[str, str] | None:
        """Create an object that must not exist yet. Returns its version; None if it exists.

        Raises:
            StoreAccessError, StoreUnavailableError: it could not be written.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        nonce = self._nonce()
        try:
            with self._operation("write", name, len(data)):
                return _version(
                    obstore.put(self._store, name, data, mode="create", attributes={NONCE: nonce}, use_multipart=False)
                )
        except (AlreadyExistsError, PreconditionError):
            # Perhaps our own: the response to the first try was lost.
            current = self.read(name)
            return current.version if current is not None and current.nonce == nonce else None

    def replace(self, name: str, data: bytes, version: Mapping[str, str] | None) -> Mapping[str, str]:
        """Replace an object if it is still of this version; with None, create it. Returns the new version.

        Raises:
            Stale: it is of another version, or is there although it should not be.
            StoreAccessError, StoreUnavailableError: it could not be written.
        """
        from obstore.exceptions import NotFoundError, PreconditionError

        try:
            written = self.create(name, data) if version is None else self._replace(name, data, version)
        except (PreconditionError, NotFoundError):
            written = None
        if written is not None:
            return written
        current = self.read(name)
        # An earlier write of this process has arrived although it seemed to fail.
        if current is not None and current.nonce.startswith(self._process):
            return current.version if current.data == data else self.replace(name, data, current.version)
        is_gone = current is None
        raise Stale(f"{name} was {'deleted' if is_gone else 'written by another process'}", is_gone)

    def _replace(self, name: str, data: bytes, version: Mapping[str, str]) -> Mapping[str, str]:
        import obstore

        mode: Any = dict(version)
        attributes: Any = {NONCE: self._nonce()}
        with self._operation("write", name, len(data)):
            return _version(obstore.put(self._store, name, data, mode=mode, attributes=attributes, use_multipart=False))

    def _nonce(self) -> str:
        return f"{self._process}-{secrets.token_hex(8)}"

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write an object, whether it exists or not.

        Raises:
            StoreAccessError, StoreUnavailableError: it could not be written.
        """
        import obstore

        with self._operation("write", name, len(data)):
            obstore.put(self._store, name, data, use_multipart=False)

    def read(self, name: str) -> Content | None:
        """Read an object; None if it does not exist.

        Raises:
            StoreAccessError, StoreUnavailableError: it could not be read.
            ValueError: it is larger than MAX_OBJECT_BYTES.
        """
        import obstore
        from obstore.exceptions import NotFoundError

        try:
            with self._operation("read", name):
                result = obstore.get(self._store, name)
                if result.meta["size"] > MAX_OBJECT_BYTES:
                    raise ValueError(f"{self.location}/{name} is larger than {MAX_OBJECT_BYTES} bytes")
                return Content(
                    self._receive(result.bytes()), _version(result.meta), str(result.attributes.get(NONCE, ""))
                )
        except NotFoundError:
            return None

    def read_range(self, name: str, start: int, length: int) -> bytes | None:
        """Read bytes of an object; None if it does not exist. Fewer are returned where it ends before.

        Raises:
            StoreAccessError, StoreUnavailableError: it could not be read.
        """
        import obstore
        from obstore.exceptions import NotFoundError

        try:
            with self._operation("read", name):
                return self._receive(obstore.get_range(self._store, name, start=start, length=length))
        except NotFoundError:
            return None

    def entries(self, folder: str = "", after: str = "") -> Iterator[ListedObject]:
        """The objects below a folder, whatever their depth, by name.

        Args:
            after: only those whose names come after this one.

        Raises:
            StoreAccessError, StoreUnavailableError: they could not be listed.
        """
        import obstore

        started, last = time.monotonic(), after
        while True:
            try:
                with self._operation("list", folder):
                    pages = obstore.list(self._store, folder or None, offset=last or None, chunk_size=PAGE)
                    for number, page in enumerate(pages):
                        if number:
                            self._count("list")
                        for meta in page:
                            last = str(meta["path"])
                            yield ListedObject(last, int(meta["size"]), _version(meta))
                return
            except StoreUnavailableError:
                # A page that breaks off is not requested again by the client, as other requests are.
                if time.monotonic() - started > self.patience / 2:
                    raise

    def delete(self, names: list[str]) -> None:
        """Delete objects; missing ones are ignored.

        Raises:
            StoreAccessError, StoreUnavailableError: one could not be deleted.
        """
        import obstore
        from obstore.exceptions import NotFoundError

        for name in names:
            try:
                with self._operation("delete", name):
                    obstore.delete(self._store, name)
            except NotFoundError:
                continue

    def ping(self) -> "Store":
        """Check within PROBE_SECONDS that the bucket answers and can be listed. Returns the same place with as little
        patience.

        Raises:
            StoreAccessError, StoreUnavailableError: it does not, or cannot be.
        """
        quick = Store(self.location, self.endpoint, self.region, patience=PROBE_SECONDS)
        next(quick.entries("job.json"), None)
        return quick

    def probe(self) -> None:
        """Check that the bucket can be listed, written, read and cleaned, and that its server knows conditional writes.

        Raises:
            StoreAccessError, StoreUnavailableError: something is missing; the message says what.
        """
        quick = self.ping()
        name = f".probe-{secrets.token_hex(8)}"
        version = quick.create(name, b"1")
        try:
            if version is None or quick.create(name, b"2") is not None:
                raise StoreAccessError(
                    f"{self.server} ignores conditional writes (If-None-Match), so two runs could write {self.location}"
                )
            newer = quick.replace(name, b"3", version)
            try:
                # Another process, as it were: a store takes its own writes for lost responses.
                Store(self.location, self.endpoint, self.region, PROBE_SECONDS).replace(name, b"4", version)
            except Stale:
                pass
            else:
                raise StoreAccessError(
                    f"{self.server} ignores conditional writes (If-Match), so two runs could write {self.location}"
                )
            if (current := quick.read(name)) is None or current.data != b"3" or current.version != newer:
                raise StoreAccessError(f"{self.server} does not return what was written a moment ago")
        finally:
            quick.delete([name])

    @property
    def usage(self) -> BucketUsage:
        """The requests of this process so far."""
        with self._counting:
            return BucketUsage(
                writes=self.requests["write"],
                reads=self.requests["read"],
                listings=self.requests["list"],
                deletions=self.requests["delete"],
                sent_bytes=self.sent,
                received_bytes=self.received,
            )

    @property
    def server(self) -> str:
        """The server, for messages."""
        return (
            self.endpoint
            or {"s3": "Amazon S3", "gs": "Google Cloud Storage", "az": "Azure Blob Storage"}[self.location.scheme]
        )

    @contextmanager
    def _operation(self, kind: str, name: str, sent: int = 0) -> Iterator[None]:
        """Count an operation, and turn its errors into a sentence; missing objects and failed conditions stay."""
        from obstore.exceptions import (
            AlreadyExistsError,
            BaseError,
            NotFoundError,
            PreconditionError,
        )

        self._count(kind, sent)
        try:
            yield
        except (AlreadyExistsError, PreconditionError):
            raise
        except (BaseError, OSError) as error:
            is_missing = isinstance(error, NotFoundError | FileNotFoundError)
            if is_missing and not any(code in str(error) for code in _NO_BUCKET):
                raise NotFoundError(name) from error
            raise self._explained(error, kind, name) from error

    def _count(self, kind: str, sent: int = 0) -> None:
        with self._counting:
            self.requests[kind] += 1
            self.sent += sent

    def _receive(self, content: Any) -> bytes:
        data = bytes(content)
        with self._counting:
            self.received += len(data)
        return data

    def _explained(self, error: Exception, kind: str, name: str) -> OSError:
        text = str(error)
        code = next((group for match in [_CODE.search(text)] if match for group in match.groups() if group), "")
        status = int(match[1]) if (match := _STATUS.search(text)) else None
        place = f"{self.location.scheme}://{self.location.bucket}"
        if any(server in text for server in _METADATA_SERVERS):
            return StoreAccessError(
                f"no credentials for {place} were found in the environment ({_VARIABLES[self.location.scheme]})"
            )
        for codes, sentence in _SENTENCES.items():
            if code in codes:
                return StoreAccessError(
                    sentence.format(place=place, server=self.server, region=self.region or "the default one")
                )
        if status in (301, 307, 400) and kind != "write":
            return StoreAccessError(
                f"{place} is in another region, or {self.server} is not its server: set region and endpoint "
                f"({code or status})"
            )
        if status in (401, 403):
            right = {"write": "write", "read": "read", "list": "list", "delete": "delete"}[kind]
            return StoreAccessError(f"the credentials may not {right} objects below {self.location} ({code or status})")
        if status is not None and 400 <= status < 500 and status not in (408, 409, 425, 429):
            return StoreAccessError(f"{self.server} refuses to {kind} {self.location}/{name}: {code or status}")
        if status is not None:
            return StoreUnavailableError(f"{self.server} answers {status} {code}".rstrip())
        # The innermost cause stands last: "… - HTTP error: error sending request".
        cause = one_line(text.partition("Debug source")[0]).rpartition(" - ")[2].strip()
        return StoreUnavailableError(f"{self.server} does not answer ({cause[:100]})")


_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_SENTENCES = {
    _NO_BUCKET: "there is no bucket {place} at {server}",
    ("InvalidAccessKeyId", "InvalidToken"): "{server} does not know the access key for {place}",
    ("SignatureDoesNotMatch", "AuthenticationFailed"): "{server} rejects the secret key for {place}",
    ("ExpiredToken", "TokenRefreshRequired"): "the credentials for {place} have expired",
    ("RequestTimeTooSkewed",): "{server} refuses requests to {place}: the clock of this machine is wrong",
    (
        "AuthorizationHeaderMalformed",
        "PermanentRedirect",
        "IllegalLocationConstraintException",
    ): "{place} is not in region {region}: set the bucket's region",
    ("NotImplemented", "NotSupported"): "{server} does not know conditional writes, which keep two runs apart",
    ("QuotaExceeded", "XMinioStorageFull"): "{place} is full",
}
"""Sentences by the codes of providers."""


def _open(store: Store) -> "ObjectStore":
    """Open the store with its provider's client.

    Raises:
        StoreAccessError: obstore is not installed, or a setting in the environment is wrong.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise StoreAccessError("runs in buckets need the package obstore") from None
    scheme = store.location.scheme
    config: dict[str, Any] = {}
    if store.endpoint:
        config["azure_storage_endpoint" if scheme == "az" else "endpoint"] = store.endpoint
    if store.region and scheme == "s3":
        config["region"] = store.region
    timeout = store.patience if store.patience <= PROBE_SECONDS else REQUEST_SECONDS
    options: Any = {
        "timeout": timedelta(seconds=timeout),
        "connect_timeout": timedelta(seconds=min(CONNECT_SECONDS, timeout)),
        "allow_http": store.endpoint.startswith("http://"),
    }
    retries: Any = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=store.patience)}
    settings: dict[str, Any] = {"config": config, "client_options": options, "retry_config": retries}
    if scheme == "s3" and (provider := _credentials_file()) is not None:
        settings["credential_provider"] = provider
    try:
        opened: ObjectStore = from_url(str(store.location), **settings)
    except (BaseError, ValueError) as error:
        raise StoreAccessError(
            f"{store.location} cannot be opened: {one_line(str(error).partition('Debug source')[0])}"
        ) from None
    return opened


def _credentials_file() -> Callable[[], dict[str, Any]] | None:
    """A reader of the credentials file of the AWS tools, which obstore does not read itself; None where the environment
    has keys, or there is no file with such a profile."""
    if os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return None
    path = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path("~/.aws/credentials").expanduser())
    profile = os.environ.get("AWS_PROFILE") or "default"

    def read() -> dict[str, Any]:
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(path)
        section = parser[profile]
        token = section.get("aws_session_token")
        return {
            "access_key_id": section["aws_access_key_id"],
            "secret_access_key": section["aws_secret_access_key"],
            "expires_at": datetime.now(UTC) + timedelta(seconds=CREDENTIALS_SECONDS),
            **({"token": token} if token else {}),
        }

    try:
        read()
    except (OSError, KeyError, configparser.Error):
        return None
    return read


def _version(meta: Mapping[str, Any]) -> dict[str, str]:
    """The version of an object, as `put` takes it: a version number of None is not accepted there."""
    return {key: str(meta[key]) for key in ("e_tag", "version") if meta.get(key) is not None}
