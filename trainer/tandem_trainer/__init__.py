"""The elastic trainer: rendezvous handler, loop, models, data, checkpoints."""
