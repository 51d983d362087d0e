"""Scripts of torch and of four libraries, as users write them: they train, resume and are evaluated unchanged."""

import os
import signal
from pathlib import Path

import pytest
import yaml

from tests.support import SCRIPTS
from tests.support.libraries import SAVED
from tests.support.local_run import LocalRun, evaluations
from tests.support.manifests import manifest
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(600), pytest.mark.full("trainer", "evaluator")]


def job_of(folder: Path, library: str, watch: str) -> Path:
    script, program = str(SCRIPTS / "unchanged.py"), str(SCRIPTS / "evaluate_unchanged.py")
    trainer = {"command": ["python", script], "args": [library, "--steps", "200", "--pause", "0"]}
    evaluators = {"command": ["python", program], "watch": watch, "settleSeconds": 1, "metric": "loss"}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(manifest(library, trainer=trainer, evaluators=evaluators)))
    return path


@pytest.mark.parametrize(("library", "watch"), SAVED.items())
def test_it_is_killed_and_resumes_with_other_numbers_of_workers_and_is_evaluated_meanwhile(
    tmp_path: Path, library: str, watch: str
) -> None:
    """2, then 1, then 3 workers."""
    job = job_of(tmp_path, library, watch)
    evaluated = 0
    for workers in (2, 1):
        slowly = f'trainer.args=["{library}", "--steps", "200", "--pause", "0.5"]'
        with LocalRun(tmp_path, "--set", f"workers.replicas={workers}", "--set", slowly, manifest=job) as run:
            known = len(list(run.path.glob(watch)))
            until(lambda known=known, run=run: len(list(run.path.glob(watch))) > known, "a checkpoint", 180)
            until(lambda known=evaluated, run=run: len(evaluations(run.path)) > known, "an evaluation", 180)
            evaluated = len(evaluations(run.path))
            os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()
            assert not run.run_dir.ended()
    with LocalRun(tmp_path, "--set", "workers.replicas=3", manifest=job) as run:
        assert run.ends(240) == 0, run.output
        assert f"{library} is complete" in run.output
    assert len(evaluations(run.path)) > evaluated
