"""The shared code of all parts of Tandem. Imports neither torch nor kopf nor kubernetes.

Training scripts may call `tandem.log` and `tandem.pausing`.
"""

from tandem.script import log, pausing

__all__ = ["__version__", "log", "pausing"]

__version__ = "0.1.0"
