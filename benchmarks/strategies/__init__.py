"""Strategies compared with each other, and with the same written by hand and with accelerate."""
