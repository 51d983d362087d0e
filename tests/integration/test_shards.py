"""A language model is trained by `tandem run` on tokens in shards, loses a rank, and continues on another number of
workers with the samples that an undisturbed run has."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogReader
from tandem.rundir.records import TRAINING, Step
from tests.support.local_run import LocalRun, evaluations
from tests.support.manifests import manifest
from tests.support.shards import library, packages, write_tokens

pytestmark = [pytest.mark.timeout(300), pytest.mark.full("trainer")]


def job(folder: Path, workers: int, max_steps: int) -> Path:
    parameters = {
        "shards": {"train": str(folder / "train"), "test": str(folder / "test"), "window": 2},
        **{"length": 16, "layers": 1, "heads": 2, "width": 16},
    }
    loop: dict[str, Any] = {"globalBatchSize": 8, "epochs": 2, "maxSteps": max_steps, "loaderWorkers": 1}
    described = manifest(
        "shards",
        trainer={"task": "causal-lm", "parameters": parameters, "loop": loop},
        workers={"replicas": workers},
        evaluators={"policy": "Every"},
        checkpoint={"everySteps": 20},
    )
    path = folder / f"job-{workers}-{max_steps}.yaml"
    path.write_text(json.dumps(described))
    return path


def samples_of_steps(run: RunDir) -> set[tuple[int, str | None]]:
    """The digests of the samples of each step, in all generations."""
    logs = [run.training_log(record.generation) for record in run.generation_records()]
    return {(entry.step, entry.ids) for log in logs for entry in LogReader(log, TRAINING) if isinstance(entry, Step)}


def test_it_loses_a_rank_and_continues_on_other_workers_with_the_samples_of_an_undisturbed_run(tmp_path: Path) -> None:
    with library("litdata"):
        write_tokens(tmp_path / "train", 1600, per_shard=100)
        write_tokens(tmp_path / "test", 12)
    variables = {"PYTHONPATH": str(packages("litdata"))}
    (tmp_path / "whole").mkdir()
    with LocalRun(tmp_path / "whole", manifest=job(tmp_path, 1, 260), variables=variables, warm=False) as whole:
        assert whole.ends(120) == 0, whole.output
    with LocalRun(tmp_path, manifest=job(tmp_path, 2, 220), variables=variables, warm=False) as run:
        run.reaches(30)
        rank = run.rank_of("worker-1")
        assert rank is not None
        rank.kill()
        assert run.ends(120) == 0, run.output
    assert len(run.run_dir.generation_records()) > 1
    with LocalRun(tmp_path, manifest=job(tmp_path, 1, 260), variables=variables, warm=False) as run:
        assert run.ends(120) == 0, run.output
    assert {entry["step"] for entry in evaluations(run.path)} >= {220, 260}
    samples = samples_of_steps(run.run_dir)
    assert sorted({step for step, _ in samples}) == list(range(1, 261))
    assert samples == samples_of_steps(whole.run_dir)
