"""Requests to the API server, with plain dicts.

Plain, because typed models refuse fields that are newer than themselves, and because a user's pod template goes through
as it is. The official client's connection is used (its configuration, its renewal of tokens), and not its dynamic
client: that asks the server what kinds it has before the first request, and the paths of seven kinds are known.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NoReturn, Self
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio import client, config

from tandem_operator import kinds
from tandem_operator.bounded import MAX_COST, SMALL, UNREAD, BoundedLines, cost, without_items
from tandem_operator.kinds import Kind
from tandem_operator.observed import version

MANAGER = "tandem-operator"
"""Our name as the writer of fields."""
REQUEST_PATIENCE = aiohttp.ClientTimeout(total=30)
WATCH_SECONDS = 300
"""How long the API server tells of changes before it ends its answer, as it does of itself after 30 to 60 minutes."""
WATCH_PATIENCE = aiohttp.ClientTimeout(total=WATCH_SECONDS + 30, sock_connect=10)
EXPIRED = 410
MAX_EVENTS = 50
"""Of one object that are read. A server has them for an hour, and repeats of one are one."""
PAGE = 40
"""Objects in one answer of a list, as long as they are of the usual size: together they may cost no more than one."""
MAX_BYTES = 8 * 2**20
"""Of any answer. An object has a megabyte and a half."""
METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
WEBHOOK = "failed calling webhook"
"""A webhook that does not answer speaks against one object, and not against all."""
APPLY, MERGE, PLAIN = "application/apply-patch+yaml", "application/merge-patch+json", "application/json"

Object = dict[str, Any]


class Unavailable(Exception):  # noqa: N818 - it is a state of the API server, and normal
    """It did not answer, or not now. Worth trying again."""


class RequestRefused(Exception):  # noqa: N818 - reads as the sentence it is
    """The API server said no, and why."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


@dataclass(frozen=True)
class ListPart:
    """A part of a list."""

    items: list[Object]
    version: int
    """The resource version of the whole list."""
    whole: bool = True
    """It has all that it should have. An object whose metadata cost too much is left out."""


