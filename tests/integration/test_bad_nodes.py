"""Bad nodes in network namespaces: a device that fails whatever it is given, and a network that reaches the coordinator
and not the other members. The job ends well without them, with a pre-flight and without."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.recovery.surroundings import INTERFACE, Network, spawn
from tandem.processes import launch
from tandem.processes.exitcode import ExitCode
from tandem.rundir.layout import RunDir
from tandem_launcher.terminal.summary import troubles_of
from tests.support import SCRIPTS, manifests
from tests.support.lines import read_lines

AUTHORITY, PORT, TOKEN = "authority", 29400, "token-of-bad-nodes"
FOUR = ("worker-0", "worker-1", "worker-2", "worker-3")
STEPS = 100
DIES_IN_PREFLIGHT = """
import os, sys
if "tandem_trainer.agent.preflight" in sys.orig_argv:
    import torch
    torch.matmul = lambda *_, **__: os.abort()
"""

pytestmark = [
    pytest.mark.full("core", "coordinator", "trainer"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2"
    ),
]


@contextmanager
def job_of_four(path: Path, bad: str, broken_device: bool, preflight: bool) -> Iterator[tuple[RunDir, dict[str, int]]]:
    """A job of four members that has ended, or been given up; its run directory, and what its agents ended with."""
    job = manifests.job(
        "bad-nodes",
        trainer={"command": [str(SCRIPTS / "steps.py")]},
        workers={"replicas": 4, "minReplicas": 1},
        elasticity={"preflight": preflight, "growCooldownSeconds": 0.5, "growAfterSeconds": 0.5},
    )
    rundir = manifests.run_directory(path / "run", job)
    with Network([AUTHORITY, *FOUR]) as network:
        if not broken_device:
            cut_from_members(network, bad)
        endpoint = f"{network.address(AUTHORITY)}:{PORT}"

        def start(place: str, command: list[str], **more: str) -> subprocess.Popen[bytes]:
            own = launch.environment(job, rundir.path, place, TOKEN, endpoint)
            variables = {**own, launch.NODE: f"node-of-{place}", "STEPS_TOTAL": str(STEPS), **more}
            return spawn(network, place, command, variables, path / f"{place}.txt")

        coordinator = start(AUTHORITY, launch.coordinator_command("0.0.0.0", PORT))
        agents = {}
        for name in FOUR:
            more = {"PYTHONPATH": broken_site(path), "STEPS_FAIL_AFTER": "3"} if broken_device and name == bad else {}
            command = launch.agent_command(job, endpoint, network.address(name))
            agents[name] = start(name, command, **more)
        codes = {name: agent.wait(200) for name, agent in agents.items()}
        coordinator.terminate()
        coordinator.wait(30)
        yield rundir, codes


def cut_from_members(network: Network, place: str) -> None:
    """What it sends to other members goes to a device that nobody has: it vanishes, in both directions of a connection,
    while the coordinator is reached."""
    for other in FOUR:
        if other != place:
            words = ["neigh", "replace", network.address(other), "lladdr", "02:00:00:00:00:99", "nud", "permanent"]
            subprocess.run(
                [*network.entering(place), "ip", *words, "dev", INTERFACE], check=True, capture_output=True, text=True
            )


def broken_site(path: Path) -> str:
    """A folder for PYTHONPATH with which a pre-flight's process dies of its first product."""
    site = path / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(DIES_IN_PREFLIGHT)
    return str(site)


@pytest.mark.parametrize("preflight", [True, False], ids=["with-preflight", "without"])
@pytest.mark.parametrize(
    ("bad", "broken_device"),
    [("worker-3", True), ("worker-3", False), ("worker-0", False)],
    ids=["bad-device", "half-connected", "half-connected-store"],
)
def test_a_job_of_four_ends_well_without_its_bad_node(
    tmp_path: Path, bad: str, broken_device: bool, preflight: bool
) -> None:
    with job_of_four(tmp_path, bad, broken_device, preflight) as (rundir, codes):
        sound = [name for name in FOUR if name != bad]
        said = "\n".join((tmp_path / f"{name}.txt").read_text() for name in (AUTHORITY, *FOUR))
        assert codes == dict.fromkeys(sound, 0) | {bad: int(ExitCode.LEFT_OUT)}, said
        assert rundir.done() is not None
        records, _ = read_lines(rundir.log / "coordinator.jsonl")
        formed = [record for record in records if record["kind"] == "generation"]
        assert formed[-1]["members"] == sound
        assert re.search(rf"{bad} (\(node node-of-{bad}\) )?is left out", said)
        troubles = troubles_of(rundir)
        assert troubles is not None
        assert re.search(rf"{bad}\b.* is left out", troubles.exclusion_message), "the last lines name it"
        if preflight:
            assert [record["reason"] for record in formed] == ["Started", "PreflightFailed"]
            assert bad in formed[-1]["detail"]
        seconds = formed[-1]["time"] - formed[0]["time"]
        print(f"left out after {seconds:.1f} s; generations: {len(formed)}: {[one['reason'] for one in formed]}")


def test_members_whose_host_name_leads_nowhere_find_each_other(tmp_path: Path) -> None:
    members = FOUR[:2]
    job = manifests.job(
        "no-name", trainer={"command": [str(SCRIPTS / "steps.py")]}, workers={"replicas": 2, "minReplicas": 2}
    )
    rundir = manifests.run_directory(tmp_path / "run", job)
    with Network([AUTHORITY, *members]) as network:
        endpoint = f"{network.address(AUTHORITY)}:{PORT}"

        def start(place: str, command: list[str]) -> subprocess.Popen[bytes]:
            own = launch.environment(job, rundir.path, place, TOKEN, endpoint)
            unknown = ["unshare", "--uts", "sh", "-c", 'hostname nowhere-at-all; exec "$@"', "sh", *command]
            variables = {**own, "GLOO_SOCKET_IFNAME": "", "STEPS_TOTAL": str(STEPS)}
            return spawn(network, place, unknown, variables, tmp_path / f"{place}.txt")

        coordinator = start(AUTHORITY, launch.coordinator_command("0.0.0.0", PORT))
        agents = [start(name, launch.agent_command(job, endpoint, network.address(name))) for name in members]
        codes = [agent.wait(120) for agent in agents]
        coordinator.terminate()
        coordinator.wait(30)
    said = "\n".join((tmp_path / f"{name}.txt").read_text() for name in (AUTHORITY, *members))
    assert codes == [0, 0], said
    records, _ = read_lines(rundir.log / "coordinator.jsonl")
    assert sum(record["kind"] == "generation" for record in records) == 1, said
