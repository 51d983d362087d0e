"""The live page of a real coordinator: who may see it, what it sends, and what it bears."""

import json
import re
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tandem.wire.protocol import RankReport
from tandem.wire.status import CheckpointRef
from tandem_coordinator.page.routes import Sessions
from tandem_coordinator.page.viewers import MAX_VIEWERS
from tests.support.coordinator_process import Agent, Coordinator
from tests.support.elastic import TOKEN
from tests.support.http_server import serving
from tests.support.lines import Lines
from tests.support.page_client import PAGE, Browser, OtherServer, Stream, invited
from tests.support.waiting import until

EVIL = "</script><script>alert(1)</script>"
GUARDED = [PAGE, f"{PAGE}stream", f"{PAGE}ready"]
OURS = ["/", "/open", *GUARDED, "/page/page.js", "/page/page.css", "/page/icon.svg", "/page/none"]


@pytest.fixture(scope="module")
def cookie(idle: Coordinator) -> str:
    return invited(idle)


def step(agents: tuple[Agent, ...], number: int, loss: float = 0.5) -> None:
    for rank, agent in enumerate(agents):
        agent.ranks = [RankReport(rank=rank, step=number, total_steps=1000, loss=loss, throughput=100.0, cpu=0.9)]


class TestWhoMayLook:
    def test_whoever_was_invited_does_so_with_a_cookie_that_no_script_and_no_other_site_can_use(
        self, idle: Coordinator
    ) -> None:
        with idle.client() as client:
            word = client.invitation()
        traded = idle.ask("POST", "/open", {"word": word})
        name, _, rest = traded.headers["Set-Cookie"].partition("=")
        assert name.startswith("tandem-")
        assert {"HttpOnly", "SameSite=Strict", f"Path={PAGE}"} <= {part.strip() for part in rest.split(";")}
        assert json.loads(traded.body) == {"page": PAGE}
        assert idle.ask("GET", PAGE, Cookie=traded.cookie).status == 200
        assert idle.ask("POST", "/open", {"word": word}).status == 403

    def test_nobody_is_invited_without_the_token(self, idle: Coordinator, cookie: str) -> None:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": cookie}):
            assert idle.ask("POST", "/v1/invitation", **headers).status == 401

    @pytest.mark.parametrize("path", GUARDED)
    def test_without_a_cookie_there_is_nothing_to_see(self, idle: Coordinator, path: str) -> None:
        for headers in ({}, {"Cookie": "tandem=x"}, {"Authorization": f"Bearer {TOKEN}"}):
            answer = idle.ask("GET", path, **headers)
            assert answer.status == (303 if path == PAGE else 401)
            assert "digits" not in answer.body
        assert idle.ask("GET", "/").headers["Location"] == "/open"

    def test_the_cookie_opens_the_page_and_nothing_else(self, idle: Coordinator, cookie: str) -> None:
        for method, path in (("GET", "/status"), ("GET", "/metrics"), ("POST", "/v1/sync"), ("POST", "/v1/target")):
            assert idle.ask(method, path, {}, Cookie=cookie).status == 401

    def test_a_browser_sends_it_to_no_other_port_whatever_is_asked_for_there(self, idle: Coordinator) -> None:
        """Browsers send cookies of 127.0.0.1 to all of its ports, and on another one may be another tenant's job."""
        browser, theirs = Browser(), Sessions("the secret of another job").path
        with idle.client() as client:
            assert browser.ask(idle.port, "/open", {"word": client.invitation()})[0] == 200
        assert browser.ask(idle.port, f"{PAGE}ready")[0] == 204
        with serving(OtherServer()) as other:
            for path in ("/", "/open", "/page", "/page/", "/page/page.js", theirs, f"{theirs}stream", PAGE[:-2]):
                browser.ask(other.server_port, path)
            assert len(other.requests) == 8
            assert other.requests[-1][1] == "tandem-own=1", "their own is sent to both"
            (ours,) = (cookie.name for cookie in browser.cookies if cookie.name != "tandem-own")
            assert [path for path, cookies in other.requests if ours in (cookies or "")] == []
        assert browser.ask(idle.port, f"{PAGE}ready")[0] == 204

    @pytest.mark.parametrize("path", OURS)
    def test_a_name_that_somebody_else_pointed_here_is_refused(self, idle: Coordinator, cookie: str, path: str) -> None:
        answer = idle.ask("GET", path, Host=f"evil.example:{idle.port}", Cookie=cookie)
        assert answer.status == 421
        assert "tandem open" in answer.error

    def test_a_page_of_another_origin_cannot_trade(self, idle: Coordinator) -> None:
        with idle.client() as client:
            word = client.invitation()
        assert idle.ask("POST", "/open", {"word": word}, Origin="http://evil.example").status == 403
        own = f"http://127.0.0.1:{idle.port}"
        assert idle.ask("POST", "/open", {"word": word}, Origin=own).status == 200

    @pytest.mark.parametrize("body", [None, [], {}, {"word": 5}, {"word": "x" * 2000}, "x"])
    def test_what_is_no_invitation_is_refused_with_a_sentence(self, idle: Coordinator, body: Any) -> None:
        answer = idle.ask("POST", "/open", body)
        assert (answer.status, answer.error) == (400, 'send {"word": …}')


