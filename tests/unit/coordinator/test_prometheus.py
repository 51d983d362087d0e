"""What a scrape of a job's coordinator is answered."""

from typing import Any

import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tandem.job.resource import CheckpointSpec
from tandem.wire import metrics
from tandem.wire.ledger import PURPOSES, BucketUsage, Ledger, UsageByPurpose
from tandem.wire.status import (
    CheckpointRef,
    Compared,
    EvaluatorView,
    Members,
    MemberView,
    Progress,
    RankView,
    Score,
    Snapshot,
    Status,
    Straggler,
)
from tandem.wire.wall_time import CAUSES, WallTime
from tandem_coordinator.base_watch import AgainstBase
from tandem_coordinator.log_followers import Training
from tandem_coordinator.prometheus import REASONS, Figures, Scrapes, prometheus_text
from tandem_coordinator.run_watcher import MAX_EVALUATORS, Evaluations, Observed, SavedCheckpoint, Volume
from tandem_coordinator.snapshots import Instant
from tandem_operator import names
from tests.support import ROOT

CLOCK = Instant(wall=1_000.0, steady=500.0)
RUNNING = Status(phase="Running", evaluators=Members(desired=1, ready=1))


KNOWN = Snapshot(
    job="digits",
    time=CLOCK.wall,
    status=Status(
        phase="Running",
        world_size=4,
        generation=5,
        workers=Members(desired=3, ready=2),
        evaluators=Members(desired=7, ready=6),
        progress=Progress(step=91, total_steps=920, epoch=3.5, remaining_seconds=60.0),
        loss=0.375,
        throughput=800.0,
        stragglers=[Straggler(rank=3, replica="worker-1", ratio=2.5)],
        latest_checkpoint=CheckpointRef(name="step-000000080", step=80, generation=5),
        latest_evaluation=Score(name="step-000000060", step=60, metric="accuracy", value=0.6),
        best_checkpoint=Score(name="step-000000040", step=40, metric="accuracy", value=0.7),
        evaluation_lag_steps=20,
    ),
    members=[
        MemberView(
            replica="worker-1",
            address="10.0.0.1",
            state="running",
            silent_seconds=0.25,
            ranks=[RankView(rank=3, step=90, cpu=1.5, gpu=0.75, gpu_memory_bytes=2**30, busy_seconds=0.125)],
        )
    ],
    evaluators=[EvaluatorView(name="evaluator-0-1", state="idle", cpu=0.9, silent_seconds=0.1)],
)
"""A job of which everything is known that a snapshot may hold …"""
ALL_KNOWN: dict[str, Any] = {
    "restarts": {"Hung": 4},
    "failures": 8,
    "budget": 10,
    "stepped_at": 499.0,
    "started_at": 700.0,
    "idle_seconds": 30.0,
    "ledger": Ledger(
        gpu_seconds=UsageByPurpose(compute=9.5),
        cpu_seconds=UsageByPurpose(evaluation=3.0),
        cost=UsageByPurpose(compute=0.5),
        bucket=BucketUsage(writes=3, reads=2, listings=40, deletions=1, sent_bytes=5000, received_bytes=60),
    ),
    "observed": Observed(
        training=Training(
            step_seconds=0.5,
            stall_seconds=0.002,
            commit_seconds=0.2,
            flops_per_sample=1e9,
            peak_flops=1e12,
            tokens_per_sample=64.5,
            learned_per_sample=60.0,
            learning_rate=0.1,
            gradient_norm=2.0,
            values={"perplexity": 12.3},
        ),
        saved=SavedCheckpoint(saved_at=940.0, size=4_096),
        volume=Volume(size=10_000, free=4_000),
        latest_evaluation=Score(name="step-000000090", step=90, metric="accuracy", value=0.6),
        against_base=AgainstBase((Compared(metric="accuracy", base=0.5, value=0.7),), worse=0),
        latest_metrics={**{f"m{number}": float(number) for number in range(40)}, "accuracy": 0.6},
    ),
}
"""… and everything else that Prometheus is told."""


def families(snapshot: Snapshot, **figures: Any) -> list[Metric]:
    """Every metric that is told, as Prometheus reads it."""
    text = prometheus_text(snapshot, "lab", Figures(clock=CLOCK, **figures)).decode()
    return list(text_string_to_metric_families(text))


