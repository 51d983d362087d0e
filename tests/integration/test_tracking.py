"""Jobs of real processes that are tracked by MLflow: training never waits for it, and in the end it has everything."""

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.job.tracking import QUIET, SQLITE
from tandem.processes.launch import POD, RUN_DIR
from tandem.rundir.layout import RunDir
from tests.support import manifests
from tests.support.lines import read_lines
from tests.support.local_run import LocalRun
from tests.support.manifests import images
from tests.support.ports import reserved_port
from tests.support.processes import TANDEM, alive, environment, tandem
from tests.support.waiting import until

with warnings.catch_warnings():
    # Of what MLflow imports.
    warnings.simplefilter("ignore")
    from mlflow import MlflowClient
    from mlflow.entities import Run

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

SCRIPT = """
import tandem, time
from pathlib import Path
while not Path(__file__).with_name("go").exists():
    time.sleep(0.05)
for step in range(1, 201):
    tandem.log(step=step, loss=1 / step, accuracy=step / 200)
"""


def job(folder: Path, **spec: Any) -> Path:
    """The file of a job."""
    file = folder / "job.yaml"
    file.write_text(json.dumps(manifests.manifest("tracked", **spec)))
    return file


def run_of(client: MlflowClient) -> Run:
    """The one run of the job."""
    (run,) = client.search_runs([client.get_experiment_by_name("tracked").experiment_id])
    return run


def curve(client: MlflowClient, key: str) -> dict[int, float]:
    """A metric by step; each step once."""
    history = client.get_metric_history(run_of(client).info.run_id, key)
    found = {metric.step: metric.value for metric in history}
    assert len(found) == len(history), "one point a step"
    return found


@pytest.fixture(scope="module")
def without_its_store(tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalRun, Path, str]:
    """A run that has ended; the file that lies where the folder of its store is wanted; and the store's address."""
    folder = tmp_path_factory.mktemp("tracked")
    script, missing = folder / "train.py", folder / "missing"
    script.write_text(SCRIPT)
    missing.write_text("a file, where a folder is wanted")
    uri = f"{SQLITE}{missing / 'mlflow.db'}"
    file = job(folder, trainer={"command": [str(script)]}, tracking={"mlflow": {"uri": uri}})
    with LocalRun(folder, manifest=file) as run:
        # MLflow takes seconds to import, and a run that ends does not wait for it.
        until(lambda: is_failing(run), "the warning")
        (folder / "go").touch()
        assert run.ends() == 0, run.output
    return run, missing, uri


@pytest.mark.full("coordinator", "cli")
def test_a_script_trains_on_without_its_store_is_warned_of_once_and_is_sent_later(
    without_its_store: tuple[LocalRun, Path, str],
) -> None:
    run, missing, uri = without_its_store
    said = [line for line in read_lines(run.run_dir.coordinator_log)[0] if line["kind"] == "event"]
    warned = [line["text"] for line in said if line["level"] == "warning"]
    assert len(warned) == 1, warned
    assert warned[0].startswith(f"tracking: {uri}: ")
    assert warned[0].endswith("training goes on, and what is missing is sent later")
    missing.unlink()
    missing.mkdir()
    sent = tandem("track", str(run.path))
    assert sent.returncode == 0, sent.stderr
    client = MlflowClient(uri)
    assert curve(client, "train/loss") == {step: 1 / step for step in range(1, 201)}
    assert curve(client, "accuracy")[200] == 1.0
    assert run_of(client).info.status == "FINISHED"


@pytest.mark.full("coordinator")
def test_in_a_pod_that_leaves_a_server_that_is_away_is_tried_again(
    without_its_store: tuple[LocalRun, Path, str], tmp_path: Path
) -> None:
    run, missed, _ = without_its_store
    # The same run with a store of its own.
    missing = tmp_path / "missing"
    missing.touch()
    uri = f"{SQLITE}{missing / 'mlflow.db'}"
    rundir = RunDir(shutil.copytree(run.path, tmp_path / "run"))
    rundir.job_file.write_text(rundir.job_file.read_text().replace(f"{missed}/", f"{missing}/"))
    command = [sys.executable, "-m", "tandem_coordinator.tracking"]
    variables = environment({RUN_DIR: str(rundir.path), POD: "a-coordinator"})
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=variables, **pipes) as sender:
        told = (json.loads(line)["failing"] for line in sender.stdout)
        assert next(told).startswith(uri)
        sender.terminate()
        assert next(told).startswith(uri)
        missing.unlink()
        missing.mkdir()
        assert list(told)[-1] == ""
    assert sender.returncode == 0
    assert run_of(MlflowClient(uri)).info.status == "FINISHED"


