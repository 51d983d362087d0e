"""Agreement between ranks: compares the settings and data that they must share, at the start and while they train.

Each rank counts its samples, reads its job and imports its torch by itself. Where one finds something else than the
others, samples are lost or taken twice and gradients are those of different programs, and every rank goes on as if all
were well. So the ranks compare the terms of their run at the start. They do so as soon as they know some of them: a
collective of torch's hangs where one rank calls another.

While they train, the samples that they have taken travel as a digest in the vote (tandem_trainer.process_group), which
covers what no term can: later epochs, a function of the script's own, a stream.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

import torch
import xxhash
from torch import Tensor

import tandem
from tandem.launch import CODE
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.process_group import Group

SHOWN = 4
"""Ranks that a sentence names before it counts the others."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Settings and data that decide the order of the samples and the result of a run. JSON; None: not known yet."""

    tandem: str = tandem.__version__
    torch: str = torch.__version__
    code: str | None = field(default_factory=lambda: os.environ.get(CODE))
    """Digest of the job's code."""
    seed: int
    strategy: Sequence[str] = ()
    """Strategy of each model."""
    dtypes: Sequence[str] = ()
    """Types of the weights, or the precision of a task."""
    samples: int | None = None
    """Samples in the data set; None for a stream."""
    global_batch_size: int | None = None
    drop_last: bool = False
    epochs: int | None = None
    max_steps: int | None = None
    order: str | None = None
    """Its name, and a digest of the first epoch where a function of the script's own makes it."""
    mixture: Sequence[int] | None = None
    """Samples that an epoch takes of each source."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """All else that the job or the script chooses."""


def dtypes_of(weights: Iterable[Tensor]) -> list[str]:
    """The types of weights, each once."""
    return sorted({str(one.dtype).removeprefix("torch.") for one in weights})


def agree(group: Group, terms: Terms) -> None:
    """See that all ranks have the same terms. Collective.

    Raises:
        ConfigurationError: they do not; names each term that differs, with the value of each rank.
    """
    found = [_flat(one) for one in group.gather(asdict(terms))]
    names = dict.fromkeys(name for one in found for name in one)
    problems = [
        f"{name} is {_values([one.get(name) for one in found])}"
        for name in names
        if any(one.get(name) != found[0].get(name) for one in found)
    ]
    if problems:
        raise ConfigurationError(
            f"ranks must begin with the same settings and data, and {'; '.join(problems)}: samples would be lost or "
            "taken twice, or ranks would train different models. Make it the same on every rank"
        )


def _flat(terms: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = terms["settings"]
    return {name: value for name, value in terms.items() if name != "settings"} | settings


def _values(values: Sequence[Any]) -> str:
    """Each value with the ranks that have it."""
    ranks = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[f"{value:,}" if type(value) is int else str(value)].append(rank)
    return " and ".join(f"{value} on {ranks_of(some)}" for value, some in ranks.items())


def ranks_of(ranks: Sequence[int]) -> str:
    """Ranks in words: `rank 3`, `ranks 1, 2, 5, 7 and 12 more`."""
    shown = ", ".join(map(str, ranks[:SHOWN]))
    more = f" and {len(ranks) - SHOWN:,} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def unusual(values: Sequence[Any]) -> list[int]:
    """The ranks that do not have what most have, or, where as many have each, what rank 0 has."""
    usual = max(values, key=values.count)
    return [rank for rank, value in enumerate(values) if value != usual]


class TakenSamples:
    """A digest of the samples that this rank's steps have taken since the last vote."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def add(self, step: int, ids: Tensor, content: int) -> None:
        """A step is taken.

        Args:
            step: steps completed.
            ids: [global batch], int64, sample ids of all ranks together.
            content: a digest of what the ids stand for, where they do not say it themselves.
        """
        self._hash.update(f"{step} {content}".encode())
        self._hash.update(ids.contiguous().numpy().data)

    @property
    def digest(self) -> int:
        """64 bits, equal on ranks that have taken the same samples."""
        return self._hash.intdigest()

    def clear(self) -> None:
        """The ranks have compared it."""
        self._hash.reset()


def refuse_samples(group: Group, taken: TakenSamples, first: int, last: int) -> NoReturn:
    """Name the ranks that have taken other samples than the others. Collective, where a vote has found some.

    Args:
        first: the first step since the vote before.
        last: the last one.

    Raises:
        ConfigurationError: always.
    """
    strange = unusual([view["taken"] for view in group.gather({"taken": f"{taken.digest:x}"})])
    where = f"step {last:,}" if first == last else f"steps {first:,} to {last:,}"
    raise ConfigurationError(
        f"{ranks_of(strange)} took other samples in {where} than the other ranks, so samples are lost or taken twice. "
        "Every rank needs the same data set in the same order (sort what os.listdir and glob give), an order= that "
        "follows from seed and epoch alone, and a stream that gives all ranks the same samples (draw random numbers in "
        "transform=)"
    )
