"""Measurements with goals: each is one target of the Makefile, ends with 1 where it misses a goal, and is no test."""
