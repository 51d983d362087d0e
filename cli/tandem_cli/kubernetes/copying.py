"""Copies the run directory of a job on Kubernetes to this machine: `tandem copy`.

A pod with the job's volume writes the archive (tandem.rundir.archive), which arrives through `kubectl exec`:

    the job runs         in an evaluator, else a worker, else the coordinator, which has the least CPU
    its pods have ended  in a pod created for the copy after the model of the newest ended one, and deleted afterwards

A job without a volume (`checkpoint.storage.shared: false`) has its checkpoints in a bucket alone. Its records and logs
come from its coordinator; for anything else the error names the URL.

A pod belongs to a tenant, so its data is not trusted: only plain files under the names of a run directory are accepted.
A checkpoint is compared with its checksums before it gets its final name, and a copy without the end marker counts as
incomplete.

Rejected: sending it through the coordinator's HTTP server (it is gone when the job has ended, and its CPU belongs to
the group); a pod for each copy (a volume may be limited to one node, and the quota may be used up).
"""

import json
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from tandem.errors import UserError
from tandem.formatting import printable, size
from tandem.job import labels
from tandem.processes.launch import module_command
from tandem.rundir.archive import END, FILES, FOLDERS, NAME, TOTAL
from tandem.rundir.checkpoint import FILE
from tandem.rundir.download import Downloaded, Tick
from tandem.rundir.durable import commit_folder, read_json_or_none, replace_json, temporary_beside
from tandem.rundir.layout import RunDir
from tandem_cli.checkpoints.verification import verify
from tandem_cli.kubernetes.execution import executable
from tandem_cli.kubernetes.job_view import RESOURCE, parse_pods
from tandem_cli.kubernetes.kubectl import ClusterError, Kubectl, end, error_from, errors_of
from tandem_cli.view import PodView

ORIGIN = "copied.json"
"""File of a copy with the job that it was copied from."""
ROLES = (labels.EVALUATOR, labels.WORKER, labels.COORDINATOR)
"""Roles whose running pods can write the archive, in order of preference."""
ARCHIVE = module_command("tandem.rundir.archive", python="python")
VOLUME = "/tandem"
LIFE_SECONDS = 6 * 3600
"""Active deadline of a pod created for a copy, in seconds, in case nobody deletes it."""
BEGIN_SECONDS = 180
"""Timeout for such a pod to become ready, in seconds: its image may have to be pulled."""
MAX_TOTAL_BYTES = 2**16
CHUNK = 2**20
_NO_ARCHIVER = re.compile(r"No module named '?tandem|unrecognized arguments: --manifests")

Raw = dict[str, Any]


def copy(kubectl: Kubectl, name: str, target: Path, checkpoints: Sequence[str], image: str, tick: Tick) -> Downloaded:
    """Copy the new files of a job.

    Args:
        name: the job's name.
        target: a new or empty folder, or an earlier copy of the same job.
        checkpoints: selectors of checkpoints (see tandem.rundir.archive).
        image: image of the pod that is created if none runs; empty: the image of the newest ended pod.

    Raises:
        UserError: the cluster refuses, the folder holds something else, the disk is full, or the archive was cut off;
            received files stay, and the next copy continues from there.
    """
    return _copy(kubectl, name, RunDir(target), checkpoints, image, tick)


def copy_manifests(kubectl: Kubectl, name: str, target: Path) -> None:
    """Copy what a list of a job's checkpoints needs into a new folder: its records, and their manifests.

    Raises:
        UserError: the cluster refuses, or the archive was cut off.
    """
    _copy(kubectl, name, RunDir(target), ["none"], "", lambda count, total: None, only_manifests=True)


def _copy(
    kubectl: Kubectl,
    name: str,
    rundir: RunDir,
    checkpoints: Sequence[str],
    image: str,
    tick: Tick,
    only_manifests: bool = False,
) -> Downloaded:
    job = kubectl.json("get", RESOURCE, name)
    items: list[Raw] = kubectl.json("get", "pods", "-l", f"{labels.JOB}={name}")["items"]
    senders = _senders(job, items)
    if not _is_shared(job) and (only_manifests or not senders or list(checkpoints) != ["none"]):
        raise UserError(_url_instead(job, None if only_manifests else rundir.path))
    # Check the folder first: it may hold another run, which must not be overwritten.
    _claim_target(rundir, job)
    with _source(kubectl, job, items, senders, image) as (pod, container, folder), tempfile.TemporaryFile() as stderr:
        selected = [arg for checkpoint in checkpoints for arg in ("--checkpoint", checkpoint)]
        # The pod skips checkpoints that the copy already has, so that an interrupted copy continues.
        present = [arg for digest in _digests(rundir) for arg in ("--have", digest)]
        if only_manifests:
            selected.append("--manifests")
        command = ("exec", pod, f"--container={container}", "--", *ARCHIVE, *selected, *present, *folder)
        child = kubectl.open(*command, errors=stderr)
        try:
            return _unpack(child, rundir, stderr, tick, only_manifests)
        except OSError as error:
            raise UserError(f"the copy cannot be written to {rundir.path}: {error.strerror or error}") from error
        finally:
            end(child)