def scraped(job: Status | Snapshot = RUNNING, **figures: Any) -> dict[tuple[str, ...], float]:
    """Every sample, by its name and the values of its own labels."""
    snapshot = Snapshot(job="digits", time=CLOCK.wall, status=job) if isinstance(job, Status) else job
    found = {}
    for family in families(snapshot, **figures):
        for sample in family.samples:
            assert (sample.labels.pop("job"), sample.labels.pop("namespace")) == ("digits", "lab")
            found[sample.name, *sample.labels.values()] = sample.value
    return found


def test_a_job_that_has_only_begun_tells_zeros_and_leaves_out_what_is_not_known() -> None:
    found = scraped()
    assert found["tandem_phase", "Running"] == 1.0
    assert found["tandem_samples_total",] == 0.0
    assert found["tandem_rewinds_total",] == 0.0
    assert {reason: found["tandem_restarts_total", reason] for reason in REASONS} == dict.fromkeys(REASONS, 0.0)
    names = {name for name, *_ in found}
    assert "tandem_step_age_seconds" not in names
    assert "tandem_checkpoint_age_seconds" not in names
    assert "tandem_loss" not in names


def test_time_is_told_by_phase_and_saves_by_their_end() -> None:
    training = Training(steps=90, samples=5_760, steps_lost=7, saves={"committed": 3, "failed": 1}, stall_seconds=0.002)
    found = scraped(seconds={"compute": 50.0, "idle": 1.5}, observed=Observed(training=training, rewinds=2))
    assert {phase: found["tandem_time_seconds_total", phase] for phase in metrics.TIME_PHASES} == {
        **dict.fromkeys(metrics.TIME_PHASES, 0.0),
        "compute": 50.0,
        "idle": 1.5,
    }
    assert (found["tandem_steps_total",], found["tandem_samples_total",]) == (90.0, 5_760.0)
    assert (found["tandem_steps_lost_total",], found["tandem_rewinds_total",]) == (7.0, 2.0)
    results = ("committed", "skipped", "failed")
    assert [found["tandem_saves_total", result] for result in results] == [3.0, 0.0, 1.0]
    assert found["tandem_checkpoint_stall_seconds",] == 0.002


def test_hours_and_cost_are_told_by_their_five_purposes() -> None:
    found = scraped(KNOWN, **ALL_KNOWN)
    assert found["tandem_gpu_seconds_total", "compute"] == 9.5
    assert found["tandem_cpu_seconds_total", "evaluation"] == 3.0
    assert found["tandem_cost_total", "compute"] == 0.5
    for name in ("tandem_gpu_seconds_total", "tandem_cpu_seconds_total", "tandem_cost_total"):
        assert {purpose for metric, *rest in found if metric == name for purpose in rest} == set(PURPOSES)


def test_the_wall_time_is_told_by_cause_and_auto_by_the_interval_that_it_has_chosen() -> None:
    ledger, training = Ledger(wall=WallTime(training=90.0, queue=4.0)), Training(interval_seconds=33.0)
    auto = CheckpointSpec(every="Auto")
    found = scraped(ledger=ledger, observed=Observed(training=training), stepped_at=1.0, checkpoints=auto)
    assert {cause: found["tandem_wall_seconds_total", cause] for cause in CAUSES} == {
        **dict.fromkeys(CAUSES, 0.0),
        "training": 90.0,
        "queue": 4.0,
    }
    assert found["tandem_checkpoint_interval_seconds",] == 33.0
    assert scraped(stepped_at=1.0, checkpoints=auto)["tandem_checkpoint_interval_seconds",] == 60.0


def test_step_times_are_a_histogram() -> None:
    buckets = [0] * (len(metrics.STEP_BUCKETS) + 1)
    buckets[3], buckets[-1] = 10, 2
    found = scraped(observed=Observed(training=Training(buckets=tuple(buckets), step_seconds_sum=200.1)))
    assert found["tandem_step_seconds_bucket", "0.005"] == 0.0
    assert found["tandem_step_seconds_bucket", "0.01"] == 10.0
    assert found["tandem_step_seconds_bucket", "60"] == 10.0
    assert found["tandem_step_seconds_bucket", "+Inf"] == found["tandem_step_seconds_count",] == 12.0
    assert found["tandem_step_seconds_sum",] == 200.1


