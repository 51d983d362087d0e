"""An evaluator of own_script.py: its accuracy on the test images. Like that script, it does not import Tandem.

Evaluator processes run it once for each checkpoint, as examples/own-script.yaml specifies (`evaluators.command`,
`watch`).
"""

import json
import os
from pathlib import Path

import torch
from own_script import digits, network


def main() -> None:
    model = network().eval()
    model.load_state_dict(torch.load(os.environ["TANDEM_CHECKPOINT"], map_location="cpu", weights_only=True)["model"])
    images, labels = digits()[1].tensors
    shard, shards = int(os.environ["TANDEM_SHARD"]), int(os.environ["TANDEM_SHARDS"])
    images, labels = images[shard::shards], labels[shard::shards]
    with torch.inference_mode():
        right = int((model(images).argmax(dim=1) == labels).sum())
    Path(os.environ["TANDEM_REPORT"]).write_text(json.dumps({"accuracy": {"mean": [right, len(labels)]}}))


if __name__ == "__main__":
    main()
