"""One run of MLflow: found again after every restart, with one point a step.

**Found again.** `tracking/run.json` names the server, the experiment and a random id. It is durable before the run is
created, and the run has the id as a tag: a process that dies between the two finds the run by its tag.

**One point a step.** MLflow keeps every point that it is sent, and cannot take one back. What it has is read from it
whenever this process starts and after every request that failed, since it is unknown how far that one came: the last
step of each curve of training, all steps of each curve of evaluators. What it has is not sent again. So there is no
record of our own that a crash could leave behind or ahead of the server. Two processes at once, which the lock prevents
on one machine, send the same points with the same times: to MLflow's databases these are one row.
"""

import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from tandem.job.resource import DistributedTrainingJob
from tandem.job.secrecy import hide_secrets
from tandem.job.tracking import ARTIFACTS, Mlflow, database, without_password
from tandem.job.tracking import FILE as RUN_FILE
from tandem.rundir import sync_client
from tandem.rundir.catalog import EvaluationResult
from tandem.rundir.checkpoint import FILE, WEIGHTS
from tandem.rundir.durable import read_json_or_none, replace_json
from tandem.rundir.layout import RunDir
from tandem_coordinator.tracking.curves import EVALUATION, LOSS, VALIDATION, Point

MAX_METRICS, MAX_PARAMETERS = 1_000, 100
"""Maximum numbers of metrics and parameters that MLflow accepts in one request."""
ID_TAG = "tandem.id"
"""Tag by which a run is found."""
PARAMETER_SECTIONS = ("trainer", "workers", "evaluators", "checkpoint", "elasticity")
EXCLUDED_PARAMETERS = ("env", "template", "resources", "storage")
"""Fields of the job that are no parameters: they are in the manifest, which is an artifact."""
REPORT = "report.html"


@dataclass(frozen=True)
class _Last:
    """The last point of a curve that the server has."""

    step: int
    measured_at: float
    """Time of the measurement, in seconds since the epoch."""


