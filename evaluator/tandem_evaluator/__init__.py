"""The evaluators: CPU processes that evaluate every checkpoint during training."""
