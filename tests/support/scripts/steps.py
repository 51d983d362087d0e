"""The smallest training script: counts steps with its group, and says so in a file. Rank 0 keeps the count on the disk.

`STEPS_AWARE` makes it speak and listen through its pulse, as the trainer does; without, it knows nothing of Tandem.
`STEPS_FAIL_AFTER` makes it fail after so many steps, whatever group it is in, as with a GPU that is broken.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tandem.processes.exitcode import ExitCode

aware = os.environ.get("STEPS_AWARE") == "1"
pulse = None
if aware:
    from tandem_trainer.pulse import Pulse, Watchdog

    pulse = Pulse.open_for_rank()
    assert pulse is not None
    Watchdog(pulse).start()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
generation = os.environ["TANDEM_GENERATION"]
folder = Path(os.environ["TANDEM_RUN_DIR"])
saved, total = folder / "saved-step", int(os.environ.get("STEPS_TOTAL", "1000000"))
step = int(saved.read_text()) if saved.exists() else 0
fails_at = step + int(os.environ.get("STEPS_FAIL_AFTER", "1000000000"))
with (folder / f"steps-{generation}-{rank}.txt").open("a", buffering=1) as said:
    try:
        while step < total:
            asked = torch.zeros(1000)
            asked[0] = pulse is not None and pulse.order == "save-and-leave"
            dist.all_reduce(asked)
            step += 1
            if rank == 0:
                beside = saved.with_suffix(".new")
                beside.write_text(str(step))
                beside.replace(saved)
            print(f"{time.time():.4f} {step} {world} {os.getpid()}", file=said)
            if pulse is not None:
                pulse.beat(step=step, total_steps=total, loss=1.0 / step, throughput=50.0)
            if step >= fails_at:
                os._exit(ExitCode.FAILED)
            if pulse is not None and asked[0]:
                pulse.last_word(ExitCode.PREEMPTED)
                os._exit(ExitCode.PREEMPTED)
            time.sleep(0.02)
    except RuntimeError as error:
        if pulse is None:
            raise
        print(f"lost its peers: {str(error).splitlines()[0]}", file=sys.stderr)
        pulse.last_word(ExitCode.PEER_LOST)
        os._exit(ExitCode.PEER_LOST)
if pulse is not None:
    pulse.last_word(0)
dist.destroy_process_group()
