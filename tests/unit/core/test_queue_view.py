"""Why a job waits, in lines for people."""

from typing import Any

from tandem.wire.queue_view import QueueView, queue_lines

WAITS: dict[str, Any] = {
    "name": "gpus",
    "integration": "Workload",
    "admitted": 0,
    "waitingSince": "2026-12-01T08:00:00Z",
    "position": 2,
    "clusterPosition": 5,
    "missing": [
        {"resource": "nvidia.com/gpu", "flavor": "a100", "amount": 1.0},
        {"resource": "nvidia.com/gpu", "flavor": "h100", "amount": 2.0},
    ],
    "holders": [
        {
            **{"kind": "DistributedTrainingJob", "name": "first", "amount": 6.0, "priority": 0},
            **{"since": "2026-12-01T07:00:00Z"},
        },
        {"kind": "Job", "name": "notebook", "amount": 1.0, "priority": -3},
    ],
    "moreHolders": 4,
    "otherNamespaces": {"holders": 3, "amount": 9.0, "lowestPriority": 0, "highestPriority": 1000},
}


def lines(**changes: Any) -> dict[str, str]:
    return dict(queue_lines(QueueView.parse({**WAITS, **changes})))


def test_the_place_what_is_missing_and_who_has_it_are_a_line_each() -> None:
    assert lines() == {
        "queue": "place 2 in gpus · 5 among all that wait for the same quota · waits since 2026-12-01 08:00:00 UTC",
        "missing": "1 nvidia.com/gpu in flavor a100, or 2 nvidia.com/gpu in flavor h100",
        "in use by": "DistributedTrainingJob first: 6 (priority 0, since 2026-12-01 07:00:00 UTC), "
        "Job notebook: 1 (priority -3), and 4 more",
        "elsewhere": "3 jobs of other namespaces: 9 (priority 0 to 1000)",
    }


def test_memory_is_a_size_and_a_part_of_a_core_a_number() -> None:
    memory = lines(missing=[{"resource": "memory", "flavor": "any", "amount": 1.5e9}], moreHolders=None)
    assert memory["missing"] == "1.5 GB memory in flavor any"
    assert memory["in use by"].endswith("Job notebook: 1 B (priority -3)")
    assert lines(missing=[{"resource": "cpu", "flavor": "any", "amount": 0.5}])["missing"] == "0.5000 cpu in flavor any"


def test_a_job_that_waits_for_nothing_has_no_line() -> None:
    assert list(queue_lines(None)) == []
    assert list(queue_lines(QueueView(name="gpus", integration="Workload", admitted=4, waited_seconds=9.0))) == []


def test_the_number_of_flavors_and_holders_is_bounded() -> None:
    missing, holders = WAITS["missing"] * 9, WAITS["holders"] * 9
    view = QueueView.read_json(
        QueueView.parse({**WAITS, "missing": missing, "holders": holders}).model_dump_json().encode()
    )
    assert (len(view.missing), len(view.holders)) == (4, 5)
