"""A script that prints without end, under `tandem run`."""

from pathlib import Path

import pytest

from tandem_launcher.printed_log import MAX_PART_BYTES
from tests.support.local_run import LocalRun

SCRIPT = """
import time
for number in range(80):
    print(("x" * 1000 + "\\n") * 10_000, end="", flush=True)
    time.sleep(0.1)
print("last words")
"""
MANIFEST = """
apiVersion: tandem.dev/v1alpha1
kind: DistributedTrainingJob
metadata: {name: flood}
spec: {trainer: {command: [python, flood.py]}, workers: {replicas: 1}, evaluators: {replicas: 0}}
"""


@pytest.mark.full("cli")
def test_it_fills_no_disk_and_a_warning_says_so_once(tmp_path: Path) -> None:
    (tmp_path / "flood.py").write_text(SCRIPT)
    (tmp_path / "job.yaml").write_text(MANIFEST)
    with LocalRun(tmp_path, manifest=tmp_path / "job.yaml", cwd=tmp_path) as run:
        assert run.ends() == 0, run.output
        assert run.output.count("worker-0 has printed more than 64 MiB") == 1
        # 800 MB were printed. Each part exceeds the bound by what is printed between two looks and during a copy.
        assert sum(file.stat().st_size for file in run.run_dir.log.iterdir()) < 6 * MAX_PART_BYTES
        shown = run.called("logs", str(run.path), "worker-0", "--tail", "3").stdout
    assert "last words" in shown
