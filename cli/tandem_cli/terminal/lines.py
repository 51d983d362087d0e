"""A run as plain lines of key=value fields, for logs and pipes: no control characters, nothing rewritten."""

import json
import time

from tandem.printable import one_line
from tandem.snapshot import Event
from tandem.status import Progress, Status
from tandem_cli.terminal.scene import Scene

Value = str | int | float | None


KNOWN = ("Running", "Succeeded", "Failed", "Suspended")
"""Phases of which there is more to tell than what is waited for."""


def event_line(event: Event) -> str:
    """One event."""
    return _line(event.at, event=event.kind, text=event.text)


def state_line(scene: Scene, now: float) -> str:
    """The state of the run; what is not known yet is left out.

    Args:
        now: seconds since the epoch.
    """
    status = scene.snapshot.status if scene.snapshot is not None else Status()
    if status.progress is None and status.phase not in KNOWN:
        return _line(
            now, phase="Leaving" if scene.leaving else "Starting", waiting=scene.notice or scene.waiting or None
        )
    progress, workers, use = status.progress, status.workers, status.utilization
    newest, evaluated, best = status.latest_checkpoint, status.latest_evaluation, status.best_checkpoint
    troubles = status.troubles
    return _line(
        now,
        phase="Leaving" if scene.leaving else "Draining" if scene.draining else status.phase,
        step=progress.step if progress else None,
        totalSteps=progress.total_steps if progress else None,
        epoch=None if progress is None or progress.epoch is None else round(progress.epoch, 2),
        loss=_short(status.loss),
        samplesPerSecond=None if status.throughput is None else round(status.throughput),
        remainingSeconds=_remaining(progress),
        workers=f"{workers.ready}/{workers.desired}" if workers else None,
        worldSize=status.world_size,
        generation=status.generation,
        restarts=status.restarts,
        checkpoint=newest.step if newest else None,
        evaluated=evaluated.step if evaluated else None,
        lagSteps=status.evaluation_lag_steps,
        # `loss` alone is that of training.
        **({_score_name(evaluated.metric): _short(evaluated.value)} if evaluated else {}),
        best=best.step if best else None,
        bestValue=_short(best.value) if best else None,
        trainerCpu=_short(use.trainer_cpu) if use else None,
        evaluatorCpu=_short(use.evaluator_cpu) if use else None,
        output=scene.output or None,
        savesFailed=(troubles.saves_failed_in_a_row or None) if troubles else None,
        linesLost=(troubles.lines_lost or None) if troubles else None,
        waiting=scene.notice or scene.waiting or None,
    )


def _remaining(progress: Progress | None) -> int | None:
    return None if progress is None or progress.remaining_seconds is None else round(progress.remaining_seconds)


def _score_name(metric: str) -> str:
    return "evaluatedLoss" if metric == "loss" else metric


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _line(at: float, **fields: Value) -> str:
    shown = {"time": time.strftime("%H:%M:%S", time.localtime(at)), **fields}
    return " ".join(f"{name}={_written(value)}" for name, value in shown.items() if value is not None)


def _written(value: Value) -> str:
    if not isinstance(value, str):
        return str(value)
    plain = one_line(value)
    return plain if plain and not set(plain) & set(' "=\\') else json.dumps(plain, ensure_ascii=False)
