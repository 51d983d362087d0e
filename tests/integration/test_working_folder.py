"""`tandem run`, typed in a folder whose files are called like modules that Tandem's own processes import."""

import json
from pathlib import Path

import pytest

from tests.support.local_run import LocalRun, evaluations

TRAPS = (
    "yaml",
    "random",
    "tandem",
    "pydantic",
    "psutil",
    "aiohttp",
    "secrets",
    "selectors",
    "tempfile",
    "queue",
    "uuid",
)
SCRIPT = """
import json, os, sys
from pathlib import Path
import neighbour, torch
import tandem_trainer.task  # as scripts do that know Tandem
assert "PYTHONSAFEPATH" not in os.environ
out = Path(os.environ["TANDEM_RUN_DIR"])
places = [sys.path[0], os.getcwd(), [place for place in sys.path if place == os.getcwd()]]
(out / "path.json").write_text(json.dumps(places))
torch.save({}, out / "last.pt")
"""
SCORE = """
import json, os
import neighbour
print(json.dumps({"accuracy": 1.0}), file=open(os.environ["TANDEM_REPORT"], "w"))
"""
MANIFEST = """
apiVersion: tandem.dev/v1alpha1
kind: DistributedTrainingJob
metadata: {name: traps}
spec:
  trainer: {command: [python, scripts/train.py]}
  workers: {replicas: 1}
  evaluators: {command: [python, scripts/score.py], watch: "*.pt", metric: accuracy}
"""


@pytest.mark.timeout(240)
def test_files_of_the_users_that_are_called_like_modules_reach_the_users_programs_alone(tmp_path: Path) -> None:
    folder = tmp_path / "typed-here"
    (folder / "scripts").mkdir(parents=True)
    for name in TRAPS:
        (folder / f"{name}.py").write_text(f"raise SystemExit('the {name}.py of the working folder was imported')\n")
    for name, content in (("train", SCRIPT), ("score", SCORE), ("neighbour", "")):
        (folder / "scripts" / f"{name}.py").write_text(content)
    (folder / "job.yaml").write_text(MANIFEST)
    run = LocalRun(tmp_path, manifest=Path("job.yaml"), cwd=folder)
    try:
        assert run.ends() == 0, run.output
        logs = "".join(file.read_text() for file in run.run_dir.log.glob("*.txt"))
        assert "was imported" not in logs + run.output
        assert json.loads((run.path / "path.json").read_text()) == [str(folder / "scripts"), str(folder), []]
        assert [result["checkpoint"] for result in evaluations(run.path)]
    finally:
        run.close()
