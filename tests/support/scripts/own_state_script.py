"""Trains with an optimizer that has a state_dict of its own: KIND FOLDER STEPS. Prints the weights at the end."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tandem_trainer.session import Session
from tests.support.own_state import WRAPPED, adam

kind, folder, steps = sys.argv[1:]
with Session(folder, checkpoint={"everySteps": 1000}) as session:
    model = session.distribute(nn.Linear(4, 2))
    optimizer = WRAPPED.get(kind, adam)([{"params": [*model.parameters()]}])
    session.keep(model, optimizer)
    rows = torch.sin(torch.arange(96.0)).reshape(24, 4)
    for batch in session.batches(TensorDataset(rows), 4, epochs=2, max_steps=int(steps)):
        batch.mean(model(batch.data[0]).square().mean(dim=1)).backward()
        optimizer.step()
        optimizer.zero_grad()
print(model.weight.tolist())
