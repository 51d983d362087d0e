"""What is counted from the logs that first ranks write."""

from pathlib import Path
from typing import Any

import pytest

from tandem_coordinator.log_followers import Training, TrainingLogs
from tests.support.lines import Lines


class Folder:
    """A folder of logs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, generation: int, *records: dict[str, Any]) -> None:
        lines = Lines(self.path / f"train-g{generation:06d}.jsonl")
        lines.append(*({"kind": record.pop("kind"), "time": 1.0, **record} for record in records))
        lines.close()

    def read(self, logs: TrainingLogs) -> Training:
        return logs.follow(sorted(self.path.iterdir()))


def rate(step: int, steps: int, seconds: float, **more: Any) -> dict[str, Any]:
    phases = {"data": 0.1 * steps * seconds, "compute": 0.9 * steps * seconds, "checkpoint": 0.0}
    return {
        **{"kind": "rate", "step": step, "steps": steps, "samples": 64 * steps, "stepSeconds": seconds},
        **{"phases": phases},
        **more,
    }


def test_steps_samples_and_time_are_summed_over_generations(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    logs = TrainingLogs(tmp_path)
    folder.write(1, {"kind": "start", "step": 0}, {"kind": "step", "step": 1, "loss": 2.0}, rate(50, 50, 0.02))
    assert folder.read(logs).steps == 50
    folder.write(2, {"kind": "start", "step": 40}, rate(100, 60, 0.02))
    folder.write(1, rate(60, 10, 0.02))
    found = folder.read(logs)
    assert (found.steps, found.samples) == (120, 120 * 64)
    assert round(found.work["training"] + found.work["recomputed"], 6) == round(120 * 0.02 * 0.9, 6)
    assert sum(found.buckets) == 120
    assert found.buckets[4] == 120, "between 0.01 and 0.025 s"
    assert found.step_seconds == 0.02


def test_steps_that_are_taken_again_are_lost(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    logs = TrainingLogs(tmp_path)
    folder.write(1, {"kind": "start", "step": 0}, rate(95, 95, 0.01))
    folder.read(logs)
    folder.write(2, {"kind": "start", "step": 50})
    assert folder.read(logs).steps_lost == 45
    folder.write(2, rate(100, 50, 0.01))
    folder.write(3, {"kind": "start", "step": 100})
    assert folder.read(logs).steps_lost == 45, "the group had saved first"


def test_saves_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    logs = TrainingLogs(tmp_path)
    assert folder.read(logs).saves == {}
    folder.write(
        1,
        {"kind": "checkpoint", "name": "step-000000050", "step": 50, "stallSeconds": 0.004, "commitSeconds": 0.25},
        {"kind": "skipped", "step": 60, "why": "the checkpoint before is still being written"},
        {"kind": "skipped", "name": "step-000000070", "step": 70, "stallSeconds": 0.004, "why": "the disk is full"},
    )
    found = folder.read(logs)
    assert found.saves == {"committed": 1, "skipped": 1, "failed": 1}
    assert (found.stall_seconds, found.commit_seconds) == (0.004, 0.25)


def test_a_coordinator_that_starts_again_counts_from_then_on_and_knows_the_last_save(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    save = {"kind": "checkpoint", "name": "step-000000050", "step": 50, "stallSeconds": 0.004, "commitSeconds": 0.25}
    folder.write(1, {"kind": "start", "step": 0}, rate(95, 95, 0.01), save)
    logs = TrainingLogs(tmp_path)
    found = folder.read(logs)
    assert (found.steps, found.saves, found.stall_seconds) == (0, {}, 0.004)
    folder.write(1, rate(100, 5, 0.01))
    assert folder.read(logs).steps == 5
    folder.write(2, {"kind": "start", "step": 50})
    assert folder.read(logs).steps_lost == 50


def test_lines_that_are_damaged_or_of_another_version_count_for_nothing(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    logs = TrainingLogs(tmp_path)
    old = rate(50, 50, 0.01)
    del old["steps"]
    folder.write(1, old, rate(60, 10, float("nan")), {"kind": "rate", "phases": 3}, {"kind": "start", "step": "x"})
    assert folder.read(logs).steps == 0


def test_what_a_sample_costs_is_known_also_after_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    samples = {
        "flopsPerSample": 1e9,
        "peakFlops": 1e12,
        "tokensPerSample": 64.5,
        "learnedPerSample": 60.0,
        "filteredSamples": "2",
    }
    folder.write(1, {"kind": "start", "step": 0, **samples}, rate(50, 50, 0.01))
    found = folder.read(TrainingLogs(tmp_path))
    assert (found.flops_per_sample, found.peak_flops) == (1e9, 1e12)
    assert (found.tokens_per_sample, found.learned_per_sample, found.filtered_samples) == (64.5, 60.0, "2")
    logs = TrainingLogs(tmp_path)
    folder.write(2, {"kind": "start", "step": 50})
    assert folder.read(logs).flops_per_sample is None, "that generation runs on something else"


def test_learning_rate_loss_and_gradient_norm_are_the_last_that_were_told(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    logs = TrainingLogs(tmp_path)
    folder.write(1, rate(10, 10, 0.1, lr=0.2, gradientNorm=3.0), rate(20, 10, 0.1, lr=0.1, loss=1.5))
    found = folder.read(logs)
    assert (found.learning_rate, found.loss, found.gradient_norm) == (0.1, 1.5, 3.0)
    assert folder.read(TrainingLogs(tmp_path)).loss == 1.5, "also of a coordinator that begins only then"
    folder.write(1, rate(30, 10, 0.1, lr="large", gradientNorm=None))
    found = folder.read(logs)
    assert (found.learning_rate, found.loss, found.gradient_norm) == (None, None, None)


def test_of_a_script_that_leaves_out_samples_steps_and_time_count(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    logs = TrainingLogs(tmp_path)
    bare = rate(50, 50, 0.02)
    del bare["samples"]
    folder.write(1, {"kind": "start", "step": 0}, bare)
    found = folder.read(logs)
    assert (found.steps, found.samples, found.samples_per_step, found.step_seconds) == (50, 0, None, 0.02)
    assert found.work["training"] > 0.0


def test_saves_that_blocked_training_setbacks_and_the_chosen_interval_are_counted(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    logs = TrainingLogs(tmp_path)
    saved = {"kind": "checkpoint", "name": "step-000000040", "step": 40}
    failed = {"kind": "skipped", "step": 45, "name": "step-000000045"}
    skipped = {"kind": "skipped", "step": 48}
    folder.write(1, {"kind": "start", "step": 0}, rate(50, 50, 0.02), saved, failed, skipped)
    folder.read(logs)
    folder.write(2, {"kind": "start", "step": 40}, {"kind": "interval", "seconds": 30.0}, rate(60, 20, 0.02))
    folder.write(3, {"kind": "start", "step": 60}, {"kind": "mirror", "step": 70, "intervalSeconds": 2.5})
    found = folder.read(logs)
    assert (found.mirror_step, found.mirror_seconds) == (70, 2.5)
    assert TrainingLogs(tmp_path).follow([]).mirror_step == 70, "after a restart, too"
    assert (found.ledger_saves, found.setbacks) == (2, 1), "a save that was skipped has blocked nothing"
    assert found.interval_seconds == 30.0
    assert TrainingLogs(tmp_path).follow([]).interval_seconds == 30.0, "after a restart, too"
    assert found.work["recomputed"] == pytest.approx(10 * 0.02 * 0.9)


def test_the_newest_finite_value_of_each_name_is_told_and_no_more_than_sixteen_names(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write(1, {"kind": "values", "step": 1, "values": {"before": 4.0}})
    logs = TrainingLogs(tmp_path)
    folder.write(
        1,
        {"kind": "values", "step": 2, "values": {"perplexity": 3.0, "reward": -1.0, "a b": 1.0, "x" * 41: 1.0}},
        {"kind": "values", "step": 3, "values": {"perplexity": 2.0, "reward": float("nan"), "text": "no number"}},
    )
    assert folder.read(logs).values == {"before": 4.0, "perplexity": 2.0}
    folder.write(1, *({"kind": "values", "step": 4, "values": {f"name{n}": 1.0}} for n in range(50)))
    assert len(folder.read(logs).values) == 15, "and one that is not finite has its place"


def test_wrong_numbers_are_counted_by_kind_and_those_of_earlier_coordinators_are_not(tmp_path: Path) -> None:
    folder = Folder(tmp_path)

    def wrong(message: str, count: int = 1) -> dict[str, Any]:
        return {"kind": "corruption", "reason": "SamplesDiffer", "message": message, "count": count}

    folder.write(1, {"kind": "start", "step": 0}, wrong("earlier"))
    logs = TrainingLogs(tmp_path)
    assert folder.read(logs).corruptions == []
    folder.write(1, wrong("step 8", 2), wrong("step 14"))
    for _ in range(2):
        (found,) = folder.read(logs).corruptions
        assert (found.reason, found.count, found.message) == ("SamplesDiffer", 3, "step 14")
