"""An ordinary DistributedDataParallel script: handwritten digits, a checkpoint of its own, nothing of Tandem.

It runs by itself:  torchrun --nproc-per-node=2 examples/own_script.py
and as it stands:   tandem run examples/own-script.yaml
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Images to train on, and images to test with."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--epochs", type=int, default=20)
    options.add_argument("--batch-size", type=int, default=32, help="of each process")
    options.add_argument("--folder", type=Path, default=Path(os.environ.get("TANDEM_RUN_DIR", ".")))
    args = options.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()

    train, test = digits()
    sampler = DistributedSampler(train, seed=0)
    batches = DataLoader(train, args.batch_size, sampler=sampler)

    torch.manual_seed(0)
    net = network().to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    checkpoint = args.folder / "own_script.pt"
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
        if rank == 0:
            print(f"resumed after epoch {state['epoch']}", flush=True)

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        if rank == 0:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            temporary = checkpoint.with_suffix(".tmp")
            torch.save(state, temporary)
            temporary.replace(checkpoint)
            if epoch % 5 == 4:
                print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)

    if rank == 0:
        with torch.no_grad():
            x, y = (part.to(device) for part in test.tensors)
            accuracy = (net(x).argmax(dim=1) == y).float().mean().item()
        print(f"test accuracy {accuracy:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
