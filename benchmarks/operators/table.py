"""Results as Markdown tables, and verdicts on the goals. Pure: records in, text and verdicts out."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.goals import Outcome, Verdict, judge_median

Record = dict[str, Any]
GOALS = {"age": 30.0, "memory": 300.0, "writes": 12.0, "cpu": 20.0}
"""Goals: seconds, MB, writes per job over its life apart from the status, milliseconds of a processor per job until
all statuses are correct."""
OVERHEADS = {
    "over a pod's start": "plain",
    "over a pod that imports torch": "plainTorch",
    "over one that makes a step": "plainStep",
}
TANDEM = "Tandem"
READS = ("get", "list", "watch")


@dataclass(frozen=True)
class Bound:
    """Goal for the median of a figure of many rounds."""

    fault: str
    figure: str
    seconds: float
    value: Callable[[Record], float]


BOUNDS = (
    Bound("created", "all pods exist", 0.3, lambda record: record["pods"]),
    Bound(
        "created", "first step over a pod that imports torch", 1.0, lambda record: record["any"] - record["plainTorch"]
    ),
    Bound(
        "worker deleted",
        "full size over a pod that imports torch",
        2.0,
        lambda record: record["full"] - record["plainTorch"],
    ),
    Bound(
        "script's worker deleted",
        "full size over a pod that imports torch",
        2.0,
        lambda record: record["full"] - record["plainTorch"],
    ),
    Bound("node", "the rest steps again", 2.5, lambda record: record["any"]),
    Bound("node and coordinator", "the rest steps again", 6.0, lambda record: record["any"]),
)


def judge(records: Sequence[Record]) -> list[Verdict]:
    """Judge the goals of all records. A round that failed counts as longer than anything."""
    verdicts = [Verdict(Outcome.MISSED, _about(record), reason) for record in records for reason in missed(record)]
    for bound in BOUNDS:
        done = [record for record in records if record["kind"] == "pods" and record["fault"] == bound.fault]
        if done:
            values = [math.inf if record["problem"] else bound.value(record) for record in done]
            verdicts.append(
                judge_median(f"{bound.fault}: {bound.figure}: at most {bound.seconds:g} s", values, bound.seconds)
            )
    return verdicts + list(_against_others(records))


def _about(record: Record) -> str:
    return "pods" if record["kind"] == "pods" else f"{operator(record)}, {record['jobs']} jobs"


def _against_others(records: Sequence[Record]) -> Iterator[Verdict]:
    """Judge that statuses are correct no later than with another operator of the same run, for as many objects."""
    runs = [record for record in records if record["kind"] == "scale"]
    goal = "seconds an object until all statuses are right: no more than"
    for own_run in (run for run in runs if operator(run) == TANDEM):
        for other in (run for run in runs if operator(run) != TANDEM):
            own, other_seconds = _seconds_an_object(own_run), _seconds_an_object(other)
            outcome = Outcome.MET if own <= other_seconds else Outcome.MISSED
            yield Verdict(outcome, f"{goal} {_about(other)}", f"{own * 1000:.1f} and {other_seconds * 1000:.1f} ms")


def _seconds_an_object(run: Record) -> float:
    counts: Mapping[str, int] = run["startCounts"]
    created = sum(count for name, count in counts.items() if name.startswith("create ") and name != "create events")
    return float(run["rightSeconds"]) / max(1, created)


def writes(counts: Mapping[str, int]) -> Counter[str]:
    """Count writes in three classes: of objects, of statuses, of Events."""
    by_class: Counter[str] = Counter()
    for name, count in counts.items():
        verb, _, resource = name.partition(" ")
        if verb in READS:
            continue
        kind = "events" if resource == "events" else "statuses" if resource.endswith("/status") else "objects"
        by_class[kind] += count
    return by_class


def megabytes(mebibytes: float) -> float:
    """Convert MiB to MB of 10^6 bytes."""
    return mebibytes * 2**20 / 1e6


def missed(record: Record) -> Iterator[str]:
    """Generate the goals that a record misses, in words."""
    if record["kind"] == "pods":
        yield from (f"{record['fault']} {record['round']}: {trouble}" for trouble in _troubles(record))
        return
    if operator(record) == TANDEM:
        figures = {
            "age": record["ages"]["oldest"],
            "memory": megabytes(record["peakMiB"]),
            "writes": writes(record["lifeCounts"])["objects"] / record["jobs"],
            "cpu": record["startCpuSeconds"] * 1000 / record["jobs"],
        }
        for name, value in figures.items():
            if value > GOALS[name]:
                yield f"{name} {value:.1f}, more than {GOALS[name]:g}"
    if record["left"]:
        yield f"left after all was deleted: {record['left']}"


def operator(record: Record) -> str:
    """Name of the operator of a record with many jobs; old records without one are Tandem's."""
    return str(record.get("operator", TANDEM))


