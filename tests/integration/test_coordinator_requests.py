"""What a coordinator answers to requests that are wrong, hostile or too large, and how it starts and stops."""

import gzip
import http.client
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from tandem.job.resource import DistributedTrainingJob
from tandem.processes import launch
from tandem.processes.exitcode import ExitCode
from tandem.rundir.layout import RunDir
from tandem.wire.coordinator_client import CoordinatorRefused, RequestCancelled
from tandem.wire.protocol import BRIEF_PATH, Sync
from tandem.wire.reasons import Reason
from tests.support.coordinator_process import Agent, Coordinator, CoordinatorProcess
from tests.support.elastic import TOKEN
from tests.support.manifests import images
from tests.support.waiting import SECONDS, until

BEFORE_IT_IS_ANSWERED = 45.0
"""A coordinator holds a heartbeat of a minute for longer."""


GARBAGE = [
    (b"", "the body is not JSON"),
    (b"{", "the body is not JSON"),
    (b"[" * 10_000, "the body is not JSON"),
    (b"[]", "the body"),
    (b"{}", "replica"),
    (b"\xff\xfe", "the body is not JSON"),
    (json.dumps({"replica": "../../etc"}).encode(), "replica"),
    (json.dumps({"replica": "a" * 300}).encode(), "replica"),
]


@pytest.mark.parametrize(("body", "complaint"), GARBAGE)
def test_garbage_is_answered_with_a_sentence(idle: Coordinator, body: bytes, complaint: str) -> None:
    status, answer = idle.raw("POST", "/v1/sync", body)
    assert status == 400
    assert complaint in answer["error"]


def test_impossible_agents_are_refused(idle: Coordinator) -> None:
    sound = {
        "replica": "worker-0",
        "incarnation": "a",
        "address": "10.0.0.1",
        "port": 4000,
        "processes": 1,
        "state": "running",
        "generation": 1,
    }
    for wrong, complaint in [
        ({"processes": 2}, "every replica of this job has 1 processes"),
        ({"generation": None}, "must name the generation"),
        ({"generation": 2**50}, "was never handed out"),
        ({"port": 0}, "port"),
        ({"address": "evil host"}, "address"),
        ({"ranks": [{"rank": 0, "step": 1}] * 65}, "ranks"),
        ({"ranks": [{"rank": 0, "step": 1}] * 2}, "has 1 processes and reports 2 ranks"),
        ({"ranks": [{"rank": 0, "step": 1, "loss": "NaN"}]}, "ranks.0.loss"),
    ]:
        status, answer = idle.raw("POST", "/v1/sync", json.dumps(sound | wrong).encode())
        assert status == 400, wrong
        assert complaint in answer["error"]
    assert idle.snapshot().members == []


def test_who_gives_up_a_request_knows_that_the_coordinator_is_there(idle: Coordinator) -> None:
    """An agent that ends gives up its heartbeat, and then says whether it has finished."""
    wish = Sync(
        replica="worker-9", incarnation="a", address="127.0.0.1", port=4000, processes=1, state="joining", node="node-1"
    )
    with idle.client() as client:
        client.status()
        with pytest.raises(RequestCancelled):
            client.sync(wish, until=lambda *_: False)
        assert client.has_answered
        client.sync(wish.model_copy(update={"state": "leaving", "finished": True}))


def test_no_more_agents_are_taken_in_than_the_job_can_have(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path).start()
    most = 2 * coordinator.rundir.read_job().spec.workers.most + 16
    agents = [Agent(coordinator, f"worker-{number}") for number in range(most)]
    until(lambda: len(coordinator.snapshot().members) == most, "all that it can have")
    wish = {"replica": "one-more", "incarnation": "a", "address": "10.0.0.1", "port": 4000, "processes": 1}
    status, answer = coordinator.raw("POST", "/v1/sync", json.dumps(wish | {"state": "joining"}).encode())
    assert status == 503
    assert f"there are {most} agents already" in answer["error"]
    for agent in agents:
        agent.vanish()
    coordinator.kill()


