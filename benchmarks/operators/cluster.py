"""Requests of the benchmark itself to the API server, many at once: as kubectl would, without a process for each."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
from kubernetes.aio import client, config

Object = dict[str, Any]
MERGE = "application/merge-patch+json"
WATCH_SECONDS = 600
RETRY_SECONDS = 0.5
MAX_SIZE = 1 << 24
"""Bytes of one line of a watch."""


@dataclass(frozen=True)
class Access:
    """Where the API server is, and how one gets in."""

    host: str
    authorities: str | None
    """The file with the server's certificate authority; None for those that the machine knows."""
    certificate: tuple[str, str] | None
    """Files with the certificate that one shows, and its key."""
    headers: dict[str, str]

    @classmethod
    async def of_kubeconfig(cls) -> Self:
        """What KUBECONFIG says.

        Raises:
            kubernetes.aio.config.ConfigException: it says nothing.
        """
        settings = client.Configuration()
        await config.load_kube_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        token = settings.api_key.get("BearerToken")
        cert, key = settings.cert_file, settings.key_file
        certificate = (str(cert), str(key)) if cert and key else None
        headers = {"Authorization": token} if token else {}
        return cls(str(settings.host), settings.ssl_ca_cert, certificate, headers)

    def tls(self, anonymous: bool = False) -> ssl.SSLContext:
        """How to speak to the server; anonymously, if whoever asks brings a token."""
        found = ssl.create_default_context(cafile=self.authorities)
        if self.certificate is not None and not anonymous:
            found.load_cert_chain(*self.certificate)
        return found

    @property
    def own_address(self) -> str:
        """This machine's address on the way to the API server: where pods of this cluster could reach it."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((urlsplit(self.host).hostname, 9))
            found: str = way.getsockname()[0]
            return found


class Cluster:
    """A connection to the API server. Use it as an asynchronous context."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(ssl=self._access.tls(), limit=48)
        self._session = aiohttp.ClientSession(
            self._access.host, connector=connector, headers=self._access.headers, read_bufsize=MAX_SIZE
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def request(
        self, method: str, path: str, body: Object | None = None, kind: str = "application/json", **query: str
    ) -> Object:
        """One request; what it answers. 404 is an answer as well, with `kind: Status`.

        Raises:
            RuntimeError: the API server refuses.
        """
        assert self._session is not None
        headers, data = {"Content-Type": kind}, None if body is None else json.dumps(body)
        timeout = aiohttp.ClientTimeout(total=120)
        async with self._session.request(
            method, path, params=query, data=data, headers=headers, timeout=timeout
        ) as answer:
            text = await answer.text()
            if answer.status >= 400 and answer.status != 404:
                raise RuntimeError(f"{method} {path}: {answer.status} {text[:500]}")
            found: Object = json.loads(text)
            return found

    async def watch(self, path: str) -> AsyncIterator[tuple[str, Object]]:
        """ADDED, MODIFIED and DELETED objects from now on, until cancelled.

        Raises:
            RuntimeError: the watch has ended: the benchmark would miss something.
        """
        assert self._session is not None
        version = (await self.request("GET", path, limit="1"))["metadata"]["resourceVersion"]
        query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(WATCH_SECONDS)}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        while True:
            async with self._session.get(path, params=query, timeout=timeout) as answer:
                if answer.status == 429 or answer.status >= 500:
                    # An API server with more to do than it can; what happens meanwhile, the next try tells.
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                if answer.status != 200:
                    raise RuntimeError(f"the watch of {path} is refused: {answer.status} {await answer.text()}")
                async for line in answer.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise RuntimeError(f"the watch of {path} has ended: {event['object'].get('message')}")
                    query["resourceVersion"] = event["object"]["metadata"]["resourceVersion"]
                    yield event["type"], event["object"]
