"""A run as MLflow has it, in a real store: one run and one point a step, whatever dies when."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.job.resource import DistributedTrainingJob
from tandem.job.tracking import FILE, SQLITE
from tandem.rundir.durable import read_json
from tandem.rundir.records import LedgerRecord
from tandem.wire.ledger import UsageByPurpose
from tests.support.lines import Lines
from tests.support.manifests import images
from tests.support.worlds.tracked_run import BEGAN, TrackedRun

with warnings.catch_warnings():
    # Of what MLflow imports.
    warnings.simplefilter("ignore")
    from mlflow import MlflowClient
    from mlflow.entities import Run

    from tandem_coordinator.tracking import mlflow_run
    from tandem_coordinator.tracking.curves import LOSS
    from tandem_coordinator.tracking.sender import Sender

pytestmark = pytest.mark.filterwarnings("ignore")


class Store:
    """A store, and the one run of an experiment in it."""

    def __init__(self, uri: str) -> None:
        self.uri, self.client = uri, MlflowClient(uri)

    def run(self, experiment: str) -> Run:
        found = self.client.get_experiment_by_name(experiment)
        (run,) = self.client.search_runs([found.experiment_id])
        return run

    def losses(self, experiment: str) -> dict[int, float]:
        """By step; each once."""
        history = self.client.get_metric_history(self.run(experiment).info.run_id, LOSS)
        found = {metric.step: metric.value for metric in history}
        assert len(found) == len(history), "one point a step"
        return found


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Making one takes a second."""
    return Store(f"{SQLITE}{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}")


