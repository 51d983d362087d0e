"""The run directory of a job on Kubernetes comes to this machine: whole, once, and only what belongs there."""

import io
import json
import os
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.errors import UserError
from tandem.rundir import archive, lease
from tandem.rundir.archive import END, TOTAL
from tandem.rundir.download import Downloaded
from tandem.rundir.layout import RunDir
from tandem_cli.kubernetes import copying
from tandem_cli.kubernetes.copying import reader_pod
from tandem_cli.kubernetes.kubectl import ClusterError, Kubectl
from tandem_cli.main import application
from tests.support import ROOT, manifests
from tests.support.checkpoints import begin, commit
from tests.support.fake_kubectl import items, pod

KUBECTL = """\
import json, os, subprocess, sys
folder, words = os.path.dirname(os.path.abspath(__file__)), sys.argv[1:]
with open(os.path.join(folder, "asked.jsonl"), "a") as asked:
    asked.write(json.dumps(words) + "\\n")
if "exec" in words:
    if os.path.exists(os.path.join(folder, "sends")):
        with open(os.path.join(folder, "sends"), "rb") as sends:
            sys.stdout.buffer.write(sends.read())
        sys.exit()
    command = [sys.executable, *words[words.index("--") + 2:]]
    ended = subprocess.run(command, capture_output=True, env={**os.environ, "TANDEM_RUN_DIR": %(run)r}, cwd=%(root)r)
    sys.stdout.buffer.write(ended.stdout)
    sys.stderr.buffer.write(ended.stderr)
    sys.exit(ended.returncode)
for answer in ("pods", "create", "wait", "delete", "distributedtrainingjobs.tandem.dev"):
    if answer in words:
        path = os.path.join(folder, answer + ".json")
        sys.stdout.write(open(path).read() if os.path.exists(path) else "")
        sys.exit()
sys.exit("nobody told me what to answer to " + " ".join(words))
"""
JOB: dict[str, Any] = {"metadata": {"name": "digits", "namespace": "team", "uid": "1"}, "spec": {}}


class Cluster:
    """A job whose evaluator runs, and the volume that its pods see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cluster"
        self.folder.mkdir()
        self.remote = manifests.run_directory(folder / "volume" / "digits", manifests.job("digits"))
        begin(self.remote, 1)
        for step in (5, 10, 15):
            commit(
                self.remote, step, files={"state/model.safetensors": b"%d" % step * 1000, "weights.safetensors": b"w"}
            )
        self.remote.best_file.write_text(json.dumps({"name": "step-000000010"}))
        (self.remote.log / "train-g000001.jsonl").write_text('{"kind": "step"}\n')
        (self.remote.leases / "evaluate-step-000000005-x.json").write_text("{}")
        program = self.folder / "kubectl"
        program.write_text(f"#!{sys.executable}\n" + KUBECTL % {"run": str(self.remote.path), "root": str(ROOT)})
        program.chmod(0o755)
        self.kubectl = Kubectl(program=str(program))
        self.has(JOB, pod("worker", 0), pod("evaluator", 0))

    def has(self, job: dict[str, Any], *pods: dict[str, Any]) -> None:
        """From now on there are this job and these pods."""
        (self.folder / "distributedtrainingjobs.tandem.dev.json").write_text(json.dumps(job))
        (self.folder / "pods.json").write_text(json.dumps(items(*pods)))

    def sends(self, members: dict[str, bytes], kind: bytes = tarfile.REGTYPE, cut: int | None = None) -> None:
        """From now on a pod sends this archive, or its first bytes."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name, content in members.items():
                info = tarfile.TarInfo(name)
                if name not in (TOTAL, END):
                    info.type, info.linkname = kind, "/etc/passwd"
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        (self.folder / "sends").write_bytes(buffer.getvalue()[:cut])

    def copy(self, to: Path, *words: str, image: str = "") -> Downloaded:
        """One call."""
        return copying.copy(self.kubectl, "digits", to, words, image, lambda count, total: None)

    @property
    def asked(self) -> list[list[str]]:
        """The words of all calls."""
        return [json.loads(line) for line in (self.folder / "asked.jsonl").read_text().splitlines()]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_the_latest_and_the_best_checkpoint_come_with_all_that_tells_of_the_run(
    cluster: Cluster, tmp_path: Path
) -> None:
    copied = cluster.copy(tmp_path / "run", "latest", "best")
    assert (copied.checkpoints, copied.faults) == (["step-000000015", "step-000000010"], [])
    there = RunDir(tmp_path / "run")
    assert [one.name for one in there.committed()] == ["step-000000015", "step-000000010"]
    assert there.read_job() == cluster.remote.read_job()
    assert (there.log / "train-g000001.jsonl").read_bytes() == (cluster.remote.log / "train-g000001.jsonl").read_bytes()
    assert not list(there.leases.iterdir())
    assert not list(there.path.glob(".tmp-*"))
    assert not list(cluster.remote.leases.glob("copy-*")), "leases are given back"
    (exec_,) = [words for words in cluster.asked if "exec" in words]
    assert "digits-evaluator-0-abcde" in exec_, "neither the group's processors nor the coordinator's"


