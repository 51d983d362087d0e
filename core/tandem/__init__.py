"""What every part of Tandem shares; imports neither torch nor kopf nor kubernetes."""

__version__ = "0.1.0"
