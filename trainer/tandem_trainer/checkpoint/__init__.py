"""Checkpoints: staged in memory within milliseconds, committed by another process, verified before use."""
