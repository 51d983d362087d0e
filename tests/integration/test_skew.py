"""The previous version and this one, side by side: what one writes and says, the other reads, as far as it knows it."""

import fcntl
import http.client
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.processes import launch
from tandem.rundir.durable import replace_json
from tandem.rundir.layout import RunDir
from tandem.rundir.ownership import ENDPOINT, LOCK
from tandem.wire.protocol import PROTOCOL_HEADERS
from tandem_evaluator.result import ShardResult
from tests.support import ROOT, SCRIPTS, manifests
from tests.support.elastic import TOKEN, Elastic
from tests.support.previous import Previous
from tests.support.processes import tandem
from tests.support.waiting import SECONDS, until

pytestmark = pytest.mark.timeout(300)
whole_runs = pytest.mark.full("core", "cli", "coordinator", "trainer", "evaluator")
"""What the quick tiers have one proof of already, or what takes a run from its beginning to its end."""

DIGITS = {
    "task": "image-classification",
    "config": {"model": "cnn", "data": {"name": "digits"}, "maxSteps": 60, "globalBatchSize": 64},
}


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Previous:
    return Previous(tmp_path_factory.mktemp("previous"))


class Mixed(Elastic):
    """A job whose coordinator, or whose agents and ranks, are of the previous version."""

    def __init__(self, path: Path, previous: Previous, *old: str, **more: Any) -> None:
        # The fork server of the tests is of this version.
        super().__init__(path, elasticity={"warmStart": "worker" not in old}, **more)
        self._previous, self._old = previous, old

    def is_old(self, *old: str) -> None:
        """Who is, of those that are started from now on."""
        self._old = old

    def _environment(self, name: str) -> dict[str, str]:
        own = super()._environment(name)
        is_old = name.partition("-")[0] in self._old
        return {**own, "PYTHONPATH": self._previous.environment["PYTHONPATH"]} if is_old else own


# --- a coordinator and agents of two versions


@pytest.mark.parametrize("old", ["coordinator", pytest.param("worker", marks=whole_runs)])
def test_a_group_trains_loses_a_rank_and_its_coordinator_and_goes_on(
    tmp_path: Path, previous: Previous, old: str
) -> None:
    with Mixed(tmp_path, previous, old).start("worker-0", "worker-1") as group:
        before = group.step_after(0.0, world=2)
        killed = group.kill_rank("worker-1")
        after = group.step_after(killed, world=2, generation=before.generation)
        assert after.step >= before.step
        group.kill_coordinator()
        group.start_coordinator()
        back = until(
            lambda: (seen := group.snapshot()) is not None and seen.status.world_size == 2 and seen,
            "the coordinator that has adopted the group",
        )
        assert back.status.generation == after.generation, "nobody was started again"
        refused = [name for name in ("worker-0", "worker-1") if "event=refused" in group.output(name)]
        assert not refused, group.output(refused[0])


@whole_runs
@pytest.mark.parametrize(
    ("first", "then"), [("coordinator", "nobody"), ("nobody", "coordinator")], ids=["upgrade", "rollback"]
)
def test_a_coordinator_of_the_other_version_adopts_what_trains(
    tmp_path: Path, previous: Previous, monkeypatch: pytest.MonkeyPatch, first: str, then: str
) -> None:
    monkeypatch.setenv("TANDEM_POD", "uid-of-its-pod")
    with Mixed(tmp_path, previous, first).start("worker-0", "worker-1") as group:
        before = group.step_after(0.0, world=2)
        group.kill_coordinator()
        group.is_old(then)
        group.start_coordinator()
        adopted = until(
            lambda: (seen := group.snapshot()) is not None and seen.status.world_size == 2 and seen,
            "the coordinator that has adopted the group",
            otherwise=lambda: group.output("coordinator"),
        )
        assert adopted.status.generation == before.generation, group.output("coordinator")
        later = group.step_after(time.time() + 4.0, world=2)
        assert later.generation == before.generation, group.output("coordinator")


@whole_runs
@pytest.mark.parametrize("old", ["coordinator", "worker"])
def test_a_pause_and_the_code_after_the_loop_refuse_nobody(tmp_path: Path, previous: Previous, old: str) -> None:
    script = tmp_path / "pausing.py"
    script.write_text(PAUSING)
    trainer = {"command": ["python", str(script)]}
    with Mixed(tmp_path, previous, old, replicas=1, trainer=trainer).start("worker-0") as group:
        until((group.rundir.path / "through").exists, "the script's end", otherwise=lambda: group.output("worker-0"))
        assert "event=refused" not in group.output("worker-0"), group.output("worker-0")


