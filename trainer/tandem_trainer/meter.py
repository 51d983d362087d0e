"""Measures training: time by phase, throughput, losses. Feeds the log and the pulse.

Cheap enough for every step: clock reads and list appends; JSON and disk are the business of the log's thread.

It is looked at where an optimizer is about to take its step, so that a loop of the user's own need not say anything:
what has been clipped by then is measured clipped. A reading costs one pass over the gradients; with one in
INTERVAL_SECONDS that is little beside steps of any length. Its value stays on the device until the log is written, for
which the losses are waited for anyway.

All ranks of a group take a step in the same time, because they wait for each other when they average gradients. The
forward pass is what each does alone, so its time is compared. On a GPU it is timed there, between two events, which
costs the training thread nothing; the times are read at a vote, when the losses have been waited for anyway.

Counted as in the PaLM paper (arXiv 2204.02311, appendix B): forward and backward pass once, nothing that is computed
again, over the peak of the GPU's data sheet. Only where both are well defined: a built-in model in a precision that
runs on tensor cores, on a GPU that is listed here. In float32, convolutions may or may not use TF32.
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

from tandem.rundir import records
from tandem.rundir.log import LogWriter
from tandem.tasks import ImageClassification
from tandem_trainer.data.order import digest
from tandem_trainer.models import build
from tandem_trainer.process_group import MAX_STEPS_BETWEEN_VOTES, VOTE_SECONDS
from tandem_trainer.pulse import Pulse

INTERVAL_SECONDS = 0.5
"""As often as the training log says how fast training is."""


class GradientNorm:
    """Measures on one rank. Gradients are those of the global batch there, which the ranks have averaged."""

    def __init__(self) -> None:
        self._measured: Tensor | None = None
        self._due = 0.0

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the gradients of an optimizer before its steps."""
        # What wraps an optimizer may be one by name alone.
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.register_step_pre_hook(self._before_step)

    @property
    def is_due(self) -> bool:
        """Whether a reading is wanted of this step."""
        return time.monotonic() >= self._due

    def tell(self, norm: Tensor) -> None:
        """Take over what was measured for another purpose, such as clipping."""
        self._measured, self._due = norm.detach(), time.monotonic() + INTERVAL_SECONDS

    def take(self) -> Tensor | None:
        """The newest reading, which counts once, a scalar that may still be being computed; None if there is none."""
        measured, self._measured = self._measured, None
        return measured

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.is_due:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # Of a stage of a pipeline alone it would say nothing.
        norm = None if any(one.is_meta for one in parameters) else _norm(one.grad for one in parameters)
        if norm is not None:
            # Fused optimizers take a scaled gradient, and its scale with it.
            scale = getattr(optimizer, "grad_scale", None)
            self.tell(norm if scale is None else norm / scale)


def _norm(gradients: Iterable[Tensor | None]) -> Tensor | None:
    """Of plain tensors alone: the norm of a sharded one is a collective, and ranks would wait for each other."""
    found = [gradient for gradient in gradients if gradient is not None]
    if not found or any(type(one) is not Tensor or one.layout != torch.strided for one in found):
        return None
    return get_total_norm(found)


RATE_SECONDS = VOTE_SECONDS / 2
"""Throughput and phases are reported at each vote, over this time at least: a save has a vote of its own."""


