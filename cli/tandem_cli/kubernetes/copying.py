"""Copies the run directory of a job on Kubernetes to this machine: `tandem copy`.

The archive (tandem.rundir.archive) is written in a pod that has the job's volume, and comes through `kubectl exec`:

    the job runs        an evaluator, else a worker, else the coordinator, which has the least of a processor
    its pods have ended a pod that is made for it, like the newest one that ended, and deleted afterwards

A pod is a tenant's own, so what comes from it is taken for a stranger's: plain files under the names of a run
directory, nothing else. A checkpoint is compared with its checksums before it gets its name, and nothing is taken for
whole whose end did not come.

Rejected: sending it through the coordinator's HTTP server (it is gone when the job has ended, and its processor belongs
to the group); a pod for each copy (a volume of one node may be mounted there alone, and a quota be used up).
"""

import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tandem import labels
from tandem.errors import UserError
from tandem.formatting import printable, size
from tandem.launch import module_command
from tandem.rundir.archive import END, FILES, FOLDERS, NAME, TOTAL
from tandem.rundir.checkpoint import FILE
from tandem.rundir.durable import commit_folder, read_json_or_none, replace_json, temporary_beside
from tandem.rundir.layout import RunDir
from tandem_cli.checkpoints.verification import verify
from tandem_cli.kubernetes.execution import executable
from tandem_cli.kubernetes.job_view import RESOURCE, pods
from tandem_cli.kubernetes.kubectl import ClusterError, Kubectl, complaint, end, errors_of

ORIGIN = "copied.json"
"""File of a copy that names the job it was copied from."""
ROLES = (labels.EVALUATOR, labels.WORKER, labels.COORDINATOR)
"""Roles whose running pods can write the archive, in order of preference."""
ARCHIVE = module_command("tandem.rundir.archive", python="python")
VOLUME = "/tandem"
LIFE_SECONDS = 6 * 3600
"""Active deadline of a pod that is made for a copy, in case nobody deletes it."""
BEGIN_SECONDS = 180
"""Time that such a pod may take to become ready: its image may have to be pulled."""
MAX_TOTAL_BYTES = 2**16
CHUNK = 2**20
_LACKING = re.compile(r"No module named '?tandem")

Raw = dict[str, Any]
Tick = Callable[[int, int], None]
"""Is given the bytes that have come and those there are."""


@dataclass
class Copy:
    """Result of a copy."""

    size: int = 0
    """Bytes received."""
    checkpoints: list[str] = field(default_factory=list)
    """Names of new checkpoints, all of them sound."""
    faults: list[str] = field(default_factory=list)
    """Sentences about checkpoints that arrived damaged or not at all."""


def copy(kubectl: Kubectl, name: str, to: Path, words: Sequence[str], image: str, tick: Tick) -> Copy:
    """Copy what is new.

    Args:
        name: of the job.
        to: a new or empty folder, or an earlier copy of the same job.
        words: which checkpoints (tandem.rundir.archive.chosen).
        image: of the pod that is made where none runs; empty: that of the newest pod that ended.

    Raises:
        UserError: the cluster refuses, the folder holds something else, there is no room, or the archive was cut off;
            what has come until then stays, and the next copy goes on from there.
    """
    job = kubectl.json("get", RESOURCE, name)
    rundir = RunDir(to)
    _expect_place(rundir, job)
    with _source(kubectl, job, image) as (pod, container, folder), tempfile.TemporaryFile() as said:
        wanted = [word for one in words for word in ("--checkpoint", one)]
        known = [word for one in _digests(rundir) for word in ("--have", one)]
        command = ("exec", pod, f"--container={container}", "--", *ARCHIVE, *wanted, *known, *folder)
        child = kubectl.open(*command, errors=said)
        try:
            return _unpack(child, rundir, said, tick)
        except OSError as error:
            raise UserError(f"the copy cannot be written to {to}: {error.strerror or error}") from error
        finally:
            end(child)


