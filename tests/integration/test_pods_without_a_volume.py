"""A job whose pods share no disk: each process group has a directory of its own, and a bucket connects them."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from tandem.processes import launch
from tandem.rundir.download import Downloader
from tandem.rundir.evaluations import best
from tandem.rundir.layout import RunDir, checkpoint_name
from tandem_trainer.sample_audit import audit
from tests.support import manifests
from tests.support.buckets import BUCKET, CREDENTIALS, moto, place
from tests.support.ports import reserved_port
from tests.support.waiting import until
from tests.support.zygote import PROGRAMS, Forked

pytestmark = pytest.mark.timeout(400)
TOKEN = "the-token-of-these-tests"
UID = "6f1c1f0e"
STEPS_PER_EPOCH = 23
CONFIG = {"model": "cnn", "data": {"name": "digits"}, "globalBatchSize": 64}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with moto() as url:
        yield url


class Job:
    """The pods of one job, as processes with directories of their own."""

    def __init__(self, folder: Path, server: str, epochs: int) -> None:
        self.folder, self.server, self.prefix = folder, server, folder.name
        folder.mkdir()
        storage = {"bucket": f"s3://{BUCKET}/{self.prefix}", "endpoint": server, "shared": False}
        self.job = manifests.job(
            trainer=manifests.images({**CONFIG, "epochs": epochs}),
            workers={"replicas": 2},
            evaluators={"processesPerReplica": 2, "metric": "accuracy"},
            checkpoint={"everySteps": 50, "storage": storage},
            elasticity={"heartbeatSeconds": 0.5, "lostAfterSeconds": 3, "growAfterSeconds": 0.5, "warmStart": False},
        )
        annotated = self.job.model_copy(
            update={"metadata": self.job.metadata.model_copy(update={"annotations": {launch.UID_ANNOTATION: UID}})}
        )
        self.manifest = folder / "job.yaml"
        self.manifest.write_text(yaml.safe_dump(annotated.dump()))
        self.port = reserved_port()
        self.pods: dict[str, subprocess.Popen[bytes] | Forked] = {}
        self._started = 0

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.pods):
            self.lose(name)

    def start(self, *names: str) -> "Job":
        """Start pods, each with an empty directory."""
        for name in names:
            self._started += 1
            rundir = self.folder / f"{name}-{self._started}"
            own = {launch.UID: UID, launch.STORAGE: json.dumps(self.job.spec.checkpoint.storage.dump())}
            if name == "coordinator":
                command = launch.coordinator_command("127.0.0.1", self.port)
                own = {launch.JOB: str(self.manifest), launch.TOKEN: TOKEN}
            elif name.startswith("worker"):
                command = launch.agent_command(self.job, f"127.0.0.1:{self.port}", "127.0.0.1", shutdown_seconds=5)
                own |= {launch.TOKEN: TOKEN, launch.NODE: name}
            else:
                command = launch.evaluators_command(2)
            own |= {launch.RUN_DIR: str(rundir), launch.REPLICA: name, "OMP_NUM_THREADS": "1"}
            variables = {**os.environ, **CREDENTIALS, **own}
            module, *words = command[command.index("-m") + 1 :]
            with (self.folder / f"{name}-{self._started}.txt").open("wb") as output:
                if module in PROGRAMS:
                    self.pods[name] = Forked(module, words, variables, output, own_session=True)
                    continue
                self.pods[name] = subprocess.Popen(
                    command, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
        return self

    def lose(self, name: str) -> None:
        """End all processes of a pod at once, as the loss of its node does."""
        pod = self.pods.pop(name)
        with suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(pod.pid).children(recursive=True), psutil.Process(pod.pid)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        pod.wait()

    def copy(self) -> RunDir:
        """What the bucket has of the run, without the files of checkpoints."""
        for name, value in CREDENTIALS.items():
            os.environ.setdefault(name, value)
        rundir = RunDir(self.folder / "copy")
        downloader = Downloader(place(self.server, self.prefix))
        downloader.records(rundir)
        downloader.manifests(rundir)
        return rundir

    def reaches(self, step: int) -> None:
        def newest() -> bool:
            with suppress(PermissionError):  # the coordinator has not begun
                committed = self.copy().committed()
                return bool(committed) and committed[0].step >= step
            return False

        until(newest, f"step {step} in the bucket", 120)

    def ends(self, *names: str) -> None:
        """Wait until these pods have ended well."""
        for name in names:
            try:
                assert self.pods[name].wait(200) == 0, self.output()
            except subprocess.TimeoutExpired:
                pytest.fail(f"{name} does not end\n{self.output()}")

    def output(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.txt"))


def test_a_job_trains_and_is_evaluated_without_a_volume(server: str, tmp_path: Path) -> None:
    steps = 10 * STEPS_PER_EPOCH
    with Job(tmp_path / "undisturbed", server, epochs=10) as job:
        job.start("coordinator", "worker-0", "worker-1", "evaluator-0")
        job.ends("worker-0", "worker-1", "evaluator-0")
        job.pods["coordinator"].send_signal(signal.SIGTERM)
        job.ends("coordinator")
        rundir = job.copy()
        assert rundir.done() is not None, job.output()
        assert rundir.committed()[0].step == steps
        assert best(rundir) is not None
        found = audit(rundir)
        assert (found.steps, found.problems, found.unknown) == (steps, [], "")
        assert list(rundir.leases.iterdir()) == []


@pytest.mark.full("core", "coordinator", "trainer", "evaluator")
def test_every_pod_may_be_lost(server: str, tmp_path: Path) -> None:
    steps = 60 * STEPS_PER_EPOCH
    with Job(tmp_path / "disturbed", server, epochs=60) as job:
        job.start("coordinator", "worker-0", "worker-1", "evaluator-0")
        job.reaches(100)
        job.lose("worker-0")
        job.start("worker-0")
        job.reaches(job.copy().committed()[0].step + 100)
        job.lose("coordinator")
        job.lose("evaluator-0")
        job.start("coordinator", "evaluator-0")
        job.ends("worker-0", "worker-1", "evaluator-0")
        job.pods["coordinator"].send_signal(signal.SIGTERM)
        job.ends("coordinator")
        rundir = job.copy()
        assert rundir.committed()[0].step == steps
        evaluated = {path.parent.name for path in rundir.evaluations.glob("step-*/g??????.json")}
        assert checkpoint_name(steps) in evaluated
        assert best(rundir) is not None
        found = audit(rundir)
        assert (found.steps, found.problems, found.unknown) == (steps, [], "")
