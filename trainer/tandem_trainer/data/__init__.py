"""The built-in data sets, loaded whole into memory, and the order in which training sees them."""

from tandem_trainer.data.loading import Samples, Split, load

__all__ = ["Samples", "Split", "load"]