class Meter:
    """The measurements of one rank; rank 0 writes the log."""

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
        """Where a log is written."""
        self._norms: list[Tensor | None] = []
        self._learning_rate: float | None = None
        self._gradient_norm: float | None = None
        """The last that are known."""
        self._losses: list[Tensor] = []
        self._steps: list[records.Step] = []
        self._step = 0
        self._loss: float | None = None
        self._throughput: float | None = None
        self._window = time.perf_counter()
        self._window_samples = self._window_steps = 0
        self._window_pause = 0.0
        self._pauses = 0
        self._data_seconds = 0.0
        self.checkpoint_seconds = 0.0
        self._voted: float | None = None
        self._began = self._ready = 0.0
        self._busy_seconds: float | None = None

    def begin_step(self) -> None:
        """A step begins: its data is looked for."""
        self._began = time.perf_counter()
        if self._voted is None:
            self._voted = self._began

    def data_ready(self) -> None:
        """The data is there; computing begins."""
        self._ready = time.perf_counter()
        self._data_seconds += self._ready - self._began

    def end_step(self, step: int, ids: Tensor, learning_rate: float | None, loss: Tensor) -> None:
        """A step is complete.

        Args:
            step: steps completed.
            ids: [global batch], its sample ids.
            learning_rate: that it was taken with; None where there is none.
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
        """Losses of the steps since the last vote; [steps], float32, on the CPU."""
        return torch.stack(self._losses).to("cpu", torch.float32)

    def mean_step_seconds(self) -> float:
        """Mean time of a step since the last vote, on the CPU and on the GPU, once the losses were waited for.

        Not the sum of what the training thread took for the steps: that runs ahead of a GPU, whose steps may be a
        thousand times as long, and the next vote would be a hundred of them away.
        """
        assert self._voted is not None
        return (time.perf_counter() - self._voted) / max(1, len(self._losses))

    def agreed(self, losses: list[float], busy_seconds: float) -> None:
        """The ranks have agreed on the losses since the last vote: log them.

        Args:
            losses: mean loss of the global batch, for each step since the last vote.
            busy_seconds: this rank's own work in these steps.
        """
        self._busy_seconds = busy_seconds / len(losses)
        self._losses.clear()
        self._voted = time.perf_counter()
        self._loss = losses[-1]
        if self._log is not None:
            self._log.append(
                *(
                    made.model_copy(update={"loss": loss, "gradient_norm": self._norm(norm)})
                    for made, loss, norm in zip(self._steps, losses, self._norms, strict=True)
                )
            )
            self._steps.clear()
            self._norms.clear()
        elapsed = time.perf_counter() - self._window
        if elapsed - self._window_pause >= RATE_SECONDS:
            self._throughput = self._window_samples / (elapsed - self._window_pause)
            self._tell_rate(elapsed)
        if self._pulse is not None:
            self._beat("train")

    def close(self) -> None:
        """No step follows: tell what has not been told, so that sums over the log are exact."""
        if self._window_steps:
            self._tell_rate(time.perf_counter() - self._window)

    def phase(self, name: str) -> None:
        """Tell the pulse what this rank is doing."""
        if self._pulse is not None:
            self._beat(name)

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """What the block does is no part of a step, and its time not one of training."""
        began = time.perf_counter()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                seconds = time.perf_counter() - began
                self._began += seconds
                if self._voted is not None:
                    self._voted += seconds
                self._window_pause += seconds

    def _tell_rate(self, elapsed: float) -> None:
        if self._log is not None:
            self._log.append(self._rate(elapsed))
        self._window += elapsed
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
        """What is logged of a reading, which is of a step now and then."""
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


class Busy:
    """A stopwatch for forward passes: `with busy: loss = forward(…)`. A pass that does not end counts for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._began: float | torch.cuda.Event | None = None
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._pauses = False

    def __enter__(self) -> None:
        if not self._pauses:
            self._began = self._now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        began, self._began = self._began, None
        if self._pauses or began is None:
            return
        if isinstance(began, float):
            self._seconds += time.perf_counter() - began
        else:
            self._events.append((began, self._event()))

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """What is done in the block is no part of a step."""
        before, self._pauses = self._pauses, True
        try:
            yield
        finally:
            self._pauses = before

    def take(self) -> float:
        """Seconds since the last call. On a GPU the work must be complete."""
        milliseconds: float = sum(begin.elapsed_time(end) for begin, end in self._events)
        seconds = self._seconds + milliseconds / 1000
        self._began, self._seconds = None, 0.0
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
"""By a part of the name that CUDA gives a GPU, the first that fits: operations a second in bfloat16 or float16, dense,
from NVIDIA's data sheets."""


RESIDENT, ON_GPU = "resident", "onGpu"
"""Names of what `peak_memory` finds."""


def peak_memory(device: torch.device) -> dict[str, int]:
    """The most memory that this process has had so far, in bytes: RESIDENT, and of a GPU what torch had allocated,
    ON_GPU. What the system does not tell is left out."""
    found = {}
    if (resident := _most_resident()) is not None:
        found[RESIDENT] = resident
    if device.type == "cuda":
        found[ON_GPU] = torch.cuda.max_memory_allocated(device)
    return found


def _most_resident() -> int | None:
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Not getrusage there: it remembers the program that has started this one, too.
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return None if found is None else 1024 * int(found[1])
    return None


class Cost(NamedTuple):
    """None where it is not well defined."""

    flops_per_sample: float | None = None
    """Of a training step."""
    peak_flops: float | None = None
    """Of one GPU, a second."""
    tokens_per_sample: float | None = None
    """As the task says it."""
    learned_per_sample: float | None = None
    """Tokens of these that the loss is over."""


def cost_of(precision: str, flops_per_sample: Callable[[], float | None], device: torch.device) -> Cost:
    """What training in a precision costs.

    Args:
        flops_per_sample: asked only where a cost is well defined.
    """
    if device.type != "cuda" or precision == "float32":
        return Cost()
    most = peak(torch.cuda.get_device_name(device))
    flops = None if most is None else flops_per_sample()
    return Cost() if flops is None else Cost(flops, most)


def peak(name: str) -> float | None:
    """Operations a second of the GPU of this name; None if it is not known."""
    return next((most for pattern, most in PEAKS if re.search(pattern, name)), None)


def per_sample(config: ImageClassification, channels: int, image_size: int, classes: int) -> float:
    """Operations of the forward and the backward pass for one sample, a multiplication and an addition being two. The
    backward pass counts twice the forward pass: once for the gradient of weights, once for that of inputs.

    Draws random numbers: seed after it.
    """
    # Not torch's FlopCounterMode, nor the meta device: their first use imports for 3.6 and 1.8 s. A test compares them.
    model = build(config.model, channels, image_size, classes).eval()
    image = torch.zeros(1, channels, image_size, image_size)
    counted: list[int] = []

    def count(module: nn.Module, given: object, out: Tensor) -> None:
        assert isinstance(module, nn.Conv2d | nn.Linear)
        # Each output is a sum of as many products as the weight has elements for it.
        counted.append(2 * out.numel() * module.weight[0].numel())

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    with torch.no_grad():
        model(image)
    return 3.0 * sum(counted)
