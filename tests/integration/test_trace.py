"""The trace of a failure of real processes: it names the cause, and its spans add up to the time without a step."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.rundir.layout import RunDir
from tests.support.collector import Collector
from tests.support.local_run import LocalRun
from tests.support.processes import tandem
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(300)
FULL = pytest.mark.full("core", "coordinator", "trainer")
LONG = ["--set", "trainer.loop.epochs=30", "--set", "checkpoint.everySteps=50", "--set", "evaluators.replicas=0"]
PARTS = ["unlogged steps", "stop of ranks", "rendezvous", "model and data", "first step"]


def logged(run_dir: RunDir, generation: int, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, run_dir.training_log(generation).read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize("regroup", [False, pytest.param(True, marks=FULL)], ids=["restart", "regroup"])
def test_a_killed_rank_is_named_and_its_spans_add_up_to_the_outage(tmp_path: Path, regroup: bool) -> None:
    collector = Collector()
    words = [*LONG, *(["--set", "elasticity.onMembershipChange=Regroup"] if regroup else [])]
    with LocalRun(tmp_path, *words, variables={"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}) as run:
        run.reaches(80)
        rank = run.rank_of("worker-1")
        assert rank is not None
        killed_at = time.time()
        rank.kill()
        until(lambda: run.run_dir.training_log(2).exists() and logged(run.run_dir, 2, "step"), "steps after the kill")
        assert run.process.wait(200) == 0
    shown = tandem("trace", str(run.path), "--generation", "2", "-o", "json")
    assert shown.returncode == 0, shown.stderr
    (trace,) = json.loads(shown.stdout)["traces"]
    assert (trace["kind"], trace["reason"]) == ("failure", "WorkerFailed")
    assert "rank 1 (worker-1) was killed by signal 9" in trace["detail"]

    # The outage, from the lines of the two logs themselves.
    started = logged(run.run_dir, 2, "start")[0]["time"]
    steps = [line["time"] for number in (1, 2) for line in logged(run.run_dir, number, "step")]
    before, after = (max(at for at in steps if at < started), min(at for at in steps if at >= started))
    seconds = {span["name"]: span["seconds"] for span in trace["spans"]}
    assert sum(seconds.values()) == pytest.approx(after - before, rel=0.02)
    assert seconds.get("not accounted", 0.0) <= 0.02 * (after - before)
    assert {*PARTS, "regroup" if regroup else "restore"} <= seconds.keys(), seconds
    # Detection takes less than a millisecond where the agent says so at once, and is left out then.
    detected = next(span["begin"] for span in trace["spans"] if span["name"] == "stop of ranks")
    assert killed_at <= detected, "what was killed cannot be found to be gone before"
    text = tandem("trace", str(run.path), "--generation", "2").stdout
    assert "failure: rank 1 (worker-1) was killed by signal 9" in text

    # The coordinator has sent the same to a collector, with the same ids.
    own = [span for span in collector.spans if span.trace_id.hex() == trace["traceId"]]
    (root,) = [span for span in own if span.span_id.hex() == trace["rootSpanId"]]
    assert (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9 == pytest.approx(trace["seconds"], abs=1e-3)
    assert {span["spanId"] for span in trace["spans"]} <= {span.span_id.hex() for span in own}
    assert len(collector.spans) == len({span.span_id for span in collector.spans}), "nothing is sent twice"
    collector.shutdown()
    collector.server_close()


@pytest.mark.parametrize(
    ("what", "reason"), [("stops", "Hung"), pytest.param("loses its agent", "MemberLost", marks=FULL)]
)
def test_the_time_until_a_failure_is_noticed_is_that_of_its_detection(tmp_path: Path, what: str, reason: str) -> None:
    with LocalRun(tmp_path, *LONG, "--set", "elasticity.hangSeconds=5") as run:
        run.reaches(80)
        process = run.rank_of("worker-1") if what == "stops" else run.of("worker-1")
        assert process is not None
        if what == "stops":
            process.suspend()
        else:
            process.kill()
        until(lambda: run.run_dir.training_log(2).exists() and logged(run.run_dir, 2, "step"), "steps afterwards")
        shown = tandem("trace", str(run.path), "--generation", "2", "-o", "json")
    (trace,) = json.loads(shown.stdout)["traces"]
    assert trace["reason"] == reason
    assert "worker-1" in trace["detail"]
    seconds = {span["name"]: span["seconds"] for span in trace["spans"]}
    assert sum(seconds.values()) == pytest.approx(trace["seconds"], rel=1e-6)
    assert seconds.get("not accounted", 0.0) <= 0.02 * trace["seconds"]
    if what == "stops":
        assert seconds["detection"] >= 4.0, seconds
    else:
        assert {"unlogged steps", "detection"} & seconds.keys()
