"""The ledger beside the processes' own seconds, for each kind of script and evaluator."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.rundir.ledger import newest_ledger
from tests.support import manifests
from tests.support.local_run import DIGITS, Lifetimes, LocalRun

BURN = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
FAMILY = f"""
import subprocess, sys, time
BURN = {BURN!r}
RUN = f"subprocess.run([sys.executable, '-c', {{BURN!r}}])"
CHILD = f"import subprocess, sys, time\\n{{RUN}}\\ntime.sleep(0.2)\\n{{BURN}}"
"""
"""A program may run CHILD, which runs a grandchild, sleeps, and computes."""
SCRIPT = f"""{FAMILY}
import os, tandem, torch
out = os.environ["TANDEM_RUN_DIR"]
for step in range(1, 26):
    subprocess.run([sys.executable, "-c", CHILD])
    if step == 10:
        with tandem.pausing("validation"):
            time.sleep(5)
    if os.environ["RANK"] == "0":
        tandem.log(step=step, loss=1.0 / step, total=25, samples=8)
        if step % 5 == 0:
            torch.save({{"step": step}}, f"{{out}}/model-{{step}}.pt")
"""
ONCE = f"""{FAMILY}
import json, os, pathlib
subprocess.run([sys.executable, "-c", CHILD])
pathlib.Path(os.environ["TANDEM_REPORT"]).write_text(json.dumps({{"score": 1.0}}))
"""
STAYS = f"""{FAMILY}
from tandem.evaluation import checkpoints
for checkpoint in checkpoints():
    subprocess.run([sys.executable, "-c", CHILD])
    checkpoint.report(score=1.0)
"""
SCORED = {"metric": "score", "goal": "Maximize"}
LONG = ["--set", "trainer.loop.epochs=300", "--set", "checkpoint.everySteps=1500"]


def with_evaluators(**evaluators: Any) -> dict[str, Any]:
    """The digits, evaluated by a program."""
    whole: dict[str, Any] = yaml.safe_load(DIGITS.read_text())
    whole["spec"]["evaluators"] = evaluators
    return whole


def of_script(**spec: Any) -> dict[str, Any]:
    return manifests.manifest("script", trainer={"command": ["python", "script.py"]}, **spec)


@pytest.mark.full("coordinator", "evaluator")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("job", "options"),
    [
        pytest.param(yaml.safe_load(DIGITS.read_text()), LONG, id="built-in"),
        pytest.param(with_evaluators(command=["python", "once.py"], **SCORED), LONG, id="a program that runs once"),
        pytest.param(with_evaluators(command=["python", "stays.py"], **SCORED), LONG, id="a program that stays"),
        pytest.param(
            of_script(
                workers={"replicas": 2},
                evaluators={"command": ["python", "once.py"], "watch": "model-*.pt", **SCORED},
            ),
            [],
            id="a script and its files",
        ),
        pytest.param(of_script(workers={"replicas": 1}, evaluators={"replicas": 0}), [], id="a script alone"),
    ],
)
def test_it_adds_up_to_the_seconds_of_all_processes(tmp_path: Path, job: dict[str, Any], options: list[str]) -> None:
    for name, text in (("script.py", SCRIPT), ("once.py", ONCE), ("stays.py", STAYS)):
        (tmp_path / name).write_text(text)
    (tmp_path / "job.json").write_text(json.dumps(job))
    with LocalRun(tmp_path, *options, manifest=tmp_path / "job.json", cwd=tmp_path) as run:
        with Lifetimes(run) as watched:
            assert run.ends(300) == 0, run.output
        ledger = newest_ledger(run.run_dir)
    seconds = ledger.worker_cpus * watched.seconds("worker") + watched.seconds("evaluator")
    # Measured: 1.0008 to 1.0015.
    assert ledger.cpu_seconds.total == pytest.approx(seconds, rel=0.01)
