"""The code that all parts of Tandem share. Imports neither torch nor kopf nor kubernetes.

A training script finds here what it may call: `tandem.log` and `tandem.pausing`.
"""

from tandem.script import log, pausing

__all__ = ["__version__", "log", "pausing"]

__version__ = "0.1.0"