class TestWhatABrowserIsTold:
    @pytest.mark.parametrize("path", OURS)
    def test_it_runs_the_pages_own_script_alone_frames_it_nowhere_and_keeps_nothing(
        self, idle: Coordinator, cookie: str, path: str
    ) -> None:
        if path == f"{PAGE}stream":
            with Stream(idle, cookie) as stream:
                headers = stream.headers
        else:
            headers = idle.ask("GET", path, Cookie=cookie).headers
        policy = {part.split()[0]: part.split()[1:] for part in headers["Content-Security-Policy"].split(";")}
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == ["'none'"]
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == ["'self'"]
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["X-Content-Type-Options"] == "nosniff"

    @pytest.mark.parametrize("path", [PAGE, "/open"])
    def test_a_page_needs_nothing_from_elsewhere_and_has_no_script_in_itself(
        self, idle: Coordinator, cookie: str, path: str
    ) -> None:
        body = idle.ask("GET", path, Cookie=cookie).body
        assert "http" not in body
        assert "<script>" not in body
        assert not re.search(r"\son[a-z]+=", body)
        for name in ("page.js", "page.css", "open.js", "icon.svg"):
            text = idle.ask("GET", f"/page/{name}", Cookie=cookie)
            assert text.status == 200
            assert "://" not in text.body.replace("http://www.w3.org/2000/svg", "")

    def test_other_requests_keep_their_answers_as_they_were(self, idle: Coordinator) -> None:
        status, answer = idle.raw("GET", "/status")
        assert status == 200
        assert answer["job"] == "digits"
        assert idle.ask("GET", "/healthz").status == 200
        assert idle.ask("GET", "/nowhere").status == 401


