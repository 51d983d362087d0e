"""A job on a cluster as people see it: every fact in words, on any width, and nothing that steers the terminal."""

from dataclasses import replace
from typing import Any

import pytest

from tandem.errors import UserError
from tandem.formatting import parse_rfc3339
from tandem.wire.status import MemberView, RankView, Snapshot, Status
from tandem_cli.kubernetes.job_view import job_events, job_summary, parse_pods
from tandem_cli.local.run_view import processes
from tandem_cli.terminal import tables
from tandem_cli.view import JobView
from tests.support import fake_kubectl as fake

MADE = parse_rfc3339("2026-11-21T12:00:00Z")
NOW = MADE + 192

RUNNING: dict[str, Any] = {
    "phase": "Running",
    "conditions": [
        {
            "type": "Running",
            "status": "True",
            "reason": "Running",
            "message": "the job is Running",
            "lastTransitionTime": "2026-11-21T12:01:00Z",
        }
    ],
    "workers": {"desired": 2, "ready": 2, "min": 1, "max": 4, "summary": "2/2"},
    "evaluators": {"desired": 2, "ready": 1, "summary": "1/2"},
    "worldSize": 2,
    "generation": 3,
    "restarts": 2,
    "progress": {"step": 1240, "totalSteps": 2700, "epoch": 42.13, "percent": 45.9, "remainingSeconds": 72.0},
    "loss": 0.0213,
    "throughput": 2310.0,
    "latestCheckpoint": {"name": "step-000001200", "step": 1200, "generation": 3},
    "latestEvaluation": {"name": "step-000001100", "step": 1100, "metric": "accuracy", "value": 0.9712},
    "bestCheckpoint": {"name": "step-000001000", "step": 1000, "metric": "accuracy", "value": 0.9731},
    "evaluationLagSteps": 100,
    "startTime": "2026-11-21T12:00:30Z",
}


def view(status: dict[str, Any], *some_pods: dict[str, Any], told: tuple[dict[str, Any], ...] = ()) -> JobView:
    job = job_summary(fake.job(**status))
    return JobView(job=job, pods=parse_pods(some_pods), job_events=job_events(told, "digits", job.made))


def drawn(seen: JobView, width: int | None = None, now: float = NOW) -> str:
    return "\n".join(line.plain for line in tables.job_lines(seen, width, now))


def test_one_job_has_every_fact_in_words() -> None:
    text = drawn(view(RUNNING, fake.pod("coordinator"), fake.pod("worker", 0)))
    for words in (
        "digits  Running  in team · made 3 min 12 s ago",
        "45 %",
        "step 1,240 of 2,700 · epoch 42.1 · about 1 min 12 s left",
        "0.0213",
        "2,310 samples/s",
        "2 of 2 (1 to 4) · world size 2 · generation 3 · 2 restarts",
        "1 of 2 · 100 steps behind",
        "step-000001200 (generation 3)",
        "step-000001100 · accuracy 97.12 %",
        "step-000001000 · accuracy 97.31 %",
    ):
        assert words in text
    assert [line.split() for line in text.splitlines() if line.startswith("worker-0")] == [
        ["worker-0", "running", "3", "min", "2", "s", "0", "node-1", "digits-worker-0-abcde"]
    ]
    assert "Running    yes  2 min 12 s" in text


def test_each_trouble_has_a_row() -> None:
    failing = {"savesFailed": 9, "savesFailedInARow": 8, "saveMessage": "no space", "linesLost": 327}
    rows = [line for line in drawn(view(RUNNING | {"troubles": failing})).splitlines() if "trouble" in line]
    assert rows[0] == "  trouble      the last 8 saves have failed: no space"
    assert len(rows) == 2
    assert "327" in rows[1]
    assert "trouble" not in drawn(view(RUNNING))


def test_a_job_that_waits_in_a_queue_has_its_place_and_who_has_the_quota_in_rows() -> None:
    queue = {
        **{"name": "gpus", "integration": "Workload", "admitted": 0, "position": 2},
        "missing": [{"resource": "nvidia.com/gpu", "flavor": "a100", "amount": 1.0}],
        "holders": [{"kind": "Job", "name": "notebook", "amount": 3.0, "priority": 5}],
    }
    lines = [line.strip() for line in drawn(view({"phase": "Pending", "queue": queue})).splitlines()]
    assert "queue        place 2 in gpus" in lines
    assert "missing      1 nvidia.com/gpu in flavor a100" in lines
    assert "in use by    Job notebook: 3 (priority 5)" in lines


