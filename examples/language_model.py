"""A small language model of the English that ships inside Python, in a loop of its own, with a Tandem session.

It runs by itself:  python examples/language_model.py
as two processes:   torchrun --nproc-per-node=2 examples/language_model.py
and as a job:       tandem run examples/language-model.yaml

Kill it at any moment and start it again, with any number of processes: it goes on where it was, with the same batches.
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tandem_trainer.session import Session

LENGTH, WIDTH = 64, 128


class Passages:
    """Passages of LENGTH bytes, with the byte that follows each: of every ten, nine to train on, and one held out."""

    def __init__(self, held_out: bool = False) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self.bytes = torch.tensor(list(text.encode()))
        numbers = range((len(self.bytes) - 1) // LENGTH)
        self.numbers = [number for number in numbers if (number % 10 == 9) == held_out]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = self.numbers[index] * LENGTH
        passage = self.bytes[start : start + LENGTH + 1]
        return passage[:-1], passage[1:]


class Model(nn.Module):
    """Two layers of a causal transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, letters: Tensor) -> Tensor:
        """[N, LENGTH] bytes → [N, LENGTH, 256] logits of the byte that follows each."""
        embedded = self.letters(letters) + self.places.weight
        return self.head(self.layers(embedded, mask=self.mask, is_causal=True))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--epochs", type=int, default=2)
    options.add_argument("--steps", type=int, help="end after so many, if that comes first")
    args = options.parse_args()

    with Session("runs/language-model") as session:
        model = session.distribute(Model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=100)
        session.keep(model, optimizer, schedule=schedule)

        for batch in session.batches(Passages(), 32, epochs=args.epochs, max_steps=args.steps, loader_workers=1):
            letters, following = batch.data
            losses = cross_entropy(model(letters).transpose(1, 2), following, reduction="none")
            batch.mean(losses.mean(dim=1)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

        if session.rank == 0:
            print(f"read {len(Passages()) * LENGTH:,} bytes {args.epochs} times", flush=True)


if __name__ == "__main__":
    main()
