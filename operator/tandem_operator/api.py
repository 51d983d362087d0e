"""Requests to the API server, with plain dicts.

Plain, because typed models refuse fields that are newer than themselves, and because a user's pod template has to pass
unchanged. The official client's connection is used (its configuration, its token renewal), and not its dynamic client:
that discovers the server's kinds before the first request, and the paths of seven kinds are known.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
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
"""The operator's name as a field manager."""
REQUEST_PATIENCE = aiohttp.ClientTimeout(total=30)
WATCH_SECONDS = 300
"""Duration of a watch request. By default the API server ends one after 30 to 60 minutes."""
WATCH_PATIENCE = aiohttp.ClientTimeout(total=WATCH_SECONDS + 30, sock_connect=10)
EXPIRED = 410
MAX_EVENTS = 50
"""Maximum number of Events of one object that are read. A server keeps them for an hour, and counts repetitions in
one."""
PAGE = 40
"""Objects in one page of a list, as long as they have the usual size: together they may cost no more than one."""
PAGE_OF_METADATA = 200
"""Objects in one page of a list of metadata, which are small. A tenant may have hundreds of thousands, and a list that
takes longer than five minutes expires."""
MAX_BYTES = 8 * 2**20
"""Maximum size of any answer. An object has a megabyte and a half."""
METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
WEBHOOK = "failed calling webhook"
"""Text of an error that concerns a single object: its webhook does not answer."""
APPLY, MERGE, PLAIN = "application/apply-patch+yaml", "application/merge-patch+json", "application/json"

Object = dict[str, Any]


class Unavailable(Exception):  # noqa: N818 - it is a state of the API server, and normal
    """The API server did not answer, or cannot now. The request is worth retrying."""


