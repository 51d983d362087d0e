"""How a model is spread over the ranks. Today: replicated on each (data parallelism)."""
