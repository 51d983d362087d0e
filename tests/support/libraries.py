"""The libraries that `scripts/unchanged.py` trains with."""

SAVED = {
    "ddp": "state-*.pt",
    "trainer": "checkpoint-*",
    "sft": "checkpoint-*",
    "lightning": "saved/*.ckpt",
    "accelerate": "state-*",
}
"""What each of them saves, as a pattern for `evaluators.watch`."""