def _claim_target(rundir: RunDir, job: Raw) -> None:
    """Create the folder of a copy of this job, or check that it is one.

    Raises:
        UserError: it holds something else.
    """
    metadata = job["metadata"]
    origin = {key: str(metadata.get(key, "")) for key in ("namespace", "name", "uid")}
    recorded = read_json_or_none(rundir.path / ORIGIN)
    if recorded != origin and rundir.path.exists() and (not rundir.path.is_dir() or any(rundir.path.iterdir())):
        other = (
            "another job of this name" if isinstance(recorded, dict) and recorded.get("name") == origin["name"] else ""
        )
        raise UserError(
            f"{rundir.path} already exists and is not a copy of this job{f', but of {other}' if other else ''}; "
            "choose another folder"
        )
    try:
        rundir.create()
        replace_json(rundir.path / ORIGIN, origin)
    except OSError as error:
        raise UserError(f"{rundir.path} cannot be created: {error.strerror}") from error


def _digests(rundir: RunDir) -> list[str]:
    """Return the manifest digests of the checkpoints that the copy already has."""
    return [digest for manifest in rundir.manifests().values() if (digest := getattr(manifest, "digest", ""))]


# Receiving


def _unpack(
    child: subprocess.Popen[bytes], rundir: RunDir, stderr: IO[bytes], tick: Tick, only_manifests: bool
) -> Downloaded:
    result, is_complete, received = Downloaded(), False, set[str]()
    assert child.stdout is not None
    # Checkpoints are assembled beside the run directory, where no command takes them for complete.
    staging = RunDir(temporary_beside(rundir.path / "copy"))
    try:
        with tarfile.open(fileobj=child.stdout, mode="r|") as archive:
            total, announced = _announced(archive, rundir.path)
            # An end of the stream without the END member is a cut: a killed pod looks like a short archive.
            while (member := archive.next()) is not None and not (is_complete := member.name == END):
                content = archive.extractfile(member)
                # Refuse links, devices and names outside a run directory: the pod is a tenant's.
                if content is None or not _is_expected(member):
                    raise ClusterError(f"the pod sent {printable(member.name[:200])!r}, which no run directory has")
                _write(content, member, rundir, None if only_manifests else staging, result)
                received.add(member.name)
                tick(result.size, total)
    except (tarfile.TarError, EOFError):
        is_complete = False
    finally:
        shutil.rmtree(staging.path, ignore_errors=True)
    if not is_complete:
        # kubectl's error tells why; give it time to write one.
        with suppress(subprocess.TimeoutExpired):
            child.wait(10)
        errors = errors_of(stderr)
        if _NO_ARCHIVER.search(errors):
            raise ClusterError(
                "the image of the job's pods has a version of Tandem that cannot send copies, or no Tandem"
            )
        if errors.strip() and not result.size:
            raise error_from(errors)
        raise ClusterError(
            f"the copy was cut off after {size(result.size)}; run the same command to continue. "
            f"{printable(errors.strip()[-500:])}".rstrip()
        )
    for name in set(FILES) - received:
        # Files that the job no longer has: a retried job, for example, is not failed any more.
        (rundir.path / name).unlink(missing_ok=True)
    for name in announced:
        if f"checkpoints/{name}/{FILE}" not in received:
            # Retention may delete a checkpoint during the copy.
            result.faults.append(f"{name}: deleted during the copy")
    return result


