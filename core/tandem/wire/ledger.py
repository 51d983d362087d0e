"""The resource use of a run by purpose, its cost, and its wall time (docs/decisions/0042-ledger.md)."""

from collections.abc import Callable, Iterator
from typing import Annotated, Literal, get_args

from pydantic import Field

from tandem.formatting import count_noun, hours, number, share, size
from tandem.model import Model, WholeNumber
from tandem.wire.wall_time import WallTime

HOUR = 3600.0

Purpose = Literal["compute", "recomputed", "waiting", "idle", "evaluation"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)

NotNegative = Annotated[float, Field(ge=0)]
Price = Annotated[float, Field(gt=0, le=1e9)]


class Prices(Model):
    """Prices per hour. `tandem plan` uses them, too."""

    gpu_per_hour: Price | None = None
    """Price of one GPU for an hour."""
    cpu_per_hour: Price | None = None
    """Price of one CPU for an hour."""
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] | None = None
    """Currency code of three letters, such as `USD`. Shown beside amounts."""


class UsageByPurpose(Model):
    """Resource use by purpose."""

    compute: NotNegative = 0.0
    """First execution of steps, and scripts that do not report their steps."""
    recomputed: NotNegative = 0.0
    """Steps that were repeated after a restart."""
    waiting: NotNegative = 0.0
    """Start of processes, rendezvous, restoring, waiting for samples, and blocking saves."""
    idle: NotNegative = 0.0
    """Lost work, a hang, evaluators without a checkpoint, and workers after the end of training."""
    evaluation: NotNegative = 0.0
    """Evaluations."""

    @property
    def total(self) -> float:
        """Sum over all purposes."""
        return self.compute + self.recomputed + self.waiting + self.idle + self.evaluation


class BucketUsage(Model):
    """Requests to a bucket and bytes of objects, of all processes of a run. Repetitions of requests are not counted."""

    writes: WholeNumber = 0
    reads: WholeNumber = 0
    listings: WholeNumber = 0
    """Each of up to a thousand objects."""
    deletions: WholeNumber = 0
    sent_bytes: WholeNumber = 0
    received_bytes: WholeNumber = 0

    @property
    def total(self) -> int:
        """Sum of all requests."""
        return self.writes + self.reads + self.listings + self.deletions

    def __add__(self, other: "BucketUsage") -> "BucketUsage":
        return BucketUsage(**{name: getattr(self, name) + getattr(other, name) for name in BucketUsage.model_fields})


class Ledger(Model):
    """GPU time, CPU time and cost of workers and evaluators since the run began. The sum is the lifetime of these
    processes times their GPUs or CPUs."""

    gpu_seconds: UsageByPurpose = UsageByPurpose()
    """GPU-seconds."""
    cpu_seconds: UsageByPurpose = UsageByPurpose()
    """CPU-seconds."""
    cost: UsageByPurpose | None = None
    """Cost of the resources that have a price in the job's `prices`."""
    currency: Annotated[str, Field(max_length=3)] | None = None
    """Currency of `cost`."""
    bucket: BucketUsage | None = None
    """Requests to the job's bucket, as its processes report them every five minutes."""
    wall: WallTime | None = None
    """Wall time by cause."""


def format_bucket(usage: BucketUsage) -> str:
    """Format requests and bytes: `1,234 requests (listings 1,000, reads 200, writes 34) · 1.2 GB sent · …`."""
    kinds = {
        "listings": usage.listings,
        "reads": usage.reads,
        "writes": usage.writes,
        "deletions": usage.deletions,
    }
    parts = ", ".join(f"{name} {count:,}" for name, count in kinds.items() if count)
    requests = f"{count_noun(usage.total, 'request')}{f' ({parts})' if parts else ''}"
    return f"{requests} · {size(usage.sent_bytes)} sent · {size(usage.received_bytes)} received"


def ledger_rows(ledger: Ledger | None) -> Iterator[tuple[str, UsageByPurpose, Callable[[float], str]]]:
    """The rows of a ledger to show: name, amounts, and the function that formats one."""
    if ledger is None:
        return
    for name, usage in (("GPU-hours", ledger.gpu_seconds), ("CPU-hours", ledger.cpu_seconds)):
        if usage.total > 0:
            yield name, usage, hours
    if ledger.cost is not None and ledger.cost.total > 0:
        currency = f" {ledger.currency}" if ledger.currency else ""
        yield "cost", ledger.cost, lambda amount: f"{number(float(amount))}{currency}"


def nonzero_purposes(usage: UsageByPurpose) -> Iterator[tuple[Purpose, float]]:
    """The purposes with an amount greater than 0."""
    return ((purpose, amount) for purpose in PURPOSES if (amount := getattr(usage, purpose)) > 0)


def format_usage(usage: UsageByPurpose, formatted: Callable[[float], str]) -> str:
    """Format the sum and its parts: `12.3 · compute 10.1 (82 %) · idle 2.2 (18 %)`."""
    shares = [
        f"{purpose} {formatted(amount)} ({share(amount / usage.total)})" for purpose, amount in nonzero_purposes(usage)
    ]
    return " · ".join([formatted(usage.total), *shares])


def priced_ledger(
    gpu_seconds: UsageByPurpose,
    cpu_seconds: UsageByPurpose,
    prices: Prices | None,
    bucket: BucketUsage | None = None,
) -> Ledger:
    """The ledger with its cost."""
    ledger = Ledger(gpu_seconds=gpu_seconds, cpu_seconds=cpu_seconds, bucket=bucket)
    if prices is None or (prices.gpu_per_hour is None and prices.cpu_per_hour is None):
        return ledger
    gpu, cpu = (prices.gpu_per_hour or 0.0) / HOUR, (prices.cpu_per_hour or 0.0) / HOUR
    cost = UsageByPurpose(
        **{
            purpose: round(gpu * getattr(gpu_seconds, purpose) + cpu * getattr(cpu_seconds, purpose), 6)
            for purpose in PURPOSES
        }
    )
    return ledger.model_copy(update={"cost": cost, "currency": prices.currency})
