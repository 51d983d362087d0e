"""The coordinator's HTTP interface (docs/architecture.md): authentication, validation and responses."""

import gzip
import hmac
import json
import logging
from typing import TypeVar

from aiohttp import web
from aiohttp.typedefs import Middleware
from pydantic import ValidationError

from tandem.model import Model
from tandem.processes.launch import token_digest
from tandem.rundir.layout import RunDir
from tandem.wire.http_server import Handler, authenticate, drain
from tandem.wire.protocol import (
    BRIEF_PATH,
    CODE_PATH,
    MAX_BODY_BYTES,
    PROTOCOL_HEADERS,
    QUEUE_PATH,
    Answer,
    Sync,
    Target,
)
from tandem.wire.queue_view import QueueView
from tandem_coordinator.code_intake import CodeIntake
from tandem_coordinator.coordinator import Coordinator
from tandem_coordinator.page.routes import LivePage
from tandem_coordinator.prometheus import CONTENT_TYPE, Scrapes, prometheus_text
from tandem_coordinator.snapshots import brief

log = logging.getLogger("tandem.coordinator")

MAX_SPARE_AGENTS = 16
"""Number of agents allowed beyond twice `maxReplicas`: a replacement starts while the agent that it replaces still
runs."""
MAX_GENERATION_LEAP = 1_000_000
"""Distance to our generation number above which a number was never handed out by anybody."""
WORTH_PACKING_BYTES = 8_192
"""Size from which on answers are compressed, in bytes."""
PACKING_LEVEL = 6
MAX_ENCODED_ANSWERS = 32
"""Maximum number of cached encoded answers. A membership of thousands takes a megabyte."""

M = TypeVar("M", bound=Model)


def application(coordinator: Coordinator, token: str, rundir: RunDir, digest: str = "") -> web.Application:
    """Create the coordinator's web application, for clients that know the token or were invited to its page.

    Args:
        digest: of another token that is as good (tandem.processes.launch.TOKEN_DIGEST); empty: there is none.
    """
    server, page = _Server(coordinator), LivePage(coordinator, token, rundir)
    guard = _require_token(token, digest, page)
    code = CodeIntake(coordinator.job, rundir, coordinator.report_code)
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_json, guard])
    app.on_response_prepare.append(_add_protocol_headers)
    page.add_to(app)
    app.add_routes(
        [
            web.post("/v1/sync", server.sync),
            web.post("/v1/target", server.target),
            web.post(QUEUE_PATH, server.queue),
            web.get("/status", server.status),
            web.get(BRIEF_PATH, server.brief),
            web.get(CODE_PATH + "/{digest}", code.get),
            web.put(CODE_PATH + "/{digest}", code.put),
            web.get("/metrics", server.metrics),
            web.get("/healthz", server.healthz),
        ]
    )
    return app


def metrics_application(coordinator: Coordinator) -> web.Application:
    """Create an application of /metrics and /healthz without authentication: Prometheus cannot hold the token of each
    job, and what it reads are numbers that steer nothing (docs/decisions/0013-signals.md)."""
    server = _Server(coordinator)
    app = web.Application(middlewares=[_errors_as_json])
    app.add_routes([web.get("/metrics", server.metrics), web.get("/healthz", server.healthz)])
    return app


