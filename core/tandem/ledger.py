"""What a run takes, by what it was for, and what that costs (docs/decisions/0042-ledger.md)."""

from collections.abc import Callable, Iterator
from typing import Annotated, Literal, get_args

from pydantic import Field

from tandem.formatting import hours, number, share
from tandem.model import Model

HOUR = 3600.0

Purpose = Literal["compute", "recomputed", "waiting", "idle", "evaluation"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)

NotNegative = Annotated[float, Field(ge=0)]
Price = Annotated[float, Field(gt=0, le=1e9)]


class Prices(Model):
    """What an hour costs. `tandem plan` takes the price of a device from here, too."""

    gpu_per_hour: Price | None = None
    """Price of one GPU for an hour."""
    cpu_per_hour: Price | None = None
    """Price of one CPU for an hour."""
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] | None = None
    """Three letters, such as `USD`. Shown beside amounts."""


class Spent(Model):
    """Amounts by what they were for."""

    compute: NotNegative = 0.0
    """Steps that were taken for the first time, and whatever a script does that says nothing of its steps."""
    recomputed: NotNegative = 0.0
    """Steps that were taken again after a restart."""
    waiting: NotNegative = 0.0
    """Start of processes, rendezvous, restoring, waiting for samples, and standing still for a save."""
    idle: NotNegative = 0.0
    """Work that did not last, a hang, evaluators without a checkpoint, and workers after the end of training."""
    evaluation: NotNegative = 0.0
    """Evaluators at work."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.compute + self.recomputed + self.waiting + self.idle + self.evaluation


class Ledger(Model):
    """GPU time and CPU time of workers and evaluators since the run began, and what they cost. It adds up to the
    seconds for which these processes existed times their GPUs or CPUs."""

    gpu_seconds: Spent = Spent()
    """GPU-seconds."""
    cpu_seconds: Spent = Spent()
    """CPU-seconds."""
    cost: Spent | None = None
    """Money, of what has a price in the job's `prices`."""
    currency: Annotated[str, Field(max_length=3)] | None = None
    """Of `cost`."""


def amounts(ledger: Ledger | None) -> Iterator[tuple[str, Spent, Callable[[float], str]]]:
    """What there is to show of a ledger: its name, the amounts, and how one is written."""
    if ledger is None:
        return
    for name, spent in (("GPU-hours", ledger.gpu_seconds), ("CPU-hours", ledger.cpu_seconds)):
        if spent.total > 0:
            yield name, spent, hours
    if ledger.cost is not None and ledger.cost.total > 0:
        currency = f" {ledger.currency}" if ledger.currency else ""
        yield "cost", ledger.cost, lambda amount: f"{number(float(amount))}{currency}"


def parts(spent: Spent) -> Iterator[tuple[Purpose, float]]:
    """What amounts were for, as far as there are any."""
    return ((purpose, amount) for purpose in PURPOSES if (amount := getattr(spent, purpose)) > 0)


def in_words(spent: Spent, written: Callable[[float], str]) -> str:
    """The sum and its parts: `12.3 · compute 10.1 (82 %) · idle 2.2 (18 %)`."""
    shares = [f"{purpose} {written(amount)} ({share(amount / spent.total)})" for purpose, amount in parts(spent)]
    return " · ".join([written(spent.total), *shares])


def priced(gpu_seconds: Spent, cpu_seconds: Spent, prices: Prices | None) -> Ledger:
    """The ledger with what it costs."""
    found = Ledger(gpu_seconds=gpu_seconds, cpu_seconds=cpu_seconds)
    if prices is None or (prices.gpu_per_hour is None and prices.cpu_per_hour is None):
        return found
    gpu, cpu = (prices.gpu_per_hour or 0.0) / HOUR, (prices.cpu_per_hour or 0.0) / HOUR
    cost = Spent(
        **{
            purpose: round(gpu * getattr(gpu_seconds, purpose) + cpu * getattr(cpu_seconds, purpose), 6)
            for purpose in PURPOSES
        }
    )
    return found.model_copy(update={"cost": cost, "currency": prices.currency})
