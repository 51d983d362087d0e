"""Agreement between ranks: compares the settings and data that they must share, at the start and during training.

Each rank counts its samples, reads its job and imports its torch by itself. If one rank differs, samples are lost or
taken twice, gradients are those of different programs, and no rank notices. So the ranks compare the terms of their run
at the start. They do so as soon as some terms are known: torch hangs where one rank calls another collective than the
others.

During training, a digest of the samples of all steps is part of each vote (tandem_trainer.process_group). It covers
what no term can: later epochs, a function of the script's own, a stream.
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
from tandem.processes.launch import CODE
from tandem.wire.status import SAMPLES_DIFFER
from tandem_trainer.failure import ConfigurationError, Disagreement
from tandem_trainer.process_group import Group

MAX_RANKS_NAMED = 4
"""Ranks that a message names before it counts the others."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Settings and data that decide the order of the samples and the result of a run. Serializable as JSON; None: not
    known yet."""

    tandem: str = tandem.__version__
    torch: str = torch.__version__
    code: str | None = field(default_factory=lambda: os.environ.get(CODE))
    """Digest of the job's code."""
    seed: int
    strategy: Sequence[str] = ()
    """Parallelism strategy of each model."""
    dtypes: Sequence[str] = ()
    """Dtypes of the weights, or the precision of a task."""
    samples: int | None = None
    """Samples in the data set; None for a stream."""
    global_batch_size: int | None = None
    drop_last: bool = False
    epochs: int | None = None
    max_steps: int | None = None
    order: str | None = None
    """Name of the order, and a digest of the first epoch where a function of the script's own makes it."""
    mixture: Sequence[int] | None = None
    """Samples per epoch of each source."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """All other settings of the job or the script."""


def dtypes_of(weights: Iterable[Tensor]) -> list[str]:
    """Return the distinct dtypes of weights."""
    return sorted({str(weight.dtype).removeprefix("torch.") for weight in weights})


def agree(group: Group, terms: Terms) -> None:
    """Check that all ranks have the same terms. Collective.

    Raises:
        ConfigurationError: terms differ; names each of them, with the value of each rank.
    """
    by_rank = [_flat(rank_terms) for rank_terms in group.gather(asdict(terms))]
    # A rank of another version may have terms that the others lack, so the names of all ranks count.
    names = dict.fromkeys(name for rank_terms in by_rank for name in rank_terms)
    problems = [
        f"{name} is {_values([rank_terms.get(name) for rank_terms in by_rank])}"
        for name in names
        if any(rank_terms.get(name) != by_rank[0].get(name) for rank_terms in by_rank)
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
    """Format each value with the ranks that have it."""
    ranks = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[f"{value:,}" if type(value) is int else str(value)].append(rank)
    return " and ".join(f"{value} on {ranks_of(holders)}" for value, holders in ranks.items())


def ranks_of(ranks: Sequence[int]) -> str:
    """Format ranks: `rank 3`, `ranks 1, 2, 5, 7 and 12 more`."""
    numbers = ", ".join(map(str, ranks[:MAX_RANKS_NAMED]))
    more = f" and {len(ranks) - MAX_RANKS_NAMED:,} more" if len(ranks) > MAX_RANKS_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}{more}"


def deviating_ranks(values: Sequence[Any]) -> list[int]:
    """Return the ranks whose value is not the most frequent one; where several are as frequent, the value of the lowest
    rank counts."""
    # max() returns the first of equals, so ties go to the lowest rank: every rank blames the same ones.
    usual = max(values, key=values.count)
    return [rank for rank, value in enumerate(values) if value != usual]


class SampleDigest:
    """Digest of the samples that this rank's steps have taken since the last vote."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def add(self, step: int, ids: Tensor, content: int) -> None:
        """Add the samples of a step.

        Args:
            step: steps completed.
            ids: [global batch], int64, sample ids of all ranks together.
            content: digest of the samples' content, where the ids alone do not identify it.
        """
        # With the step: two ranks that swap the samples of two steps differ.
        self._hash.update(f"{step} {content}".encode())
        self._hash.update(ids.contiguous().numpy().data)

    @property
    def digest(self) -> int:
        """Digest of 64 bits, equal on ranks that have taken the same samples."""
        return self._hash.intdigest()

    def clear(self) -> None:
        """Start anew, after the ranks have compared the digest."""
        self._hash.reset()


class SamplesDiffer(Disagreement, ConfigurationError):  # noqa: N818 - it is what is the case
    """Ranks have taken different samples."""

    corruption = SAMPLES_DIFFER


def refuse_samples(group: Group, samples: SampleDigest, first: int, last: int) -> NoReturn:
    """Raise an error that names the ranks which have taken other samples. Collective, after a vote has found a
    difference.

    Args:
        samples: digest of this rank.
        first: first step since the previous vote.
        last: last step.

    Raises:
        SamplesDiffer: always.
    """
    # The vote tells that digests differ, and not whose.
    deviating = deviating_ranks([view["taken"] for view in group.gather({"taken": f"{samples.digest:x}"})])
    steps = f"step {last:,}" if first == last else f"steps {first:,} to {last:,}"
    raise SamplesDiffer(
        f"{ranks_of(deviating)} took other samples in {steps} than the other ranks, so samples are lost or taken "
        "twice. Every rank needs the same data set in the same order (sort what os.listdir and glob give), an order= "
        "that follows from seed and epoch alone, and a stream that gives all ranks the same samples (draw random "
        "numbers in transform=)",
        deviating,
    )
