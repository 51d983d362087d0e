"""Samples that an epoch repeats and skips when its ranks become 2, 1, and 3: `python -m benchmarks.sample_gap`."""