def test_a_second_copy_takes_what_is_new(cluster: Cluster, tmp_path: Path) -> None:
    cluster.copy(tmp_path / "run", "latest")
    commit(cluster.remote, 20, files={"weights.safetensors": b"new"})
    with (cluster.remote.log / "train-g000001.jsonl").open("a") as log:
        log.write('{"kind": "end"}\n')
    assert cluster.copy(tmp_path / "run", "all").checkpoints == ["step-000000020", "step-000000010", "step-000000005"]
    assert cluster.copy(tmp_path / "run", "all").checkpoints == []
    assert (tmp_path / "run/log/train-g000001.jsonl").read_text().count("\n") == 2


def test_a_checkpoint_that_came_damaged_is_said_and_not_kept(cluster: Cluster, tmp_path: Path) -> None:
    weights = cluster.remote.checkpoint("step-000000015") / "weights.safetensors"
    weights.write_bytes(b"x")
    copied = cluster.copy(tmp_path / "run", "latest", "best")
    assert copied.checkpoints == ["step-000000010"]
    assert [fault.partition(":")[0] for fault in copied.faults] == ["step-000000015"]
    assert RunDir(tmp_path / "run").checkpoint_names() == ["step-000000010"]


def test_an_archive_that_was_cut_off_is_no_copy_and_the_next_one_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    cluster.sends(
        {TOTAL: b'{"bytes": 4, "checkpoints": []}', "log/a.jsonl": b"a\n", "log/b.jsonl": b"b\n", END: b""},
        cut=3 * 512 + 512,
    )
    with pytest.raises(ClusterError, match="was cut off after 2 B; run the same command to continue"):
        cluster.copy(tmp_path / "run", "none")
    (cluster.folder / "sends").unlink()
    assert cluster.copy(tmp_path / "run", "latest").checkpoints == ["step-000000015"]


def test_files_that_are_not_the_runs_are_left_out(cluster: Cluster, tmp_path: Path) -> None:
    """One of another name would have the whole copy refused."""
    for name in (".nfs0001", "epoch=1 notes.txt", ".tmp-latest.json"):
        (cluster.remote.log / name).write_text("x")
    cluster.copy(tmp_path / "run", "none")
    assert [path.name for path in (tmp_path / "run/log").iterdir()] == ["train-g000001.jsonl"]


def test_a_job_that_was_tried_again_has_not_failed_in_its_copy_any_more(cluster: Cluster, tmp_path: Path) -> None:
    cluster.remote.mark_failed("TrainingFailed", "no room", 1)
    cluster.copy(tmp_path / "run", "none")
    assert RunDir(tmp_path / "run").failed()
    cluster.remote.failed_file.unlink()
    cluster.copy(tmp_path / "run", "none")
    assert not RunDir(tmp_path / "run").ended()


def test_a_checkpoint_that_was_deleted_while_it_was_sent_is_said(cluster: Cluster, tmp_path: Path) -> None:
    cluster.sends({TOTAL: b'{"bytes": 1, "checkpoints": ["step-000000005"]}', END: b""})
    assert cluster.copy(tmp_path / "run", "all").faults == ["step-000000005: deleted during the copy"]


