"""The coordinator's HTTP interface (docs/architecture.md): authentication, validation and responses."""

import gzip
import hmac
import json
import logging
from typing import TypeVar

from aiohttp import web
from aiohttp.typedefs import Middleware
from pydantic import ValidationError

from tandem.http_server import Handler, authenticate, drain
from tandem.launch import token_digest
from tandem.model import Model
from tandem.protocol import BRIEF, CODE, FIRST, MAX_BODY_BYTES, OURS, Answer, Sync, Target, spoken, worded
from tandem.rundir.layout import RunDir
from tandem_coordinator.code_intake import CodeIntake
from tandem_coordinator.coordinator import Coordinator
from tandem_coordinator.page.routes import LivePage
from tandem_coordinator.prometheus import CONTENT_TYPE, Scrapes, prometheus_text
from tandem_coordinator.snapshots import brief

log = logging.getLogger("tandem.coordinator")

SPARE_AGENTS = 16
"""So many replicas beyond twice `maxReplicas` may be there: a replacement starts beside what it replaces."""
MAX_LEAP = 1_000_000
"""A generation number so far above ours was never given out by anybody."""
WORTH_PACKING_BYTES = 8_192
"""Shorter answers are sent as they are."""
PACKING_LEVEL = 6
MAX_ENCODED = 32
"""So many encoded answers are kept. A membership of thousands takes a megabyte."""

M = TypeVar("M", bound=Model)


def application(coordinator: Coordinator, token: str, rundir: RunDir, digest: str = "") -> web.Application:
    """The web application that answers for a coordinator to whoever knows the token, or was invited to its page.

    Args:
        digest: of another token that is as good (tandem.launch.TOKEN_DIGEST); empty: there is none.
    """
    server, page = _Server(coordinator), LivePage(coordinator, token, rundir)
    guard = _only_with(token, digest, page)
    code = CodeIntake(coordinator.job, rundir, coordinator.code_arrived)
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_sentences, guard])
    app.on_response_prepare.append(_say_protocol)
    page.add_to(app)
    app.add_routes(
        [
            web.post("/v1/sync", server.sync),
            web.post("/v1/target", server.target),
            web.get("/status", server.status),
            web.get(BRIEF, server.brief),
            web.get(CODE + "/{digest}", code.look),
            web.put(CODE + "/{digest}", code.take),
            web.get("/metrics", server.metrics),
            web.get("/healthz", server.healthz),
        ]
    )
    return app


def metrics_application(coordinator: Coordinator) -> web.Application:
    """/metrics and /healthz alone, for whoever asks: Prometheus cannot hold the token of each job, and what it reads
    are numbers that steer nothing (docs/decisions/0013-signals.md)."""
    server = _Server(coordinator)
    app = web.Application(middlewares=[_sentences])
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
        protocol = spoken(request.headers)

        def hung_up() -> bool:
            return request.transport is None or request.transport.is_closing()

        body = self._encode(await self._coordinator.sync(sync, hung_up, protocol), protocol)
        if len(body) < WORTH_PACKING_BYTES or "gzip" not in request.headers.get("Accept-Encoding", ""):
            return web.Response(body=body, content_type="application/json")
        return web.Response(
            body=self._pack(body), content_type="application/json", headers={"Content-Encoding": "gzip"}
        )

    async def target(self, request: web.Request) -> web.Response:
        wish = await _body(request, Target)
        workers = self._coordinator.job.spec.workers
        if not workers.min_replicas <= wish.replicas <= workers.most:
            raise _refused(f"replicas must be from {workers.min_replicas} to {workers.most}, not {wish.replicas}")
        if wish.replicas % (apart := self._coordinator.job.spec.workers_apart):
            raise _refused(
                f"replicas must be a multiple of {apart}, over which pipelines are spread, not {wish.replicas}"
            )
        try:
            return web.json_response({"replicas": await self._coordinator.retarget(wish.replicas)})
        except TimeoutError:
            raise web.HTTPServiceUnavailable(text="the number of replicas cannot be written to the disk") from None

    async def status(self, request: web.Request) -> web.Response:
        return web.json_response(worded(self._coordinator.snapshot(), spoken(request.headers)))

    async def brief(self, _: web.Request) -> web.Response:
        return web.json_response(brief(self._coordinator.snapshot(most=0)).dump())

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._scrapes.text(), headers={"Content-Type": CONTENT_TYPE})

    async def healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    def _check(self, sync: Sync) -> None:
        coordinator = self._coordinator
        if sync.processes != coordinator.job.spec.workers.processes:
            raise _refused(
                f"every replica of this job has {coordinator.job.spec.workers.processes} processes, "
                f"and {sync.replica} says it has {sync.processes}"
            )
        if sync.generation is not None and sync.generation > coordinator.state.number + MAX_LEAP:
            raise _refused(f"no generation {sync.generation} was ever given out")
        if len(sync.ranks) > sync.processes:
            raise _refused(f"{sync.replica} has {sync.processes} processes and tells of {len(sync.ranks)}")
        agents, most = coordinator.state.agents, 2 * coordinator.job.spec.workers.most + SPARE_AGENTS
        if sync.replica not in agents and len(agents) >= most:
            raise web.HTTPServiceUnavailable(text=f"there are {most} agents already, more than this job can have")

    def _encode(self, answer: Answer, protocol: int) -> bytes:
        """The answer's JSON. Most answers are the same for many agents: a thousand times they are encoded once."""
        membership = answer.membership
        number = None if membership is None else membership.generation
        key = (answer.order, answer.why, answer.stacks, answer.left_out, answer.preflight, number, protocol > FIRST)
        if key not in self._encoded:
            if len(self._encoded) >= MAX_ENCODED:
                self._encoded.clear()
            self._encoded[key] = json.dumps(worded(answer, protocol)).encode()
        return self._encoded[key]

    def _pack(self, body: bytes) -> bytes:
        """A large membership is packed once for all: among ten thousand members, ten gigabytes become one or two."""
        if self._packed[0] is not body:
            self._packed = (body, gzip.compress(body, PACKING_LEVEL))
        return self._packed[1]


def _only_with(token: str, digest: str, page: LivePage) -> Middleware:
    # Only digests are compared: the time that takes says nothing of a token.
    expected = {one for one in (token_digest(token), digest) if one}

    def has_token(request: web.Request) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        known = token_digest(given)
        return scheme == "Bearer" and any(hmac.compare_digest(known, one) for one in expected)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        of_page = page.guards(request.path)
        if not has_token(request) and not (of_page and page.knows(request)):
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


async def _say_protocol(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(OURS)


@web.middleware
async def _sentences(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal is JSON with one sentence, whoever raised it."""
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
            raise _refused("the body is not JSON") from None
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        raise _refused(f"{where}: {first['msg']}") from None


def _refused(sentence: str) -> web.HTTPBadRequest:
    return web.HTTPBadRequest(text=sentence)
