"""Training, from top to bottom: data, model, where to start, steps, checkpoints, the end.

Everything that makes it elastic stands at the edges: it starts from the newest checkpoint that counts, its data order
is a function of the step, it may be told to save and leave, and its last act names the final checkpoint.
"""

import logging
import math
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from tandem.exitcode import ExitCode
from tandem.job import DistributedTrainingJob
from tandem.manifest import Broken
from tandem.rewind import Rewind, data_step, decide, steps_left_out, windows
from tandem.rundir import RunDir
from tandem.tasks import ImageClassification
from tandem_trainer.checkpoint.format import parse
from tandem_trainer.checkpoint.restoring import Loaded, record_start, restore
from tandem_trainer.checkpoint.saving import Author, Outcome, SaveFailed, Saver
from tandem_trainer.checkpoint.state import load_optimizer_state, load_weights, optimizer_state, weights
from tandem_trainer.checkpoint.writer import Superseded
from tandem_trainer.classification import Stepper
from tandem_trainer.data import load
from tandem_trainer.data.order import Batches, Order
from tandem_trainer.data.seed import mixed
from tandem_trainer.group import Group
from tandem_trainer.health import Health
from tandem_trainer.journal import Journal
from tandem_trainer.meter import Meter
from tandem_trainer.mistake import ConfigurationError
from tandem_trainer.models import build
from tandem_trainer.models.dropout import key_dropout
from tandem_trainer.optimization import build_optimizer, rate_factor
from tandem_trainer.pulse import Pulse
from tandem_trainer.strategies.replicated import distribute, prepare

log = logging.getLogger(__name__)

LAST_SAVE_TRIES = 3


class StopRequest:
    """Whether somebody asked this rank to save and leave: by SIGTERM, or through its pulse."""

    def __init__(self, pulse: Pulse | None) -> None:
        self._pulse, self._signalled = pulse, False
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def __bool__(self) -> bool:
        return self._signalled or (self._pulse is not None and self._pulse.order == "save-and-leave")


def train(
    job: DistributedTrainingJob, rundir: RunDir, group: Group, generation: int, members: list[str], pulse: Pulse | None
) -> ExitCode:
    """Train the built-in task until its end or until asked to leave. Collective: every rank of the generation calls it.

    Raises:
        ConfigurationError: the job cannot work as it is written.
        Superseded: a newer generation has taken over.
        SaveFailed: the last checkpoint could not be written.
    """
    stop = StopRequest(pulse)
    config = job.spec.trainer.settings
    checkpoints = job.spec.checkpoint

    # Data and model
    torch.use_deterministic_algorithms(config.deterministic)
    samples = load(config.data, "train")
    order = order_of(config, len(samples))
    rewinds = rewinds_of_all(rundir, group)
    left_out = windows(rewinds)
    data_steps = steps_of(config, order)
    total_steps = data_steps - steps_left_out(data_steps, left_out)
    torch.manual_seed(mixed(config.seed))
    model = build(config.model, samples.channels, samples.image_size, samples.classes)
    draws = key_dropout(model)
    model = prepare(model, config, group)
    optimizer = build_optimizer(config.optimizer, model)

    # Where to start
    def apply(loaded: Loaded) -> None:
        load_weights(model, loaded.weights)
        load_optimizer_state(model, optimizer, loaded.optimizer)

    restored = restore(rundir, group, apply)
    loaded = restored.loaded
    if loaded is None and config.initial_weights is not None:
        load_initial(model, Path(config.initial_weights))
    record_start(rundir, group, generation, members, loaded)
    restored.release()
    step = loaded.manifest.step if loaded else 0
    stepper = Stepper(config, group, distribute(model, config, group), draws, optimizer, samples)
    if loaded and stepper.scaler.is_enabled():
        stepper.scaler.load_state_dict(loaded.manifest.loop["scaler"])

    health = Health(loaded.manifest.loop.get("health") if loaded else None)

    # All ranks save, rank 0 keeps the log
    parent = loaded.manifest.name if loaded else None
    journal = Journal(rundir, generation) if group.rank == 0 else None
    author = Author(generation, parent, group.world_size, group.rank, checkpoints.weights_precision == "bfloat16")
    if journal is None:
        saver = Saver(rundir, author, lambda: None, lambda outcome: None)
    else:
        saver = Saver(rundir, author, journal.settle, lambda outcome: _log_save(journal, outcome))
        saver.last = loaded.manifest.reference if loaded else None
        for name, why in restored.passed_over.items():
            journal.write("passed", checkpoint=name, why=why)
            log.warning("checkpoint=%s passed over: %s", name, why)
        journal.write("start", step=step, totalSteps=total_steps, worldSize=group.world_size, resumedFrom=parent)
        log.info(
            "generation=%d world=%d step=%d of %d from=%s", generation, group.world_size, step, total_steps, parent
        )

    def save() -> None:
        """Stage a checkpoint of the state after `step`. Collective, without a word."""
        loop: dict[str, Any] = {"health": health.memory()}
        if stepper.scaler.is_enabled():
            loop["scaler"] = stepper.scaler.state_dict()
        position = order.position(data_step(step, left_out))
        meter.checkpoint_seconds += saver.save(step, position, weights(model), optimizer_state(model, optimizer), loop)

    # Steps
    batches = Batches(order)
    meter = Meter(order, group.world_size, total_steps, journal, pulse)
    next_vote = step + 1
    last_save = time.monotonic()
    stopping = False
    first = step
    while step < total_steps and not stopping:
        meter.begin_step()
        ids = batches.ids(data_step(step, left_out))
        rate = config.optimizer.learning_rate * rate_factor(config.schedule, step, total_steps)
        meter.data_ready()
        loss = stepper.take(step, ids, rate)
        step += 1
        meter.end_step(step, ids, rate, loss)
        if step == first + 1:
            saver.prepare(weights(model), optimizer_state(model, optimizer))

        save_due = checkpoints.every_steps is not None and step % checkpoints.every_steps == 0
        # A vote before each save: no useless loss gets into a checkpoint, and its steps are logged before it counts.
        if save_due or step in (next_vote, total_steps):
            interval = checkpoints.interval_seconds
            overdue = interval is not None and time.monotonic() - last_save >= interval
            verdict = group.vote(meter.pending_losses(), bool(stop), overdue, saver.busy, meter.mean_step_seconds())
            next_vote = step + verdict.steps_to_next
            stopping = verdict.stop
            save_due = save_due or verdict.save
            meter.agreed(verdict.losses, stepper.busy.take())
            bad = health.first_bad(step - len(verdict.losses) + 1, verdict.losses)
            if bad is not None:
                saver.close()
                worst = verdict.losses[bad - step - 1] if step - bad < len(verdict.losses) else math.nan
                rewind = decide(rewinds, generation, bad, _finite(worst), data_steps)
                code = go_back(rundir, journal, rewind, bad, len(rewinds))
                group.barrier()
                return code
            if save_due and step < total_steps and not stopping:
                if saver.superseded:
                    raise Superseded(f"generation {generation} was superseded")
                if not verdict.busy:
                    save()
                elif journal is not None:
                    journal.write("skipped", step=step, why="the checkpoint before is still being written")
                last_save = time.monotonic()

    # The last checkpoint is waited for
    meter.phase("saving")
    for _ in range(LAST_SAVE_TRIES):
        outcome = saver.wait()
        if saver.superseded:
            raise Superseded(f"generation {generation} was superseded")
        if group.tell({"saved": saver.last is not None and saver.last.step == step})["saved"]:
            break
        save()
    outcome = saver.wait()
    saver.close()
    if group.rank == 0:
        if saver.last is None or saver.last.step != step:
            raise SaveFailed(f"the checkpoint after step {step} could not be written: {outcome.get('failed')}")
        if step == total_steps:
            rundir.mark_done(saver.last, totalSteps=total_steps)
    if journal is not None:
        journal.write("end", step=step, why="complete" if step == total_steps else "asked to leave")
        journal.close()
    group.barrier()
    return ExitCode.DONE if step == total_steps else ExitCode.PREEMPTED