class RequestRefused(Exception):  # noqa: N818 - reads as the sentence it is
    """The API server refused a request; says why."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


@dataclass(frozen=True)
class ListPart:
    """A page of a list."""

    items: list[Object]
    version: int
    """Resource version of the whole list."""
    is_complete: bool = True
    """Whether it has all of its items. An object whose metadata cost too much is left out."""


class ApiServer:
    """A connection to the API server. Close it, or use it as an asynchronous context."""

    def __init__(self, connection: client.ApiClient) -> None:
        self._client = connection
        self.acts: Callable[[str], bool] = lambda namespace: True
        """Whether this operator is the one that writes in a namespace (tandem_operator.leader)."""
        self.requests = 0
        """Number of requests sent."""
        self._apis: dict[str, str] = {}
        """The apiVersion that the server has, by groups that may have one of several."""

    @classmethod
    async def connect(cls) -> Self:
        """Connect with the pod's service account, or else with the kubeconfig.

        Raises:
            kubernetes.aio.config.ConfigException: neither exists.
        """
        settings = client.Configuration()
        settings.connection_pool_maxsize = 64
        try:
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        except config.ConfigException:
            await config.load_kube_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        # With trust_env, aiohttp reads ~/.netrc for each request, in a thread: a tenth of what a job cost.
        settings.client_session_kwargs = {"trust_env": False}
        settings.proxy = settings.proxy or _proxy(str(settings.host))
        return cls(client.ApiClient(settings))

    @property
    def proxy(self) -> str | None:
        """The proxy of the connection."""
        proxy: str | None = self._client.configuration.proxy
        return proxy

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Read one object, None if it does not exist.

        Raises:
            Unavailable, RequestRefused: the request failed.
        """
        try:
            return await self._request("GET", self._served(kind).path(namespace, name))
        except RequestRefused as error:
            if error.code == 404:
                return None
            raise

    async def pages(self, kind: Kind, namespace: str = "", selector: str = "") -> AsyncIterator[ListPart]:
        """List all objects, some dozens at a time.

        Raises:
            Unavailable, RequestRefused: the request failed; with code 410 if it took so long that the rest has expired.
        """
        query = {"labelSelector": selector} if selector else {}
        page, accept = (PAGE_OF_METADATA, METADATA) if kind in kinds.METADATA_ONLY else (PAGE, PLAIN)
        limit = page
        if kind.group in kinds.VERSIONS:
            await self._discover(kind.group)
        kind = self._served(kind)
        while True:
            params = {**query, "limit": str(limit)}
            unread: dict[str, str] = {}
            is_complete = True
            try:
                listing = await self._request("GET", kind.path(namespace), params, accept=accept)
            except TooLarge as error:
                if limit > 1:
                    limit //= 2
                    continue
                unread = {UNREAD: f"it has {error}, and is not read"}
                listing, is_complete = await self._metadata(kind, namespace, params)
            metadata = listing.get("metadata", {})
            # Items of a list lack their apiVersion and kind.
            type_fields = {"apiVersion": kind.api, "kind": kind.name}
            items = [{**item, **type_fields, **unread} for item in listing.get("items") or []]
            yield ListPart(items, version(metadata), is_complete)
            if not metadata.get("continue"):
                return
            query["continue"] = metadata["continue"]
            limit = min(page, 2 * limit)

    async def _metadata(self, kind: Kind, namespace: str, query: dict[str, str]) -> tuple[Object, bool]:
        """List only the metadata of objects, because the rest is too large; returns also whether the list has its items
        at all: managed fields can be as large as the rest."""
        try:
            return await self._request("GET", kind.path(namespace), query, accept=METADATA), True
        except TooLarge as error:
            return json.loads(without_items(error.content)), False

    async def changes(
        self, kind: Kind, version: int, namespace: str = "", selector: str = ""
    ) -> AsyncGenerator[tuple[str, Object], None]:
        """Watch objects from a version on: yields ADDED, MODIFIED, DELETED, and BOOKMARK, which carries only a version.
        An object that costs too much is skipped. Ends after some minutes, and has to be repeated.

        Raises:
            Unavailable, RequestRefused: the request failed; with code 410 if that version is too old.
        """
        params = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_SECONDS)}
        params |= {"resourceVersion": str(version), **({"labelSelector": selector} if selector else {})}
        path = self._served(kind).path(namespace)
        try:
            answer = await self._send("GET", path, params, patience=WATCH_PATIENCE)
            with closing(answer):
                if answer.status >= 400:
                    _checked("GET", path, answer.status, await _content(answer))
                async for piece in BoundedLines(answer.content).iter_chunked(SMALL):
                    for line in piece.splitlines():
                        event = _parsed("GET", path, answer.status, line)
                        event_type, body = event.get("type"), event.get("object")
                        if not isinstance(event_type, str) or not isinstance(body, dict):
                            raise Unavailable(f"GET {path}: what answers is not an API server")
                        if event_type == "ERROR":
                            code = body.get("code")
                            _raise_for_status("GET", path, code if isinstance(code, int) else 500, body)
                        yield event_type, body
                    # One piece may hold hundreds of objects, so other tasks get a turn.
                    await asyncio.sleep(0)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unavailable(f"GET {path}: {error or type(error).__name__}") from error

    async def create(self, kind: Kind, manifest: Object) -> Object:
        """Create an object.

        Raises:
            Unavailable, RequestRefused: the request failed; with code 409 if the name is taken.
        """
        self._check(kind, manifest["metadata"]["namespace"])
        kind = self._served(kind)
        manifest, path = {**manifest, "apiVersion": kind.api}, kind.path(manifest["metadata"]["namespace"])
        # Templates end up in pods, where an unknown field has to be an error, and not ignored.
        strict = {"fieldValidation": "Strict"} if kind is kinds.POD else {}
        return await self._request("POST", path, {"fieldManager": MANAGER, **strict}, manifest)

    async def apply(self, kind: Kind, manifest: Object) -> Object:
        """Apply a manifest on the server side, and take over its fields from other writers.

        Raises:
            Unavailable, RequestRefused: the request failed; with code 409 if it has a UID and there is no such object.
        """
        metadata = manifest["metadata"]
        self._check(kind, metadata["namespace"])
        path = kind.path(metadata["namespace"], metadata["name"])
        return await self._request("PATCH", path, {"fieldManager": MANAGER, "force": "true"}, manifest, APPLY)

    async def replace(self, kind: Kind, manifest: Object) -> Object:
        """Replace an object, if it still has the manifest's resource version.

        Raises:
            Unavailable, RequestRefused: the request failed; with code 409 if it has another one.
        """
        metadata = manifest["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"])
        return await self._request("PUT", path, {"fieldManager": MANAGER}, manifest)

    async def patch_status(
        self, kind: Kind, namespace: str, name: str, changes: Object, version: str = ""
    ) -> Object | None:
        """Change fields of a status; returns the object, None if it is gone or too large to be read.

        Args:
            version: expected resource version; empty for any.

        Raises:
            Unavailable, RequestRefused: the request failed; with code 409 if it has another version.
        """
        self._check(kind, namespace)
        path = self._served(kind).path(namespace, name, "status")
        body: Object = {"status": changes, **({"metadata": {"resourceVersion": version}} if version else {})}
        try:
            return await self._request("PATCH", path, {"fieldManager": MANAGER}, body, MERGE)
        except TooLarge:
            # The status is written; the next list contains the object.
            return None
        except RequestRefused as error:
            if error.code == 404:
                return None
            raise

    async def events(self, namespace: str, uid: str) -> list[Object]:
        """Read the Events about one object.

        Raises:
            Unavailable, RequestRefused: the request failed.
        """
        query = {"fieldSelector": f"involvedObject.uid={uid}", "limit": str(MAX_EVENTS)}
        listing = await self._request("GET", kinds.EVENT.path(namespace), query)
        return [event for event in listing.get("items") or [] if isinstance(event, dict)]

    async def pending_workloads(self, queues: Iterable[tuple[str, str]]) -> list[Object]:
        """Read the places of the Workloads that wait in LocalQueues, from Kueue's visibility API; none of a queue that
        Kueue does not know.

        Args:
            queues: namespace and name of each.

        Raises:
            Unavailable, RequestRefused: a request failed; with code 404 if the cluster does not have that API.
        """
        kind = kinds.VISIBLE_QUEUE
        await self._discover(kind.group)
        items: list[Any] = []
        for namespace, queue in queues:
            try:
                answer = await self._request("GET", self._served(kind).path(namespace, queue, "pendingworkloads"))
                items += answer.get("items") or []
            except RequestRefused as error:
                if error.code != 404:
                    raise
        return [item for item in items if isinstance(item, dict)]

    async def terminate(self, kind: Kind, namespace: str, name: str, uid: str, annotations: Object) -> None:
        """Have the kubelet terminate all containers of a pod, if it still has this UID. The pod and its logs stay.

        Args:
            annotations: annotations to set.

        Raises:
            Unavailable, RequestRefused: the request failed.
        """
        self._check(kind, namespace)
        # The only mutable field of a pod that terminates it.
        body = {"metadata": {"uid": uid, "annotations": annotations}, "spec": {"activeDeadlineSeconds": 1}}
        try:
            await self._request("PATCH", kind.path(namespace, name), {"fieldManager": MANAGER}, body, MERGE)
        except RequestRefused as error:
            if error.code not in (404, 409):
                raise

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Delete an object and its dependents, if it still has this UID.

        Raises:
            Unavailable, RequestRefused: the request failed.
        """
        self._check(kind, namespace)
        options = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._request("DELETE", self._served(kind).path(namespace, name), body=options)
        except RequestRefused as error:
            # It is gone, or another object has its name by now.
            if error.code not in (404, 409):
                raise

    async def _discover(self, group: str) -> None:
        """Find out which version of a group the server has, from the list of all groups: the address of a group that it
        does not have is answered with a 404 that is no `Status`, as from a proxy.

        Raises:
            Unavailable, RequestRefused: the request failed; with code 404 if it has none that is known.
        """
        answer = await self._request("GET", "/apis")
        groups = [
            entry for entry in answer.get("groups") or [] if isinstance(entry, dict) and entry.get("name") == group
        ]
        entries = [entry for api in groups for entry in api.get("versions") or [] if isinstance(entry, dict)]
        served = {entry.get("version") for entry in entries}
        version = next((version for version in kinds.VERSIONS[group] if version in served), None)
        if version is None:
            raise RequestRefused(404, "NotFound", f"the server has none of {kinds.VERSIONS[group]} of {group}")
        self._apis[group] = f"{group}/{version}"

    def _served(self, kind: Kind) -> Kind:
        return replace(kind, api=self._apis[kind.group]) if kind.group in self._apis else kind

    def _check(self, kind: Kind, namespace: str) -> None:
        """Check the Lease before each write: a reconcile that took long may end after the Lease was lost.

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
        return _checked(method, path, answer.status, content)

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
        """Send a request; returns the answer before its body is read."""
        self.requests += 1
        address = f"{path}?{urlencode(query)}" if query else path
        headers = {"Accept": accept, "Content-Type": kind}
        prepared = await self._client.param_serialize(
            method, address, header_params=headers, auth_settings=["BearerToken"]
        )
        url, sent_headers = prepared[1], prepared[2]
        answer = await self._client.call_api(method, url, sent_headers, body, _request_timeout=patience)
        response: aiohttp.ClientResponse = answer.response
        return response


