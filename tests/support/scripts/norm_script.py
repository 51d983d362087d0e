"""A user's script with batch normalisation, whose running statistics each rank takes of its own samples."""

import os

import torch
from torch import nn

from tandem_trainer.session import Session


class Numbers:
    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((4,), float(number))


with Session(seed=1) as session:
    norm = nn.BatchNorm1d(4)
    model = session.distribute(nn.Sequential(norm, nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.keep(model, optimizer)
    for batch in session.batches(Numbers(), 6):
        batch.mean(model(batch.data).squeeze(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {os.environ['RANK']} mean={norm.running_mean.tolist()}")