@pytest.mark.parametrize("old", ["coordinator", "worker"])
def test_a_script_whose_ranks_end_one_after_the_other_is_complete(tmp_path: Path, previous: Previous, old: str) -> None:
    script = tmp_path / "uneven.py"
    script.write_text(UNEVEN)
    trainer = {"command": ["python", str(script)]}
    with Mixed(tmp_path, previous, old, trainer=trainer).start("worker-0", "worker-1") as group:
        for name in ("worker-0", "worker-1"):
            assert group.agents[name].wait(SECONDS) == 0, group.output(name)
            assert "event=refused" not in group.output(name), group.output(name)
            assert "event=finished-alone" not in group.output(name), group.output(name)
        until(lambda: group.rundir.done() is not None, "DONE", otherwise=lambda: group.output("coordinator"))
        assert "generation 2" not in group.output("coordinator")


UNEVEN = """
import os, time
time.sleep(4 * int(os.environ["RANK"]))
"""
PAUSING = """
import os, time
from pathlib import Path
from tandem_trainer.pulse import Pulse

pulse = Pulse.open_for_rank()
for step in range(1, 30):
    pulse.beat(step=step, total_steps=30, loss=1.0)
    time.sleep(0.05)
for step in range(20):
    pulse.beat(step=30, total_steps=30, loss=1.0, phase="validating", pauses=True)
    time.sleep(0.1)
Path(os.environ["TANDEM_RUN_DIR"], "through").touch()
pulse.last_word(0)
"""


def test_each_version_says_what_it_reads_and_is_read_by_who_says_nothing(tmp_path: Path, previous: Previous) -> None:
    for old in ("coordinator", "nobody"):
        (tmp_path / old).mkdir()
        with Mixed(tmp_path / old, previous, old) as group:
            group.start_coordinator()
            connection = http.client.HTTPConnection("127.0.0.1", group.port, timeout=10)
            connection.request("GET", "/status", headers={"Authorization": f"Bearer {TOKEN}"})
            answer = connection.getresponse()
            told = answer.read()
            connection.close()
            assert PROTOCOL_HEADERS.items() <= dict(answer.getheaders()).items()
            # What is answered to somebody who does not ask, the previous version reads.
            code = "import json, sys; from tandem.wire.status import Snapshot; Snapshot.read(json.load(sys.stdin))"
            subprocess.run([sys.executable, "-c", code], input=told, env=previous.environment, check=True, timeout=60)


# --- the command line and a coordinator of two versions


@contextmanager
def going_on(group: Elastic) -> Iterator[None]:
    """Have the run directory marked as `tandem run` marks one that goes on."""
    folder = group.rundir.path
    replace_json(folder / ENDPOINT, {"url": f"http://{group.host}:{group.port}", "token": TOKEN})
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("old", ["coordinator", pytest.param("cli", marks=whole_runs)])
def test_status_and_open_ask_a_coordinator_of_the_other_version(tmp_path: Path, previous: Previous, old: str) -> None:
    call = previous.tandem if old == "cli" else with_ours
    with Mixed(tmp_path, previous, old, replicas=1).start("worker-0") as group, going_on(group):
        group.step_after(0.0, world=1)
        asked = call("status", group.rundir.path, "-o", "json")
        assert asked.returncode == 0, asked.stderr
        told = json.loads(asked.stdout)
        # The files of the run know nothing of its processes.
        assert told["status"]["phase"] == "Running"
        assert [pod["name"] for pod in told["pods"]] == ["coordinator", "worker-0"]
        opened = call("open", group.rundir.path, "--print")
        assert opened.stdout.startswith(f"http://{group.host}:{group.port}/open#"), opened.stderr


# --- run directories


Call = Callable[..., "subprocess.CompletedProcess[str]"]