class Server:
    """`mlflow server` on this machine, which can be away for a while."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = reserved_port()
        self.uri = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--backend-store-uri", f"{SQLITE}{self._folder / 'mlflow.db'}", "--workers", "1"]
        command += ["--artifacts-destination", str(self._folder / "artifacts")]
        variables = {**os.environ, **QUIET, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self._folder / "server.txt").open("ab") as output:
            self._process = subprocess.Popen(
                command, env=variables, stdout=output, stderr=output, start_new_session=True
            )

    def answers(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=10) as answer:
            return bool(answer.status == 200)
        return False

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    """One that answers."""
    made = Server(folder)
    made.start()
    try:
        until(made.answers, "MLflow's server", otherwise=(folder / "server.txt").read_text)
        yield made
    finally:
        made.stop()


@pytest.mark.full("coordinator")
def test_three_kills_and_a_server_that_is_away_leave_one_run_with_one_point_a_step(tmp_path: Path) -> None:
    config = {"data": {"name": "digits"}, "globalBatchSize": 64, "epochs": 100_000}
    with server(tmp_path) as mlflow:
        file = job(
            tmp_path,
            trainer=images(config),
            checkpoint={"everySteps": 50},
            evaluators={"replicas": 0},
            tracking={"mlflow": {"uri": mlflow.uri}},
        )
        client = MlflowClient(mlflow.uri)
        with LocalRun(tmp_path, manifest=file) as run:
            until(lambda: steps_sent(client) >= 50, "the first checkpoint's steps", pause=0.5)
            kill(run.rank_of("worker-0"))
            until(lambda: (seen := run.status()) and seen.status.generation == 2, "the second generation")
            mlflow.stop()
            run.reaches(run.step() + 20)
            kill(run.of("coordinator"))
            until(lambda: is_failing(run), "the warning of the new coordinator")
            run.reaches(run.step() + 20)
            mlflow.start()
            kill(run.of("worker-0"))
            run.reaches(run.step() + 20)
            until(mlflow.answers, "MLflow's server again", pause=0.5)
            # The next one does not wait until it is time to try again.
            kill(sender_of(run))
            until(lambda: not is_failing(run), "everything is sent", pause=0.5)
            run.interrupt()
            run.ends()
        sent = tandem("track", str(run.path))
        assert sent.returncode == 0, sent.stderr
        last = max(manifest.step for manifest in run.run_dir.committed())
        losses = curve(client, "train/loss")
        assert losses.keys() == set(range(1, last + 1))
        # Of a step that was taken again, the log of the latest generation tells the loss that counts.
        assert losses == {line["step"]: line["loss"] for line in run.logged("step") if line["step"] <= last}
        assert len(run.logged("start")) >= 3


def steps_sent(client: MlflowClient) -> int:
    """How many steps the server has, of any run of the job."""
    experiment = client.get_experiment_by_name("tracked")
    found = client.search_runs([experiment.experiment_id]) if experiment else []
    return max((len(client.get_metric_history(run.info.run_id, "train/loss")) for run in found), default=0)


def kill(process: Any) -> None:
    process.kill()


def sender_of(run: LocalRun) -> psutil.Process | None:
    """The process that sends, which the coordinator has started."""
    coordinator = run.of("coordinator")
    return next(iter(coordinator.children()), None) if coordinator else None


@pytest.mark.full("cli")
def test_the_local_store_is_opened_by_a_server_that_ends_with_the_command(tmp_path: Path) -> None:
    file = tmp_path / "runs" / "mlflow.db"
    file.parent.mkdir()
    MlflowClient(f"{SQLITE}{file}").create_experiment("tracked")
    command = [TANDEM, "ui", "--print"]
    with (tmp_path / "said.txt").open("w+") as output:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=output, stderr=output)
        said = tmp_path / "said.txt"
        until(lambda: "Ctrl-C ends it" in said.read_text() or process.poll() is not None, "the server")
        assert process.poll() is None, said.read_text()
        address = next(line for line in said.read_text().splitlines() if line.startswith("http://"))
        started = psutil.Process(process.pid).children(recursive=True)
        assert started
        with urllib.request.urlopen(f"{address}health", timeout=60) as answer:
            assert answer.read() == b"OK"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert not [one for one in started if alive(one.pid)]


def is_failing(run: LocalRun) -> bool:
    """Whether the job says that MLflow lacks something."""
    seen = run.status()
    return bool(seen and seen.status.troubles and seen.status.troubles.tracking_message)
