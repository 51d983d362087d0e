"""Measures training: time by phase, throughput, losses, gradient norm. Feeds the log and the pulse.

Cheap enough for every step: clock reads and list appends; the log's thread does the JSON and the disk.

The gradient norm is read in an optimizer pre-step hook, so that a loop of the user's own need not report it: gradients
that are clipped by then are measured clipped. A reading costs one pass over the gradients; with one in INTERVAL_SECONDS
that is little beside steps of any length. Its value stays on the device until the log is written, which waits for the
losses anyway.

All ranks of a group take a step in the same time, because they wait for each other when they average gradients. Each
does its forward pass alone, so the time of this pass is compared. On a GPU it is timed between two events, which costs
the training thread nothing; the times are read at a vote, which waits for the losses anyway.

Utilization (MFU) is computed as in the PaLM paper (arXiv 2204.02311, appendix B): forward and backward pass once,
without recomputation, over the peak of the GPU's data sheet. Only where both are well defined: a built-in model in a
precision that runs on tensor cores, on a GPU that is listed here. In float32, convolutions may or may not use TF32.
"""

import contextlib
import math
import re
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.utils.hooks import RemovableHandle

from tandem.job.tasks import ImageParameters
from tandem.rundir import records
from tandem.rundir.log import LogWriter
from tandem_trainer.data.order import digest
from tandem_trainer.models import build
from tandem_trainer.process_group import MAX_STEPS_BETWEEN_VOTES, VOTE_SECONDS
from tandem_trainer.pulse import Pulse

INTERVAL_SECONDS = 0.5
"""Interval of readings of the gradient norm, and of rates in the training log, in seconds."""


