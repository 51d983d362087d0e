"""An evaluator of huggingface_trainer.py: the loss of each checkpoint on held-out text, while training continues.

Evaluator processes start this program, as examples/huggingface-trainer.yaml specifies (`evaluators.command`).
"""

import torch
from huggingface_trainer import Passages, make_model
from safetensors.torch import load_file

from tandem.evaluation import Mean, checkpoints


def main() -> None:
    model, rows = make_model().eval(), Passages(held_out=True).rows
    for checkpoint in checkpoints():
        model.load_state_dict(load_file(checkpoint.weights))
        shard, total = rows[checkpoint.shard :: checkpoint.shards], 0.0
        for part in shard.split(64):
            with torch.inference_mode():
                total += model(input_ids=part, labels=part).loss.item() * len(part)
        checkpoint.report(loss=Mean(total, len(shard)))


if __name__ == "__main__":
    main()
