"""Audit of a run's samples: whether each was taken once in each epoch, read from the logs.

    python -m tandem_trainer.sample_audit RUN_DIR

`tandem verify` runs it, in a process of its own, because the order of the samples needs torch. The last line of the
output is the result as JSON.

The steps that count are those along the lineage: of each generation the steps from where it started up to where its
successor did. Each must be logged once, with the digest of the samples that its seed
gives it. A digest is logged when all ranks have agreed on it, so it speaks for all of them.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.rundir.checkpoint import DataPosition
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import data_step, windows
from tandem.rundir.log import LogReader
from tandem.rundir.records import TRAINING, Step
from tandem_trainer.data.order import Batches, Order, digest

MAX_STEPS_NAMED = 5
"""Maximum steps that a problem names."""


@dataclass(frozen=True)
class Audit:
    """Result of an audit."""

    steps: int
    """Steps along the lineage."""
    samples: int | None
    """Samples in the data set; None if not known."""
    epochs: int
    """Epochs that the steps complete; 0 if the order is not known."""
    left_out: int
    """Batches that rewinds have left out."""
    problems: list[str]
    """Problems found, one sentence each."""
    unknown: str
    """Reason why the samples of the steps cannot be told from the logs; empty: they can, and were compared."""


def audit(rundir: RunDir) -> Audit:
    """Compare the logs of a run with the order that its seed gives.

    Raises:
        OSError: the run directory cannot be read.
        ValueError: a record of its generations is damaged.
    """
    records = {record.generation: record for record in rundir.generation_records()}
    rewinds, links = rundir.rewind_records(), rundir.chain()
    position = next((manifest.data for manifest in rundir.committed() if manifest.data is not None), None)
    order = _order(position)
    batches = None if order is None else Batches(order)
    logged: dict[int, int] = {}
    deviating: list[int] = []
    compared = 0
    data_steps: list[int] = []
    for generation in reversed(links):
        first_step, last_step = records[generation].start_step, links[generation]
        skipped = windows(rewind for rewind in rewinds if rewind.generation < generation)
        for step in _steps(rundir, generation):
            if step.step <= first_step or (last_step is not None and step.step > last_step):
                continue
            logged[step.step] = logged.get(step.step, 0) + 1
            if batches is not None and step.ids is not None:
                compared += 1
                taken_step = data_step(step.step - 1, skipped)
                data_steps.append(taken_step)
                if step.ids != digest(batches.ids(taken_step)):
                    deviating.append(step.step)
    last = int((rundir.done() or {}).get("totalSteps") or max(logged, default=0))
    problems = [
        f"{description}: {_list_steps(steps)}"
        for description, steps in (
            ("steps that are not logged", [step for step in range(1, last + 1) if step not in logged]),
            ("steps that are logged more than once", [step for step, count in logged.items() if count > 1]),
        )
        if steps
    ]
    unknown = "" if order is not None else _unknown_reason(position)
    if position is not None and position.first is None and deviating and len(deviating) == compared:
        unknown = "its order is a function of the script's own, or its checkpoints are of an earlier version"
        deviating = []
    if deviating:
        problems.append(f"steps that took other samples than the seed gives them: {_list_steps(deviating)}")
    is_known = order is not None and not unknown
    skipped_batches = sum(end - start for start, end in windows(rewinds))
    epochs = (max(data_steps) + 1) // order.steps_per_epoch if order is not None and is_known and data_steps else 0
    return Audit(
        len(logged), None if position is None else position.samples, epochs, skipped_batches, problems, unknown
    )


def _order(position: DataPosition | None) -> Order | None:
    if position is None or position.samples is None or position.batch is None:
        return None
    if position.taken is not None or position.shards is not None:
        return None
    return Order(
        position.samples, position.batch, position.seed, position.first or 0, drop_last=bool(position.drop_last)
    )


def _unknown_reason(position: DataPosition | None) -> str:
    if position is None:
        return "no checkpoint says in which order it reads its data"
    if position.taken is not None:
        return "it reads a mixture of sources"
    if position.shards is not None:
        return "it reads shards, whose sizes are in their index"
    return "it reads a stream" if position.samples is None else "its order is a function of the script's own"


def _steps(rundir: RunDir, generation: int) -> Iterator[Step]:
    reader = LogReader(rundir.training_log(generation), TRAINING)
    return (record for record in reader if isinstance(record, Step))


def _list_steps(steps: list[int]) -> str:
    more = f" and {len(steps) - MAX_STEPS_NAMED:,} more" if len(steps) > MAX_STEPS_NAMED else ""
    return ", ".join(f"{step:,}" for step in sorted(steps)[:MAX_STEPS_NAMED]) + more


def main() -> None:
    """Print the audit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    print(json.dumps(asdict(audit(RunDir(parser.parse_args().run_dir)))), flush=True)


if __name__ == "__main__":
    main()
