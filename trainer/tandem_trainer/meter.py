"""Measures training as it goes: time by phase, throughput, losses; feeds the log and the pulse.

Cheap enough for every step: clock reads and list appends; JSON and disk are the business of the log's thread.
"""

import contextlib
import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from tandem.rundir import records
from tandem.rundir.log import LogWriter
from tandem_trainer.data.order import digest
from tandem_trainer.gradients import GradientNorm
from tandem_trainer.group import MOST_STEPS_BETWEEN_VOTES
from tandem_trainer.pulse import Pulse

RATE_SECONDS = 0.5
"""Window over which throughput and phases are reported."""


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
        assert len(self._losses) <= MOST_STEPS_BETWEEN_VOTES

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