def test_the_newest_checkpoint_has_a_size_an_age_and_a_time_when_the_next_is_due() -> None:
    saved, training = SavedCheckpoint(saved_at=940.0, size=4_096), Training(step_seconds=0.5)
    observed = Observed(saved=saved, training=training, volume=Volume(size=10_000, free=4_000))
    found = scraped(observed=observed, stepped_at=497.5, checkpoints=CheckpointSpec(every_steps=100, every_seconds=90))
    assert (found["tandem_checkpoint_bytes",], found["tandem_checkpoint_age_seconds",]) == (4_096.0, 60.0)
    assert found["tandem_checkpoint_interval_seconds",] == 50.0
    assert found["tandem_step_age_seconds",] == 2.5
    assert (found["tandem_volume_bytes",], found["tandem_volume_free_bytes",]) == (10_000.0, 4_000.0)


@pytest.mark.parametrize(
    ("stepped_at", "age"), [(400.0, 300.0), (None, None)], ids=["a built-in task", "a script that says nothing"]
)
def test_without_a_checkpoint_its_age_is_that_of_the_job_if_it_saves(
    stepped_at: float | None, age: float | None
) -> None:
    found = scraped(started_at=700.0, stepped_at=stepped_at)
    assert found.get(("tandem_checkpoint_age_seconds",)) == age


def test_evaluators_that_keep_up_let_nothing_wait() -> None:
    assert scraped()["tandem_evaluation_wait_seconds",] == 0.0
    waiting = Observed(evaluations=Evaluations(merged=3, skipped=2, failed=1, waits_since=880.0))
    found = scraped(observed=waiting)
    assert found["tandem_evaluation_wait_seconds",] == 120.0
    results = ("merged", "skipped", "failed")
    assert [found["tandem_evaluations_total", result] for result in results] == [3.0, 2.0, 1.0]
    without = scraped(Status(phase="Running", evaluators=Members(desired=0, ready=0)))
    assert ("tandem_evaluation_wait_seconds",) not in without


@pytest.mark.parametrize("phase", ["Succeeded", "Failed", "Draining"])
def test_when_training_has_ended_nothing_grows_old(phase: Any) -> None:
    saved = SavedCheckpoint(saved_at=0.0, size=1)
    figures: dict[str, Any] = {"stepped_at": 0.0, "started_at": 0.0, "idle_seconds": 600.0}
    found = scraped(Status(phase=phase), observed=Observed(saved=saved), **figures)
    ages = {name for name, *_ in found if name.endswith(("age_seconds", "wait_seconds", "idle_seconds"))}
    assert ages == set()


