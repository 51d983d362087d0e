"""Warm starts: ranks are forked from a process that has imported torch, instead of importing it each time."""
