"""Samples that an epoch repeats and skips when its ranks become 2, 1, and 3: `python -m benchmarks.sample_gap`.

Trainer and accelerate alone save and end on request, and resume as their documentation says. With the adapter the same
script is a job that `tandem run` starts with 2, 1 and 3 workers, killed twice with SIGKILL, all of it at the same time.
It is also compared with an undisturbed run: by the digests of samples, step by step.

Fails if the adapter repeats or skips a sample, or a digest differs.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import yaml

from benchmarks.sample_gap.script import SAMPLES
from tandem.rundir.layout import RunDir

SCRIPT = Path(__file__).with_name("script.py")
WORLDS, STOPS = (2, 1, 3), (8, 18, None)
"""Ranks of each phase, and the step after which it ends."""
BETWEEN_LOOKS, PATIENCE = 0.1, 180.0


def seen_samples(folder: Path, phases: int) -> tuple[Counter[int], list[int]]:
    """Count how often the model saw each sample, and find the step at which each phase started. Steps that a later
    phase repeated from an earlier checkpoint were lost: they do not count."""
    lines = [
        [json.loads(line) for path in folder.glob(f"seen-{phase}-*.jsonl") for line in path.read_text().splitlines()]
        for phase in range(phases)
    ]
    start_steps = [min(line["step"] for line in phase) for phase in lines]
    counts: Counter[int] = Counter()
    for phase, end in zip(lines, [*start_steps[1:], sys.maxsize], strict=True):
        for line in phase:
            if line["step"] < end:
                counts.update(line["samples"])
    return counts, start_steps


def alone(library: str, folder: Path) -> tuple[Counter[int], list[int]]:
    """Save and resume as the library does it."""
    for phase, (ranks, stop) in enumerate(zip(WORLDS, STOPS, strict=True)):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(SCRIPT), library, "--folder", str(folder), "--phase", str(phase)]
        command += ["--stop-at", str(stop)] if stop else []
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, env=environment, check=True, capture_output=True)
    return seen_samples(folder, len(WORLDS))


def digests(run: Path) -> dict[int, str]:
    """Read the digest of the samples of each step from the training log; a later generation overrides."""
    lines = [line for path in sorted((run / "log").glob("train-g*.jsonl")) for line in path.read_text().splitlines()]
    steps = [record for record in map(json.loads, filter(None, lines)) if record["kind"] == "step"]
    return {record["step"]: record["ids"] for record in steps}


def start(library: str, folder: Path, run: Path, phase: int, ranks: int, pause: float) -> subprocess.Popen[bytes]:
    """Start a `tandem run` of the job."""
    args = [library, "--adapter", "--folder", str(folder), "--phase", str(phase), "--pause", str(pause)]
    job = {
        "apiVersion": "tandem.dev/v1alpha1",
        "kind": "DistributedTrainingJob",
        "metadata": {"name": "sample-gap"},
        "spec": {
            "trainer": {"command": ["python", str(SCRIPT)], "args": args},
            "workers": {"replicas": ranks},
            "evaluators": {"replicas": 0},
            "checkpoint": {"everySteps": 2},
        },
    }
    manifest = folder / f"job-{phase}.yaml"
    manifest.write_text(yaml.safe_dump(job))
    command = [str(Path(sys.executable).with_name("tandem")), "run", str(manifest), "--run-dir", str(run)]
    with (folder / f"output-{phase}.txt").open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for a run to complete."""
    if process.wait(PATIENCE):
        raise SystemExit(f"a run failed: {(folder / 'output-0.txt').parent}: {process.returncode}")


def with_adapter(library: str, folder: Path) -> tuple[Counter[int], list[int], bool]:
    """Run a job that is killed twice and resumed with other numbers of ranks; returns also whether its digests equal
    those of the undisturbed run."""
    undisturbed = folder / "undisturbed"
    undisturbed.mkdir()
    finish(start(library, undisturbed, folder / "run-undisturbed", 0, WORLDS[0], 0), undisturbed)
    run = folder / "run"
    for phase, (ranks, stop) in enumerate(zip(WORLDS, STOPS, strict=True)):
        process = start(library, folder, run, phase, ranks, 0.3 if stop else 0.0)
        if stop is None:
            finish(process, folder)
            break
        deadline = time.monotonic() + PATIENCE
        while not (checkpoints := RunDir(run).committed()) or checkpoints[0].step < stop:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"phase {phase} ended early:\n{(folder / f'output-{phase}.txt').read_text()}")
            time.sleep(BETWEEN_LOOKS)
        # The run's guardian ends its remaining processes.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    counts, start_steps = seen_samples(folder, len(WORLDS))
    return counts, start_steps, digests(run) == digests(folder / "run-undisturbed")


def main() -> int:
    """Measure, print a table; returns whether the adapter leaves a gap."""
    print(
        f"{'one epoch of ' + str(SAMPLES) + ' samples, on 2, 1, 3 ranks':<50}{'repeated':>9}{'skipped':>9}  resumed at"
    )
    failed = False
    for library in ("trainer", "accelerate"):
        for adapted in (False, True):
            with tempfile.TemporaryDirectory() as name:
                same = True
                if adapted:
                    counts, start_steps, same = with_adapter(library, Path(name))
                else:
                    counts, start_steps = alone(library, Path(name))
            repeated = sum(count > 1 for count in counts.values())
            skipped = SAMPLES - len(counts)
            label = f"{library} {'with the adapter, killed' if adapted else 'alone, saved'} and resumed"
            suffix = "" if not adapted else "; digests as undisturbed" if same else "; digests differ"
            print(f"{label:<50}{repeated:>9}{skipped:>9}  steps {start_steps[1]}, {start_steps[2]}{suffix}", flush=True)
            moves = all(before < after for before, after in pairwise(start_steps))
            failed = failed or (adapted and bool(repeated or skipped or not same or not moves))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
