"""A job whose score is its argument, for tests of sweeps: its script and its evaluator need no torch."""

from pathlib import Path
from typing import Any

TRAIN = """
import os, sys, time
from pathlib import Path

import tandem

height, steps, seconds = float(sys.argv[1]), int(sys.argv[2]), 0.1
if height < float(sys.argv[3]):
    # Only a pruner ends it, and it arrives last at each rung: the first one there always passes.
    steps, seconds = 10**9, 0.5
run = Path(os.environ["TANDEM_RUN_DIR"])
out = run / "out"
out.mkdir(exist_ok=True)
is_first = os.environ.get("RANK", "0") == "0"
if is_first:
    with (run / "starts").open("a") as starts:
        starts.write("started\\n")
done = max((int(path.stem[5:]) for path in out.glob("step-*.txt")), default=0)
for step in range(done + 1, steps + 1):
    time.sleep(seconds)
    tandem.log(step=step, loss=1 / step, total=steps)
    if is_first and step % 5 == 0:
        temporary = out / "new"
        temporary.write_text(str(height * (1 + step / 1000)))
        temporary.rename(out / f"step-{step}.txt")
"""
SCORE = """
import json, os, pathlib
value = float(pathlib.Path(os.environ["TANDEM_CHECKPOINT"]).read_text())
pathlib.Path(os.environ["TANDEM_REPORT"]).write_text(json.dumps({"height": value}))
"""
EVALUATORS = {
    "command": ["python", "score.py"],
    "watch": "out/step-*.txt",
    "settleSeconds": 0.2,
    "policy": "Every",
    "metric": "height",
    "goal": "Maximize",
}


def write(folder: Path) -> Path:
    """The folder of its code."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(TRAIN)
    (folder / "score.py").write_text(SCORE)
    return folder


def spec(steps: int = 30, lowest: float = 0.0, **changed: Any) -> dict[str, Any]:
    """The spec of the job.

    Args:
        lowest: a trial of a lower height has no end, and is slow: only a pruner stops it.
    """
    trainer = {"command": ["python", "train.py"], "args": ["0.5", str(steps), str(lowest)]}
    return {"trainer": trainer, "evaluators": EVALUATORS, **changed}


def sweep(heights: list[float], **changed: Any) -> dict[str, Any]:
    """The spec of a sweep over it: one trial for each height."""
    space = {"trainer.args[0]": {"values": heights}}
    return {"space": space, "sampler": "grid", "pruner": {"minSteps": 5}, "workers": 2, **changed}
