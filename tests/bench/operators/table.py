"""Results as markdown tables. Pure: records in, text out."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Record = dict[str, Any]
GOALS = {"age": 30.0, "memory": 300.0, "writes": 12.0}
"""Seconds, MB, writes per job over its life apart from the status."""
TOLD = "create events"
READS = ("get", "list", "watch")


def writes(counts: Mapping[str, int]) -> Counter[str]:
    """Writes in three classes: of objects, of statuses, of Events."""
    found: Counter[str] = Counter()
    for name, count in counts.items():
        verb, _, resource = name.partition(" ")
        if verb in READS:
            continue
        kind = "events" if name == TOLD else "statuses" if resource.endswith("/status") else "objects"
        found[kind] += count
    return found


def megabytes(mebibytes: float) -> float:
    """10^6 bytes."""
    return mebibytes * 2**20 / 1e6


def missed(record: Record) -> Iterator[str]:
    """Goals that a record does not reach, in words."""
    if record["kind"] != "scale":
        return
    life = writes(record["lifeCounts"])
    found = {
        "age": record["ages"]["oldest"],
        "memory": megabytes(record["peakMiB"]),
        "writes": life["objects"] / record["jobs"],
    }
    for name, value in found.items():
        if value > GOALS[name]:
            yield f"{name} {value:.1f}, more than {GOALS[name]:g}"
    if record["left"]:
        yield f"left after all was deleted: {record['left']}"


def scale(records: Sequence[Record]) -> str:
    """A column for each run with many jobs."""
    runs = [record for record in records if record["kind"] == "scale"]
    if not runs:
        return ""
    rows = [list(_lines(run)) for run in runs]
    head = ["what", *(f"{run['jobs']} jobs" for run in runs)]
    body = [[rows[0][index][0], *(row[index][1] for row in rows)] for index in range(len(rows[0]))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *body])


def _lines(run: Record) -> Iterator[tuple[str, str]]:
    jobs, life = run["jobs"], writes(run["lifeCounts"])
    reads = sum(count for name, count in run["lifeCounts"].items() if name.partition(" ")[0] in READS)
    steady = writes(run["steadyCounts"])
    yield "all jobs applied after", f"{run['appliedSeconds']:.1f} s"
    yield "all pods exist after", f"{run['madeSeconds']:.1f} s"
    yield "all pods run (simulated) after", f"{run['runningSeconds']:.1f} s"
    yield "all statuses right after", f"{run['rightSeconds']:.1f} s"
    yield (
        "oldest status while all train (median; goal ≤ 30 s)",
        (f"{run['ages']['oldest']:.1f} s ({run['ages']['median']:.1f})"),
    )
    yield "all ended after their last step", f"{run['endedSeconds']:.1f} s"
    yield "nothing left after deletion of all", "NO" if run["left"] else f"{run['deletedSeconds']:.1f} s"
    yield "operator: peak memory (goal < 300 MB)", f"{megabytes(run['peakMiB']):.0f} MB"
    yield "operator: CPU until all statuses are right", f"{run['startCpuSeconds']:.1f} s"
    yield "operator: cores while all train", f"{run['steadyCores']:.2f}"
    yield "writes per job over its life, apart from status and Events (goal ≤ 12)", f"{life['objects'] / jobs:.2f}"
    yield "Events per job", f"{life['events'] / jobs:.2f}"
    yield "writes of statuses while all train, each second", f"{steady['statuses'] / run['steadySeconds']:.1f}"
    yield "reads per job over its life", f"{reads / jobs:.2f}"
    yield "looks at jobs that failed, or were broken", str(run["complaints"])
    yield "load average, before and after", f"{run['load'][0]:.1f}, {run['load'][1]:.1f}"