def order_of(config: ImageClassification, samples: int) -> Order:
    """The order of the slice that the job trains on.

    Raises:
        ConfigurationError: the data set has no such slice.
    """
    start, end = config.data.start or 0, config.data.end or samples
    if end > samples or start >= end:
        asked = f"data.start {start} and data.end {end}" if config.data.end else f"data.start {start}"
        raise ConfigurationError(f"{asked} is no slice of {config.data.name}, which has {samples} training samples")
    return Order(end - start, config.global_batch_size, config.seed, first=start)


def load_initial(model: nn.Module, path: Path) -> None:
    """Put weights from a file into a model.

    Raises:
        ConfigurationError: the file is not there, or holds other weights.
    """
    try:
        load_weights(model, parse(memoryview(bytearray(path.read_bytes()))))
    except OSError as error:
        raise ConfigurationError(f"initialWeights {path} cannot be read: {error.strerror}") from error
    except Broken as error:
        raise ConfigurationError(f"initialWeights {path}: {error}") from error


def steps_of(config: ImageClassification, order: Order) -> int:
    """Optimizer steps of the whole run."""
    steps = config.epochs * order.steps_per_epoch
    return min(steps, config.max_steps) if config.max_steps is not None else steps


def _log_save(journal: Journal, outcome: Outcome) -> None:
    facts = {"name": outcome["name"], "step": outcome["step"], "stallSeconds": round(outcome["stallSeconds"], 6)}
    if "committed" in outcome:
        journal.write("checkpoint", **facts, commitSeconds=round(outcome["seconds"], 6), bytes=outcome["bytes"])
    else:
        why = outcome.get("failed") or outcome["superseded"]
        journal.write("skipped", **facts, why=why)
        log.warning("checkpoint=%s not written: %s", outcome["name"], why)


def rewinds_of_all(rundir: RunDir, group: Group) -> list[Rewind]:
    """The rewinds of the run, as rank 0 reads them. Collective."""
    mine = [rewind.dump() for rewind in rundir.rewind_records()] if group.rank == 0 else []
    return [Rewind.parse(rewind) for rewind in group.tell({"rewinds": mine})["rewinds"]]


def go_back(rundir: RunDir, journal: Journal | None, rewind: Rewind | None, bad_step: int, earlier: int) -> ExitCode:
    """The loss is useless: write down from where the next generation starts, or, after too many times, the end."""
    if rewind is None:
        code, why = (
            ExitCode.DIVERGED,
            (
                f"the training loss became NaN, infinite or worse than untrained at step {bad_step}, "
                f"and going back and leaving data out has not helped {earlier} times. "
                "Try a lower learningRate, a warm-up, or a gradientClipNorm."
            ),
        )
    else:
        code, why = (
            ExitCode.REWOUND,
            (
                f"the loss became useless at step {rewind.bad_step}: going back to before step {rewind.resume_before} "
                f"and leaving out {rewind.skip_to - rewind.skip_from} batches"
            ),
        )
    if journal is not None:
        if rewind is None:
            rundir.mark_failed("Diverged", why, code)
        else:
            rundir.record_rewind(rewind)
            journal.write("rewind", **rewind.dump())
        journal.write("end", step=bad_step, why=why)
        journal.close()
        log.error("%s", why)
    return code


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
