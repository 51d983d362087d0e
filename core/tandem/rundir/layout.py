"""The layout of the run directory: the name of every file and folder in it.

    job.json                              the resolved job
    coordinator.json                      the last generation number given out
    coordinator.beside.json               further state of the coordinator, which older versions do not read
    generations/000007.json               which checkpoint a generation resumed from; written once (see lineage)
    rewinds/000001.json                   where the loss became useless, and the data to skip (see lineage)
    micro-batches/000007.json             a micro-batch that did not fit into memory; written once (see micro_batch)
    finished-members/000007.<id>.worker-0 its ranks have ended well while no coordinator answered
    checkpoints/step-000000500/           committed by one rename of a never-used name; never written again
        manifest.json                     files, checksums, generation, parent, mesh, data position, RNG, versions
        state/…  weights.safetensors      resumable state, and the weights alone for evaluators
    evaluations/step-000000500/           g000007.shard-0-of-2.json …, then g000007.json, the merged result; idempotent
    watched/step-000000500/               a checkpoint that the script wrote in its own way (tandem.rundir.watched)
    best.json latest.json                 hints of evaluators and checkpoint writer; never trusted without the manifest
    wrong.json                            pictures that the best checkpoint misclassifies (tandem.rundir.wrong_samples)
    leases/…                              expiring leases of readers and evaluators (see lease)
    tracking/                             the run's identity on a tracking server (tandem_coordinator.tracking), and
                                          the spans that a collector has (tandem_coordinator.tracing)
    log/….jsonl                           log records; one writer for each file; for people and reports only
    log/provenance.jsonl                  the coordinator's hash chain of what the run used and produced (provenance)
    BROKEN-OFF                            the last checkpoint of a training loop that ended early: no step follows
    DONE | FAILED.json                    the end of training, at which evaluators drain and stop
    previous/  attempt/                   the content of an earlier run, moved here unchanged (see ownership)
    numbering.json                        the first generation number of the present run
    code/<hex>.tar.gz  packages-<hex>/    packed code by its digest, and the packages it requires (tandem.rundir.code)

Readers poll, trust only a committed folder whose manifest verifies, and treat a vanished one as normal.
"""

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tandem.formatting import one_line
from tandem.job.resource import DistributedTrainingJob
from tandem.job.tracking import FOLDER
from tandem.model import finite, whole_number
from tandem.processes.exitcode import ExitCode
from tandem.rundir import lease, sync_client
from tandem.rundir.checkpoint import Broken, Manifest, OtherFormat
from tandem.rundir.durable import create_json, list_folder, read_json, read_json_or_none, replace_json
from tandem.rundir.lineage import Chain, GenerationRecord, Rewind, chain, counts, is_rewound
from tandem.rundir.micro_batch import MAX_BYTES, OutOfMemoryRecord, memory_settings_digest
from tandem.wire.status import STOPPED_EARLY, CheckpointRef

FOLDERS = ("generations", "rewinds", "checkpoints", "evaluations", "leases", "log")
EARLIER_FOLDERS = ("previous", "attempt")
"""Folders of earlier content: a run that was started over, and an attempt that had saved nothing."""
_TRAINING_LOG = re.compile(r"^train-g([0-9]{6,9})\.jsonl$")
_EVALUATOR_LOG = re.compile(r"^evaluator-(.+)\.jsonl$")
_STEP = re.compile(r"^step-([0-9]{9,15})$")
_LEASE = re.compile(r"^([a-z]+)-(step-\d{9,})[-.]")
_GENERATION = re.compile(r"^([0-9]{6,15})\.json$")
_FINISHED = re.compile(r"^([0-9]{6,15})\.([0-9a-z]+)\.(.+)$")
END_SECONDS = 2.0
"""Time in seconds for which a bucket is asked for the end of a run."""
MAX_END_BYTES = 2**20
"""Maximum size of DONE and FAILED.json that is read."""
MAX_STOP_REASON_LENGTH = 600
"""Maximum length of a sentence that says why a run stopped early, in characters."""
BAD = ".bad"
STALE = ".stale"
SET_ASIDE_NAME = re.compile(rf"^step-(?P<step>\d{{9,}})(?P<mark>{re.escape(BAD)}|{re.escape(STALE)})(?:\.\d+)?$")
"""Folder names of checkpoints that were set aside."""


