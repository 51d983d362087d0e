"""Traces sent to a collector of OpenTelemetry, played by an HTTP server that decodes what it is sent: one that takes
them, one that is away, one that is slow, one that refuses."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.processes.launch import RUN_DIR, module_command
from tandem.rundir.layout import RunDir
from tandem.rundir.timeline import TimelineReader
from tandem.wire.trace import identified, root_id, traces
from tandem_coordinator import tracing
from tandem_coordinator.tracing import SpanSender, collector
from tests.support.collector import Collector
from tests.support.processes import tandem
from tests.support.waiting import until
from tests.support.worlds.simulated_run import make_run


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    server = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    monkeypatch.setattr(tracing, "TIMEOUT_SECONDS", 0.5)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run with a failure, whose job failed at last."""
    path = tmp_path_factory.mktemp("runs") / "broken"
    return RunDir(make_run(path, steps=300, kills={130: "WorkerFailed"}, end="failed"))


def values(span: Any) -> dict[str, Any]:
    kinds = ("string_value", "int_value", "double_value")
    return {
        pair.key: next(getattr(pair.value, kind) for kind in kinds if pair.value.HasField(kind))
        for pair in span.attributes
    }


def test_a_collector_receives_each_trace_with_the_ids_that_everybody_derives(played: Collector, broken: RunDir) -> None:
    count = SpanSender(broken, notes=False).send()
    found = traces(TimelineReader(broken).read())
    expected = {(trace.trace_id, root_id(trace)) for trace in found}
    expected |= {(trace.trace_id, own) for trace in found for own, _ in identified(trace)}
    assert {(span.trace_id.hex(), span.span_id.hex()) for span in played.spans} == expected
    assert len(played.spans) == count == len(expected)
    assert {*played.paths} == {"/v1/traces"}
    assert played.resources[0]["service.name"] == "tandem"

    failure = next(trace for trace in found if trace.kind == "failure")
    own = {span.span_id.hex(): span for span in played.spans if span.trace_id.hex() == failure.trace_id}
    root = own.pop(root_id(failure))
    assert (root.name, root.parent_span_id, root.status.code) == ("failure", b"", 2)
    assert values(root)["tandem.change.reason"] == "WorkerFailed"
    assert values(root)["tandem.generation"] == 2
    assert {span.parent_span_id for span in own.values()} == {root.span_id}
    parts = [own[identity] for identity, span in identified(failure) if span in failure.spans]
    ends = [root.start_time_unix_nano, *(span.end_time_unix_nano for span in parts)]
    assert [span.start_time_unix_nano for span in parts] == ends[:-1]
    assert ends[-1] == root.end_time_unix_nano
    saves = [values(span) for span in own.values() if span.name == "save"]
    assert saves, "work is sent, too"
    assert all(save["tandem.checkpoint"].startswith("step-") for save in saves)


def test_what_is_not_over_is_sent_when_it_is(played: Collector, tmp_path: Path) -> None:
    rundir = RunDir(make_run(tmp_path / "run", steps=300, kills={130: "WorkerFailed"}, stop_after=200))
    sender = SpanSender(rundir, notes=True)
    assert sender.send() > 0
    assert [span.name for span in played.spans].count("training") == 1, "that of the second goes on"
    assert sender.send() == 0
    with rundir.coordinator_log.open("a") as log:
        log.write(json.dumps({"kind": "closed", "time": 2e9, "generation": 2, "reason": "Hung"}) + "\n")
    assert sender.send() == 1
    # A coordinator that starts again.
    assert SpanSender(rundir, notes=True).send() == 0
    assert SpanSender(rundir, notes=False).send() == len(played.spans) / 2


@pytest.mark.parametrize("trouble", ["away", "slow", "refuses", "is full"])
def test_a_collector_in_trouble_gets_everything_later(played: Collector, broken: RunDir, trouble: str) -> None:
    if trouble == "refuses":
        played.code = 400
    elif trouble == "slow":
        played.seconds = 2.0
    elif trouble == "is full":
        played.code = 503
    else:
        played.shutdown()
        played.server_close()
    sender = SpanSender(broken, notes=False)
    began = time.monotonic()
    with pytest.raises(ConnectionError) as error:
        sender.send()
    assert time.monotonic() - began < 30, "it gives up in time"
    assert "\n" not in str(error.value)
    assert str(error.value)
    assert not played.spans or trouble == "slow"
    played.code, played.seconds = 200, 0.0
    played.spans.clear()
    back = Collector(played.server_address[1]) if trouble == "away" else played
    try:
        assert sender.send() == len(back.spans) > 0
    finally:
        if back is not played:
            back.shutdown()
            back.server_close()


def test_the_process_reports_a_collector_that_is_away_and_sends_when_it_is_back(
    played: Collector, tmp_path: Path
) -> None:
    rundir = RunDir(make_run(tmp_path / "run", steps=100))
    played.code = 400
    process = subprocess.Popen(
        module_command("tandem_coordinator.tracing"),
        env={**os.environ, RUN_DIR: str(rundir.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert json.loads(process.stdout.readline())["failing"].startswith(f"{played.url}: ")
        played.code = 200
        until(lambda: len(played.spans) > 0, "spans")
        while json.loads(process.stdout.readline())["failing"]:
            pass
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.stdin.close()
        process.stdout.close()
        process.wait()


def test_it_ends_with_its_parent(played: Collector, tmp_path: Path) -> None:
    rundir = RunDir(make_run(tmp_path / "run", steps=50))
    process = subprocess.Popen(
        module_command("tandem_coordinator.tracing"),
        env={**os.environ, RUN_DIR: str(rundir.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) != 0


def test_it_is_off_unless_a_collector_is_named() -> None:
    assert collector({}) == ""
    assert collector({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}) == ""
    assert collector({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}) == "http://a"
    both = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b/v1/traces"}
    assert collector(both) == "http://b/v1/traces"


def test_the_command_sends_a_finished_run(played: Collector, broken: RunDir) -> None:
    sent = tandem("trace", str(broken.path), "--otlp", played.url)
    assert sent.returncode == 0, sent.stderr
    assert sent.stdout == f"sent {len(played.spans)} spans to {played.url}\n"
    assert not broken.tracking.exists(), "it notes nothing in a directory that may be a copy"
    played.code = 400
    refused = tandem("trace", str(broken.path), "--otlp", played.url)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: the traces were not sent: {played.url}: ")
    wrong = tandem("trace", str(broken.path), "--otlp", "localhost")
    assert wrong.stderr == "error: --otlp takes the URL of a collector, such as http://localhost:4318, not localhost\n"
