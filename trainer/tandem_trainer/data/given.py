"""What a script may give as its data, and what is refused."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from tandem_trainer.data.order import Order
from tandem_trainer.data.sampling import EpochOrder
from tandem_trainer.errors import ConfigurationError


def has_indices(dataset: Any) -> bool:
    """Whether samples are asked for by number; a stream gives them in its own order."""
    # torch's IterableDataset has a __getitem__ that only raises, and may have a length.
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return indexed and not isinstance(dataset, IterableDataset)


def plain_order(samples: int, global_batch_size: int, seed: int, drop_last: bool) -> Order:
    """Each sample once in an epoch.

    Raises:
        ConfigurationError: without its last partial batch an epoch has none.
    """
    if drop_last and samples < global_batch_size:
        raise ConfigurationError(
            f"drop_last leaves out all of the {samples} samples, because global_batch_size={global_batch_size} is more"
        )
    return Order(samples, global_batch_size, seed, drop_last=drop_last)


def check_data(
    dataset: Any, global_batch_size: int | None, order: EpochOrder | None, epochs: int, max_steps: int | None
) -> None:
    """Make sure that `session.batches` can do what it is asked for.

    Raises:
        ConfigurationError: the data cannot be used like that.
    """
    for name, number in (("global_batch_size", global_batch_size), ("epochs", epochs), ("max_steps", max_steps)):
        if number is not None and number < 1:
            raise ConfigurationError(f"{name}={number}: it must be at least 1")
    if isinstance(dataset, DataLoader):
        raise ConfigurationError(
            "give session.batches the data set itself and not a DataLoader, whose batches belong to one number of "
            "processes; collate and loader_workers are arguments of session.batches"
        )
    if isinstance(dataset, Iterator):
        raise ConfigurationError(
            f"a {type(dataset).__name__} can be read only once; give something that begins anew for each epoch"
        )
    if has_indices(dataset) and not len(dataset):
        raise ConfigurationError("the data set is empty")
    if order is not None and not has_indices(dataset):
        raise ConfigurationError("order= needs a data set with indices; a stream is read in its own order")
    if order is None and global_batch_size is None:
        raise ConfigurationError("say with global_batch_size how many samples make a step")
