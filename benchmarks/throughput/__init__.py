"""Throughput of Tandem's loop beside a bare one, and of training with evaluators beside training without."""
