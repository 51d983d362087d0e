"""A plain script for the jobs of `pods`: passed to `python -c`, it only uses Tandem's variables for its folder.

Ranks add up a number over gloo, a step every 20 ms; the first of them writes a line per step, in the form that `inside`
reads, and every 25 steps a checkpoint beside the old one, which it then replaces.
"""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

STEP_SECONDS, SAVE_EVERY = 0.02, 25
FOLDER = Path(os.environ["TANDEM_RUN_DIR"])
SAVED = FOLDER / "checkpoint.pt"

dist.init_process_group("gloo")
step = torch.tensor([torch.load(SAVED)["step"] if SAVED.exists() else 0])
dist.broadcast(step, 0)
log = None
if dist.get_rank() == 0:
    log = (FOLDER / f"script-g{int(os.environ['TANDEM_GENERATION']):06d}.jsonl").open("a", buffering=1)
while True:
    started = time.perf_counter()
    dist.all_reduce(torch.ones(1))
    step += 1
    if log is not None:
        record = {"kind": "step", "time": time.time(), "step": int(step), "world": dist.get_world_size()}
        print(json.dumps(record), file=log)
        if int(step) % SAVE_EVERY == 0:
            temporary = SAVED.with_suffix(".new")
            torch.save({"step": int(step)}, temporary)
            temporary.replace(SAVED)
    time.sleep(max(0.0, STEP_SECONDS - (time.perf_counter() - started)))
