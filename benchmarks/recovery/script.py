"""The training script of both sides: an ordinary DistributedDataParallel loop with a checkpoint, started by torchrun.

It knows nothing of Tandem. A step takes about 20 ms; every SAVE_EVERY steps rank 0 writes a checkpoint beside the old
one and renames it. Each rank keeps a log of its own, one line per event: time, event, group, world size, rank, step.
The group is a word that rank 0 invents when it starts and tells the others, so two groups never share one, whatever
numbers their rendezvous gives them.

A trip wire is how a fault hits a moment of milliseconds: the file `trip-save` (or `trip-restore`) in the folder ends
the first rank that meets it, by SIGKILL, in the middle of the next save (or restore).
"""

import os
import signal
import time
from pathlib import Path

folder = Path(os.environ["RECOVERY_FOLDER"])
replica = os.environ["RECOVERY_REPLICA"]
log = (folder / f"writer-{replica}-{os.getpid()}.txt").open("a", buffering=1)
group, world, rank, step = "-", 0, 0, 0


def say(event: str) -> None:
    print(f"{time.time():.4f} {event} {group} {world} {rank} {step}", file=log)


say("born")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

say("imported")

SAVE_EVERY = 25
STEP_SECONDS = 0.02
SAVED = folder / "checkpoint.pt"


def trip(where: str) -> None:
    wire = folder / f"trip-{where}"
    try:
        wire.unlink()
    except FileNotFoundError:
        return
    say(f"tripped-{where}")
    os.kill(os.getpid(), signal.SIGKILL)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
told = [os.urandom(4).hex() if rank == 0 else None]
dist.broadcast_object_list(told)
group = str(told[0])
say("joined")

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
say("restored")

while True:
    began = time.perf_counter()
    generator = torch.Generator().manual_seed(step * world + rank)
    images, labels = torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)
    loss: torch.Tensor = F.cross_entropy(replicated(images), labels)
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    say("step")
    if rank == 0 and step % SAVE_EVERY == 0:
        beside = SAVED.with_suffix(f".{os.getpid()}")
        with beside.open("wb") as file:
            torch.save({"model": model.state_dict(), "step": step}, file)
            trip("save")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(SAVED)
        say("saved")
    time.sleep(max(0.0, STEP_SECONDS - (time.perf_counter() - began)))
