"""Cost of a checkpoint for training, Tandem beside alternatives. See docs/development/benchmarks.md."""