def _expect_place(rundir: RunDir, job: Raw) -> None:
    """Make the folder that of a copy of this job.

    Raises:
        UserError: it holds something else.
    """
    metadata = job["metadata"]
    origin = {key: str(metadata.get(key, "")) for key in ("namespace", "name", "uid")}
    there = read_json_or_none(rundir.path / ORIGIN)
    if there != origin and rundir.path.exists() and (not rundir.path.is_dir() or any(rundir.path.iterdir())):
        whose = "another job of that name" if isinstance(there, dict) and there.get("name") == origin["name"] else ""
        raise UserError(
            f"{rundir.path} is there already and is no copy of this job{f', but of {whose}' if whose else ''}; "
            "give another folder"
        )
    try:
        rundir.create()
        replace_json(rundir.path / ORIGIN, origin)
    except OSError as error:
        raise UserError(f"{rundir.path} cannot be made: {error.strerror}") from error


def _digests(rundir: RunDir) -> list[str]:
    """Digests of the manifests of checkpoints that the copy already has."""
    return [digest for one in rundir.manifests().values() if (digest := getattr(one, "digest", ""))]


# What comes


def _unpack(child: subprocess.Popen[bytes], rundir: RunDir, said: IO[bytes], tick: Tick) -> Copy:
    copied, whole, came = Copy(), False, set[str]()
    assert child.stdout is not None
    aside = RunDir(temporary_beside(rundir.path / "copy"))
    try:
        with tarfile.open(fileobj=child.stdout, mode="r|") as archive:
            total, announced = _announced(archive, rundir.path)
            while (member := archive.next()) is not None and not (whole := member.name == END):
                content = archive.extractfile(member)
                if content is None or not _is_expected(member):
                    raise ClusterError(f"the pod sent {printable(member.name[:200])!r}, which no run directory has")
                _take(content, member, rundir, aside, copied)
                came.add(member.name)
                tick(copied.size, total)
    except (tarfile.TarError, EOFError):
        whole = False
    finally:
        shutil.rmtree(aside.path, ignore_errors=True)
    if not whole:
        with suppress(subprocess.TimeoutExpired):
            child.wait(10)
        errors = errors_of(said)
        if _LACKING.search(errors):
            raise ClusterError("the image of the job's pods has a version of Tandem that cannot send copies, or none")
        if errors.strip() and not copied.size:
            raise complaint(errors)
        raise ClusterError(
            f"the copy was cut off after {size(copied.size)}; the same command goes on from there. "
            f"{printable(errors.strip()[-500:])}".rstrip()
        )
    for name in set(FILES) - came:
        # A job that was tried again has failed no more.
        (rundir.path / name).unlink(missing_ok=True)
    for name in announced:
        if f"checkpoints/{name}/{FILE}" not in came:
            copied.faults.append(f"{name}: it was deleted while it was sent")
    return copied