def test_hours_and_cost_have_a_row_each_and_the_list_a_column_where_a_job_has_prices() -> None:
    ledger = {"cpuSeconds": {"compute": 5400.0, "waiting": 1800.0}, "cost": {"compute": 0.6, "waiting": 0.2}}
    seen = view(RUNNING | {"ledger": ledger | {"currency": "EUR"}})
    rows = [line.split(maxsplit=1) for line in drawn(seen).splitlines() if "compute" in line]
    assert rows == [
        ["CPU-hours", "2.000 · compute 1.500 (75 %) · waiting 0.5000 (25 %)"],
        ["cost", "0.8000 EUR · compute 0.6000 EUR (75 %) · waiting 0.2000 EUR (25 %)"],
    ]
    heads, row, other = (line.plain for line in tables.jobs([seen.job, view(RUNNING).job], None, NOW, False))
    assert "COST" in heads
    assert "0.8000 EUR" in row
    assert "EUR" not in other
    assert "COST" not in tables.jobs([view(RUNNING).job], None, NOW, False)[0].plain


def test_processes_are_listed_with_their_node_and_what_their_ranks_use_where_that_is_known() -> None:
    gpus = [RankView(rank=rank, step=1, cpu=1.04, gpu=0.5 + rank / 10) for rank in (0, 1)]
    cpu = [RankView(rank=2, step=1, cpu=0.96)]
    on = {"address": "10.0.0.1", "state": "running", "silent_seconds": 0.0}
    members = [
        MemberView(replica="worker-0", node="n0", ranks=gpus, **on),
        MemberView(replica="worker-1", node="n1", ranks=cpu, **on),
    ]
    seen = Snapshot(job="digits", time=0.0, status=Status(), members=members, events=[])
    lines = [line.rstrip() for line in drawn(replace(view(RUNNING), pods=processes(seen))).splitlines()]
    assert "PROCESS      STATE    NODE  BUSY" in lines
    assert "worker-0     running  n0    2.1 cores · GPU 50 % 60 %" in lines
    assert "worker-1     running  n1    1.0 cores" in lines
    here = seen.model_copy(update={"members": [members[1].model_copy(update={"node": None})]})
    assert "worker-1     running  1.0 cores" in drawn(replace(view(RUNNING), pods=processes(here)))


def test_a_pod_that_does_not_run_says_why() -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}
    assert "ImagePullBackOff: Back-off pulling image" in drawn(view(RUNNING, fake.pod("worker", 0, waiting)))


def test_what_failed_is_told_first() -> None:
    failed = {**RUNNING, "phase": "Failed", "message": "the loss stayed NaN", "completionTime": "2026-11-21T12:02:30Z"}
    first, second, *_ = drawn(view(failed)).splitlines()
    assert first == "digits  Failed  in team · made 3 min 12 s ago · took 2 min"
    assert second.strip() == "the loss stayed NaN"


def test_a_job_that_no_operator_takes_up_says_so_after_a_while() -> None:
    assert "no operator" not in drawn(view({}), now=MADE + 3)
    assert "no operator has handled it" in drawn(view({}), now=MADE + 60)
    assert "no operator" not in drawn(view(RUNNING), now=MADE + 60)


def test_a_job_that_is_being_deleted_says_so() -> None:
    leaving = fake.job(**RUNNING)
    leaving["metadata"]["deletionTimestamp"] = "2026-11-21T12:03:00Z"
    assert "it is being deleted" in drawn(JobView(job=job_summary(leaving)))


def test_remaining_time_is_told_of_what_goes_on_alone() -> None:
    assert "left" not in drawn(view({**RUNNING, "phase": "Suspended"}))


def test_the_last_events_are_the_jobs_own_and_warnings() -> None:
    told = (
        fake.event("DistributedTrainingJob", "digits", "Started", "generation 1 with 2 workers"),
        fake.event("Pod", "digits-worker-0-abcde", "Pulled", "Container image is there"),
        fake.event("Pod", "digits-worker-0-abcde", "BackOff", "Back-off restarting", type="Warning", count=4),
    )
    text = drawn(view(RUNNING, told=told))
    assert "job       generation 1 with 2 workers (Started)" in text
    assert "!  worker-0  Back-off restarting (BackOff, 4 times since" in text
    assert "Container image" not in text


def test_warnings_of_a_start_are_over_once_the_pod_runs() -> None:
    told = tuple(
        fake.event("Pod", f"digits-worker-{index}-abcde", reason, f"{reason} of {index}", type="Warning")
        for index in (0, 1)
        for reason in ("FailedScheduling", "FailedMount", "Unhealthy", "BackOff")
    )
    starts = fake.pod("worker", 1, {"waiting": {"reason": "ContainerCreating"}})
    text = drawn(view(RUNNING, fake.pod("worker", 0), starts, told=told))
    assert [
        line.split("  ")[-1].split(" (")[0] for line in text.splitlines() if " of " in line and "  !  " in line
    ] == [*("BackOff of 0", "FailedScheduling of 1", "FailedMount of 1", "Unhealthy of 1", "BackOff of 1")]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    why = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image from a far away place " * 5}}
    told = (fake.event("DistributedTrainingJob", "digits", "Started", "generation 1 with 2 workers " * 8),)
    text = drawn(view({**RUNNING, "message": "a long message " * 20}, fake.pod("worker", 0, why), told=told), width)
    assert max(len(line) for line in text.splitlines()) <= max(width, 60)