def with_ours(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    return tandem(*words)


READ = [
    ("checkpoints", "ls"),
    ("checkpoints", "verify"),
    ("checkpoints", "prune"),
    ("report",),
]


def run_of(of: Call, folder: Path, **config: Any) -> Path:
    """A run to its end by one of the versions."""
    manifest = manifests.manifest(
        "digits",
        trainer={**DIGITS, "config": {**DIGITS["config"], **config}},  # type: ignore[dict-item]
        checkpoint={"everySteps": 20, "keepLast": 5},
    )
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(manifest))
    ended = of("run", file, "--run-dir", folder / "run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def old_run(previous: Previous, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(previous.tandem, tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def new_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(with_ours, tmp_path_factory.mktemp("new"))


@whole_runs
@pytest.mark.parametrize("words", READ, ids=" ".join)
def test_this_version_reads_a_run_of_the_previous_one(old_run: Path, words: tuple[str, ...]) -> None:
    said = tandem(*words, old_run)
    assert said.returncode == 0, said.stderr
    assert "another version" not in said.stdout + said.stderr
    assert "not a job" not in said.stdout


@whole_runs
@pytest.mark.parametrize("words", READ, ids=" ".join)
def test_the_previous_version_reads_a_run_of_this_one(
    previous: Previous, new_run: Path, words: tuple[str, ...]
) -> None:
    said = previous.tandem(*words, new_run)
    assert said.returncode == 0, said.stderr
    assert "another version" not in said.stdout + said.stderr
    assert "not a job" not in said.stdout


@whole_runs
def test_a_run_of_the_previous_version_goes_on_with_this_one(previous: Previous, tmp_path: Path) -> None:
    run = run_of(previous.tandem, tmp_path)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    (run / "DONE").unlink()
    resumed = tandem("run", tmp_path / "job.yaml", "--run-dir", run)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    records = [json.loads(path.read_text()) for path in sorted((run / "generations").iterdir())]
    assert records[-1]["resumedFrom"]["step"] == 60
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == names, "nothing is set aside"


# --- optimizers with a state_dict of their own


def trained(version: Previous | None, kind: str, folder: Path, steps: int) -> "subprocess.CompletedProcess[str]":
    environment = dict(os.environ) if version is None else version.environment
    path = os.pathsep.join(one for one in (environment.get("PYTHONPATH"), str(ROOT)) if one)
    (folder / "DONE").unlink(missing_ok=True)
    words = [sys.executable, SCRIPTS / "own_state_script.py", kind, folder, str(steps)]
    return subprocess.run(
        words, env={**environment, "PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.full("core", "trainer")
@pytest.mark.parametrize("kind", ["forwarding", "lookahead"])
def test_the_previous_version_goes_on_from_what_an_optimizer_keeps(
    tmp_path: Path, previous: Previous, kind: str
) -> None:
    undisturbed = trained(None, kind, tmp_path / "undisturbed", 9)
    assert trained(None, kind, tmp_path / "run", 6).returncode == 0
    found = trained(previous, kind, tmp_path / "run", 9)
    assert (found.returncode, found.stdout) == (0, undisturbed.stdout), found.stderr


# --- evaluators


@whole_runs
@pytest.mark.parametrize("old", [True, False], ids=["an older evaluator", "this evaluator"])
def test_checkpoints_of_the_previous_version_are_evaluated(
    previous: Previous, old_run: Path, tmp_path: Path, old: bool
) -> None:
    """Also where the job was written anew by this version, as a coordinator does after an upgrade."""
    rundir = RunDir(shutil.copytree(old_run, tmp_path / "run"))
    shutil.rmtree(rundir.evaluations)
    rundir.best_file.unlink()
    rundir.create()
    job = rundir.read_job()
    rundir.write_job(job)
    environment = previous.environment if old else os.environ
    ended = subprocess.run(
        launch.evaluator_command(0),
        env={**environment, **launch.environment(job, rundir.path, "evaluator-0"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    final = (rundir.done() or {})["final"]
    (merged,) = (rundir.evaluations / final["name"]).glob("g??????.json")
    assert json.loads(merged.read_text())["samples"] > 0
    assert not list(rundir.checkpoints.glob("*.bad")), "none is set aside"


def test_results_with_fields_of_a_later_version_are_merged(tmp_path: Path) -> None:
    """What the next version adds to a result, this one passes over."""
    result = ShardResult(
        checkpoint="step-000000020",
        step=20,
        generation=1,
        samples=2,
        confusion=[[1, 0], [0, 1]],
        shard=0,
        shards=1,
        loss_sum=0.5,
        seconds=1.0,
        evaluator="evaluator-0",
        at=1.0,
    )
    assert ShardResult.read(result.to_json() | {"perplexity": 3.0}) == result