def _announced(archive: tarfile.TarFile, folder: Path) -> tuple[int, list[str]]:
    """Read the announced bytes and the names of the checkpoints among them.

    Raises:
        UserError: the disk has no room for them.
    """
    first = archive.next()
    content = None if first is None or first.name != TOTAL else archive.extractfile(first)
    if content is None:
        raise EOFError
    try:
        announcement = json.loads(content.read(MAX_TOTAL_BYTES))
        total, names = int(announcement["bytes"]), [str(name) for name in announcement["checkpoints"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ClusterError(f"the pod sent an archive that cannot be read: {error}") from error
    free = shutil.disk_usage(folder).free
    if total > free:
        raise UserError(f"the copy needs {size(total)}, and {folder} has {size(free)} free")
    return total, names


def _is_expected(member: tarfile.TarInfo) -> bool:
    top = member.name.partition("/")[0]
    is_known = member.name in FILES or ("/" in member.name and top in (*FOLDERS, "checkpoints"))
    return member.isreg() and is_known and all(NAME.fullmatch(part) for part in member.name.split("/"))


def _write(
    content: IO[bytes], member: tarfile.TarInfo, rundir: RunDir, staging: RunDir | None, result: Downloaded
) -> None:
    """Write one file. A checkpoint is committed when its manifest, which arrives last, verifies it.

    Args:
        staging: folder of checkpoints that are incomplete; None: only manifests come, which nothing verifies.
    """
    part_of = staging if member.name.startswith("checkpoints/") else None
    path = (part_of or rundir).path / member.name
    path.parent.mkdir(parents=True, exist_ok=True)
    # Write and rename, so that an interrupted copy leaves no partial file under a final name.
    temporary = temporary_beside(path)
    with temporary.open("wb") as file:
        shutil.copyfileobj(content, file, CHUNK)
    result.size += member.size
    temporary.replace(path)
    if part_of is not None and path.parent.parent == part_of.checkpoints and path.name == FILE:
        _commit(path.parent.name, rundir, part_of, result)


def _commit(name: str, rundir: RunDir, staging: RunDir, result: Downloaded) -> None:
    verdict = verify(staging, name)
    if verdict.outcome != "sound":
        result.faults += [f"{name}: {fault}" for fault in verdict.faults or (verdict.outcome,)]
        return
    # An existing checkpoint of this name is of an earlier generation: the pod skips those that the copy has.
    shutil.rmtree(rundir.checkpoint(name), ignore_errors=True)
    commit_folder(staging.checkpoint(name), rundir.checkpoint(name))
    result.checkpoints.append(name)


# The sending pod


def _senders(job: Raw, items: Sequence[Raw]) -> list[PodView]:
    """Return the running pods that have the run directory, the first one preferred."""
    roles = ROLES if _is_shared(job) else (labels.COORDINATOR,)
    # A running pod needs no image pull and no quota; evaluators first, because training does not wait for them.
    return sorted(
        (pod for pod in executable(parse_pods(items)) if pod.role in roles), key=lambda pod: roles.index(pod.role)
    )


@contextmanager
def _source(
    kubectl: Kubectl, job: Raw, items: Sequence[Raw], senders: Sequence[PodView], image: str
) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield a pod with the run directory, its container, and that directory if its environment does not name it."""
    if senders:
        yield senders[0].pod, senders[0].container, ()
        return
    name = str(job["metadata"]["name"])
    manifest = reader_pod(job, items, image)
    pod = kubectl.run("create", "-f", "-", "-o", "name", stdin=json.dumps(manifest)).text.strip()
    try:
        kubectl.run(*("wait", pod, "--for=condition=Ready", f"--timeout={BEGIN_SECONDS}s"), seconds=BEGIN_SECONDS + 30)
        yield pod, "copy", (f"{VOLUME}/{name}",)
    finally:
        with suppress(ClusterError):  # its deadline ends it anyway
            kubectl.run("delete", pod, "--wait=false", "--grace-period=0")


def _storage(job: Raw) -> Raw:
    storage: Raw = job.get("spec", {}).get("checkpoint", {}).get("storage", {})
    return storage


def _is_shared(job: Raw) -> bool:
    """Whether the pods of a job share a directory."""
    return bool(_storage(job).get("shared", True))


def _url_instead(job: Raw, target: Path | None) -> str:
    """Describe the command that copies a job's run from its bucket; without a target, the one that lists its
    checkpoints."""
    storage, name = _storage(job), str(job["metadata"]["name"])
    if target is None:
        command = shlex.join(["tandem", "checkpoints", "ls", str(storage.get("bucket", ""))])
        return f"{name} has no volume: its checkpoints are in its bucket alone. List them there: {command}"
    options = [f"--{key}={storage[key]}" for key in ("endpoint", "region") if key in storage]
    command = shlex.join(["tandem", "copy", str(storage.get("bucket", "")), str(target), *options])
    return f"{name} has no volume: its checkpoints are in its bucket alone. Copy the run from there: {command}"


def reader_pod(job: Raw, ended: Sequence[Raw], image: str) -> Raw:
    """Build a sleeping pod with the volume of a job, after the model of its newest pod.

    Raises:
        UserError: no image with Tandem is known.
    """
    name = str(job["metadata"]["name"])
    newest = max(ended, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default=None)
    spec: Raw = {} if newest is None else newest["spec"]
    role = "" if newest is None else str(newest["metadata"].get("labels", {}).get(labels.ROLE, ""))
    model: Raw = next((entry for entry in spec.get("containers", []) if entry["name"] == role), {})
    image = image or str(model.get("image", ""))
    if not image:
        raise UserError(
            f"{name} has no pods any more, so the image to read its volume with is unknown; name an image with Tandem "
            "with --image, for instance the evaluators'"
        )
    claim = _storage(job).get("claimName") or f"{labels.stem(name)}-checkpoints"
    user = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    # The volume may be bound to a node or zone, so the pod is scheduled like the model.
    scheduling: Raw = {key: spec[key] for key in ("imagePullSecrets", "tolerations") if key in spec}
    scheduling["nodeSelector"] = {"kubernetes.io/os": "linux", **spec.get("nodeSelector", {})}
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
    if "imagePullPolicy" in model:
        container["imagePullPolicy"] = model["imagePullPolicy"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "tandem-copy-", "labels": {"app.kubernetes.io/name": "tandem-copy"}},
        "spec": {
            **scheduling,
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "activeDeadlineSeconds": LIFE_SECONDS,
            "terminationGracePeriodSeconds": 0,
            "securityContext": spec.get("securityContext") or user,
            "containers": [container],
            "volumes": [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}}],
        },
    }
