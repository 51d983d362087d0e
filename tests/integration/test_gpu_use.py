"""The GPUs of a program that has never heard of Tandem: from its agent to every place that shows a rank's GPU. NVML is
played."""

import os
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.wire import metrics
from tandem_cli.report.logs import read_coordinator_log
from tests.support import ROOT
from tests.support.elastic import TOKEN, Elastic
from tests.support.waiting import until

PYNVML = """
import sys
from tandem_trainer.agent import gpu_watch
from tests.support.nvml import Nvml

gpu_watch.DRIVER = {driver!r}
sys.modules[__name__] = Nvml()
"""
"""In the place of the module: it also says what stands for CUDA's driver."""


@pytest.mark.full("trainer", "coordinator", "cli")
def test_they_are_in_status_metrics_and_report(tmp_path: Path) -> None:
    driver, places = tmp_path / "driver", tmp_path / "places"
    driver.touch()
    places.mkdir()
    (places / "pynvml.py").write_text(PYNVML.format(driver=str(driver)))
    # The second of each worker's two computes on no GPU.
    program = f'test "$LOCAL_RANK" = 1 || exec < {driver}; while :; do sleep 0.1; done'
    workers = {"replicas": 2, "processesPerReplica": 2}
    trainer, cold = {"command": ["sh", "-c", program]}, {"warmStart": False}
    with Elastic(tmp_path, trainer=trainer, workers=workers, elasticity=cold) as group:
        group.start_coordinator()
        path = os.pathsep.join([str(places), str(ROOT), os.environ.get("PYTHONPATH", "")])
        for name, visible in (("worker-0", "3,0"), ("worker-1", "GPU-c,GPU-b")):
            group.extra |= {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": visible}
            group.start_agent(name)

        def use() -> tuple[float, int | None] | None:
            snapshot = group.snapshot()
            found = None if snapshot is None else snapshot.status.utilization
            return None if found is None or found.gpu is None else (round(found.gpu, 4), found.gpu_memory_bytes)

        both = (0.935, (94 + 93) * 2**20)
        until(lambda: use() == both, "both GPUs", otherwise=lambda: f"{use()}\n{group.output('worker-0')}")
        snapshot = group.snapshot()
        ranks = {one.rank: (one.gpu, one.gpu_memory_bytes) for member in snapshot.members for one in member.ranks}
        assert ranks == {0: (0.94, 94 * 2**20), 2: (0.93, 93 * 2**20)}
        assert snapshot.status.phase == "Running"

        page = urllib.request.Request(f"http://127.0.0.1:{group.port}/metrics")
        page.add_header("Authorization", f"Bearer {TOKEN}")
        with urllib.request.urlopen(page) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            found = {(one.name, one.labels.get("rank")): one.value for family in families for one in family.samples}
        for rank, busy in (("0", 94), ("2", 93)):
            assert found[metrics.RANK_GPU.name, rank] == busy / 100
            assert found[metrics.RANK_GPU_MEMORY.name, rank] == busy * 2**20
        assert (metrics.RANK_GPU.name, "1") not in found

        def recorded() -> set[str]:
            log = read_coordinator_log(group.rundir.coordinator_log, [])
            return {one.name for one in log.gpu} & {one.rank for one in log.memory}

        until(lambda: recorded() == {"0", "2"}, "both in the log that the report is made of")