class FinishedMember(NamedTuple):
    """A member of a generation whose ranks have all ended with exit code 0."""

    generation: int
    replica: str
    incarnation: str


@dataclass(frozen=True, kw_only=True)
class SetAsideCheckpoint:
    """A checkpoint that was set aside: renamed so that nobody resumes from it."""

    path: Path
    checkpoint: str
    """The name before it was set aside."""
    step: int
    is_bad: bool
    """Whether it is damaged. Otherwise a generation that no longer counts has committed it."""
    why: str
    """The reason, in a sentence; empty if the note beside it is missing."""
    at: float | None
    """Time at which it was set aside, in seconds since the epoch."""


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint folder or of its folder of evaluations; None for any other folder."""
    match = _STEP.match(name)
    return int(match[1]) if match else None


def generation_of_log(path: Path) -> int | None:
    """The generation whose rank 0 writes this log; None if it is another file."""
    match = _TRAINING_LOG.match(path.name)
    return int(match[1]) if match else None


def evaluator_of_log(path: Path) -> str | None:
    """The evaluator that writes this log; None if it is another file."""
    match = _EVALUATOR_LOG.match(path.name)
    return match[1] if match else None


def checkpoint_name(step: int) -> str:
    """The folder name of the checkpoint taken after `step`."""
    return f"step-{step:09d}"


class RunDir:
    """One job's directory on the shared disk."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.job_file = self.path / "job.json"
        self.coordinator_file = self.path / "coordinator.json"
        self.beside_coordinator_file = self.path / "coordinator.beside.json"
        self.generations = self.path / "generations"
        self.rewinds = self.path / "rewinds"
        self.micro_batches = self.path / "micro-batches"
        self.finished = self.path / "finished-members"
        self.checkpoints = self.path / "checkpoints"
        self.evaluations = self.path / "evaluations"
        self.leases = self.path / "leases"
        self.log = self.path / "log"
        self.code = self.path / "code"
        self.best_file = self.path / "best.json"
        self.wrong_file = self.path / "wrong.json"
        self.latest_file = self.path / "latest.json"
        self.broken_off_file = self.path / "BROKEN-OFF"
        self.done_file = self.path / "DONE"
        self.failed_file = self.path / "FAILED.json"
        self.numbering_file = self.path / "numbering.json"
        self.tracking = self.path / FOLDER

    def title(self, job: str) -> str:
        """The run's title: the job's name, and that of the directory where they differ. It distinguishes runs of the
        same manifest."""
        directory = self.path.absolute().name
        return job if directory in (job, "") else f"{job} ({directory})"

    def create(self) -> None:
        """Create the folders that are missing."""
        for name in FOLDERS:
            (self.path / name).mkdir(parents=True, exist_ok=True)

    @staticmethod
    def refresh(patience: float = sync_client.PATIENCE_SECONDS) -> None:
        """Exchange the run directory with those of other pods through the bucket. Does nothing if all processes share
        one directory.

        Args:
            patience: seconds for which it is tried.

        Raises:
            OSError: the bucket does not answer, or refuses.
        """
        sync_client.exchange(patience)

    # Logs

    @property
    def coordinator_log(self) -> Path:
        """The coordinator's log."""
        return self.log / "coordinator.jsonl"

    @property
    def provenance(self) -> Path:
        """The hash chain of what the run used and produced (tandem.rundir.provenance)."""
        return self.log / "provenance.jsonl"

    def training_log(self, generation: int) -> Path:
        """The log of rank 0 of a generation."""
        return self.log / f"train-g{generation:06d}.jsonl"

    def training_logs(self) -> dict[int, Path]:
        """The training logs by generation, oldest first."""
        logs = {number: path for path in list_folder(self.log) if (number := generation_of_log(path)) is not None}
        return dict(sorted(logs.items()))

    def evaluator_log(self, name: str) -> Path:
        """The log of an evaluator."""
        return self.log / f"evaluator-{name}.jsonl"

    # The job

    def write_job(self, job: DistributedTrainingJob) -> None:
        """Record the job that this directory belongs to."""
        replace_json(self.job_file, job.dump_brief())

    def read_job(self) -> DistributedTrainingJob:
        """The job that this directory belongs to.

        Raises:
            FileNotFoundError, ValueError: there is none, or it is not one.
        """
        return DistributedTrainingJob.read(read_json(self.job_file))

    # Its code

    def pack(self, digest: str) -> Path:
        """The packed code of a digest, `sha256:…`."""
        return self.code / f"{digest.removeprefix('sha256:')}.tar.gz"

    def packages(self, key: str) -> Path:
        """The folder of installed packages; it appears once the installation is complete."""
        return self.code / f"packages-{key}"

    # Generations

    def record_generation(self, record: GenerationRecord) -> bool:
        """Write a generation's record. Returns False if that generation already has one.

        Raises:
            OSError: the disk, or the bucket, cannot be written.
        """
        if not create_json(self.generations / f"{record.generation:06d}.json", record.dump_brief()):
            return False
        # Where pods share no disk, another group may have been first in the bucket: its record has replaced ours then.
        sync_client.exchange()
        return self.generation_record(record.generation) == record

    def generation_files(self) -> list[Path]:
        """The records of generations, by name."""
        return [path for path in list_folder(self.generations) if _GENERATION.match(path.name)]

    def generation_records(self) -> list[GenerationRecord]:
        """All records, oldest first.

        Raises:
            ValueError: one is damaged. To go on without it could make a checkpoint count that does not, or lose all
                that came before, so a person has to look.
        """
        records = [self._record(int(path.stem), path.name) for path in self.generation_files()]
        return sorted(records, key=lambda record: record.generation)

    def generation_record(self, generation: int) -> GenerationRecord | None:
        """The record of one generation; None if it has none.

        Raises:
            ValueError: it is damaged.
        """
        name = f"{generation:06d}.json"
        return self._record(generation, name) if (self.generations / name).exists() else None

    def _record(self, generation: int, name: str) -> GenerationRecord:
        path = self.generations / name
        try:
            record = GenerationRecord.read(read_json(path))
        except ValueError as error:
            raise ValueError(f"{path} is damaged; without it Tandem cannot tell which checkpoints count") from error
        if record.generation != generation:
            raise ValueError(f"{path} is damaged: it speaks of generation {record.generation}")
        return record

    def newest_generation(self) -> int:
        """The highest generation that has a record; 0 if there is none."""
        return max((int(path.stem) for path in self.generation_files()), default=0)

    def first_generation(self) -> int:
        """The lowest generation number of this run. Lower numbers belong to earlier runs in this directory: numbers
        are never reused, so a group of an earlier run that is still alive behind a broken network always has the
        lower one."""
        # Without numbering.json no run has been moved away: this is the first one.
        return whole_number((_object(read_json_or_none(self.numbering_file)) or {}).get("first")) or 1

    def chain(self) -> Chain:
        """The generations that count (see lineage)."""
        return chain(self.generation_records())

    def stacks(self, generation: int) -> Path:
        """The folder for the stacks of a generation that hung."""
        return self.path / "stacks" / f"g{generation:06d}"

    # Rewinds

    def record_rewind(self, rewind: Rewind) -> bool:
        """Write a rewind's record. Returns False if one of that number exists."""
        self.rewinds.mkdir(exist_ok=True)
        is_new = create_json(self.rewinds / f"{rewind.number:06d}.json", rewind.dump_brief())
        sync_client.exchange()
        return is_new

    def rewind_files(self) -> list[Path]:
        """The records of rewinds, oldest first."""
        return [path for path in list_folder(self.rewinds) if _GENERATION.match(path.name)]

    def rewind_records(self) -> list[Rewind]:
        """All rewinds, oldest first."""
        return [Rewind.read(read_json(path)) for path in self.rewind_files()]

    # Micro-batches

    def record_misfit(self, misfit: OutOfMemoryRecord) -> bool:
        """Record that a micro-batch did not fit into memory. Returns False if its generation already has such a
        record."""
        self.micro_batches.mkdir(exist_ok=True)
        is_new = create_json(self.micro_batches / f"{misfit.generation:06d}.json", misfit.dump_brief())
        sync_client.exchange()
        return is_new

    def misfits(self) -> list[OutOfMemoryRecord]:
        """The recorded micro-batches that did not fit, oldest first. Damaged records are skipped: the next run out of
        memory writes a new one."""
        misfits = []
        for path in list_folder(self.micro_batches):
            if _GENERATION.match(path.name):
                with suppress(OSError, ValueError):
                    misfits.append(OutOfMemoryRecord.read(read_json(path, MAX_BYTES)))
        return misfits

    def limits(self, job: DistributedTrainingJob) -> list[int]:
        """Upper bounds of a micro-batch of this job in samples, one for each time that one did not fit; the smallest
        applies."""
        settings = memory_settings_digest(job)
        return [misfit.limit for misfit in self.misfits() if misfit.settings == settings]

    # Members whose ranks have ended well

    def record_finished(self, member: FinishedMember) -> None:
        """Record that a member has finished, for a coordinator that does not answer now."""
        self.finished.mkdir(exist_ok=True)
        create_json(self.finished / f"{member.generation:06d}.{member.incarnation}.{member.replica}", {})

    def finished_members(self) -> frozenset[FinishedMember]:
        """The recorded members that have finished, of all generations."""
        try:
            matches = [_FINISHED.match(path.name) for path in list_folder(self.finished)]
        except NotADirectoryError:
            # A file of the script's own.
            return frozenset()
        return frozenset(FinishedMember(int(match[1]), match[3], match[2]) for match in matches if match)

    # Checkpoints

    def checkpoint(self, name: str) -> Path:
        """The folder of a checkpoint."""
        return self.checkpoints / name

    def manifest(self, name: str) -> Manifest:
        """The verified manifest of a committed checkpoint (its files are verified by whoever reads them).

        Raises:
            FileNotFoundError: it is not there, or not any more.
            Broken: its manifest is missing or damaged.
        """
        return Manifest.load(self.checkpoint(name))

    def committed(self) -> list[Manifest]:
        """Manifests of all committed checkpoints on the chain, newest first. Damaged ones are skipped."""
        return self.counting(self.manifests())

    def counting(self, manifests: Mapping[str, Manifest | Broken]) -> list[Manifest]:
        """The checkpoints on the chain among the result of `manifests`, newest first."""
        links, rewinds = self.chain(), self.rewind_records()
        # The chain lists generations newest first, so sorting by index puts the newest first.
        order = {generation: index for index, generation in enumerate(links)}
        on_chain = []
        for manifest in manifests.values():
            if isinstance(manifest, Broken):
                continue
            if counts(links, manifest.reference) and not is_rewound(rewinds, manifest.reference):
                on_chain.append(manifest)
        return sorted(on_chain, key=lambda manifest: (order[manifest.generation], -manifest.step))

    def damaged(self) -> dict[str, str]:
        """Names of committed folders whose manifest is missing or does not verify, each with the reason."""
        return {
            name: str(manifest)
            for name, manifest in self.manifests().items()
            if isinstance(manifest, Broken) and not isinstance(manifest, OtherFormat)
        }

    def manifests(self) -> dict[str, Manifest | Broken]:
        """The manifest of every committed folder, or the error in it; lowest step first."""
        manifests: dict[str, Manifest | Broken] = {}
        for name in self.checkpoint_names():
            try:
                manifests[name] = self.manifest(name)
            # Retention of another process may delete a checkpoint between listing and reading.
            except FileNotFoundError:
                continue
            except Broken as error:
                manifests[name] = error
        return manifests

    def bad(self) -> dict[str, str]:
        """Checkpoints that were set aside because they are damaged, each with the reason; newest step first."""
        damaged = (
            checkpoint
            for checkpoint in reversed(self.all_set_aside())
            if checkpoint.is_bad and checkpoint.path.is_dir()
        )
        return {checkpoint.path.name: checkpoint.why or "it is damaged" for checkpoint in damaged}

    def checkpoint_names(self) -> list[str]:
        """Names of the committed checkpoint folders, lowest step first, on the chain or not, sound or not."""
        steps = (
            (step, path.name) for path in list_folder(self.checkpoints) if (step := step_of(path.name)) is not None
        )
        return [name for _, name in sorted(steps)]

    def set_aside(self, name: str, mark: str = BAD, why: str = "") -> Path | None:
        """Rename a checkpoint so that nobody uses it. Returns its new path; None if another process was first."""
        source = self.checkpoint(name)
        # A checkpoint of the same step may have been set aside before: count up until a name is free.
        for attempt in range(1000):
            target = source.with_name(f"{name}{mark}" + (f".{attempt}" if attempt else ""))
            if target.exists():
                continue
            try:
                source.rename(target)
            # The source is gone: another process has renamed it first.
            except FileNotFoundError:
                return None
            except OSError:
                if target.exists():
                    continue
                raise
            # The note is for people. The checkpoint is out of use without it.
            with suppress(OSError):
                replace_json(self.checkpoints / f"{target.name}.why.json", {"why": why, "at": time.time()})
            return target
        raise OSError(f"{source} was set aside a thousand times already")

    def all_set_aside(self) -> list[SetAsideCheckpoint]:
        """The checkpoints that were set aside, damaged or superseded, by name."""
        checkpoints = []
        for path in list_folder(self.checkpoints):
            if match := SET_ASIDE_NAME.match(path.name):
                note = _object(read_json_or_none(path.with_name(f"{path.name}.why.json"))) or {}
                checkpoints.append(
                    SetAsideCheckpoint(
                        path=path,
                        checkpoint=path.name.partition(match["mark"])[0],
                        step=int(match["step"]),
                        is_bad=match["mark"] == BAD,
                        why=str(note.get("why") or ""),
                        at=finite(note.get("at")),
                    )
                )
        return checkpoints

    def set_aside_names(self) -> list[str]:
        """Folder names of the checkpoints that were set aside."""
        return [path.name for path in list_folder(self.checkpoints) if SET_ASIDE_NAME.match(path.name)]

    def readers(self, by_own_clock: bool = False) -> dict[str, tuple[str, ...]]:
        """The readers of each checkpoint that has a running lease, as verb and holder; lease files are named
        `<verb>-<checkpoint>-…`.

        Args:
            by_own_clock: see tandem.rundir.lease.is_held.
        """
        readers: dict[str, tuple[str, ...]] = {}
        for path in list_folder(self.leases):
            if (match := _LEASE.match(path.name)) and lease.is_held(path, by_own_clock):
                holder = (_object(read_json_or_none(path)) or {}).get("holder", "somebody")
                readers[match[2]] = (*readers.get(match[2], ()), f"{match[1]} by {holder}")
        return readers

    # Hints

    def hint_latest(self, reference: CheckpointRef) -> None:
        """Record which checkpoint is probably the newest."""
        replace_json(self.latest_file, reference.dump())

    # The end

    def mark_broken_off(self, final: CheckpointRef, why: str = "") -> None:
        """Record that no step follows this checkpoint because the script has left its training loop; DONE may come much
        later.

        Args:
            why: the reason that the script gave.
        """
        replace_json(self.broken_off_file, {"final": final.dump(), "why": why, "at": time.time()})

    def broken_off(self, reference: CheckpointRef) -> str | None:
        """The reason for which the loop ended at this checkpoint, empty if the script gave none, while the code after
        the loop still runs; None if the loop did not end there."""
        content = _object(read_json_or_none(self.broken_off_file)) or {}
        # After DONE the loop's early end is history.
        if self.done_file.exists() or content.get("final") != reference.dump():
            return None
        return str(content.get("why", ""))

    def mark_done(self, final: CheckpointRef | None, stopped_early: str = "", **facts: Any) -> None:
        """Record that training is complete, and which checkpoint is its last; None if it is not known whether there is
        one. An existing DONE is not replaced.

        Args:
            stopped_early: a sentence that begins with STOPPED_EARLY, where fewer steps were taken than announced.
        """
        early = {"stoppedEarly": stopped_early} if stopped_early else {}
        content = {"final": None if final is None else final.dump(), "at": time.time()}
        create_json(self.done_file, {**content, **early, **facts})
        sync_client.exchange()

    def mark_failed(self, reason: str, message: str, exit_code: int, **facts: Any) -> None:
        """Record that the job has failed for good: a CamelCase reason and a sentence for people. An existing record is
        not replaced.

        Args:
            facts: `replica`, `rank` and `traceback` of the process that failed first, as far as they are known.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        content = {"reason": reason, "message": message, "exitCode": exit_code, "at": time.time()}
        create_json(self.failed_file, {**facts, **content})
        # Where pods share no disk: it is sent with the next exchange, or the last one of this pod.
        with suppress(OSError):
            sync_client.exchange(END_SECONDS)

    def set_aside_failure(self) -> None:
        """Remove the record of a failure because the job is retried; it stays among the logs."""
        self._keep_among_logs(self.failed_file, "failed")

    def reopen(self) -> None:
        """Remove the record that training is complete because there is more to do; it stays among the logs."""
        self.broken_off_file.unlink(missing_ok=True)
        self._keep_among_logs(self.done_file, "done")

    def _keep_among_logs(self, file: Path, name: str) -> None:
        self.log.mkdir(exist_ok=True)
        # Earlier failures are kept, too: take the first free number.
        number = 1
        while (target := self.log / f"{name}-{number}.json").exists():
            number += 1
        file.rename(target)

    def done(self) -> dict[str, Any] | None:
        """The content of DONE, None while training is not complete."""
        return _object(read_json_or_none(self.done_file, MAX_END_BYTES))

    def failed(self) -> dict[str, Any] | None:
        """The content of FAILED.json, None while the job has not failed."""
        return _object(read_json_or_none(self.failed_file, MAX_END_BYTES))

    def end_code(self) -> int | None:
        """The exit code for processes of a run that has ended, as it records it; None if it records no end."""
        if not self.ended():
            # Where pods share no disk, another one may have recorded it a moment ago.
            with suppress(OSError):
                self.refresh(END_SECONDS)
        if self.done() is not None:
            return ExitCode.DONE
        if (failed := self.failed()) is None:
            return None
        code = failed.get("exitCode")
        return code if isinstance(code, int) and 0 < code < 256 else ExitCode.FAILED

    def ended(self) -> bool:
        """Whether training has ended, successfully or not."""
        return self.done_file.exists() or self.failed_file.exists()


def stopped_early(done: Mapping[str, Any] | None) -> str:
    """The sentence in DONE that says why a run took fewer steps than announced; empty if it took them all."""
    text = "" if done is None else done.get("stoppedEarly", "")
    return one_line(text)[:MAX_STOP_REASON_LENGTH] if isinstance(text, str) and text.startswith(STOPPED_EARLY) else ""


def _object(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None