class _Server:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._encoded: dict[tuple[object, ...], bytes] = {}
        self._packed = (b"", b"")
        namespace = coordinator.job.metadata.namespace
        self._scrapes = Scrapes(lambda: prometheus_text(coordinator.snapshot(), namespace, coordinator.figures()))

    async def sync(self, request: web.Request) -> web.Response:
        sync = await _body(request, Sync)
        self._check(sync)

        def hung_up() -> bool:
            return request.transport is None or request.transport.is_closing()

        body = self._encode(await self._coordinator.sync(sync, hung_up))
        if len(body) < WORTH_PACKING_BYTES or "gzip" not in request.headers.get("Accept-Encoding", ""):
            return web.Response(body=body, content_type="application/json")
        return web.Response(
            body=self._pack(body), content_type="application/json", headers={"Content-Encoding": "gzip"}
        )

    async def target(self, request: web.Request) -> web.Response:
        target = await _body(request, Target)
        workers = self._coordinator.job.spec.workers
        if not workers.min_replicas <= target.replicas <= workers.most:
            raise _bad_request(f"replicas must be from {workers.min_replicas} to {workers.most}, not {target.replicas}")
        if target.replicas % (multiple := self._coordinator.job.spec.workers_apart):
            raise _bad_request(
                f"replicas must be a multiple of {multiple}, over which pipelines are spread, not {target.replicas}"
            )
        try:
            return web.json_response({"replicas": await self._coordinator.retarget(target.replicas)})
        except TimeoutError:
            raise web.HTTPServiceUnavailable(text="the number of replicas cannot be written to the disk") from None

    async def queue(self, request: web.Request) -> web.Response:
        self._coordinator.queue = await _body(request, QueueView)
        return web.json_response({})

    async def status(self, _: web.Request) -> web.Response:
        return web.json_response(self._coordinator.snapshot().dump())

    async def brief(self, _: web.Request) -> web.Response:
        return web.json_response(brief(self._coordinator.snapshot(max_members=0)).dump())

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._scrapes.text(), headers={"Content-Type": CONTENT_TYPE})

    async def healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    def _check(self, sync: Sync) -> None:
        coordinator = self._coordinator
        if sync.processes != coordinator.job.spec.workers.processes:
            raise _bad_request(
                f"every replica of this job has {coordinator.job.spec.workers.processes} processes, "
                f"but {sync.replica} reports {sync.processes}"
            )
        if sync.generation is not None and sync.generation > coordinator.state.number + MAX_GENERATION_LEAP:
            raise _bad_request(f"generation {sync.generation} was never handed out")
        if len(sync.ranks) > sync.processes:
            raise _bad_request(f"{sync.replica} has {sync.processes} processes and reports {len(sync.ranks)} ranks")
        agents, max_agents = coordinator.state.agents, 2 * coordinator.job.spec.workers.most + MAX_SPARE_AGENTS
        if sync.replica not in agents and len(agents) >= max_agents:
            raise web.HTTPServiceUnavailable(text=f"there are {max_agents} agents already, more than this job can have")

    def _encode(self, answer: Answer) -> bytes:
        """Encode an answer as JSON. Most answers are the same for many agents: a thousand equal ones are encoded
        once."""
        membership = answer.membership
        number = None if membership is None else membership.generation
        key = (answer.order, answer.why, answer.stacks, answer.left_out, answer.preflight, number)
        if key not in self._encoded:
            if len(self._encoded) >= MAX_ENCODED_ANSWERS:
                self._encoded.clear()
            self._encoded[key] = json.dumps(answer.dump()).encode()
        return self._encoded[key]

    def _pack(self, body: bytes) -> bytes:
        """Compress a body. A large membership is compressed once for all: among ten thousand members, ten gigabytes
        become one or two."""
        if self._packed[0] is not body:
            self._packed = (body, gzip.compress(body, PACKING_LEVEL))
        return self._packed[1]


def _require_token(token: str, digest: str, page: LivePage) -> Middleware:
    # Only digests are compared, so that the time of a comparison reveals nothing about a token.
    expected = {expected_digest for expected_digest in (token_digest(token), digest) if expected_digest}

    def has_token(request: web.Request) -> bool:
        scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
        sent_digest = token_digest(sent)
        return scheme == "Bearer" and any(
            hmac.compare_digest(sent_digest, expected_digest) for expected_digest in expected
        )

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        of_page = page.is_page_path(request.path)
        if not has_token(request) and not (of_page and page.has_session(request)):
            if request.path != "/healthz" and not of_page:
                raise web.HTTPUnauthorized(text="the job's token is missing or wrong; send Authorization: Bearer TOKEN")
            return await handler(request)
        authenticate(request)
        try:
            response = await handler(request)
        except web.HTTPException:
            await drain(request)
            raise
        await drain(request)
        return response

    return guard


async def _add_protocol_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(PROTOCOL_HEADERS)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Send every error as JSON with one sentence, also those that aiohttp raises."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status == web.HTTPRequestEntityTooLarge.status_code:
            sentence = f"a request may have {MAX_BODY_BYTES} bytes at most"
        else:
            sentence = error.text or error.reason
        return web.json_response({"error": sentence}, status=error.status)


async def _body(request: web.Request, model: type[M]) -> M:
    body = await request.read()
    try:
        return model.read_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise _bad_request("the body is not JSON") from None
        location = ".".join(str(part) for part in first["loc"]) or "the body"
        raise _bad_request(f"{location}: {first['msg']}") from None


def _bad_request(sentence: str) -> web.HTTPBadRequest:
    return web.HTTPBadRequest(text=sentence)