class MlflowRun:
    """The run of one job on one server. For one thread.

    Raises:
        Exception: whatever goes wrong on the way to the server. Make another one then: what the server has is not
            known any more.
    """

    def __init__(self, rundir: RunDir, job: DistributedTrainingJob, uri: str) -> None:
        self._rundir, self._job = rundir, job
        self._mlflow = job.spec.tracking.mlflow or Mlflow()
        self._client = MlflowClient(uri)
        self._run = self._find_or_create(uri)
        self._last: dict[str, _Last] = {}
        self._steps: dict[str, set[int]] = {}
        for metric in self._run.to_proto().data.metrics:
            if metric.key.startswith((EVALUATION, VALIDATION)):
                history = self._client.get_metric_history(self.id, metric.key)
                self._steps[metric.key] = {point.step for point in history}
            else:
                self._last[metric.key] = _Last(metric.step, metric.timestamp / 1000)
        if self._run.info.status != "RUNNING":
            self._client.update_run(self.id, status="RUNNING")
        self._describe()

    @property
    def id(self) -> str:
        """Id of the run in MLflow."""
        return str(self._run.info.run_id)

    def send(self, points: Iterable[Point]) -> None:
        """Send the points that the server does not have, in this order."""
        news = (Metric(p.key, p.value, int(p.measured_at * 1000), p.step) for p in points if self._is_new(p))
        for metrics in _batches(news, MAX_METRICS):
            self._client.log_batch(self.id, metrics=metrics)

    def mark_repeated(self, generation: int, resumed_step: int, started_at: float) -> None:
        """Record in a tag which steps a generation repeats that were sent before it started.

        Args:
            resumed_step: the step that it resumed from.
            started_at: seconds since the epoch.
        """
        last, tag = self._last.get(LOSS), f"tandem.repeated.generation-{generation}"
        if (
            last is not None
            and last.step > resumed_step
            and last.measured_at < started_at
            and tag not in self._run.data.tags
        ):
            self._client.set_tag(self.id, tag, f"{resumed_step + 1}-{last.step}")
            self._run.data.tags[tag] = ""

    def end(self, status: str) -> None:
        """Set the final status, and send the report if there is one.

        Args:
            status: FINISHED, FAILED or KILLED.
        """
        if (report := self._rundir.path / REPORT).is_file():
            self._client.log_artifact(self.id, str(report))
        self._client.set_terminated(self.id, status)

    def register(self, best: EvaluationResult) -> None:
        """Upload the weights of a checkpoint and register them as a version of the job's model, unless they are."""
        manifest = self._rundir.manifest(best.checkpoint.name)
        model = self._mlflow.named_model or self._job.metadata.name
        versions = self._client.search_model_versions(f"run_id = '{self.id}'")
        if any(version.name == model and version.tags.get("tandem.digest") == manifest.digest for version in versions):
            return
        folder, artifact_path = self._rundir.checkpoint(manifest.name), f"checkpoints/{manifest.name}"
        sync_client.fetch(manifest.name, manifest.digest, [WEIGHTS])
        for name in (FILE, WEIGHTS):
            self._client.log_artifact(self.id, str(folder / name), artifact_path)
        with suppress(MlflowException):
            # It may exist already; if it cannot be created, creating the version fails with the reason.
            self._client.create_registered_model(model)
        metric = self._job.spec.evaluation.metric
        tags = {
            "tandem.job": self._job.metadata.name,
            "tandem.checkpoint": manifest.name,
            "tandem.step": manifest.step,
            "tandem.generation": manifest.generation,
            "tandem.digest": manifest.digest,
            f"tandem.{metric}": best.metrics.get(metric, ""),
        }
        self._client.create_model_version(
            model,
            f"{self._run.info.artifact_uri}/{artifact_path}",
            self.id,
            {key: str(value) for key, value in tags.items()},
        )

    def _is_new(self, point: Point) -> bool:
        """Whether the server has neither this point nor another one of that step; marks it as sent."""
        if point.key.startswith((EVALUATION, VALIDATION)):
            steps = self._steps.setdefault(point.key, set())
            is_new = point.step not in steps
            steps.add(point.step)
            return is_new
        last = self._last.get(point.key)
        if last is not None and point.step <= last.step:
            return False
        self._last[point.key] = _Last(point.step, point.measured_at)
        return True

    def _find_or_create(self, uri: str) -> Run:
        name = self._mlflow.experiment or self._job.metadata.name
        experiment = self._experiment(name, uri)
        file, target = self._rundir.tracking / RUN_FILE, {"uri": without_password(uri), "experiment": name}
        record = read_json_or_none(file)
        if not isinstance(record, dict) or {key: record.get(key) for key in target} != target or "id" not in record:
            self._rundir.tracking.mkdir(exist_ok=True)
            record = {**target, "id": secrets.token_hex(8)}
            replace_json(file, record)
        if "runId" in record:
            return self._client.get_run(record["runId"])
        matches = self._client.search_runs([experiment], f"tags.`{ID_TAG}` = '{record['id']}'")
        run = matches[0] if matches else self._create(experiment, record["id"])
        replace_json(file, {**record, "experimentId": experiment, "runId": run.info.run_id})
        return run

    def _create(self, experiment: str, identity: str) -> Run:
        metadata = self._job.metadata
        tags = {
            ID_TAG: identity,
            "tandem.job": metadata.name,
            "tandem.runDir": str(self._rundir.path),
            "mlflow.source.name": "tandem",
        }
        return self._client.create_run(experiment, tags=tags, run_name=self._rundir.title(metadata.name))

    def _experiment(self, name: str, uri: str) -> str:
        if (experiment := self._client.get_experiment_by_name(name)) is not None:
            return str(experiment.experiment_id)
        # Without a server, MLflow would put artifacts into whatever folder this process works in.
        file = database(uri)
        artifact_location = None if file is None else (file.parent / ARTIFACTS / name).as_uri()
        try:
            return str(self._client.create_experiment(name, artifact_location=artifact_location))
        except MlflowException:
            if (experiment := self._client.get_experiment_by_name(name)) is None:
                raise
            return str(experiment.experiment_id)

    def _describe(self) -> None:
        """Send the job's settings. MLflow never changes a parameter: a setting that a resumed job has changed is sent
        as a tag."""
        existing, settings = self._run.data.params, parameters(self._job)
        news = [Param(key, value) for key, value in settings.items() if key not in existing]
        for params in _batches(news, MAX_PARAMETERS):
            self._client.log_batch(self.id, params=params)
        changed = [
            RunTag(f"changed.{key}", value) for key, value in settings.items() if existing.get(key, value) != value
        ]
        for tags in _batches(changed, MAX_PARAMETERS):
            self._client.log_batch(self.id, tags=tags)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "job.yaml")
            text = yaml.safe_dump(hide_secrets(self._job.dump_brief()), sort_keys=False, allow_unicode=True, width=100)
            file.write_text(text, "utf-8")
            self._client.log_artifact(self.id, str(file))


def parameters(job: DistributedTrainingJob) -> dict[str, str]:
    """The job's settings by dotted path, those of its training with their defaults."""
    spec = hide_secrets(job.spec.dump_brief())
    trainer = dict(spec["trainer"])
    if job.spec.trainer.task is not None:
        loop = hide_secrets(job.spec.trainer.settings_of_loop.dump())
        trainer["loop" if job.spec.trainer.config is None else "config"] = loop
    flat: dict[str, str] = {}
    for section in PARAMETER_SECTIONS:
        flat |= dict(_flat(section, {**spec, "trainer": trainer}.get(section, {})))
    return flat


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in EXCLUDED_PARAMETERS:
                yield from _flat(f"{path}.{name}", inner)
    elif value is not None and value != []:
        yield path, str(value)


def _batches(items: Iterable[Any], max_size: int) -> Iterator[list[Any]]:
    batch = []
    for item in items:
        batch.append(item)
        if len(batch) == max_size:
            yield batch
            batch = []
    if batch:
        yield batch
