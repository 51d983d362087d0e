"""An evaluator: the loss of a state that `trainer.py` has saved, on the passages that it would evaluate itself."""

import torch
from transformers import GPT2LMHeadModel

from tandem.evaluation import Mean, checkpoints
from trainer import passages


def main() -> None:
    _, held_out = passages()
    for checkpoint in checkpoints():
        shard = torch.stack([row["input_ids"] for row in held_out[checkpoint.shard :: checkpoint.shards]])
        model = GPT2LMHeadModel.from_pretrained(checkpoint.folder).eval()
        total = 0.0
        with torch.inference_mode():
            for part in shard.split(32):
                total += model(input_ids=part, labels=part).loss.item() * len(part)
        checkpoint.report(loss=Mean(total, len(shard)))


if __name__ == "__main__":
    main()
