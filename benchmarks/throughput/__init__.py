"""Throughput of our loop beside a bare one, and of training with evaluators beside training without."""
