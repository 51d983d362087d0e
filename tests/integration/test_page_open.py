"""`tandem open` as a user calls it: for a run on this machine, and through a kubectl that answers as the test wants."""

import base64
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import fake_kubectl as fakes
from tests.support.coordinator_process import Coordinator
from tests.support.elastic import TOKEN
from tests.support.fake_kubectl import FakeKubectl
from tests.support.local_run import LocalRun
from tests.support.manifests import job, run_directory
from tests.support.page_client import Stream
from tests.support.processes import TANDEM, environment, tandem
from tests.support.waiting import SECONDS, until

ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)/open#([A-Za-z0-9_-]+)")
JOBS = "distributedtrainingjobs.tandem.dev"
FORBIDDEN = 'Error from server (Forbidden): %s is forbidden: User "ann" cannot %s in the namespace "team"'


@pytest.fixture
def fake(tmp_path: Path) -> FakeKubectl:
    (tmp_path / "bin").mkdir()
    made = FakeKubectl(tmp_path / "bin")
    made.answers("get", JOBS, "digits", says=fakes.job(phase="Running"))
    made.answers("get", "secret", "digits-token", says={"data": {"token": base64.b64encode(TOKEN.encode()).decode()}})
    return made


def opened(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`tandem open`, where no browser can be."""
    return tandem("open", *words, cwd=cwd, variables={"BROWSER": "false %s", **variables})


def refused(answer: subprocess.CompletedProcess[str]) -> str:
    assert answer.returncode == 2, answer.stdout
    assert "Traceback" not in answer.stderr
    return " ".join(answer.stderr.split())


def opens(coordinator: Coordinator, said: str) -> None:
    """What was said is an address that opens the page of this coordinator, once."""
    found = ADDRESS.search(said)
    assert found is not None, said
    assert int(found[1]) == coordinator.port
    traded = coordinator.ask("POST", "/open", {"word": found[2]})
    assert traded.status == 200
    with Stream(coordinator, traded.cookie) as stream:
        stream.until(lambda parts: "digits" in parts.get("head", ""), "the page")


def published(coordinator: Coordinator, run: Path) -> Path:
    """A run directory that says where its coordinator is, as that of `tandem run` does."""
    run_directory(run, job())
    (run / "endpoint.json").write_text(json.dumps({"url": f"http://127.0.0.1:{coordinator.port}", "token": TOKEN}))
    return run


class TestARunOnThisMachine:
    def test_is_opened_by_an_address_that_is_good_for_once(self, coordinator: Coordinator, tmp_path: Path) -> None:
        run = published(coordinator, tmp_path / "here")
        said = opened(str(run), "--print", cwd=tmp_path)
        assert said.returncode == 0, said.stderr
        assert TOKEN not in said.stdout + said.stderr
        opens(coordinator, said.stdout)

    def test_is_opened_in_the_users_own_browser(self, coordinator: Coordinator, tmp_path: Path) -> None:
        browser = tmp_path / "browser"
        browser.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/opened\n')
        browser.chmod(0o755)
        run = published(coordinator, tmp_path / "here")
        said = opened(str(run), cwd=tmp_path, BROWSER=f"{browser} %s")
        assert said.stdout == f"opened http://127.0.0.1:{coordinator.port}\n"
        opens(coordinator, (tmp_path / "opened").read_text())

    def test_is_named_by_an_address_where_there_is_no_browser(self, coordinator: Coordinator, tmp_path: Path) -> None:
        said = opened(str(published(coordinator, tmp_path / "here")), cwd=tmp_path, PATH=str(tmp_path))
        assert "there is no browser here" in said.stdout
        opens(coordinator, said.stdout)

    def test_needs_no_name_where_it_is_the_only_one(self, coordinator: Coordinator, tmp_path: Path) -> None:
        published(coordinator, tmp_path / "runs" / "digits")
        opens(coordinator, opened("--print", cwd=tmp_path).stdout)
        opens(coordinator, opened("digits", "--print", cwd=tmp_path).stdout)
        published(coordinator, tmp_path / "runs" / "other")
        message = refused(opened("--print", cwd=tmp_path))
        assert "several runs are active: runs/digits, runs/other" in message

    def test_that_is_over_is_answered_with_what_shows_it(self, tmp_path: Path) -> None:
        run_directory(tmp_path / "runs" / "digits", job())
        assert "tandem report runs/digits" in refused(opened("runs/digits", cwd=tmp_path))
        assert "does not exist" in refused(opened("runs/digit", cwd=tmp_path))
        assert "no run is active here" in refused(opened(cwd=tmp_path))

    def test_whose_coordinator_is_gone_is_said_to_be_so(self, tmp_path: Path) -> None:
        run = run_directory(tmp_path / "here", job()).path
        (run / "endpoint.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "token": "x"}))
        assert "does not answer" in refused(opened(str(run), cwd=tmp_path))
        (run / "endpoint.json").write_text("{")
        assert "cannot be read" in refused(opened(str(run), cwd=tmp_path))


@contextmanager
def started(fake: FakeKubectl, folder: Path, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    with (folder / "said.txt").open("w") as said, (folder / "told.txt").open("w") as told:
        process = subprocess.Popen(
            [TANDEM, "open", "digits", "--print", *words],
            cwd=folder,
            env=environment({"BROWSER": "false %s", "PATH": fake.path}),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=told,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(SECONDS)


def forwards(fake: FakeKubectl, coordinator: Coordinator) -> None:
    line = f"Forwarding from 127.0.0.1:{coordinator.port} -> 7070\n"
    fake.answers("port-forward", says=line, stays=True)


class TestAJobOnACluster:
    def test_is_reached_through_kubectl_until_ctrl_c(
        self, coordinator: Coordinator, fake: FakeKubectl, tmp_path: Path
    ) -> None:
        forwards(fake, coordinator)
        with started(fake, tmp_path, "-n", "team") as process:
            until(lambda: ADDRESS.search((tmp_path / "said.txt").read_text()), "the address")
            opens(coordinator, (tmp_path / "said.txt").read_text())
            until(lambda: "Ctrl-C closes it" in (tmp_path / "told.txt").read_text(), "the advice")
            process.send_signal(signal.SIGINT)
            assert process.wait(SECONDS) == 130
        asked = next(call.words for call in fake.asked if "port-forward" in call.words)
        assert asked[0] == "--namespace=team"
        assert asked[-2:] == ["service/digits-coordinator", ":http"]
        assert TOKEN not in (tmp_path / "said.txt").read_text() + (tmp_path / "told.txt").read_text()

    def test_keeps_its_port_when_the_coordinator_is_replaced_and_ends_with_the_job(
        self, coordinator: Coordinator, fake: FakeKubectl, tmp_path: Path
    ) -> None:
        forwards(fake, coordinator)
        told = tmp_path / "told.txt"
        with started(fake, tmp_path) as process:
            until(lambda: "is forwarded to digits" in told.read_text(), "the way")
            coordinator.kill()
            until(lambda: "does not answer; trying again" in told.read_text(), "that it is away")
            until(lambda: any(f"{coordinator.port}:http" in call.words for call in fake.asked), "a new way")
            coordinator.start()
            until(lambda: "answers again" in told.read_text(), "that it is back")
            fake.answers("get", JOBS, "digits", says=fakes.job(phase="Succeeded"))
            coordinator.kill()
            assert process.wait(SECONDS) == 0
            assert "digits has ended (Succeeded)" in told.read_text()

    def test_that_has_ended_has_no_page(self, fake: FakeKubectl, tmp_path: Path) -> None:
        fake.answers("get", JOBS, "digits", says=fakes.job(phase="Failed"))
        message = refused(opened("digits", cwd=tmp_path, PATH=fake.path))
        assert "digits has ended (Failed)" in message
        assert "tandem status digits" in message

    def test_whose_secret_may_not_be_read_says_which_right_is_missing(self, fake: FakeKubectl, tmp_path: Path) -> None:
        fake.answers("get", "secret", "digits-token", complains=FORBIDDEN % ('secrets "digits-token"', 'get "secrets"'))
        message = refused(opened("digits", cwd=tmp_path, PATH=fake.path))
        assert "permission to `get` this one of the `secrets`" in message
        assert 'User "ann"' in message

    def test_that_may_not_be_forwarded_says_which_rights_are_missing(self, fake: FakeKubectl, tmp_path: Path) -> None:
        fake.answers("port-forward", complains=FORBIDDEN % ('pods "x"', 'create resource "pods/portforward"'))
        message = refused(opened("digits", cwd=tmp_path, PATH=fake.path))
        assert "to `create` `pods/portforward`" in message

    def test_without_a_secret_yet_says_who_makes_it(self, fake: FakeKubectl, tmp_path: Path) -> None:
        fake.answers("get", "secret", "digits-token", complains='Error from server (NotFound): secrets "x" not found')
        assert "check that the operator is running" in refused(opened("digits", cwd=tmp_path, PATH=fake.path))


@pytest.mark.full("core", "cli", "coordinator")
@pytest.mark.timeout(400)
def test_a_real_run_says_how_to_open_its_page_and_shows_its_end(tmp_path: Path) -> None:
    words = ("--set", "trainer.loop.epochs=40", "--set", "evaluators.processesPerReplica=1")
    with LocalRun(tmp_path, *words) as run:
        run.reaches(10)
        assert f"live page: tandem open {run.path}" in run.output
        found = ADDRESS.search(opened(str(run.path), "--print", cwd=tmp_path).stdout)
        port = int(found[1])
        coordinator = Coordinator.__new__(Coordinator)
        coordinator.port = port
        traded = coordinator.ask("POST", "/open", {"word": found[2]})
        with Stream(coordinator, traded.cookie, "narrow", json.loads(traded.body)["page"]) as stream:
            stream.until(lambda parts: "Training loss" in parts.get("losses", ""), "the loss")
            stream.until(lambda parts: "evaluated" in parts.get("checkpoints", ""), "an evaluation")
            stream.until_its_end()
        assert stream.over is True
        assert "Succeeded" in stream.parts["head"]
        assert "step 920 of 920" in stream.parts["head"]
        assert run.ends() == 0
        assert TOKEN not in run.output