def scale(records: Sequence[Record]) -> str:
    """Format a column for each run with many jobs."""
    runs = [record for record in records if record["kind"] == "scale"]
    if not runs:
        return ""
    rows = [list(_lines(run)) for run in runs]
    has_others = any(operator(run) != TANDEM for run in runs)
    head = ["what", *(f"{operator(run)}, {run['jobs']} jobs" if has_others else f"{run['jobs']} jobs" for run in runs)]
    body = [[rows[0][index][0], *(row[index][1] for row in rows)] for index in range(len(rows[0]))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *body])


def _lines(run: Record) -> Iterator[tuple[str, str]]:
    jobs, life = run["jobs"], writes(run["lifeCounts"])
    reads = sum(count for name, count in run["lifeCounts"].items() if name.partition(" ")[0] in READS)
    steady = writes(run["steadyCounts"])
    yield "all jobs applied after", f"{run['appliedSeconds']:.1f} s"
    by_role = [f"{role}s {seconds:.1f}" for role, seconds in sorted(run.get("madeSecondsByRole", {}).items())]
    yield "all pods exist after", f"{run['madeSeconds']:.1f} s" + (f" ({', '.join(by_role)})" if by_role else "")
    yield "all pods run (simulated) after", f"{run['runningSeconds']:.1f} s"
    yield "all statuses right after", f"{run['rightSeconds']:.1f} s"
    yield (
        "oldest status while all train (median; goal ≤ 30 s)",
        f"{run['ages']['oldest']:.1f} s ({run['ages']['median']:.1f})" if run["ages"] else "tells no step",
    )
    yield "all ended after their last step", f"{run['endedSeconds']:.1f} s"
    yield "nothing left after deletion of all", "NO" if run["left"] else f"{run['deletedSeconds']:.1f} s"
    yield "operator: peak memory (goal < 300 MB)", f"{megabytes(run['peakMiB']):.0f} MB"
    steady_mib = run.get("steadyMiB")
    yield "operator: memory while all train", f"{megabytes(steady_mib):.0f} MB" if steady_mib else ""
    yield "operator: CPU until all statuses are right", f"{run['startCpuSeconds']:.1f} s"
    yield "operator: the same per job (goal ≤ 20 ms)", f"{run['startCpuSeconds'] * 1000 / jobs:.0f} ms"
    yield "operator: cores while all train", f"{run['steadyCores']:.2f}"
    yield "operator: CPU over its life", f"{run['cpuSeconds']:.1f} s"
    yield "writes per job over its life, apart from status and Events (goal ≤ 12)", f"{life['objects'] / jobs:.2f}"
    yield "writes of statuses per job, until all are right", f"{writes(run['startCounts'])['statuses'] / jobs:.2f}"
    yield "Events per job", f"{life['events'] / jobs:.2f}"
    yield "writes of statuses while all train, each second", f"{steady['statuses'] / run['steadySeconds']:.1f}"
    yield "reads per job over its life", f"{reads / jobs:.2f}"
    yield "looks at jobs that failed, or were broken", str(run["complaints"])
    yield "load average in the last minute, the last five", f"{run['load'][0]:.1f}, {run['load'][1]:.1f}"


def pods(records: Sequence[Record]) -> str:
    """Format a row for each fault of pods."""
    done = [record for record in records if record["kind"] == "pods"]
    if not done:
        return ""
    head = ["what", "rounds", "failures", "two groups", "first step again", "back at full size", *OVERHEADS]
    body = [
        _row(fault, [record for record in done if record["fault"] == fault]) for fault in dict.fromkeys(_faults(done))
    ]
    plain, imported, stepped = (
        _spread([record[name] for record in done if name in record]) for name in OVERHEADS.values()
    )
    lines = "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *body])
    created = _spread([record["pods"] for record in done if "pods" in record])
    loads = [load for record in done for load in record["load"]]
    return (
        f"{lines}\n\nMedian (least to most), in seconds. After creation all pods exist after {created}. A plain pod of "
        f"the trainer's image runs its first line after {plain}, has imported torch after {imported}, and made a step "
        f"by itself after {stepped}. Load average {min(loads):.1f} to {max(loads):.1f}."
    )


def _faults(done: Sequence[Record]) -> Iterator[str]:
    return (record["fault"] for record in done)


def _row(fault: str, done: Sequence[Record]) -> list[str]:
    good = [record for record in done if not record["problem"]]
    overheads = [[record["full"] - record[floor] for record in good if floor in record] for floor in OVERHEADS.values()]
    return [
        fault,
        str(len(done)),
        str(len(done) - len(good)),
        str(sum(bool(record.get("twoGroups")) for record in done)),
        _spread([record["any"] for record in good if "any" in record]),
        _spread([record["full"] for record in good]),
        *(_spread(values) for values in overheads),
    ]


def _troubles(record: Record) -> Iterator[str]:
    if record["problem"]:
        yield record["problem"]
    yield from record.get("twoGroups", [])
    yield from (f"{name}: {reason}" for name, reason in record.get("damaged", {}).items())


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})" if values else ""