class GradientNorm:
    """Norm of the gradients, measured on one rank. They are those of the global batch there, averaged over the
    ranks."""

    def __init__(self) -> None:
        self._reading: Tensor | None = None
        self._due = 0.0
        self._hooks: list[RemovableHandle] = []

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure the gradients of an optimizer before its steps."""
        # A wrapper may be an optimizer by name only.
        if isinstance(optimizer, torch.optim.Optimizer):
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))

    def close(self) -> None:
        """Stop measuring."""
        for hook in self._hooks:
            hook.remove()

    @property
    def is_due(self) -> bool:
        """Whether a reading of this step is due."""
        return time.monotonic() >= self._due

    def record(self, norm: Tensor) -> None:
        """Record a norm that was measured for another purpose, such as clipping."""
        self._reading, self._due = norm.detach(), time.monotonic() + INTERVAL_SECONDS

    def take(self) -> Tensor | None:
        """Return the newest reading, once: a scalar that may still be being computed; None if there is none."""
        reading, self._reading = self._reading, None
        return reading

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.is_due:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # The norm of one pipeline stage alone would mean nothing.
        norm = (
            None
            if any(parameter.is_meta for parameter in parameters)
            else _norm(parameter.grad for parameter in parameters)
        )
        if norm is not None:
            # Fused optimizers take a scaled gradient, and its scale with it.
            scale = getattr(optimizer, "grad_scale", None)
            self.record(norm if scale is None else norm / scale)


def _norm(gradients: Iterable[Tensor | None]) -> Tensor | None:
    """Compute the norm of plain tensors; None for others: the norm of a sharded tensor is a collective, and ranks would
    wait for each other."""
    tensors = [gradient for gradient in gradients if gradient is not None]
    if not tensors or any(type(tensor) is not Tensor or tensor.layout != torch.strided for tensor in tensors):
        return None
    return get_total_norm(tensors)


RATE_SECONDS = VOTE_SECONDS / 2
"""Minimum time over which throughput and phases are reported, in seconds. They are reported at votes, and each save has
a vote of its own."""


class Meter:
    """Measurements of one rank; rank 0 writes the log."""

    def __init__(
        self,
        steps_per_epoch: int | None,
        world_size: int,
        total_steps: int | None,
        writer: LogWriter | None,
        pulse: Pulse | None,
    ) -> None:
        self._steps_per_epoch, self._world_size, self._total_steps = steps_per_epoch, world_size, total_steps
        self._log, self._pulse = writer, pulse
        self.gradients = GradientNorm() if writer is not None else None
        """Gradient norm; None on ranks that write no log."""
        self._norms: list[Tensor | None] = []
        self._learning_rate: float | None = None
        self._gradient_norm: float | None = None
        """Last value that is known."""
        self._losses: list[Tensor] = []
        self._steps: list[records.Step] = []
        self._step = 0
        self._loss: float | None = None
        self._throughput: float | None = None
        self._window_start = time.perf_counter()
        self._window_samples = self._window_steps = 0
        self._window_pause = 0.0
        self._pauses = 0
        self._data_seconds = 0.0
        self.checkpoint_seconds = 0.0
        self._last_vote: float | None = None
        self._step_start = self._ready = 0.0
        self._busy_seconds: float | None = None

    def begin_step(self) -> None:
        """Record the start of a step: its data is being loaded."""
        self._step_start = time.perf_counter()
        if self._last_vote is None:
            self._last_vote = self._step_start

    def data_ready(self) -> None:
        """Record that the data is loaded; computing starts."""
        self._ready = time.perf_counter()
        self._data_seconds += self._ready - self._step_start

    def end_step(self, step: int, ids: Tensor, learning_rate: float | None, loss: Tensor) -> None:
        """Record a complete step.

        Args:
            step: steps completed.
            ids: [global batch], sample ids of the step.
            learning_rate: learning rate of the step; None if there is none.
            loss: this rank's part of the global mean; scalar, may still be being computed on a GPU.
        """
        self._losses.append(loss)
        self._step = step
        if learning_rate is not None:
            self._learning_rate = learning_rate
        self._window_samples += len(ids)
        self._window_steps += 1
        if self._log is not None:
            self._steps.append(
                records.Step(time=time.time(), step=step, samples=len(ids), ids=digest(ids), lr=learning_rate)
            )
            self._norms.append(None if self.gradients is None else self.gradients.take())
        if self._pulse is not None:
            self._beat("train")
        assert len(self._losses) <= MAX_STEPS_BETWEEN_VOTES

    def pending_losses(self) -> Tensor:
        """Return the losses of the steps since the last vote; [steps], float32, on the CPU."""
        return torch.stack(self._losses).to("cpu", torch.float32)

    def mean_step_seconds(self) -> float:
        """Compute the mean time of a step since the last vote, on the CPU and on the GPU, in seconds. Call it after
        `pending_losses`.

        Not the sum of the training thread's times: that thread runs ahead of a GPU, whose steps may be a
        thousand times as long, and the next vote would be a hundred of them away.
        """
        assert self._last_vote is not None
        return (time.perf_counter() - self._last_vote) / max(1, len(self._losses))

    def agreed(self, losses: list[float], busy_seconds: float) -> None:
        """Log the losses since the last vote, on which the ranks have agreed.

        Args:
            losses: mean loss of the global batch, for each step since the last vote.
            busy_seconds: this rank's own work in these steps.
        """
        self._busy_seconds = busy_seconds / len(losses)
        self._losses.clear()
        self._last_vote = time.perf_counter()
        self._loss = losses[-1]
        if self._log is not None:
            self._log.append(
                *(
                    step.model_copy(update={"loss": loss, "gradient_norm": self._norm(norm)})
                    for step, loss, norm in zip(self._steps, losses, self._norms, strict=True)
                )
            )
            self._steps.clear()
            self._norms.clear()
        elapsed = time.perf_counter() - self._window_start
        if elapsed - self._window_pause >= RATE_SECONDS:
            self._throughput = self._window_samples / (elapsed - self._window_pause)
            self._write_rate(elapsed)
        if self._pulse is not None:
            self._beat("train")

    def close(self) -> None:
        """Write the last rate, so that sums over the log are exact: no step follows."""
        if self.gradients is not None:
            self.gradients.close()
        if self._window_steps:
            self._write_rate(time.perf_counter() - self._window_start)

    def phase(self, name: str) -> None:
        """Report the activity of this rank through the pulse."""
        if self._pulse is not None:
            self._beat(name)

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Exclude a block from the time of steps and of training."""
        started_at = time.perf_counter()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                seconds = time.perf_counter() - started_at
                self._step_start += seconds
                if self._last_vote is not None:
                    self._last_vote += seconds
                self._window_pause += seconds

    def _write_rate(self, elapsed: float) -> None:
        if self._log is not None:
            self._log.append(self._rate(elapsed))
        self._window_start += elapsed
        self._window_samples = self._window_steps = 0
        self._data_seconds = self.checkpoint_seconds = self._window_pause = 0.0

    def _rate(self, elapsed: float) -> records.Rate:
        stepping = elapsed - self._window_pause
        compute = max(0.0, stepping - self._data_seconds - self.checkpoint_seconds)
        phases = {"data": self._data_seconds, "compute": compute, "checkpoint": self.checkpoint_seconds}
        return records.Rate(
            time=time.time(),
            step=self._step,
            epoch=self._epoch,
            throughput=self._window_samples / stepping,
            steps=self._window_steps,
            samples=self._window_samples,
            step_seconds=stepping / self._window_steps,
            world_size=self._world_size,
            phases=phases | ({"pause": self._window_pause} if self._window_pause else {}),
            lr=self._learning_rate,
            loss=self._loss,
            gradient_norm=self._gradient_norm,
        )

    def _norm(self, norm: Tensor | None) -> float | None:
        """Return the value to log for a reading; only some steps have one."""
        if norm is None:
            return None
        value = float(norm)
        self._gradient_norm = value if math.isfinite(value) else None
        return self._gradient_norm

    @property
    def _epoch(self) -> float | None:
        return None if self._steps_per_epoch is None else self._step / self._steps_per_epoch

    def _beat(self, phase: str) -> None:
        assert self._pulse is not None
        self._pulse.beat(
            step=self._step,
            total_steps=self._total_steps,
            epoch=self._epoch,
            loss=self._loss,
            throughput=self._throughput,
            busy_seconds=self._busy_seconds,
            phase=phase,
        )