def test_without_a_terminal_each_row_is_one_line() -> None:
    why = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image " * 50}}
    rows = [line for line in drawn(view(RUNNING, fake.pod("worker", 0, why))).splitlines() if "worker-0" in line]
    assert len(rows) == 1
    assert rows[0].count("Back-off pulling image") == 50


def test_control_characters_do_not_reach_the_terminal() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\r"
    status = {**RUNNING, "message": evil}
    status["conditions"] = [{**RUNNING["conditions"][0], "message": evil, "reason": evil}]
    told = (fake.event("Pod", "digits-worker-0-abcde", evil, evil, type="Warning"),)
    text = drawn(view(status, fake.pod("worker", 0, {"waiting": {"reason": evil}}, node=evil), told=told))
    assert all(letter.isprintable() or letter == "\n" for letter in text)


def test_all_jobs_have_a_row_each() -> None:
    seen = [job_summary(fake.job(**RUNNING)), job_summary(fake.job("other"))]
    head, first, second = (line.plain for line in tables.jobs(seen, None, NOW, with_namespace=False))
    assert head.split() == ["NAME", "PHASE", "WORKERS", "STEP", "DONE", "LEFT", "LOSS", "BEST", "AGE", "MESSAGE"]
    row = "digits  Running  2/2  1,240  45 %  1 min 12 s  0.0213  97.31 %  3 min 12 s"
    assert first.split() == row.split()
    assert second.startswith("other")
    assert "no operator has handled it" in second


FAILED = {**RUNNING, "phase": "Failed", "message": "rank 1 (worker-1) failed: KeyError: 'lable'; " + "and more " * 40}


@pytest.mark.parametrize("width", [40, 50, 80, 120])
def test_all_jobs_are_a_line_each_whatever_one_of_them_says(width: int) -> None:
    seen = [job_summary(fake.job(**RUNNING)), job_summary(fake.job("other", **FAILED))]
    lines = [line.plain for line in tables.jobs(seen, width, NOW, with_namespace=True, place="RUN")]
    assert len(lines) == 3
    assert max(map(len, lines)) <= width
    assert [line.split()[:3] for line in lines[1:]] == [["team", "digits", "Running"], ["team", "other", "Failed"]]


def test_of_a_long_path_the_end_is_listed() -> None:
    seen = [replace(job_summary(fake.job(**RUNNING)), namespace="/somebody/has/projects/on/handwriting/runs/digits")]
    _, row = (line.plain for line in tables.jobs(seen, 50, NOW, with_namespace=True, place="RUN"))
    assert row == "…/handwriting/runs/digits  digits  Running  1,240"


def test_what_matters_most_has_room_first() -> None:
    seen = [job_summary(fake.job(**RUNNING)), job_summary(fake.job("other", **FAILED))]

    def titles(width: int) -> list[str]:
        return tables.jobs(seen, width, NOW, with_namespace=False)[0].plain.split()

    assert titles(50) == ["NAME", "PHASE", "STEP", "DONE", "BEST", "AGE"]
    assert titles(80) == ["NAME", "PHASE", "STEP", "LOSS", "BEST", "AGE", "MESSAGE"]
    ended = [replace(one, status=one.status.model_copy(update={"workers": None, "progress": None})) for one in seen]
    head, *_ = tables.jobs(ended, 120, NOW, with_namespace=False)
    assert head.plain.split() == ["NAME", "PHASE", "LOSS", "BEST", "AGE", "MESSAGE"], "what all leave empty"
    assert titles(120) == ["NAME", "PHASE", "WORKERS", "STEP", "DONE", "LEFT", "LOSS", "BEST", "AGE", "MESSAGE"]


def test_a_status_of_a_newer_operator_is_read_as_far_as_it_is_known() -> None:
    newer = {**RUNNING, "somethingNew": {"a": 1}}
    newer["conditions"] = [*RUNNING["conditions"], {"type": "Brandnew", "status": "True", "reason": "x"}]
    seen = job_summary(fake.job(**newer))
    assert (seen.status.phase, seen.status.conditions[-1].type) == ("Running", "Brandnew")


def test_conditions_for_programs_alone_are_not_shown() -> None:
    ready = {"type": "Ready", "status": "True", "reason": "Running"}
    other = {"type": "example.com/Billed", "status": "True", "reason": "Paid"}
    text = drawn(view({**RUNNING, "conditions": [*RUNNING["conditions"], ready, other]}))
    assert "Ready" not in text
    assert "example.com/Billed" in text


def test_a_status_that_cannot_be_read_is_no_stack_trace() -> None:
    with pytest.raises(UserError, match="the status of digits cannot be read at phase"):
        job_summary(fake.job(phase="Dancing"))