def test_leases_are_renewed_while_anything_is_sent(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_LENGTH_SECONDS", 0.5)
    monkeypatch.setattr(archive, "RENEWAL_SECONDS", 0.1)
    held: list[int] = []

    class Slow(io.BytesIO):
        def write(self, content: Any) -> int:
            time.sleep(0.3)
            held.append(len(cluster.remote.readers(by_own_clock=True)))
            return super().write(content)

    archive.write(cluster.remote, cluster.remote.committed(), Slow())
    assert len(held) > 1
    assert held[:-1] == [3] * (len(held) - 1)


@pytest.mark.parametrize(
    "name",
    [
        *("../escaped", "/tmp/escaped", "log/../../escaped", "checkpoints/../../escaped", "log/.hidden", "local.lock"),
        *("code/x.tar.gz", "checkpoints", "log/a\nb"),
    ],
)
def test_what_no_run_directory_has_is_refused(cluster: Cluster, tmp_path: Path, name: str) -> None:
    cluster.sends({TOTAL: b'{"bytes": 1, "checkpoints": []}', name: b"x", END: b""})
    with pytest.raises(ClusterError, match="which no run directory has"):
        cluster.copy(tmp_path / "run", "none")
    assert not (tmp_path / "escaped").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_what_is_no_plain_file_is_refused(cluster: Cluster, tmp_path: Path, kind: bytes) -> None:
    cluster.sends({TOTAL: b'{"bytes": 1, "checkpoints": []}', "log/train-g000001.jsonl": b"", END: b""}, kind)
    with pytest.raises(UserError):
        cluster.copy(tmp_path / "run", "none")
    assert not os.path.lexists(tmp_path / "run/log/train-g000001.jsonl")


def test_what_does_not_fit_is_said_before_it_comes(cluster: Cluster, tmp_path: Path) -> None:
    cluster.sends({TOTAL: b'{"bytes": 1000000000000000, "checkpoints": []}', END: b""})
    with pytest.raises(UserError, match=r"the copy needs .* free"):
        cluster.copy(tmp_path / "run", "none")


def test_a_folder_that_is_no_copy_of_this_job_is_left_alone(cluster: Cluster, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is not a copy of this job; choose another folder"):
        cluster.copy(own, "none")
    assert [path.name for path in own.iterdir()] == ["thesis.txt"]
    cluster.copy(tmp_path / "run", "none")
    cluster.has({**JOB, "metadata": {**JOB["metadata"], "uid": "2"}}, pod("worker", 0))
    with pytest.raises(UserError, match="but of another job of this name"):
        cluster.copy(tmp_path / "run", "none")


def test_an_image_without_the_archive_is_named(cluster: Cluster, tmp_path: Path) -> None:
    (cluster.folder / "kubectl").write_text(
        (cluster.folder / "kubectl").read_text().replace("sys.executable, *words", "sys.executable, '-S', *words")
    )
    with pytest.raises(ClusterError, match="has a version of Tandem that cannot send copies, or no Tandem"):
        cluster.copy(tmp_path / "run", "none")


def ended(**spec: Any) -> dict[str, Any]:
    done = pod("evaluator", 0, state={"terminated": {"exitCode": 0}}, phase="Succeeded")
    container = {"name": "evaluator", "image": "registry/evaluator:1", "imagePullPolicy": "Never"}
    return {**done, "spec": {"containers": [container], "securityContext": {"runAsUser": 10001}, **spec}}


def test_of_a_job_that_is_over_a_pod_is_made_which_reads_its_volume_and_is_deleted(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.has(JOB, ended(tolerations=[{"key": "cpu"}]))
    (cluster.folder / "create.json").write_text("pod/tandem-copy-1\n")
    cluster.sends({TOTAL: b'{"bytes": 2, "checkpoints": []}', "log/a.jsonl": b"a\n", END: b""})
    cluster.copy(tmp_path / "run", "latest")
    verbs = [[word for word in ("create", "wait", "exec", "delete") if word in words] for words in cluster.asked]
    assert [verb for (verb,) in filter(None, verbs)] == ["create", "wait", "exec", "delete"]
    assert next(words for words in cluster.asked if "exec" in words)[-1] == "/tandem/digits"
    cluster.sends({}, cut=0)
    with pytest.raises(ClusterError):
        cluster.copy(tmp_path / "run", "latest")
    assert "delete" in cluster.asked[-1], "also where the copy fails"


def test_the_pod_is_restricted_and_has_the_image_and_the_volume_of_the_job() -> None:
    made = reader_pod(JOB, [ended(imagePullSecrets=[{"name": "hub"}])], "")["spec"]
    (container,) = made["containers"]
    assert (container["image"], container["imagePullPolicy"]) == ("registry/evaluator:1", "Never")
    assert made["volumes"][0]["persistentVolumeClaim"] == {"claimName": "digits-checkpoints"}
    assert (made["securityContext"], made["imagePullSecrets"]) == ({"runAsUser": 10001}, [{"name": "hub"}])
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert made["automountServiceAccountToken"] is False
    assert made["nodeSelector"] == {"kubernetes.io/os": "linux"}
    placed = reader_pod(JOB, [ended(nodeSelector={"disk": "fast"})], "")["spec"]["nodeSelector"]
    assert placed == {"kubernetes.io/os": "linux", "disk": "fast"}
    own = {"metadata": JOB["metadata"], "spec": {"checkpoint": {"storage": {"claimName": "shared"}}}}
    assert reader_pod(own, [], "mine")["spec"]["volumes"][0]["persistentVolumeClaim"] == {"claimName": "shared"}
    with pytest.raises(UserError, match="with --image"):
        reader_pod(JOB, [], "")


BUCKET = {"bucket": "s3://bucket/runs/digits", "endpoint": "http://minio:9000", "region": "eu-1", "shared": False}
ALONE = {**JOB, "spec": {"checkpoint": {"storage": BUCKET}}}


@pytest.mark.parametrize(
    ("selector", "role"), [("latest", "coordinator"), ("all", "worker"), ("none", "worker"), ("none", "")]
)
def test_of_a_job_without_a_volume_the_url_is_named_where_no_pod_has_what_is_wanted(
    cluster: Cluster, tmp_path: Path, selector: str, role: str
) -> None:
    cluster.has(ALONE, pod(role, 0) if role else ended())
    with pytest.raises(UserError) as caught:
        cluster.copy(tmp_path / "run", selector)
    command = f"tandem copy s3://bucket/runs/digits {tmp_path / 'run'} --endpoint=http://minio:9000 --region=eu-1"
    assert str(caught.value).endswith(command)
    assert not [words for words in cluster.asked if "create" in words]
    assert not (tmp_path / "run").exists(), "the command that is named copies to it"


def test_records_of_a_job_without_a_volume_come_from_its_coordinator(cluster: Cluster, tmp_path: Path) -> None:
    cluster.has(ALONE, pod("evaluator", 0), pod("worker", 0), pod("coordinator", 0))
    copied = cluster.copy(tmp_path / "run", "none")
    assert (copied.checkpoints, copied.size > 0) == ([], True)
    (exec_,) = [words for words in cluster.asked if "exec" in words]
    assert "--container=coordinator" in exec_


def test_checkpoints_on_a_cluster_are_listed_as_they_are_there(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their manifests alone come, however large they are."""
    monkeypatch.setenv("PATH", str(cluster.folder), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    (cluster.remote.checkpoint("step-000000010") / "weights.safetensors").unlink()
    # Who reads one now is not copied.
    (cluster.remote.leases / "evaluate-step-000000005-x.json").unlink()

    def printed(*words: str) -> Any:
        command = ("checkpoints", *words, "-o", "json")
        done = CliRunner().invoke(application(command), command)
        assert done.exit_code == 0, done.output
        return json.loads(done.output)

    there, here = printed("ls", "digits", "-n", "team"), printed("ls", str(cluster.remote.path))
    assert (there["run"], there["freeBytes"]) == ("digits", None)
    assert [one["name"] for one in there["checkpoints"]] == [f"step-{step:09d}" for step in (15, 10, 5)]
    assert there["checkpoints"] == here["checkpoints"]
    assert printed("show", "digits", "latest", "--context", "lab")["name"] == "step-000000015"
    asked = [words for words in cluster.asked if "exec" in words]
    assert [words[-3:] for words in asked] == [["--checkpoint", "none", "--manifests"]] * 2
    assert not Path("runs/digits").exists()


def test_checkpoints_of_a_job_without_a_volume_are_listed_in_its_bucket(cluster: Cluster, tmp_path: Path) -> None:
    cluster.has(ALONE, pod("coordinator", 0))
    with pytest.raises(UserError, match=r"List them there: tandem checkpoints ls s3://bucket/runs/digits$"):
        copying.copy_manifests(cluster.kubectl, "digits", tmp_path / "digits")


def test_an_image_that_sends_no_manifests_is_named(cluster: Cluster, tmp_path: Path) -> None:
    program, words = cluster.folder / "kubectl", '*words[words.index("--") + 2:]'
    older = '*(word.replace("--manifests", "--manifests-too") for word in words[words.index("--") + 2:])'
    program.write_text(program.read_text().replace(words, older))
    with pytest.raises(ClusterError, match="has a version of Tandem that cannot send copies"):
        copying.copy_manifests(cluster.kubectl, "digits", tmp_path / "digits")
