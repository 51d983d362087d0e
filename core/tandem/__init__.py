"""The code that all parts of Tandem share. Imports neither torch nor kopf nor kubernetes."""

__version__ = "0.1.0"
