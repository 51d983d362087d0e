"""The training script of both sides: an ordinary DistributedDataParallel loop with a checkpoint, started by torchrun.

It does not know Tandem. A step takes about 20 ms; every SAVE_EVERY steps rank 0 writes a checkpoint beside the old one
and renames it. Each rank has a log of its own, one line per event: time, event, group, world size, rank, step. The
group is a word that rank 0 generates at its start and broadcasts, so two groups never share one, whatever numbers their
rendezvous gives them.

A trip wire lets a fault hit a moment of milliseconds: the file `trip-save` (or `trip-restore`) in the folder ends the
first rank that reaches it, by SIGKILL, in the middle of the next save (or restore).
"""

import os
import signal
import time
from pathlib import Path

folder = Path(os.environ["RECOVERY_FOLDER"])
replica = os.environ["RECOVERY_REPLICA"]
log = (folder / f"writer-{replica}-{os.getpid()}.txt").open("a", buffering=1)
group, world, rank, step = "-", 0, 0, 0


def log_event(event: str) -> None:
    print(f"{time.time():.4f} {event} {group} {world} {rank} {step}", file=log)


log_event("born")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

log_event("imported")

SAVE_EVERY = 25
STEP_SECONDS = 0.02
SAVED = folder / "checkpoint.pt"


def trip(moment: str) -> None:
    wire = folder / f"trip-{moment}"
    try:
        wire.unlink()
    except FileNotFoundError:
        return
    log_event(f"tripped-{moment}")
    os.kill(os.getpid(), signal.SIGKILL)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
group_word = [os.urandom(4).hex() if rank == 0 else None]
dist.broadcast_object_list(group_word)
group = str(group_word[0])
log_event("joined")

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
if rank == 0 and SAVED.exists():
    saved = torch.load(SAVED, weights_only=True)
    trip("restore")
    model.load_state_dict(saved["model"])
    step = saved["step"]
start = torch.tensor([step])
dist.broadcast(start, 0)
step = int(start)
replicated = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
log_event("restored")

while True:
    started = time.perf_counter()
    generator = torch.Generator().manual_seed(step * world + rank)
    images, labels = torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)
    loss: torch.Tensor = F.cross_entropy(replicated(images), labels)
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    log_event("step")
    if rank == 0 and step % SAVE_EVERY == 0:
        temporary = SAVED.with_suffix(f".{os.getpid()}")
        with temporary.open("wb") as file:
            torch.save({"model": model.state_dict(), "step": step}, file)
            trip("save")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(SAVED)
        log_event("saved")
    time.sleep(max(0.0, STEP_SECONDS - (time.perf_counter() - started)))
