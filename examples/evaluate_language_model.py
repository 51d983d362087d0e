"""An evaluator of language_model.py: scores of each checkpoint on held-out text, while training continues.

Evaluator processes start this program, as examples/language-model.yaml specifies (`evaluators.command`). By hand:

    TANDEM_CHECKPOINT=runs/language-model/checkpoints/step-000000050 python examples/evaluate_language_model.py
"""

import math

import torch
from language_model import LENGTH, Model, Passages
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from tandem.evaluation import Mean, checkpoints


def main() -> None:
    model, passages = Model().eval(), Passages(held_out=True)
    for checkpoint in checkpoints():
        model.load_state_dict(load_file(checkpoint.weights))
        shard = range(checkpoint.shard, len(passages), checkpoint.shards)
        nats, right = 0.0, 0
        for start in range(0, len(shard), 64):
            letters, following = default_collate([passages[number] for number in shard[start : start + 64]])
            with torch.inference_mode():
                logits = model(letters).transpose(1, 2)
            nats += cross_entropy(logits, following, reduction="none").double().sum().item()
            right += int((logits.argmax(dim=1) == following).sum())
        letters_read = len(shard) * LENGTH
        checkpoint.report(
            loss=Mean(nats, letters_read),
            bitsPerByte=Mean(nats / math.log(2), letters_read),
            accuracy=Mean(right, letters_read),
        )


if __name__ == "__main__":
    main()