def _announced(archive: tarfile.TarFile, folder: Path) -> tuple[int, list[str]]:
    """Bytes that will come, and names of checkpoints among them.

    Raises:
        UserError: there is no room for them.
    """
    first = archive.next()
    content = None if first is None or first.name != TOTAL else archive.extractfile(first)
    if content is None:
        raise EOFError
    try:
        told = json.loads(content.read(MAX_TOTAL_BYTES))
        total, names = int(told["bytes"]), [str(name) for name in told["checkpoints"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ClusterError(f"the pod sent an archive that cannot be read: {error}") from error
    free = shutil.disk_usage(folder).free
    if total > free:
        raise UserError(f"the copy has {size(total)}, and {folder} has room for {size(free)}")
    return total, names


def _is_expected(member: tarfile.TarInfo) -> bool:
    top = member.name.partition("/")[0]
    known = member.name in FILES or ("/" in member.name and top in (*FOLDERS, "checkpoints"))
    return member.isreg() and known and all(NAME.fullmatch(part) for part in member.name.split("/"))


def _take(content: IO[bytes], member: tarfile.TarInfo, rundir: RunDir, aside: RunDir, copied: Copy) -> None:
    """One file; a checkpoint gets its name when its manifest, which comes last, shows it to be sound."""
    is_part = member.name.startswith("checkpoints/")
    path = (aside if is_part else rundir).path / member.name
    path.parent.mkdir(parents=True, exist_ok=True)
    written = temporary_beside(path)
    with written.open("wb") as file:
        shutil.copyfileobj(content, file, CHUNK)
    copied.size += member.size
    written.replace(path)
    if is_part and path.parent.parent == aside.checkpoints and path.name == FILE:
        _commit(path.parent.name, rundir, aside, copied)


def _commit(name: str, rundir: RunDir, aside: RunDir, copied: Copy) -> None:
    found = verify(aside, name)
    if found.outcome != "sound":
        copied.faults += [f"{name}: {fault}" for fault in found.faults or (found.outcome,)]
        return
    # One of that name that is here already is an earlier generation's, since the pod was told which ones are.
    shutil.rmtree(rundir.checkpoint(name), ignore_errors=True)
    commit_folder(aside.checkpoint(name), rundir.checkpoint(name))
    copied.checkpoints.append(name)


# Who sends it


@contextmanager
def _source(kubectl: Kubectl, job: Raw, image: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """A pod that has the volume, its container, and the run directory if its variables do not tell."""
    name = str(job["metadata"]["name"])
    there: list[Raw] = kubectl.json("get", "pods", "-l", f"{labels.JOB}={name}")["items"]
    running = sorted(executable(pods(there)), key=lambda pod: ROLES.index(pod.role))
    if running:
        yield running[0].pod, running[0].container, ()
        return
    manifest = reader(job, there, image)
    made = kubectl.ask("create", "-f", "-", "-o", "name", given=json.dumps(manifest)).text.strip()
    try:
        kubectl.ask(*("wait", made, "--for=condition=Ready", f"--timeout={BEGIN_SECONDS}s"), seconds=BEGIN_SECONDS + 30)
        yield made, "copy", (f"{VOLUME}/{name}",)
    finally:
        with suppress(ClusterError):  # it ends by itself
            kubectl.ask("delete", made, "--wait=false", "--grace-period=0")


def reader(job: Raw, ended: Sequence[Raw], image: str) -> Raw:
    """A pod that only sleeps, with the volume of a job: as the newest of its pods was, as far as that matters.

    Raises:
        UserError: nothing tells which image has Tandem in it.
    """
    name = str(job["metadata"]["name"])
    newest = max(ended, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default=None)
    spec: Raw = {} if newest is None else newest["spec"]
    role = "" if newest is None else str(newest["metadata"].get("labels", {}).get(labels.ROLE, ""))
    theirs: Raw = next((one for one in spec.get("containers", []) if one["name"] == role), {})
    image = image or str(theirs.get("image", ""))
    if not image:
        raise UserError(
            f"no pod of {name} is left that tells which image to read its volume with; give one that has Tandem in it "
            "with --image, for instance the evaluators'"
        )
    storage = job.get("spec", {}).get("checkpoint", {}).get("storage", {})
    claim = storage.get("claimName") or f"{labels.stem(name)}-checkpoints"
    user = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    kept = {key: spec[key] for key in ("imagePullSecrets", "tolerations", "nodeSelector") if key in spec}
    container: Raw = {
        "name": "copy",
        "image": image,
        "command": ["python", "-c", f"import time; time.sleep({LIFE_SECONDS})"],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}},
        "volumeMounts": [{"name": "checkpoints", "mountPath": VOLUME}],
    }
    if "imagePullPolicy" in theirs:
        container["imagePullPolicy"] = theirs["imagePullPolicy"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "tandem-copy-", "labels": {"app.kubernetes.io/name": "tandem-copy"}},
        "spec": {
            **kept,
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "activeDeadlineSeconds": LIFE_SECONDS,
            "terminationGracePeriodSeconds": 0,
            "securityContext": spec.get("securityContext") or user,
            "containers": [container],
            "volumes": [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}}],
        },
    }
