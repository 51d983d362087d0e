"""The benchmark's own requests to the API server, many at the same time: like kubectl, without a process for each."""

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
MAX_LINE_BYTES = 1 << 24
"""Maximum length of a line of a watch, in bytes."""


@dataclass(frozen=True)
class Access:
    """Address and credentials of the API server."""

    host: str
    authorities: str | None
    """File with the server's certificate authority; None for the machine's own."""
    certificate: tuple[str, str] | None
    """Files with the client's certificate and its key."""
    headers: dict[str, str]

    @classmethod
    async def of_kubeconfig(cls) -> Self:
        """Load KUBECONFIG.

        Raises:
            kubernetes.aio.config.ConfigException: there is no valid configuration.
        """
        settings = client.Configuration()
        await config.load_kube_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        token = settings.api_key.get("BearerToken")
        cert, key = settings.cert_file, settings.key_file
        certificate = (str(cert), str(key)) if cert and key else None
        headers = {"Authorization": token} if token else {}
        return cls(str(settings.host), settings.ssl_ca_cert, certificate, headers)

    def tls(self, anonymous: bool = False) -> ssl.SSLContext:
        """TLS settings for the server; anonymous if each request has a token."""
        context = ssl.create_default_context(cafile=self.authorities)
        if self.certificate is not None and not anonymous:
            context.load_cert_chain(*self.certificate)
        return context

    @property
    def own_address(self) -> str:
        """This machine's address on the route to the API server, which pods of the cluster could reach."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((urlsplit(self.host).hostname, 9))
            address: str = probe.getsockname()[0]
            return address


class Cluster:
    """A connection to the API server. Use it as an asynchronous context."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(ssl=self._access.tls(), limit=48)
        self._session = aiohttp.ClientSession(
            self._access.host, connector=connector, headers=self._access.headers, read_bufsize=MAX_LINE_BYTES
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def request(
        self, method: str, path: str, body: Object | None = None, kind: str = "application/json", **query: str
    ) -> Object:
        """Send one request; returns the response. 404 is a response as well, with `kind: Status`.

        Raises:
            RuntimeError: the API server refuses it.
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
            response: Object = json.loads(text)
            return response

    async def watch(self, path: str) -> AsyncIterator[tuple[str, Object]]:
        """Yield ADDED, MODIFIED and DELETED objects from now on, until cancelled.

        Raises:
            RuntimeError: the watch has ended: the benchmark would miss events.
        """
        assert self._session is not None
        version = (await self.request("GET", path, limit="1"))["metadata"]["resourceVersion"]
        query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(WATCH_SECONDS)}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        while True:
            async with self._session.get(path, params=query, timeout=timeout) as answer:
                if answer.status == 429 or answer.status >= 500:
                    # The API server is overloaded; the next attempt gets the events meanwhile.
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