def test_a_large_request_is_refused(idle: Coordinator) -> None:
    status, answer = idle.raw("POST", "/v1/sync", b" " * 70_000)
    assert status == 413
    assert "65536 bytes" in answer["error"]


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xe9"])
@pytest.mark.parametrize("path", ["/status", "/v1/brief", "/metrics", "/v1/sync", "/v1/target", "/nowhere"])
def test_without_the_token_nothing_is_answered(idle: Coordinator, path: str, header: str) -> None:
    status, answer = idle.raw("GET" if "v1" not in path else "POST", path, Authorization=header)
    assert status == 401
    assert "token" in answer["error"]
    assert TOKEN not in answer["error"]


def packed(port: int, path: str, token: str = "") -> tuple[int, str | None]:
    """The answer to a body that is packed: its status, and what becomes of the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    headers = {"Content-Encoding": "gzip", **({"Authorization": f"Bearer {token}"} if token else {})}
    connection.request("POST", path, gzip.compress(b"{}"), headers)
    response = connection.getresponse()
    connection.close()
    return response.status, response.headers["Connection"]


@pytest.mark.parametrize("path", ["/v1/sync", "/status", "/healthz", "/open", "/page/x"])
def test_no_body_is_unpacked_and_no_connection_of_a_stranger_goes_on(idle: Coordinator, path: str) -> None:
    assert packed(idle.port, path, "wrong") == (401 if path in ("/v1/sync", "/status") else 415, "close")


def test_no_body_is_unpacked_for_whom_the_coordinator_knows(idle: Coordinator) -> None:
    assert packed(idle.port, "/v1/sync", TOKEN) == (415, None)


def test_the_port_of_metrics_is_for_strangers(tmp_path: Path) -> None:
    found, port_file = Coordinator(tmp_path), tmp_path / "ports"
    command = launch.coordinator_command("127.0.0.1", 0, port_file)
    found.process = CoordinatorProcess(found.rundir, [*command, "--metrics-port", "0"])
    try:
        ports = until(lambda: port_file.exists() and port_file.read_text().split(), "its start")
        assert packed(int(ports[1]), "/metrics") == (415, "close")
    finally:
        found.kill()


def test_another_token_is_as_good_if_the_coordinator_was_given_its_digest(tmp_path: Path) -> None:
    digest = launch.token_digest("the operator's")
    found = Coordinator(tmp_path).start(**{launch.TOKEN_DIGEST: digest})
    try:
        for token in (TOKEN, "the operator's"):
            with found.client(token) as client:
                assert client.status().job == "digits"
        with found.client(digest) as client, pytest.raises(CoordinatorRefused, match="token"):
            client.status()
    finally:
        found.kill()


def test_liveness_needs_no_token_and_other_paths_do_not_exist(idle: Coordinator) -> None:
    assert idle.raw("GET", "/healthz", Authorization="")[0] == 200
    assert idle.raw("GET", "/nowhere")[0] == 404
    with idle.client("wrong") as client, pytest.raises(CoordinatorRefused, match="token"):
        client.status()


def test_a_heartbeat_that_says_nothing_new_is_held_and_then_answered(
    coordinator: Coordinator, agents: tuple[Agent, Agent]
) -> None:
    agents[0].vanish()
    says_nothing_new = agents[0].sync("running", agents[0].membership)
    with coordinator.client() as client:
        began = time.monotonic()
        assert client.sync(says_nothing_new).order == "run"
        # For how long at most is shown in time that jumps (tests/unit/coordinator/test_coordinator_heartbeats.py).
        assert time.monotonic() - began > 0.75 * coordinator.rundir.read_job().spec.elasticity.heartbeat_seconds


def test_the_operator_is_told_in_one_word_why_the_job_has_failed(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path).start()
    coordinator.rundir.mark_failed(Reason.CHECKPOINT_DOES_NOT_FIT, "layers differ", ExitCode.CONFIGURATION)
    answer = until(
        lambda: (found := coordinator.raw("GET", BRIEF_PATH)[1])["status"]["phase"] == "Failed" and found, "it"
    )
    assert (answer["reason"], answer["status"]["message"]) == ("CheckpointDoesNotFit", "layers differ")
    coordinator.kill()


def test_told_to_stop_it_answers_what_it_holds_and_stops(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, elasticity={"heartbeatSeconds": 60.0, "lostAfterSeconds": 600.0}).start()
    agent = Agent(coordinator, "worker-0")
    until(lambda: coordinator.snapshot().members, "an agent whose heartbeat is held")
    coordinator.process.send_signal(signal.SIGTERM)
    assert coordinator.process.wait(BEFORE_IT_IS_ANSWERED) == 0
    agent.vanish()


def refusal(rundir: RunDir, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-m", "tandem_coordinator", "--host", "127.0.0.1", "--port", "0", *arguments]
    process = CoordinatorProcess(rundir, command, **environment)
    _, complaint = process.communicate()
    assert process.returncode == ExitCode.USAGE
    assert b"Traceback" not in complaint
    assert complaint.count(b"\n") == 1
    return complaint.decode()


def test_what_keeps_it_from_starting_is_one_sentence(tmp_path: Path) -> None:
    rundir = Coordinator(tmp_path).rundir
    assert "set TANDEM_TOKEN" in refusal(rundir, TANDEM_TOKEN="")
    assert "16 or more" in refusal(rundir, TANDEM_TOKEN="letmein")
    assert "set TANDEM_RUN_DIR" in refusal(rundir, TANDEM_RUN_DIR="")
    assert "70000 is not a port" in refusal(rundir, "--port", "70000")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use" in refusal(rundir, "--port", str(port))
    rundir.job_file.write_text("{}")
    assert "job.json is not a job" in refusal(rundir)
    rundir.job_file.unlink()
    assert "job.json is missing" in refusal(rundir)


def test_a_job_that_comes_in_a_file_is_recorded_for_all_others(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path)
    given = coordinator.rundir.read_job()
    coordinator.rundir.job_file.rename(tmp_path / "given.json")
    with mock.patch.dict(os.environ, {launch.JOB: str(tmp_path / "given.json")}):
        coordinator.start()
    assert coordinator.kill(signal.SIGTERM) == 0
    assert coordinator.rundir.read_job() == given


def test_a_file_with_another_number_of_workers_is_recorded_anew(tmp_path: Path) -> None:
    rundir = Coordinator(tmp_path, workers={"replicas": 1}).rundir
    changed = Coordinator(tmp_path / "changed", workers={"replicas": 3}).rundir.job_file
    port_file = tmp_path / "port"
    command = [*launch.coordinator_command("127.0.0.1", 0, port_file), "--job", str(changed)]
    process = CoordinatorProcess(rundir, command)
    try:
        until(port_file.exists, "the coordinator's start")
        assert rundir.read_job().spec.workers.replicas == 3
    finally:
        process.kill()
        process.wait(SECONDS)


def test_a_run_that_stays_complete_keeps_the_training_that_made_it(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path)
    rundir, given = coordinator.rundir, coordinator.rundir.read_job().dump()
    for uid, epochs, replicas in (("first", 100, 2), ("second", 4, 3), ("third", 8, 3), ("fourth", 101, 3)):
        given["metadata"]["annotations"] = {launch.UID_ANNOTATION: uid}
        given["spec"]["trainer"]["loop"] = {"epochs": epochs}
        given["spec"]["workers"]["replicas"] = replicas
        (tmp_path / "given.json").write_text(json.dumps(given))
        if uid == "first":
            rundir.write_job(DistributedTrainingJob.parse(given))
            rundir.mark_done(None)
            continue
        with mock.patch.dict(os.environ, {launch.JOB: str(tmp_path / "given.json")}):
            coordinator.start()
        assert coordinator.kill(signal.SIGTERM) == 0
        goes_on = epochs > 100
        assert (rundir.done() is None) == goes_on, f"{epochs} epochs after 100 that were made"
        recorded = rundir.read_job().spec
        assert (recorded.trainer.settings_of_loop.epochs, recorded.workers.replicas) == (101 if goes_on else 100, 3)


def test_another_job_of_that_name_on_the_volume_of_one_that_failed_is_a_new_try(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path)
    rundir = coordinator.rundir
    (rundir.checkpoints / "step-000000500").mkdir()
    first = rundir.read_job().dump()
    for uid, stays in (("first", True), ("first", True), ("second", False)):
        first["metadata"]["annotations"] = {launch.UID_ANNOTATION: uid}
        (tmp_path / "given.json").write_text(json.dumps(first))
        if uid == "first":
            rundir.write_job(DistributedTrainingJob.parse(first))
            rundir.mark_failed("RestartBudgetSpent", "too many failures", 1)
        with mock.patch.dict(os.environ, {launch.JOB: str(tmp_path / "given.json")}):
            coordinator.start()
        assert coordinator.kill(signal.SIGTERM) == 0
        assert (rundir.failed() is not None) == stays
    assert json.loads((rundir.log / "failed-1.json").read_text())["reason"] == "RestartBudgetSpent"


def test_a_file_that_is_no_job_or_another_job_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    rundir = Coordinator(tmp_path).rundir
    before = rundir.job_file.read_bytes()
    missing = tmp_path / "missing.json"
    assert f"{missing}" in refusal(rundir, "--job", str(missing))
    wrong = tmp_path / "wrong.json"
    wrong.write_text(before.decode().replace('"replicas"', '"replica"'))
    assert "did you mean replicas?" in refusal(rundir, "--job", str(wrong))
    (rundir.checkpoints / "step-000000500").mkdir()
    other = Coordinator(tmp_path / "other", trainer=images({"seed": 7}))
    complaint = refusal(rundir, "--job", str(other.rundir.job_file))
    assert f"{rundir.path} holds step-000000500, which this job cannot continue" in complaint
    assert "(spec.trainer.loop.seed: there 0, now 7)" in complaint
    assert "set spec.checkpoint.onExisting to Fresh" in complaint
    assert "(tandem submit FILE --set spec.checkpoint.onExisting=Fresh; " in complaint
    assert rundir.job_file.read_bytes() == before


def test_what_a_job_lacks_on_its_volume_ends_it_before_a_worker_starts_and_never_once_it_runs(tmp_path: Path) -> None:
    weights = str(tmp_path / "weights.safetensors")
    trainer = images({"initialWeights": weights})
    coordinator = Coordinator(tmp_path, trainer=trainer)
    rundir, given = coordinator.rundir, coordinator.rundir.read_job().dump()
    for uid, lacks in (("first", True), ("second", False)):
        given["metadata"]["annotations"] = {launch.UID_ANNOTATION: uid}
        (tmp_path / "given.json").write_text(json.dumps(given))
        if not lacks:
            # The same object that has been taken already, as after its coordinator was killed.
            rundir.write_job(DistributedTrainingJob.parse(given))
            rundir.set_aside_failure()
        with mock.patch.dict(os.environ, {launch.JOB: str(tmp_path / "given.json")}):
            coordinator.start()
        assert coordinator.kill(signal.SIGTERM) == 0
        assert (rundir.failed() is not None) == lacks
        if lacks:
            told = rundir.failed() or {}
            assert (told["reason"], told["exitCode"]) == ("ConfigurationError", 78)
            assert told["message"] == f"spec.trainer.loop.initialWeights: there is no file {weights}"


@pytest.mark.parametrize("is_saved", [False, True])
def test_another_object_takes_what_saved_nothing_and_with_fresh_also_what_did(tmp_path: Path, is_saved: bool) -> None:
    """The same one, whose coordinator starts again, goes on."""
    coordinator = Coordinator(tmp_path)
    rundir = coordinator.rundir
    given = rundir.read_job().dump()
    for uid, seed in (("first", 0), ("second", 7), ("second", 7), ("second.1", 7)):
        given["metadata"]["annotations"] = {launch.UID_ANNOTATION: uid}
        given["spec"]["trainer"]["loop"] = {"seed": seed}
        given["spec"]["checkpoint"] = {"onExisting": "Fresh"}
        (tmp_path / "given.json").write_text(json.dumps(given))
        if uid == "first":
            rundir.write_job(DistributedTrainingJob.parse(given))
            rundir.mark_failed("WorkerFailed", "a typo", 1)
            if is_saved:
                (rundir.checkpoints / "step-000000500").mkdir()
            continue
        with mock.patch.dict(os.environ, {launch.JOB: str(tmp_path / "given.json")}):
            coordinator.start()
        (rundir.checkpoints / "step-000000100").mkdir(exist_ok=True)
        assert coordinator.kill(signal.SIGTERM) == 0
        assert rundir.failed() is None
    assert rundir.checkpoint_names() == ["step-000000100"]
    earlier = RunDir(rundir.path / ("previous" if is_saved else "attempt"))
    assert (earlier.failed() or {})["message"] == "a typo"
    assert earlier.checkpoint_names() == (["step-000000500"] if is_saved else [])