class Stopwatch:
    """Stopwatch of forward passes: `with busy: loss = forward(…)`. A pass that raises is not counted."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._started: float | torch.cuda.Event | None = None
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._pauses = False

    def __enter__(self) -> None:
        if not self._pauses:
            self._started = self._now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        started, self._started = self._started, None
        if self._pauses or started is None:
            return
        if isinstance(started, float):
            self._seconds += time.perf_counter() - started
        else:
            self._events.append((started, self._event()))

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Exclude a block from the measured time."""
        was_paused, self._pauses = self._pauses, True
        try:
            yield
        finally:
            self._pauses = was_paused

    def take(self) -> float:
        """Return the seconds of forward passes since the last call. On a GPU the work must be complete."""
        milliseconds: float = sum(start.elapsed_time(end) for start, end in self._events)
        seconds = self._seconds + milliseconds / 1000
        self._started, self._seconds = None, 0.0
        self._events.clear()
        return seconds

    def _now(self) -> "float | torch.cuda.Event":
        return self._event() if self._on_gpu else time.perf_counter()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


PEAKS: tuple[tuple[str, float], ...] = (
    (r"\bB200\b", 2250e12),
    (r"\bH200\b", 989e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100 NVL\b", 835e12),
    (r"\bH100\b", 989e12),
    (r"\bA100\b", 312e12),
    (r"\bL40S\b", 362e12),
    (r"\bL4\b", 121e12),
    (r"\bA40\b", 149.7e12),
    (r"\bA10\b", 125e12),
)
"""Peak operations a second in bfloat16 or float16, dense, from NVIDIA's data sheets, by a pattern of the name that CUDA
gives a GPU; the first match counts."""


RESIDENT, ON_GPU = "resident", "onGpu"
"""Keys of the result of `peak_memory`."""


def peak_memory(device: torch.device) -> dict[str, int]:
    """Measure the peak memory of this process so far, in bytes: RESIDENT, and on a GPU the memory allocated by torch,
    ON_GPU. Values that the system does not tell are left out."""
    peaks = {}
    if (resident := _max_resident()) is not None:
        peaks[RESIDENT] = resident
    if device.type == "cuda":
        peaks[ON_GPU] = torch.cuda.max_memory_allocated(device)
    return peaks


def _max_resident() -> int | None:
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Not getrusage on Linux: it includes the program that has started this one.
    with contextlib.suppress(OSError):
        match = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return None if match is None else 1024 * int(match[1])
    return None


class Cost(NamedTuple):
    """Cost of training. None: not well defined."""

    flops_per_sample: float | None = None
    """Operations of a training step for one sample."""
    peak_flops: float | None = None
    """Peak operations of one GPU, a second."""
    tokens_per_sample: float | None = None
    """Tokens of a sample, as the task reports them."""
    learned_per_sample: float | None = None
    """Tokens of a sample that the loss is over."""


def cost_of(precision: str, flops_per_sample: Callable[[], float | None], device: torch.device) -> Cost:
    """Compute the cost of training in a precision.

    Args:
        precision: precision of the forward pass.
        flops_per_sample: called only where a cost is well defined.
        device: device of the rank.
    """
    if device.type != "cuda" or precision == "float32":
        return Cost()
    peak_flops = peak(torch.cuda.get_device_name(device))
    flops = None if peak_flops is None else flops_per_sample()
    return Cost() if flops is None else Cost(flops, peak_flops)


def peak(name: str) -> float | None:
    """Return the peak operations a second of the GPU of this name; None if it is not listed."""
    return next((flops for pattern, flops in PEAKS if re.search(pattern, name)), None)


def per_sample(config: ImageParameters, channels: int, image_size: int, classes: int) -> float:
    """Count the operations of the forward and the backward pass for one sample, a multiplication and an addition being
    two. The backward pass counts twice the forward pass: once for the gradient of weights, once for that of inputs.

    Draws random numbers: set the seed afterwards.
    """
    # Not torch's FlopCounterMode, nor the meta device: their first use imports for 3.6 and 1.8 s. A test compares them.
    model = build(config.model, channels, image_size, classes).eval()
    image = torch.zeros(1, channels, image_size, image_size)
    operations: list[int] = []

    def count(module: nn.Module, inputs: object, out: Tensor) -> None:
        assert isinstance(module, nn.Conv2d | nn.Linear)
        # Each output is a sum of as many products as the weight has elements for it.
        operations.append(2 * out.numel() * module.weight[0].numel())

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    with torch.no_grad():
        model(image)
    return 3.0 * sum(operations)
