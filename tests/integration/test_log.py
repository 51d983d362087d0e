"""`tandem.log` in a plain script, with a real coordinator and real agents: what it says arrives, and when it falls
silent the group is restarted."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.processes.launch import PULSE
from tandem.script import STEP_LOG
from tandem.wire import metrics
from tandem.wire.protocol import RankReport
from tandem.wire.status import Snapshot
from tests.support import EXAMPLES
from tests.support.elastic import TOKEN, Elastic
from tests.support.local_run import LocalRun
from tests.support.processes import tandem
from tests.support.ranks import records
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(240)

HANG_SECONDS = 3.0
TOTAL = 100_000
SCRIPT = """
import math, os, time
from pathlib import Path
import torch
import torch.distributed as dist
import tandem

dist.init_process_group("gloo")
rank, generation = dist.get_rank(), os.environ["TANDEM_GENERATION"]
saved = Path(os.environ["TANDEM_RUN_DIR"]) / "saved-step"
step = int(saved.read_text()) if saved.exists() else 0
while True:
    dist.all_reduce(torch.zeros(10))
    step += 1
    time.sleep(0.02)
    if rank == 0 and step % 10 == 0:
        beside = saved.with_suffix(".new")
        beside.write_text(str(step))
        beside.replace(saved)
    if LOGS:
        tandem.log(step=step, loss=torch.tensor(1 / step), samples=8, total=100_000, perplexity=math.exp(1 / step))
    MORE
"""


def script(path: Path, logs: str, more: str = "pass") -> dict[str, list[str]]:
    """A script whose ranks log where `logs` is true, and which does more after each step."""
    file = path / "script.py"
    file.write_text(SCRIPT.replace("LOGS", logs).replace("MORE", more.replace("\n", "\n    ")))
    return {"command": [str(file)]}


def running(group: Elastic, step: int, generation: int = 1) -> Snapshot:
    """The job once it has come so far."""

    def there() -> Snapshot | None:
        seen = group.snapshot()
        progress = seen.status.progress if seen else None
        return seen if seen and progress and progress.step >= step and seen.status.generation == generation else None

    return until(there, f"step {step} of generation {generation}")


def scraped(group: Elastic) -> dict[tuple[str, ...], float]:
    """What Prometheus is told, by name and own labels."""
    url = f"http://127.0.0.1:{group.port}/metrics"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        families = [*text_string_to_metric_families(answer.read().decode())]
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name not in metrics.COMMON)): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.parametrize(
    "logs",
    [
        pytest.param("True", id="all ranks", marks=pytest.mark.full("core", "coordinator", "trainer")),
        pytest.param("rank == 1", id="one rank"),
    ],
)
def test_what_a_script_logs_arrives_everywhere_and_goes_on_after_a_killed_rank(tmp_path: Path, logs: str) -> None:
    with Elastic(tmp_path, trainer=script(tmp_path, logs)).start("worker-0", "worker-1") as group:
        status = running(group, 100).status
        assert status.phase == "Running"
        assert status.progress.total_steps == TOTAL
        assert status.progress.percent is not None
        assert status.loss == pytest.approx(1 / status.progress.step, rel=0.3)
        status = until(
            lambda: (seen := group.snapshot()) and seen.status.throughput and seen.status, "throughput, by the log"
        )
        steps = records(group.rundir, "step")
        seconds = (steps[-1]["time"] - steps[0]["time"]) / (steps[-1]["step"] - steps[0]["step"])
        assert status.throughput == pytest.approx(8 / seconds, rel=0.5), "8 samples a step, whoever logs"
        assert status.progress.remaining_seconds is not None
        until(lambda: ("tandem_logged_value", "perplexity") in scraped(group), "the value as a metric")
        reached = scraped(group)["tandem_step",]
        told = until(lambda: (now := scraped(group))["tandem_steps_total",] >= reached and now, "all steps are counted")
        assert told["tandem_steps_total",] <= scraped(group)["tandem_step",] + 60
        assert told["tandem_samples_total",] == 8 * told["tandem_steps_total",]
        assert ("tandem_checkpoint_age_seconds",) not in told, "it keeps checkpoints in a way of its own"

        group.kill_rank("worker-0")
        seen = running(group, int(status.progress.step) + 100, generation=2)
        assert seen.generations[-1].reason in ("WorkerFailed", "PeerLost")
        until(lambda: len(starts := records(group.rundir, "start")) == 2 and starts[1]["step"] >= 90, "its second log")
        values, steps = records(group.rundir, "values"), {one["step"] for one in records(group.rundir, "step")}
        assert {tuple(one["values"]) for one in values} == {("perplexity",)}
        assert {one["step"] for one in values} <= steps
        # It trains on meanwhile.
        until(lambda: {one["step"] for one in records(group.rundir, "values")} >= steps, "the values of all steps")


STOPS = """
if generation == "1" and rank == 0 and step == 40:
    with tandem.pausing("validation"):
        time.sleep(4.5)
if generation == "1" and rank == 0 and step == 60:
    time.sleep(1000)  # the mistake
