"""`tandem debug` on a real cluster: stacks of ranks through kubectl, a debugger on one of them, and who may not."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import manifests
from tests.support.cluster.operated import Job, Operator, kubeconfig
from tests.support.cluster.pods import Namespace
from tests.support.debug_adapter import DebugClient
from tests.support.processes import TANDEM, environment, tandem
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(600), pytest.mark.full("cli", "trainer")]
SCRIPT = """\
import time
import tandem
import torch
import torch.distributed as dist

dist.init_process_group("gloo")


def takes_a_step(step):
    time.sleep(0.05)
    dist.all_reduce(torch.ones(1))
    tandem.log(step=step, loss=1.0)


for step in range(1, 1_000_000):
    takes_a_step(step)
"""
LINE = SCRIPT.splitlines().index("    time.sleep(0.05)") + 1
SEES = [
    {"apiGroups": ["tandem.dev"], "resources": ["distributedtrainingjobs"], "verbs": ["get", "list"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
]
"""Rights of somebody who may look at jobs, and not into their pods."""


@contextmanager
def training(namespace: Namespace, folder: Path, name: str, **trainer: str) -> Iterator[Job]:
    """A job of two workers that makes steps for as long as it is there."""
    code = folder / "code"
    code.mkdir()
    (code / "train.py").write_text(SCRIPT)
    whole = manifests.manifest(
        name,
        trainer={"command": ["python", "train.py"], **trainer},
        workers={"replicas": 2, "minReplicas": 2},
        evaluators={"replicas": 0},
    )
    (folder / "job.json").write_text(json.dumps(whole))
    result = tandem("submit", str(folder / "job.json"), "--code", str(code), "-n", namespace.name)
    assert result.returncode == 0, result.stdout + result.stderr
    job = Job(namespace, name)
    # The nodes may have to pull the image first.
    job.trains(seconds=300)
    yield job
    namespace("delete", "dtj", name, "--wait=false")


def test_the_stacks_of_the_ranks_are_told_and_training_goes_on(
    namespace: Namespace, operator: Operator, tmp_path: Path
) -> None:
    with training(namespace, tmp_path, "stacks") as job:
        told = tandem("debug", job.name, "-n", namespace.name)
        assert (told.returncode, told.stderr) == (0, "")
        _, *lines = told.stdout.splitlines()
        assert [line.split()[0] for line in lines] == ["0", "1"]
        assert {line.split()[2] for line in lines} == {"worker-0", "worker-1"}

        def asleep() -> str:
            one = tandem("debug", job.name, "1", "-n", namespace.name)
            assert one.returncode == 0, one.stderr
            return one.stdout if f'train.py", line {LINE}, in takes_a_step' in one.stdout else ""

        text = until(asleep, "rank 1 in the line that waits")
        assert text.startswith("rank 1 · worker-")
        before = lives(job)
        assert job.trains(beyond=job.step)
        assert lives(job) == before

        variables = {"KUBECONFIG": str(who_only_sees(namespace, tmp_path))}
        refused = tandem("debug", job.name, "1", "-n", namespace.name, variables=variables)
        assert refused.returncode == 2
        assert "The missing right is `create` on `pods/exec`" in " ".join(refused.stderr.split())


def lives(job: Job) -> tuple[int, int]:
    """Generations and restarts. Pods that wait for a processor may have used some up before."""
    return job.status["generation"], job.status.get("restarts", 0)


def who_only_sees(namespace: Namespace, folder: Path) -> Path:
    """Access to the cluster with the rights of SEES."""
    namespace("create", "serviceaccount", "sees")
    api = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "sees"}}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "sees"}
    account = [{"kind": "ServiceAccount", "name": "sees", "namespace": namespace.name}]
    for one in ({"kind": "Role", "rules": SEES}, {"kind": "RoleBinding", "roleRef": role, "subjects": account}):
        namespace("apply", "-f", "-", stdin=json.dumps({**api, **one}))
    return kubeconfig(namespace, folder, account="sees")


def test_a_debugger_stops_a_rank_on_the_cluster_and_the_job_does_not_count_as_hung(
    namespace: Namespace, operator: Operator, libraries: str, tmp_path: Path
) -> None:
    with training(namespace, tmp_path, "attach", image=libraries) as job, attached(job) as found:
        before = lives(job)
        with DebugClient(found["port"]) as debugger:
            debugger.attach(f"{found['folder']}/train.py", LINE)
            top, *_ = debugger.stopped()
            assert (top["name"], top["line"]) == ("takes_a_step", LINE)
            assert int(debugger.evaluate("step", top)) >= job.step
            job.becomes(lambda: "is at debugger" in str(job.status.get("message")), "why it pauses")
            debugger.request("disconnect", terminateDebuggee=False)
        assert job.trains(beyond=job.step)
        assert lives(job) == before


@contextmanager
def attached(job: Job) -> Iterator[dict[str, object]]:
    """`tandem debug JOB 1 --attach` while it forwards a port; what it has said."""
    command = [TANDEM, "debug", job.name, "1", "--attach", "-o", "json", "-n", job.namespace.name]
    process = subprocess.Popen(
        command,
        env=environment({"PYTHONUNBUFFERED": "1"}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if line == "}\n":
                break
        assert said, process.communicate()[1]
        # kubectl says the addresses that it listens on once it does.
        assert "Forwarding from 127.0.0.1" in process.stdout.readline()
        yield json.loads(said)
    finally:
        # As Ctrl-C on a terminal: to kubectl, too.
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=30)