Make = Callable[..., TrackedRun]


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes the run of a test, with an experiment of its own."""

    def made(**spec: object) -> TrackedRun:
        mlflow = {"experiment": request.node.name, "model": request.node.name.replace("/", "-")}
        return TrackedRun(tmp_path / "run", **{"tracking": {"mlflow": mlflow}, **spec})

    return made


@pytest.fixture
def run(make: Make) -> TrackedRun:
    return make()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """The name of the experiment."""
    return str(request.node.name)


def sender(run: TrackedRun, store: Store) -> Sender:
    """A process that sends, as it begins."""
    return Sender(run.rundir, run.job, store.uri)


def test_three_generations_are_one_run_with_one_point_a_step(run: TrackedRun, store: Store, name: str) -> None:
    saved = None
    for generation in (1, 2, 3):
        # Each has a process of its own, which knows nothing of the one before.
        sending, first = sender(run, store), saved.step if saved else 0
        run.begin(generation, saved, at=1000.0 * generation)
        run.steps(generation, first + 1, first + 130, at=1000.0 * generation)
        saved = run.save(generation, first + 100)
        assert sending.send() is False
    losses = store.losses(name)
    assert losses.keys() == set(range(1, 301))
    assert {int(value) for step, value in losses.items() if step > 200} == {3}
    run.rundir.mark_done(saved)
    sending.send()
    assert store.losses(name).keys() == set(range(1, 331)), "nothing is taken again"


def test_runs_of_one_manifest_have_names_of_their_own(run: TrackedRun, store: Store, name: str) -> None:
    sender(run, store).send()
    assert store.run(name).info.run_name == f"{run.job.metadata.name} (run)"


def test_a_process_that_dies_after_a_request_sends_nothing_twice(
    run: TrackedRun, store: Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.begin(1)
    run.steps(1, 1, 1200)
    run.save(1, 1200)
    requests = 0

    def log_batch(client: MlflowClient, *given: object, **named: object) -> None:
        nonlocal requests
        real(client, *given, **named)
        requests += 1 if "metrics" in named else 0
        if requests == 2:
            raise ConnectionResetError("the answer was lost")

    real = MlflowClient.log_batch
    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "log_batch", log_batch)
        sending = sender(run, store)
        with pytest.raises(ConnectionResetError):
            sending.send()
    # Until it is tried again, training goes back behind what was sent.
    early = run.save(1, 100)
    run.begin(2, early, at=5000.0)
    run.steps(2, 101, 1500, at=5000.0)
    run.save(2, 1500)
    sending.send()
    losses = store.losses(name)
    assert losses.keys() == set(range(1, 1501))
    first = {step for step, value in losses.items() if value < 2}
    assert first == set(range(1, 1001)), "two requests arrived: the first of each step stays"
    assert store.run(name).data.tags["tandem.repeated.generation-2"] == "101-1000"


def test_the_ledger_is_sent_now_and_then_and_as_it_was_at_the_end(run: TrackedRun, store: Store, name: str) -> None:
    log = Lines(run.rundir.coordinator_log)

    def account(compute: float, idle: float) -> None:
        cpu = UsageByPurpose(compute=compute, idle=idle)
        log.append(
            LedgerRecord(time=BEGAN + compute, cpu_seconds=cpu, cost=UsageByPurpose(compute=compute / 100)).dump()
        )

    def sent(amount: str) -> list[tuple[int, float]]:
        history = store.client.get_metric_history(store.run(name).info.run_id, f"ledger/{amount}")
        return [(metric.step, metric.value) for metric in history]

    sending = sender(run, store)
    run.begin(1)
    account(3600.0, 0.0)
    sending.send()
    account(5400.0, 1800.0)
    sending.send()
    assert sent("cpuHours.total") == [(3600, 1.0)], "so soon nothing new"
    sending.end()
    sender(run, store).end()
    assert sent("cpuHours.total") == [(3600, 1.0), (7200, 2.0)]
    assert sent("cpuHours.idle") == [(7200, 0.5)]
    assert sent("cost.compute") == [(3600, 36.0), (7200, 54.0)]
    assert sent("gpuHours.total") == [], "there is no GPU"


def test_two_processes_at_once_add_up_to_one(run: TrackedRun, store: Store, name: str) -> None:
    run.begin(1)
    one, other = sender(run, store), sender(run, store)
    one.send()
    other.send()
    run.steps(1, 1, 100)
    run.save(1, 100, accuracy=0.5)
    one.send()
    other.send()
    assert store.losses(name).keys() == set(range(1, 101))
    history = store.client.get_metric_history(store.run(name).info.run_id, "eval/accuracy")
    assert [metric.step for metric in history] == [100]


def test_a_run_that_was_made_and_not_noted_is_found_again(
    run: TrackedRun, store: Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mlflow_run.replace_json

    def replace_json(path: Path, value: dict[str, object]) -> None:
        if "runId" in value:
            raise OSError("the disk is full")
        real(path, value)

    with monkeypatch.context() as patched:
        patched.setattr(mlflow_run, "replace_json", replace_json)
        with pytest.raises(OSError, match="disk"):
            sender(run, store).send()
    made = store.run(name)
    sender(run, store).send()
    assert store.run(name).info.run_id == made.info.run_id
    assert read_json(run.rundir.tracking / FILE)["runId"] == made.info.run_id


def test_evaluations_that_come_late_or_again_are_there_once(run: TrackedRun, store: Store, name: str) -> None:
    run.begin(1)
    run.save(1, 200, accuracy=0.8)
    sender(run, store).send()
    run.save(1, 100, accuracy=0.7)
    sender(run, store).send()
    sender(run, store).send()
    history = store.client.get_metric_history(store.run(name).info.run_id, "eval/accuracy")
    assert {metric.step: metric.value for metric in history} == {100: 0.7, 200: 0.8}
    assert len(history) == 2


def test_parameters_are_the_jobs_settings_and_what_a_resumed_job_has_otherwise_is_a_tag(
    make: Make, store: Store, name: str
) -> None:
    env = [{"name": "HF_TOKEN", "value": "hunter2"}]
    run = make(trainer=images({"epochs": 4}) | {"env": env})
    sender(run, store).send()
    given = run.job.dump()
    given["spec"]["trainer"]["loop"]["epochs"] = 8
    run.job = DistributedTrainingJob.parse(given)
    sender(run, store).send()
    found = store.run(name)
    assert found.data.params["trainer.loop.epochs"] == "4"
    assert found.data.params["trainer.loop.optimizer.name"] == "adam", "defaults, too"
    assert found.data.tags["changed.trainer.loop.epochs"] == "8"
    assert "hunter2" not in str(found.to_dictionary())
    manifest = Path(store.client.download_artifacts(found.info.run_id, "job.yaml")).read_text()
    assert "epochs: 8" in manifest
    assert "hunter2" not in manifest


def test_the_best_checkpoint_is_registered_once_with_where_it_comes_from(
    run: TrackedRun, store: Store, name: str
) -> None:
    run.begin(1)
    best, last = run.save(1, 100, accuracy=0.9), run.save(1, 200, accuracy=0.8)
    (run.rundir.path / "report.html").write_text("<p>the report")
    run.rundir.mark_done(last)
    for _ in range(2):
        sending = sender(run, store)
        assert sending.send() is True, "all is evaluated"
        sending.end()
    (version,) = store.client.search_model_versions(f"name = '{name}'")
    found, manifest = store.run(name), run.rundir.manifest(best.name)
    assert version.run_id == found.info.run_id
    assert (version.tags["tandem.step"], version.tags["tandem.digest"]) == ("100", manifest.digest)
    assert version.tags["tandem.accuracy"] == "0.9"
    assert version.tags["tandem.job"] == found.data.tags["tandem.job"] == run.job.metadata.name
    weights = store.client.download_artifacts(found.info.run_id, f"checkpoints/{best.name}/weights.safetensors")
    assert Path(weights).read_bytes() == b"weights"
    assert version.source.endswith(f"checkpoints/{best.name}")
    assert found.info.status == "FINISHED"
    assert "report.html" in [one.path for one in store.client.list_artifacts(found.info.run_id)]


@pytest.mark.parametrize(("ending", "status"), [("failed", "FAILED"), ("stopped", "KILLED")])
def test_a_run_that_was_stopped_or_failed_says_so_until_it_goes_on(
    run: TrackedRun, store: Store, name: str, ending: str, status: str
) -> None:
    run.begin(1)
    if ending == "failed":
        run.rundir.mark_failed("Broken", "it broke", 1)
    sending = sender(run, store)
    sending.send()
    sending.end()
    assert store.run(name).info.status == status
    sender(run, store).send()
    assert store.run(name).info.status == "RUNNING"


def test_another_destination_gets_a_run_of_its_own_with_everything(run: TrackedRun, store: Store, name: str) -> None:
    run.begin(1)
    run.steps(1, 1, 50)
    run.save(1, 50)
    sender(run, store).send()
    given = run.job.dump()
    given["spec"]["tracking"]["mlflow"]["experiment"] = f"{name}-2"
    run.job = DistributedTrainingJob.parse(given)
    sender(run, store).send()
    assert store.losses(f"{name}-2") == store.losses(name)
