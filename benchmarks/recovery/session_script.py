"""A loop of the user's own with a session, for the model and the data of the built-in trainer's side."""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from tandem_trainer.models import build
from tandem_trainer.session import Session

SAMPLES, CLASSES, EPOCHS = 4096, 10, 1_000_000


def main() -> None:
    """Train until killed."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(SAMPLES, 3, 16, 16, generator=generator)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    with Session() as session:
        model = session.distribute(build("baby-cnn", 3, 16, CLASSES))
        optimizer = torch.optim.AdamW(model.parameters())
        session.keep(model, optimizer)
        for batch in session.batches(TensorDataset(images, labels), 128, epochs=EPOCHS):
            inputs, targets = batch.data
            batch.mean(cross_entropy(model(inputs), targets, reduction="none")).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
