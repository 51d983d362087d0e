"""What the operator asks of its Python, so that one object of the API server's neither ends nor stops it."""

import gc
import sys

NESTING = 12_000
"""Levels of JSON that can be parsed. The API server takes 10,000, and a template may have them; by default Python stops
at a thousand, in kopf's watch as well. So many take 1.3 MB of the stack, which has eight."""
COLLECTION = (50_000, 20, 50)
"""Objects that are made between two collections of garbage, and after how many of those older ones are looked at. With
the defaults a megabyte and a half of empty lists took 60 to 670 ms to parse, because all that is there is looked at
again and again; so it takes 45."""


def prepare() -> None:
    """Prepare this process. To be called once everything is imported: that is not looked at any more."""
    sys.setrecursionlimit(max(sys.getrecursionlimit(), NESTING))
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTION)