def _checked(method: str, path: str, status: int, content: bytes) -> Object:
    """The body of an answer.

    Raises:
        Unavailable, RequestRefused: the request failed.
    """
    body = _parsed(method, path, status, content or b"{}")
    if status >= 400:
        _raise_for_status(method, path, status, body)
    return body


def _parsed(method: str, path: str, status: int, text: bytes) -> Object:
    message = f"{method} {path}: what answers is not an API server ({status})"
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unavailable(message) from error
    if not isinstance(body, dict):
        raise Unavailable(message)
    return body


def _raise_for_status(method: str, path: str, status: int, body: Object) -> NoReturn:
    """Raise the error that a `Status` of the API server describes.

    Raises:
        Unavailable, RequestRefused: the request failed.
    """
    message = str(body.get("message", ""))
    if status == 429 or (status >= 500 and WEBHOOK not in message):
        raise Unavailable(f"{method} {path}: {status} {message}")
    raise RequestRefused(status, body.get("reason", ""), message or str(status))


def _proxy(host: str) -> str | None:
    """The proxy that the environment specifies for an address."""
    address = urlsplit(host)
    return None if proxy_bypass(address.netloc) else getproxies().get(address.scheme)


class TooLarge(Unavailable):
    """An answer costs more memory than the operator grants it."""

    def __init__(self, message: str, content: bytes) -> None:
        super().__init__(message)
        self.content = content


async def _content(answer: aiohttp.ClientResponse) -> bytes:
    """The body of an answer.

    Raises:
        TooLarge: it is larger, or costs more, than allowed.
    """
    content = bytearray()
    async for piece in answer.content.iter_any():
        content += piece
        if len(content) > MAX_BYTES:
            answer.close()
            raise TooLarge(f"more than {MAX_BYTES} bytes", b"")
    if cost(content) > MAX_COST:
        raise TooLarge("more objects, lists and values than any real one", bytes(content))
    return bytes(content)