def test_every_metric_of_the_list_is_exported_with_the_labels_that_it_says() -> None:
    found = {family.name: family for family in families(KNOWN, **ALL_KNOWN)}
    # The parser names a counter without its ending.
    assert sorted(found) == sorted(metric.name.removesuffix("_total") for metric in metrics.ALL)
    for metric in metrics.ALL:
        family = found[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(metric.labels), sample
            assert all(sample.labels.values()), sample


def test_of_the_metrics_of_a_checkpoint_a_bounded_number_is_told_and_the_one_that_decides_is_among_them() -> None:
    found = scraped(KNOWN, **ALL_KNOWN)
    told = [key[1] for key in found if key[0] == "tandem_evaluation_metric"]
    assert len(told) == 16
    assert found["tandem_evaluation_metric", "accuracy"] == 0.6


def test_what_is_known_of_each_replica_rank_and_evaluator_is_told_of_it() -> None:
    found = scraped(KNOWN, **ALL_KNOWN)
    assert (
        found.items()
        >= {
            ("tandem_worker_silent_seconds", "worker-1"): 0.25,
            ("tandem_rank_step", "3"): 90.0,
            ("tandem_rank_cpu_cores", "3"): 1.5,
            ("tandem_rank_gpu_utilization_ratio", "3"): 0.75,
            ("tandem_rank_gpu_memory_bytes", "3"): 2**30,
            ("tandem_rank_busy_seconds", "3"): 0.125,
            ("tandem_straggler_ratio", "3", "worker-1"): 2.5,
            ("tandem_evaluator_cpu_cores", "evaluator-0-1"): 0.9,
            ("tandem_evaluation_score", "accuracy"): 0.6,
            ("tandem_best_score", "accuracy"): 0.7,
            ("tandem_restarts_total", "Hung"): 4.0,
        }.items()
    )
    names = ("step", "steps_planned", "epoch", "remaining_seconds", "loss", "throughput_samples_per_second")
    assert [found[f"tandem_{name}",] for name in names] == [91.0, 920.0, 3.5, 60.0, 0.375, 800.0]
    names = ("world_size", "generation", "workers_desired", "workers_ready", "evaluators_desired", "evaluators_ready")
    assert [found[f"tandem_{name}",] for name in names] == [4.0, 5.0, 3.0, 2.0, 7.0, 6.0]
    names = ("checkpoint_step", "evaluation_step", "best_step", "evaluation_lag_steps", "restart_budget_used")
    assert [found[f"tandem_{name}",] for name in names] == [80.0, 60.0, 40.0, 20.0, 8.0]


def test_a_counter_begins_at_zero_or_its_first_increase_would_be_none() -> None:
    told = {name for name, *_ in scraped()}
    assert {metric.name for metric in metrics.ALL if metric.kind == "counter"} <= told


def test_tokens_a_second_are_told_of_tasks_that_count_them() -> None:
    training = Training(tokens_per_sample=64.5, learned_per_sample=60.0)
    found = scraped(Status(phase="Running", throughput=800.0), observed=Observed(training=training))
    assert found["tandem_throughput_tokens_per_second",] == 51_600.0
    assert found["tandem_throughput_learned_tokens_per_second",] == 48_000.0
    assert not {name for name, *_ in scraped(Status(phase="Running", throughput=800.0)) if "tokens" in name}


def test_requests_to_the_bucket_are_told_by_operation() -> None:
    found = scraped(KNOWN, **ALL_KNOWN)
    operations = {"writes": 3, "reads": 2, "listings": 40, "deletions": 1}
    assert {name: found["tandem_bucket_requests_total", name] for name in operations} == operations
    assert found["tandem_bucket_bytes_total", "sent"] == 5000
    assert found["tandem_bucket_bytes_total", "received"] == 60


def test_mfu_is_told_where_cost_and_peak_are_known() -> None:
    training = Training(flops_per_sample=1e9, peak_flops=1e12)
    running = Status(phase="Running", world_size=2, throughput=800.0)
    assert scraped(running, observed=Observed(training=training))["tandem_mfu_ratio",] == 0.4
    assert ("tandem_mfu_ratio",) not in scraped(running)


def test_whoever_asks_without_a_pause_costs_a_tenth_of_the_time_at_most() -> None:
    now, made = [100.0], []

    def make() -> bytes:
        now[0] += 0.5
        made.append(now[0])
        return f"{len(made)}".encode()

    scrapes = Scrapes(make, clock=lambda: now[0])
    until = now[0] + 60.0
    while now[0] < until:
        assert scrapes.text() == f"{len(made)}".encode()
        now[0] += 0.01
    assert 11 <= len(made) <= 13


def test_what_is_made_in_no_time_is_made_anew_for_each_scrape_a_second() -> None:
    now = [100.0]
    scrapes = Scrapes(lambda: f"{now[0]}".encode(), clock=lambda: now[0])
    for second in (100.0, 101.0, 102.0):
        now[0] = second
        assert scrapes.text() == f"{second}".encode()


def test_after_the_last_step_no_checkpoint_is_due() -> None:
    observed = Observed(saved=SavedCheckpoint(saved_at=0.0, size=1), training=Training(step_seconds=0.5))
    due = {("tandem_checkpoint_age_seconds",), ("tandem_checkpoint_interval_seconds",)}
    assert due <= scraped(observed=observed, stepped_at=499.0).keys()
    assert not due & scraped(observed=observed, stepped_at=499.0, finishing=True).keys()


def test_the_series_of_the_largest_job_are_taken_and_not_many_more() -> None:
    member, evaluator = KNOWN.members[0], KNOWN.evaluators[0]
    members = [
        member.model_copy(
            update={
                "replica": f"digits-worker-{number}-abcde",
                "ranks": [member.ranks[0].model_copy(update={"rank": number})],
            }
        )
        for number in range(10_000)
    ]
    evaluators = [evaluator.model_copy(update={"name": f"evaluator-{number}"}) for number in range(MAX_EVALUATORS)]
    largest = KNOWN.model_copy(update={"members": members, "evaluators": evaluators})
    lines = prometheus_text(largest, "lab", Figures(clock=CLOCK, **ALL_KNOWN)).decode().splitlines()
    values = yaml.safe_load((ROOT / "charts/tandem/values.yaml").read_text())
    limit = values["metrics"]["podMonitor"]["sampleLimit"]
    assert 0.9 * limit < sum(not line.startswith("#") for line in lines) < limit


def test_a_pod_that_takes_anothers_place_goes_on_with_its_series() -> None:
    lost, comes = (names.pod("digits", names.WORKER, 3, entropy) for entropy in ("one", "other"))
    members = [
        KNOWN.members[0].model_copy(update={"replica": replica, "silent_seconds": seconds, "ranks": []})
        for replica, seconds in ((lost, 7.0), (comes, 0.5), ("worker-0", 0.25))
    ]
    found = scraped(KNOWN.model_copy(update={"members": members}))
    told = {own[0]: value for (name, *own), value in found.items() if name == "tandem_worker_silent_seconds"}
    assert told == {"digits-worker-3": 7.0, "worker-0": 0.25}


def test_stragglers_and_evaluators_have_one_series_for_each_place_too() -> None:
    workers = [names.pod("digits", names.WORKER, 3, entropy) for entropy in ("one", "other")]
    evaluators = [names.pod("digits", names.EVALUATOR, 0, entropy) for entropy in ("one", "other")]
    stragglers = [Straggler(rank=3, replica=pod, ratio=ratio) for pod, ratio in zip(workers, (2.5, 3.5), strict=True)]
    views = [
        EvaluatorView(name=f"{pod}-{index}", state="idle", cpu=cpu, silent_seconds=0.1)
        for pod, cpu in zip(evaluators, (0.25, 0.75), strict=True)
        for index in range(2)
    ]
    unknown = EvaluatorView(name="evaluator-1-0", state="idle", silent_seconds=0.1)
    status = KNOWN.status.model_copy(update={"stragglers": stragglers})
    text = prometheus_text(
        KNOWN.model_copy(update={"status": status, "evaluators": [*views, unknown]}), "lab", Figures(clock=CLOCK)
    ).decode()
    told = [line for line in text.splitlines() if line.startswith(("tandem_straggler_ratio{", "tandem_evaluator_cpu"))]
    own = 'job="digits",namespace="lab"'
    assert told == [
        f'tandem_straggler_ratio{{{own},rank="3",replica="digits-worker-3"}} 3.5',
        f'tandem_evaluator_cpu_cores{{evaluator="digits-evaluator-0-0",{own}}} 0.75',
        f'tandem_evaluator_cpu_cores{{evaluator="digits-evaluator-0-1",{own}}} 0.75',
    ]


def test_a_script_that_logs_steps_tells_their_age_and_is_owed_no_checkpoint() -> None:
    names = {name for name, *_ in scraped(stepped_at=499.0, started_at=700.0, scripted=True)}
    assert "tandem_step_age_seconds" in names
    assert not names & {"tandem_checkpoint_age_seconds", "tandem_checkpoint_interval_seconds"}
    names = {name for name, *_ in scraped(stepped_at=499.0, started_at=700.0)}
    assert names >= {"tandem_checkpoint_age_seconds", "tandem_checkpoint_interval_seconds"}


def test_the_base_model_is_told_where_there_is_one() -> None:
    assert not [key for key in scraped() if "base" in key[0]]
    compared = (Compared(metric="perplexity", base=8.0, value=6.0), Compared(metric="loss", base=2.0))
    found = scraped(observed=Observed(against_base=AgainstBase(compared=compared, worse=3)))
    assert {key: value for key, value in found.items() if "base" in key[0]} == {
        ("tandem_evaluation_base_metric", "perplexity"): 8.0,
        ("tandem_evaluation_base_metric", "loss"): 2.0,
        ("tandem_evaluation_worse_than_base",): 3.0,
    }
