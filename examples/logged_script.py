"""An ordinary PyTorch loop that says how far it is: `tandem.log` shows step, loss, accuracy and speed of the job.

It runs by itself, where `tandem.log` does nothing:  python examples/logged_script.py
and on two processes as a job:                       tandem run examples/logged-script.yaml
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tandem

EPOCHS, BATCH_SIZE = 12, 25
CHECKPOINT = Path(os.environ.get("TANDEM_RUN_DIR", ".")) / "logged_script.pt"


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    train = TensorDataset(x[:1500], y[:1500])
    sampler = DistributedSampler(train, seed=0)
    batches = DataLoader(train, BATCH_SIZE, sampler=sampler)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    first = 0
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, weights_only=True)
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1

    # Steps completed over the whole run: a restarted job goes on counting.
    step, total = first * len(batches), EPOCHS * len(batches)
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            step += 1
            # Every process may say this, or one alone. `samples` are those of all processes together.
            tandem.log(step=step, loss=loss, samples=len(labels) * world_size, total=total)

        if rank == 0:
            # What takes long between two steps is no hang.
            with tandem.pausing("validation"), torch.no_grad():
                accuracy = (network(x[1500:]).argmax(dim=1) == y[1500:]).float().mean()
            tandem.log(step=step, accuracy=accuracy)
            print(f"test accuracy {accuracy:.3f} after {step} steps", flush=True)
            temporary = CHECKPOINT.with_suffix(".tmp")
            torch.save({"model": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, temporary)
            temporary.replace(CHECKPOINT)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
