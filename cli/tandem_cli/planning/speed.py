"""Step time and cost, from data sheets. Pure.

    compute          operations / (peak of the device × utilization); a third forward, two thirds backward
    communication    ddp: 2 (N - 1) / N × gradients, once a step (a ring's all-reduce)
                     fsdp: (N - 1) / N × (2 × parameters + gradients), in each pass: gathered for the forward and for
                     the backward pass, reduced after it
                     fsdp+tensor, besides: 2 (T - 1) / T × the activations and gradients that T ranks reduce
                     dp: parameters + gradients, in each pass
                     model: the activations and gradients that go from device to device
    step             compute + the communication that is not overlapped: ddp's overlaps with the backward pass of the
                     last micro-batch, fsdp's with its whole pass; the others' overlaps with nothing

Not included: reading data, checkpoints, latency of small messages, and kernels that wait for memory instead of
computing. Small models wait: their utilization is far below the default.
"""

from dataclasses import dataclass

from tandem.job.footprint import Footprint, Pass
from tandem.job.tasks import Loop
from tandem_cli.planning.memory import PlannedStrategy

UTILIZATION = 0.4
"""Share of a device's peak that training reaches: that of large transformers on many GPUs
(https://arxiv.org/abs/2204.02311, table 3: 0.21 to 0.46)."""
BACKWARD = 2 / 3
"""Share of the operations of a pass that the backward pass takes: two matrix products for each of the forward pass."""
HOUR = 3600.0


@dataclass(frozen=True)
class DeviceSpec:
    """Data sheet of a device."""

    memory: int
    """Bytes."""
    half: float
    """Operations a second in bfloat16 or float16, dense."""
    full: float
    """Operations a second in float32, without TF32: torch's default."""
    bandwidth: float
    """Bytes a second from one device to another of the same machine, in one direction."""

    def peak(self, precision: str) -> float:
        """Operations a second in a precision of the loop."""
        return self.full if precision == "float32" else self.half


DEVICES = {
    "h200": DeviceSpec(141 * 10**9, 989e12, 67e12, 450e9),
    "h100": DeviceSpec(80 * 10**9, 989e12, 67e12, 450e9),
    "a100": DeviceSpec(80 * 10**9, 312e12, 19.5e12, 300e9),
    "l40s": DeviceSpec(48 * 10**9, 362e12, 91.6e12, 32e9),
    "l4": DeviceSpec(24 * 10**9, 121e12, 30.3e12, 32e9),
}
"""NVIDIA's data sheets: SXM modules with NVLink, and cards with PCIe 4.0 ×16."""
DEFAULT_DEVICE = "h100"


@dataclass(frozen=True)
class Speed:
    """Assumed speed of a device."""

    flops: float
    """Peak, in operations a second."""
    utilization: float
    """Share of the peak that is reached."""
    bandwidth: float
    """Bytes a second between two devices."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    compute: float
    communication: float
    """Seconds of communication, overlapped or not."""
    step: float


def step_time(
    strategy: PlannedStrategy,
    world_size: int,
    footprint: Footprint,
    traced: Pass,
    passes: int,
    speed: Speed,
    tensor: int = 1,
) -> StepTime:
    """Compute the time of an optimizer step.

    Args:
        world_size: data-parallel ranks.
        traced: pass of the rank that has most samples.
        passes: passes of a step.
        tensor: ranks that split each matrix.
    """
    compute = traced.flops * passes / (speed.flops * speed.utilization)
    share = (world_size - 1) / world_size
    # Bytes that go over the links in a step, and the seconds of computation that they overlap with.
    transferred, overlap = 0.0, 0.0
    if strategy is PlannedStrategy.DDP:
        transferred, overlap = 2 * share * footprint.gradients, BACKWARD * compute / passes
    elif strategy in (PlannedStrategy.FSDP, PlannedStrategy.TENSOR):
        transferred, overlap = share * (2 * footprint.parameters + footprint.gradients) * passes, compute
    reduced = 2 * (tensor - 1) / tensor * traced.added_up * passes / speed.bandwidth
    communication = transferred / speed.bandwidth
    step = compute + reduced + max(0.0, communication - overlap)
    return StepTime(compute, communication + reduced, step)


def steps_of(loop: Loop, samples: int) -> int:
    """Compute the optimizer steps of a whole run over this many samples."""
    size = loop.global_batch_size
    epoch = samples // size if loop.drop_last else -(-samples // size)
    steps = loop.epochs * epoch
    return steps if loop.max_steps is None else min(steps, loop.max_steps)


def cost(steps: int, step_seconds: float, world_size: int, price_per_hour: float) -> float:
    """Compute the cost of the steps, in the currency of the price, which is that of one device."""
    return steps * step_seconds * world_size * price_per_hour / HOUR
