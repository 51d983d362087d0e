"""Whether a run may go on in its data where its checkpoint stands.

A step says which samples it takes only together with the number of samples, the batch size and the seed. With others,
the steps that are left would leave samples out or take them twice, and nothing would show it. So a run that has others
is refused. Rejected: to convert the position (the permutation of other samples is another one, so what was seen of this
epoch cannot be told from what was not).

A stream is read in its own order, and its position counts samples, so its batch size may change.
"""

from typing import Protocol

from tandem.rundir.checkpoint import DataPosition
from tandem_trainer.errors import ConfigurationError


class Positions(Protocol):
    """The data of a run, counted in data steps."""

    def position(self, step: int) -> DataPosition:
        """Where the data stands before a data step."""


def check_position(found: DataPosition | None, data: Positions, step: int) -> None:
    """Make sure that the data of this run is that of a checkpoint.

    Args:
        found: where the checkpoint stands; None where its writer had no data.
        step: the data step that this is.

    Raises:
        ConfigurationError: it is not.
    """
    if found is None:
        return
    now = data.position(step)
    changes = [f"the seed {found.seed}, now {now.seed}"] if found.seed != now.seed else []
    if found.samples is None and now.samples is not None and not changes and found != _bare(now):
        changes = [f"{_place(found)}, where this run would have {_place(now)}"]
    changes += [
        words.format(before, after)
        for words, before, after in (
            ("{:,} training samples, now {:,}", found.samples, now.samples),
            ("a global batch size of {:,}, now {:,}", found.batch, now.batch),
            ("drop_last {}, now {}", found.drop_last, now.drop_last),
        )
        if before is not None and after is not None and before != after
    ]
    if changes:
        raise ConfigurationError(
            f"the checkpoint was written with {'; '.join(changes)}: going on would leave samples out or take them "
            "twice. Set it back, or begin a new run from the checkpoint's weights, in a folder of its own "
            "(tandem checkpoints export)"
        )


def _bare(position: DataPosition) -> DataPosition:
    """As a checkpoint has it that does not say of what data it is."""
    return DataPosition(seed=position.seed, epoch=position.epoch, cursor=position.cursor)


def _place(position: DataPosition) -> str:
    return f"its data at epoch {position.epoch}, sample {position.cursor:,}"