class ApiServer:
    """A connection to the API server. Close it, or use it as an asynchronous context."""

    def __init__(self, connection: client.ApiClient) -> None:
        self._client = connection
        self.acts: Callable[[str], bool] = lambda namespace: True
        """Whether this operator is the one that writes in a namespace (tandem_operator.leader)."""
        self.requests = 0
        """So many were sent."""

    @classmethod
    async def connect(cls) -> Self:
        """Connect with the pod's service account, or else as kubectl would.

        Raises:
            kubernetes.aio.config.ConfigException: neither is there.
        """
        settings = client.Configuration()
        settings.connection_pool_maxsize = 64
        try:
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        except config.ConfigException:
            await config.load_kube_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        # Left to aiohttp, it reads ~/.netrc for each request, in a thread: a tenth of what a job cost.
        settings.client_session_kwargs = {"trust_env": False}
        settings.proxy = settings.proxy or _proxy(str(settings.host))
        return cls(client.ApiClient(settings))

    @property
    def proxy(self) -> str | None:
        """By whom it goes."""
        found: str | None = self._client.configuration.proxy
        return found

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """One object, None if there is none.

        Raises:
            Unavailable, Refused: see there.
        """
        try:
            return await self._request("GET", kind.path(namespace, name))
        except RequestRefused as error:
            if error.code == 404:
                return None
            raise

    async def pages(self, kind: Kind, namespace: str = "", selector: str = "") -> AsyncIterator[ListPart]:
        """All objects, some dozens at a time.

        Raises:
            Unavailable, Refused: see there. Refused with 410 if it took so long that the rest has expired.
        """
        query = {"labelSelector": selector} if selector else {}
        limit = PAGE
        while True:
            asked = {**query, "limit": str(limit)}
            unread: dict[str, str] = {}
            whole = True
            try:
                found = await self._request("GET", kind.path(namespace), asked)
            except TooLarge as error:
                if limit > 1:
                    limit //= 2
                    continue
                unread = {UNREAD: f"it has {error}, and is not read"}
                found, whole = await self._metadata(kind, namespace, asked)
            metadata = found.get("metadata", {})
            # Items of a list do not say what they are.
            said = {"apiVersion": kind.api, "kind": kind.name}
            items = [{**one, **said, **unread} for one in found.get("items") or []]
            yield ListPart(items, version(metadata), whole)
            if not metadata.get("continue"):
                return
            query["continue"] = metadata["continue"]
            limit = min(PAGE, 2 * limit)

    async def _metadata(self, kind: Kind, namespace: str, query: dict[str, str]) -> tuple[Object, bool]:
        """A list whose items have their metadata alone, and whether it has its items at all: managed fields can be as
        much as the rest."""
        try:
            return await self._request("GET", kind.path(namespace), query, accept=METADATA), True
        except TooLarge as error:
            return json.loads(without_items(error.content)), False

    async def changes(
        self, kind: Kind, version: int, namespace: str = "", selector: str = ""
    ) -> AsyncGenerator[tuple[str, Object], None]:
        """What happens to objects from a version on: ADDED, MODIFIED, DELETED, and BOOKMARK, which tells a version
        alone. An object that costs too much is passed over. Ends after some minutes, to be asked for again.

        Raises:
            Unavailable, Refused: see there. Refused with 410 if that version is too long ago.
        """
        asked = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_SECONDS)}
        asked |= {"resourceVersion": str(version), **({"labelSelector": selector} if selector else {})}
        path = kind.path(namespace)
        try:
            answer = await self._send("GET", path, asked, patience=WATCH_PATIENCE)
            with closing(answer):
                if answer.status >= 400:
                    _understood("GET", path, answer.status, await _content(answer))
                async for piece in BoundedLines(answer.content).iter_chunked(SMALL):
                    for line in piece.splitlines():
                        told = _parsed("GET", path, answer.status, line)
                        what, found = told.get("type"), told.get("object")
                        if not isinstance(what, str) or not isinstance(found, dict):
                            raise Unavailable(f"GET {path}: what answers is not an API server")
                        if what == "ERROR":
                            code = found.get("code")
                            _judge("GET", path, code if isinstance(code, int) else 500, found)
                        yield what, found
                    # What comes all at once may be hundreds of objects, and others wait.
                    await asyncio.sleep(0)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unavailable(f"GET {path}: {error or type(error).__name__}") from error

    async def create(self, kind: Kind, manifest: Object) -> Object:
        """Make an object.

        Raises:
            Unavailable, Refused: see there. Refused with 409 if the name is taken.
        """
        self._check(kind, manifest["metadata"]["namespace"])
        path = kind.path(manifest["metadata"]["namespace"])
        # Templates end up in pods: a field that there is not is an error, and not passed over.
        strict = {"fieldValidation": "Strict"} if kind is kinds.POD else {}
        return await self._request("POST", path, {"fieldManager": MANAGER, **strict}, manifest)

    async def apply(self, kind: Kind, manifest: Object) -> Object:
        """Have the fields of a manifest be so, whoever set them before.

        Raises:
            Unavailable, Refused: see there. Refused with 409 if it has a UID and there is no such object.
        """
        metadata = manifest["metadata"]
        self._check(kind, metadata["namespace"])
        path = kind.path(metadata["namespace"], metadata["name"])
        return await self._request("PATCH", path, {"fieldManager": MANAGER, "force": "true"}, manifest, APPLY)

    async def replace(self, kind: Kind, manifest: Object) -> Object:
        """Have an object be as this, if it still has the resource version that this has.

        Raises:
            Unavailable, Refused: see there. Refused with 409 if it has another one.
        """
        metadata = manifest["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"])
        return await self._request("PUT", path, {"fieldManager": MANAGER}, manifest)

    async def patch_status(
        self, kind: Kind, namespace: str, name: str, changes: Object, version: str = ""
    ) -> Object | None:
        """Change fields of a status; None if the object is gone.

        Args:
            version: only if this is still its resource version.

        Raises:
            Unavailable, Refused: see there. Refused with 409 if it has another version.
        """
        self._check(kind, namespace)
        path = kind.path(namespace, name, "status")
        body: Object = {"status": changes, **({"metadata": {"resourceVersion": version}} if version else {})}
        try:
            return await self._request("PATCH", path, {"fieldManager": MANAGER}, body, MERGE)
        except TooLarge:
            # It is written; what it is a status of, the next list tells.
            return None
        except RequestRefused as error:
            if error.code == 404:
                return None
            raise

    async def events(self, namespace: str, uid: str) -> list[Object]:
        """Events about one object.

        Raises:
            Unavailable, Refused: see there.
        """
        query = {"fieldSelector": f"involvedObject.uid={uid}", "limit": str(MAX_EVENTS)}
        found = await self._request("GET", kinds.EVENT.path(namespace), query)
        return [one for one in found.get("items") or [] if isinstance(one, dict)]

    async def terminate(self, kind: Kind, namespace: str, name: str, uid: str, annotations: Object) -> None:
        """Have the kubelet end all that runs in a pod, if it is still the one with this UID. The pod and its logs stay.

        Args:
            annotations: to give it.

        Raises:
            Unavailable, Refused: see there.
        """
        self._check(kind, namespace)
        # The only field of a pod that ends it, and that may be changed.
        body = {"metadata": {"uid": uid, "annotations": annotations}, "spec": {"activeDeadlineSeconds": 1}}
        try:
            await self._request("PATCH", kind.path(namespace, name), {"fieldManager": MANAGER}, body, MERGE)
        except RequestRefused as error:
            if error.code not in (404, 409):
                raise

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Delete an object with what belongs to it, if it is still the one with this UID.

        Raises:
            Unavailable, Refused: see there.
        """
        self._check(kind, namespace)
        options = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._request("DELETE", kind.path(namespace, name), body=options)
        except RequestRefused as error:
            # Gone, or another one has its name by now.
            if error.code not in (404, 409):
                raise

    def _check(self, kind: Kind, namespace: str) -> None:
        """Before each write: a look that took long may end after the Lease was lost.

        Raises:
            Unavailable: another operator writes there, or may.
        """
        if kind is not kinds.LEASE and not self.acts(namespace):
            raise Unavailable(f"{kind.name} in {namespace}: not written, the Lease is not held")

    async def _request(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Object | None = None,
        kind: str = PLAIN,
        accept: str = PLAIN,
    ) -> Object:
        try:
            answer = await self._send(method, path, query, body, kind, accept)
            content = await _content(answer)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unavailable(f"{method} {path}: {error or type(error).__name__}") from error
        return _understood(method, path, answer.status, content)

    async def _send(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Object | None = None,
        kind: str = PLAIN,
        accept: str = PLAIN,
        patience: aiohttp.ClientTimeout = REQUEST_PATIENCE,
    ) -> aiohttp.ClientResponse:
        """An answer of which nothing is read yet."""
        self.requests += 1
        address = f"{path}?{urlencode(query)}" if query else path
        headers = {"Accept": accept, "Content-Type": kind}
        prepared = await self._client.param_serialize(
            method, address, header_params=headers, auth_settings=["BearerToken"]
        )
        url, sent = prepared[1], prepared[2]
        answer = await self._client.call_api(method, url, sent, body, _request_timeout=patience)
        found: aiohttp.ClientResponse = answer.response
        return found


def _understood(method: str, path: str, status: int, content: bytes) -> Object:
    """What an answer says.

    Raises:
        Unavailable, Refused: see there.
    """
    found = _parsed(method, path, status, content or b"{}")
    if status >= 400:
        _judge(method, path, status, found)
    return found


def _parsed(method: str, path: str, status: int, text: bytes) -> Object:
    words = f"{method} {path}: what answers is not an API server ({status})"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unavailable(words) from error
    if not isinstance(found, dict):
        raise Unavailable(words)
    return found


def _judge(method: str, path: str, status: int, found: Object) -> NoReturn:
    """What the API server means by a `Status`.

    Raises:
        Unavailable, Refused: see there.
    """
    said = str(found.get("message", ""))
    if status == 429 or (status >= 500 and WEBHOOK not in said):
        raise Unavailable(f"{method} {path}: {status} {said}")
    raise RequestRefused(status, found.get("reason", ""), said or str(status))


def _proxy(host: str) -> str | None:
    """The proxy that the environment names for an address."""
    address = urlsplit(host)
    return None if proxy_bypass(address.netloc) else getproxies().get(address.scheme)


class TooLarge(Unavailable):
    """An answer costs more than is read."""

    def __init__(self, words: str, content: bytes) -> None:
        super().__init__(words)
        self.content = content


async def _content(answer: aiohttp.ClientResponse) -> bytes:
    """The body of an answer.

    Raises:
        TooLarge: it has or costs more.
    """
    found = bytearray()
    async for piece in answer.content.iter_any():
        found += piece
        if len(found) > MAX_BYTES:
            answer.close()
            raise TooLarge(f"more than {MAX_BYTES} bytes", b"")
    if cost(found) > MAX_COST:
        raise TooLarge("more objects, lists and values than any real one", bytes(found))
    return bytes(found)
