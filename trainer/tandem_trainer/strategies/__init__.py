"""Parallelism strategies: how a model is distributed over the ranks. Today: replicated (data parallelism)."""