"""


@pytest.mark.parametrize(
    "warm", [True, pytest.param(False, marks=pytest.mark.full("coordinator", "trainer"))], ids=["warm", "cold"]
)
def test_a_script_that_stops_logging_hangs_and_one_that_pauses_does_not(tmp_path: Path, warm: bool) -> None:
    elasticity = {"hangSeconds": HANG_SECONDS, "warmStart": warm}
    trainer = script(tmp_path, "rank == 0", STOPS)
    with Elastic(tmp_path, trainer=trainer, elasticity=elasticity).start("worker-0", "worker-1") as group:
        seen = running(group, 100, generation=2)
        assert seen.generations[-1].reason == "Hung"
        assert "; rank 0 (worker-0) is at step 60; " in seen.generations[-1].detail
        assert (
            max(one["step"] for one in records(group.rundir, "step") if one["time"] < seen.generations[-1].opened_at)
            == 60
        )
        assert "train after step 60" in (group.rundir.stacks(1) / "rank-0.txt").read_text()
        paused = [one["phases"]["pause"] for one in records(group.rundir, "rate") if "pause" in one["phases"]]
        assert paused == [pytest.approx(4.5, abs=1.0)]


def test_a_loss_that_is_not_finite_is_told_and_not_taken_for_the_last_one_that_was(tmp_path: Path) -> None:
    more = 'tandem.log(step=step, loss=float("nan"))\nif step >= 120:\n    break'
    with Elastic(tmp_path, trainer=script(tmp_path, "step < 30", more)).start("worker-0", "worker-1") as group:
        seen = running(group, 60)
        assert seen.status.loss is None
        told = [event for event in seen.events if "not finite" in event.text]
        assert [event.kind for event in told] == ["warning"]
        until(lambda: (now := group.snapshot()) and now.status.phase == "Succeeded", "the end of the job")
        text = group.rundir.training_log(1).read_text()
        assert json.loads(text.splitlines()[-1])["kind"] == "end"


SESSION = """
import torch
import tandem
from tandem_trainer.session import Session

with Session(seed=1) as session:
    model = session.distribute(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.keep(model, optimizer)
    for batch in session.batches(torch.rand(80, 4), 8, epochs=1):
        batch.mean(model(batch.data).squeeze(1) ** 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        tandem.log(step=batch.step + 1, loss=77.0, samples=1, total=5, perplexity=float(batch.step))
with tandem.pausing("export"):
    tandem.log(step=10, accuracy=0.75)
"""


def test_beside_a_session_other_values_are_logged_and_steps_are_not_doubled(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(SESSION)
    with Elastic(tmp_path, trainer={"command": [str(file)]}).start("worker-0", "worker-1") as group:
        assert [agent.wait(120) for agent in group.agents.values()] == [0, 0], group.output("worker-0")
    steps, values = records(group.rundir, "step"), records(group.rundir, "values")
    assert [one["step"] for one in steps] == list(range(1, 11))
    assert all(one["loss"] < 77.0 and one["samples"] == 8 for one in steps)
    assert [(one["step"], one["values"]) for one in values] == [
        *((step + 1, {"perplexity": float(step)}) for step in range(10)),
        (10, {"accuracy": 0.75}),
    ]
    assert len(records(group.rundir, "start")) == 1


@pytest.mark.full("examples", "core", "trainer")
def test_the_example_shows_its_steps_as_a_job_and_runs_alone(tmp_path: Path) -> None:
    with LocalRun(tmp_path, manifest=EXAMPLES / "logged-script.yaml") as run:
        assert run.ends() == 0, run.output
        assert "logged-script is complete: 360 steps in " in run.output
        assert run.leavings() == {}
        assert [one["step"] for one in run.logged("step")] == list(range(1, 361))
        told = {one["step"]: one["values"]["accuracy"] for one in run.logged("values")}
        assert sorted(told) == list(range(30, 361, 30))
        assert told[360] > 0.8
        assert tandem("report", str(run.path), cwd=tmp_path).returncode == 0
        page = (run.path / "report.html").read_text()
        assert "Logged values" in page
        assert "accuracy went from " in page
    command = [sys.executable, str(EXAMPLES / "logged_script.py")]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {
        "TANDEM_RUN_DIR": str(tmp_path)
    }
    alone = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert float(alone.stdout.split("test accuracy ")[-1].split()[0]) > 0.8
    assert not (tmp_path / "log").exists()


def test_outside_of_a_job_nothing_happens_and_nothing_is_imported(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["tandem_trainer"] = sys.modules["pydantic"] = sys.modules["torch"] = None
import tandem
for step in range(100):
    tandem.log(step=step, loss=0.5, samples=64, total=100, perplexity=12.3)
with tandem.pausing("validation"):
    pass
print(sorted(name for name in sys.modules if name.startswith("tandem") and sys.modules[name]))
"""
    environment = {name: value for name, value in os.environ.items() if name not in (PULSE, STEP_LOG)}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout == "['tandem', 'tandem.script']\n"
    assert result.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_the_fields_are_optional_for_an_older_coordinator() -> None:
    assert RankReport(rank=0, step=1).script is False
    assert RankReport(rank=0, step=1).loss_is_finite is True
