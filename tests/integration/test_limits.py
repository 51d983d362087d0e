"""A run in a container whose limits are too small for it: a control group on this machine."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.rundir.durable import read_json
from tests.support.cluster.machine.cgroups import ROOT, hierarchies
from tests.support.local_run import LocalRun

GROWS = """
import time
blocks = []
while True:
    blocks.append(bytes([1]) * 2**23)
    time.sleep(0.02)
"""
MANIFEST = """
apiVersion: tandem.dev/v1alpha1
kind: DistributedTrainingJob
metadata: {name: grows}
spec:
  trainer: {command: [python, grows.py]}
  workers: {replicas: 1}
  evaluators: {replicas: 0}
  elasticity: {maxRestarts: 0}
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with 900 MB of memory, of the first version or the second."""
    hierarchy = next((path for path in hierarchies() if path == ROOT or path.name == "memory"), None)
    if hierarchy is None or not os.access(hierarchy, os.W_OK):
        pytest.skip("no control groups can be made here")
    folder = hierarchy / f"tandem-test-{secrets.token_hex(4)}"
    folder.mkdir()
    limit = next((folder / name for name in ("memory.max", "memory.limit_in_bytes") if (folder / name).exists()), None)
    if limit is None:
        folder.rmdir()
        pytest.skip("no control groups for memory can be made here")
    limit.write_text(str(900_000_000))
    yield folder
    folder.rmdir()


@pytest.mark.full("cli")
def test_a_rank_that_the_kernel_kills_says_so_everywhere(tmp_path: Path, group: Path) -> None:
    (tmp_path / "grows.py").write_text(GROWS)
    (tmp_path / "job.yaml").write_text(MANIFEST)
    own = group.parent / next(
        (
            line.split(":", 2)[2].lstrip("/")
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if "memory" in line
        ),
        "",
    )
    # What this process starts now is in the group.
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        run = LocalRun(tmp_path, manifest=tmp_path / "job.yaml", cwd=tmp_path, warm=False)
    finally:
        (own / "cgroup.procs").write_text(str(os.getpid()))
    with run:
        assert run.ends() == 1
    words = "rank 0 (worker-0) failed: killed by the kernel (SIGKILL): the memory limit of "
    assert words in run.output
    assert words in read_json(run.path / "FAILED.json")["message"]
