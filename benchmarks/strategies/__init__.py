"""Strategies beside each other, and beside the same written by hand and with accelerate."""