class TestTheStream:
    def test_sends_every_part_and_then_what_changes(
        self, coordinator: Coordinator, agents: tuple[Agent, Agent]
    ) -> None:
        step(agents, 10)
        with Stream(coordinator, invited(coordinator)) as stream:
            stream.until(lambda parts: "step 10 of 1,000" in parts.get("head", ""), "the step")
            stream.until(lambda parts: "<svg" in parts.get("speed", "") and "<svg" in parts.get("use", ""), "charts")
            assert {"head", "tiles", "losses", "events", "members", "generations", "checkpoints"} <= stream.parts.keys()
            assert "worker-0" in stream.parts["members"]
            assert "the job starts" in stream.parts["generations"]
            step(agents, 20)
            stream.until(lambda parts: "step 20 of 1,000" in parts["head"], "the next step")

    def test_draws_for_the_screen_that_looks(self, coordinator: Coordinator, agents: tuple[Agent, Agent]) -> None:
        cookie, boxes = invited(coordinator), []
        for look in ("wide", "narrow"):
            with Stream(coordinator, cookie, look) as stream:
                stream.until(lambda parts: "<svg" in parts.get("speed", ""), "a chart")
                boxes.append(stream.parts["speed"].partition('viewBox="0 0 ')[2].partition(" ")[0])
        assert boxes == ["1072", "358"]
        assert coordinator.ask("GET", f"{PAGE}stream?look=round", Cookie=cookie).status == 400

    def test_says_that_it_is_there_while_nothing_happens(self, idle: Coordinator, cookie: str) -> None:
        with Stream(idle, cookie) as stream:
            stream.until(lambda _: stream.kinds.count("beat") >= 2, "two beats")

    def test_is_given_to_so_many_and_to_the_next_when_one_has_left(self, idle: Coordinator, cookie: str) -> None:
        with ExitStack() as stack:
            streams = [stack.enter_context(Stream(idle, cookie)) for _ in range(MAX_VIEWERS)]
            assert {stream.status for stream in streams} == {200}
            assert idle.ask("GET", f"{PAGE}stream", Cookie=cookie).status == 429
            assert "tries again" in idle.ask("GET", f"{PAGE}ready", Cookie=cookie).error
        until(lambda: idle.ask("GET", f"{PAGE}ready", Cookie=cookie).status == 204, "room again")

    def test_shows_what_a_run_says_and_runs_none_of_it(
        self, coordinator: Coordinator, agents: tuple[Agent, Agent]
    ) -> None:
        log = Lines(coordinator.rundir.log / "evaluator-x.jsonl")
        log.append({"kind": "usage", "time": time.time(), "cpuSeconds": 1.0, "state": EVIL, "checkpoint": EVIL})
        log.close()
        told = coordinator.rundir.log / "coordinator.jsonl"
        with told.open("a") as file:
            file.write(json.dumps({"kind": "event", "time": 1.0, "level": "info", "text": EVIL}) + "\n")
        with Stream(coordinator, invited(coordinator)) as stream:
            stream.until(lambda parts: "alert(1)" in parts.get("events", ""), "the event")
        assert not any("<script" in part for part in stream.parts.values())


class TestACoordinatorThatComesAndGoes:
    def test_shows_the_whole_run_after_its_restart_to_those_who_were_invited_before(
        self, coordinator: Coordinator, agents: tuple[Agent, Agent]
    ) -> None:
        step(agents, 10)
        cookie = invited(coordinator)
        with Stream(coordinator, cookie) as stream:
            stream.until(lambda parts: "step 10" in parts.get("head", ""), "the step")
            agents[1].reason = "WorkerFailed"
            stream.until(lambda parts: "worker failed" in parts.get("generations", ""), "generation 2")
        coordinator.kill()
        coordinator.start()
        with Stream(coordinator, cookie) as stream:
            stream.until(lambda parts: "generation 1 with 2 replicas" in parts.get("events", ""), "the old events")
            stream.until(lambda parts: parts.get("generations", "").count("<tr") == 3, "both generations")

    def test_says_on_leaving_whether_the_job_is_over(
        self, coordinator: Coordinator, agents: tuple[Agent, Agent]
    ) -> None:
        cookie = invited(coordinator)
        with Stream(coordinator, cookie) as stream:
            stream.until(lambda parts: "head" in parts, "the page")
            coordinator.kill(signal.SIGTERM)
            stream.until_its_end()
            assert stream.over is False
        coordinator.start()
        coordinator.rundir.mark_done(CheckpointRef(name="step-000000100", step=100, generation=1))
        with Stream(coordinator, cookie) as stream:
            stream.until(lambda parts: "head" in parts, "the page")
            coordinator.kill(signal.SIGTERM)
            stream.until_its_end()
            assert stream.over is True
            assert "Succeeded" in stream.parts["head"]

    def test_ends_though_somebody_looks_who_does_not_read(self, tmp_path: Path) -> None:
        made = Coordinator(tmp_path).start()
        try:
            cookie = invited(made)
            with socket.create_connection(("127.0.0.1", made.port)) as deaf:
                deaf.sendall(f"GET {PAGE}stream HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {cookie}\r\n\r\n".encode())
                until(lambda: b"200 OK" in deaf.recv(1000, socket.MSG_PEEK), "the stream")
                assert made.kill(signal.SIGTERM) == 0
        finally:
            if made.process is not None and made.process.poll() is None:
                made.kill()
