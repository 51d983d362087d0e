"""The layout of the run directory: the name of every file and folder in it.

    job.json                              the resolved job
    coordinator.json                      the last generation number given out
    coordinator.beside.json               what the coordinator remembers besides, which older ones do not know
    generations/000007.json               who trained from which checkpoint on; written once (see lineage)
    rewinds/000001.json                   where the loss became useless and what data is left out (see rewind)
    micro-batches/000007.json             what did not fit into memory; written once (see micro_batch)
    checkpoints/step-000000500/           committed by one rename of a never-used name; never written again
        manifest.json                     files, checksums, generation, parent, mesh, data position, RNG, versions
        state/…  weights.safetensors      resumable state, and the weights alone for evaluators
    evaluations/step-000000500/           g000007.shard-0-of-2.json …, then g000007.json, the merged result; idempotent
    watched/step-000000500/               a checkpoint that the script wrote in its own way (tandem.rundir.watched)
    best.json latest.json                 hints, replaced atomically; never trusted without the manifest
    wrong.json                            pictures of what the best one takes for something else (tandem.wrong_samples)
    leases/…                              who is reading or evaluating what until when
    tracking/                             which run of a tracking server this is (tandem_coordinator.tracking)
    log/….jsonl                           what happened; one writer for each file; for people and reports only
    BROKEN-OFF                            a loop that was left early, and its last checkpoint: its steps are over
    DONE | FAILED.json                    the end, so that evaluators drain and stop
    previous/  attempt/                   what was here before, moved aside as it was (see tandem.rundir.ownership)
    numbering.json                        from which generation on numbers are of the run that is here
    code/<hex>.tar.gz  packages-<hex>/    packed code by its digest, and what its requirements.txt lists (tandem.code)

Readers poll, trust only a committed folder whose manifest verifies, and treat a vanished one as normal.
"""

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.formatting import one_line
from tandem.job import DistributedTrainingJob
from tandem.model import finite, whole
from tandem.rundir import lease
from tandem.rundir.checkpoint import Broken, Manifest, OtherFormat
from tandem.rundir.durable import create_json, listed, read_json, read_json_or_none, replace_json
from tandem.rundir.lineage import Chain, GenerationRecord, Rewind, chain, counts, is_rewound
from tandem.rundir.micro_batch import MAX_BYTES, Misfit, settings_of
from tandem.status import STOPPED_EARLY, CheckpointRef
from tandem.tracking import FOLDER

FOLDERS = ("generations", "rewinds", "checkpoints", "evaluations", "leases", "log")
EARLIER = ("previous", "attempt")
"""Folders of what was here before: a run that was begun anew, and an attempt that had saved nothing."""
_TRAINING_LOG = re.compile(r"^train-g([0-9]{6,9})\.jsonl$")
_EVALUATOR_LOG = re.compile(r"^evaluator-(.+)\.jsonl$")
_STEP = re.compile(r"^step-([0-9]{9,15})$")
_LEASE = re.compile(r"^([a-z]+)-(step-\d{9,})[-.]")
_GENERATION = re.compile(r"^([0-9]{6,15})\.json$")
MAX_END_BYTES, MAX_EARLY = 2**20, 600
"""Of DONE and FAILED.json."""
BAD = ".bad"
STALE = ".stale"
ASIDE = re.compile(rf"^step-(?P<step>\d{{9,}})(?P<mark>{re.escape(BAD)}|{re.escape(STALE)})(?:\.\d+)?$")
"""What a checkpoint is called that was set aside."""


@dataclass(frozen=True, kw_only=True)
class SetAside:
    """A checkpoint that was set aside, under its new name."""

    path: Path
    checkpoint: str
    """The name that it had."""
    step: int
    is_bad: bool
    """Damaged; otherwise committed by a generation that no longer counts."""
    why: str
    """Empty where the note beside it is missing."""
    at: float | None
    """When, seconds since the epoch."""


def step_of(name: str) -> int | None:
    """The step of a checkpoint folder, or of the folder of its evaluations; None if it is another folder."""
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
        """What tells a run from others of the same manifest: the job's name, and that of the directory where it is
        another one."""
        directory = self.path.absolute().name
        return job if directory in (job, "") else f"{job} ({directory})"

    def create(self) -> None:
        """Make the folders that are missing."""
        for name in FOLDERS:
            (self.path / name).mkdir(parents=True, exist_ok=True)

    # Logs

    @property
    def coordinator_log(self) -> Path:
        """What the coordinator writes."""
        return self.log / "coordinator.jsonl"

    def training_log(self, generation: int) -> Path:
        """What rank 0 of a generation writes."""
        return self.log / f"train-g{generation:06d}.jsonl"

    def training_logs(self) -> dict[int, Path]:
        """Those that are there by generation, oldest first."""
        found = {number: path for path in listed(self.log) if (number := generation_of_log(path)) is not None}
        return dict(sorted(found.items()))

    def evaluator_log(self, name: str) -> Path:
        """What an evaluator writes."""
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
        """The folder of installed packages; it is there once it is complete."""
        return self.code / f"packages-{key}"

    # Generations

    def record_generation(self, record: GenerationRecord) -> bool:
        """Write a generation's record; False if that generation already has one."""
        return create_json(self.generations / f"{record.generation:06d}.json", record.dump_brief())

    def generation_records(self) -> list[GenerationRecord]:
        """All records, oldest first.

        Raises:
            ValueError: one is damaged. To go on without it could make a checkpoint count that does not, or lose all
                that came before, so a person has to look.
        """
        found = (_GENERATION.match(path.name) for path in listed(self.generations))
        records = [self._record(int(match[1]), match[0]) for match in found if match]
        return sorted(records, key=lambda record: record.generation)

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
        """The highest generation that has a record, 0 if none has."""
        found = (_GENERATION.match(path.name) for path in listed(self.generations))
        return max((int(match[1]) for match in found if match), default=0)

    def first_generation(self) -> int:
        """The lowest number of a generation of this run: those before are of what was here earlier. Numbers never
        come again, so that what is left of an earlier group, behind a broken network, is always the older one."""
        return whole((_object(read_json_or_none(self.numbering_file)) or {}).get("first")) or 1

    def chain(self) -> Chain:
        """The generations that count (see lineage)."""
        return chain(self.generation_records())

    def stacks(self, generation: int) -> Path:
        """Where the stacks of a generation that hung are written."""
        return self.path / "stacks" / f"g{generation:06d}"

    # Rewinds

    def record_rewind(self, rewind: Rewind) -> bool:
        """Write a rewind down; False if one of that number exists."""
        self.rewinds.mkdir(exist_ok=True)
        return create_json(self.rewinds / f"{rewind.number:06d}.json", rewind.dump_brief())

    def rewind_files(self) -> list[Path]:
        """The records of rewinds, oldest first."""
        return [path for path in listed(self.rewinds) if _GENERATION.match(path.name)]

    def rewind_records(self) -> list[Rewind]:
        """All rewinds, oldest first."""
        return [Rewind.read(read_json(path)) for path in self.rewind_files()]

    # Micro-batches

    def record_misfit(self, misfit: Misfit) -> bool:
        """Write down that a micro-batch did not fit into memory; False if one of its generation has been."""
        self.micro_batches.mkdir(exist_ok=True)
        return create_json(self.micro_batches / f"{misfit.generation:06d}.json", misfit.dump_brief())

    def misfits(self) -> list[Misfit]:
        """Those that were written down, oldest first. A damaged one is passed over: what it said is learnt again."""
        found = []
        for path in listed(self.micro_batches):
            if _GENERATION.match(path.name):
                with suppress(OSError, ValueError):
                    found.append(Misfit.read(read_json(path, MAX_BYTES)))
        return found

    def limits(self, job: DistributedTrainingJob) -> list[int]:
        """Samples that a micro-batch of a job may have, each time that one did not fit; the smallest counts."""
        settings = settings_of(job)
        return [one.limit for one in self.misfits() if one.settings == settings]

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
        """Manifests of all committed checkpoints on the chain, newest first. Damaged ones are passed over."""
        return self.counting(self.manifests())

    def counting(self, manifests: Mapping[str, Manifest | Broken]) -> list[Manifest]:
        """Of what `manifests` gave, those on the chain, newest first."""
        links, rewinds = self.chain(), self.rewind_records()
        order = {generation: index for index, generation in enumerate(links)}
        found = []
        for manifest in manifests.values():
            if isinstance(manifest, Broken):
                continue
            if counts(links, manifest.reference) and not is_rewound(rewinds, manifest.reference):
                found.append(manifest)
        return sorted(found, key=lambda manifest: (order[manifest.generation], -manifest.step))

    def damaged(self) -> dict[str, str]:
        """Committed folders whose manifest is missing or does not verify, each with what is wrong."""
        return {
            name: str(found)
            for name, found in self.manifests().items()
            if isinstance(found, Broken) and not isinstance(found, OtherFormat)
        }

    def manifests(self) -> dict[str, Manifest | Broken]:
        """For each committed folder its manifest, or what is wrong with it; lowest step first."""
        found: dict[str, Manifest | Broken] = {}
        for name in self.checkpoint_names():
            try:
                found[name] = self.manifest(name)
            except FileNotFoundError:
                continue
            except Broken as error:
                found[name] = error
        return found

    def bad(self) -> dict[str, str]:
        """Checkpoints that were set aside because they are damaged, each with the reason, newest step first."""
        found = (one for one in reversed(self.all_set_aside()) if one.is_bad and one.path.is_dir())
        return {one.path.name: one.why or "it is damaged" for one in found}

    def checkpoint_names(self) -> list[str]:
        """Names of the committed checkpoint folders, lowest step first, on the chain or not, sound or not."""
        found = ((step, path.name) for path in listed(self.checkpoints) if (step := step_of(path.name)) is not None)
        return [name for _, name in sorted(found)]

    def set_aside(self, name: str, mark: str = BAD, why: str = "") -> Path | None:
        """Take a checkpoint out of the running by renaming it; None if another process was first."""
        source = self.checkpoint(name)
        for attempt in range(1000):
            target = source.with_name(f"{name}{mark}" + (f".{attempt}" if attempt else ""))
            if target.exists():
                continue
            try:
                source.rename(target)
            except FileNotFoundError:
                return None
            except OSError:
                if target.exists():
                    continue
                raise
            with suppress(OSError):
                replace_json(self.checkpoints / f"{target.name}.why.json", {"why": why, "at": time.time()})
            return target
        raise OSError(f"{source} was set aside a thousand times already")

    def all_set_aside(self) -> list[SetAside]:
        """What was set aside, damaged or superseded, by name."""
        found = []
        for path in listed(self.checkpoints):
            if match := ASIDE.match(path.name):
                note = _object(read_json_or_none(path.with_name(f"{path.name}.why.json"))) or {}
                found.append(
                    SetAside(
                        path=path,
                        checkpoint=path.name.partition(match["mark"])[0],
                        step=int(match["step"]),
                        is_bad=match["mark"] == BAD,
                        why=str(note.get("why") or ""),
                        at=finite(note.get("at")),
                    )
                )
        return found

    def set_aside_names(self) -> list[str]:
        """Names of what was set aside."""
        return [path.name for path in listed(self.checkpoints) if ASIDE.match(path.name)]

    def readers(self, by_own_clock: bool = False) -> dict[str, tuple[str, ...]]:
        """For each checkpoint with a running lease, verb and holder of each; files are `<verb>-<checkpoint>-…`.

        Args:
            by_own_clock: see tandem.rundir.lease.is_held.
        """
        found: dict[str, tuple[str, ...]] = {}
        for path in listed(self.leases):
            if (match := _LEASE.match(path.name)) and lease.is_held(path, by_own_clock):
                holder = (_object(read_json_or_none(path)) or {}).get("holder", "somebody")
                found[match[2]] = (*found.get(match[2], ()), f"{match[1]} by {holder}")
        return found

    # Hints

    def hint_latest(self, reference: CheckpointRef) -> None:
        """Tell readers which checkpoint is probably the newest."""
        replace_json(self.latest_file, reference.dump())

    # The end

    def mark_broken_off(self, final: CheckpointRef, why: str = "") -> None:
        """Say that no step follows this checkpoint, because the script has left its loop; DONE may come much later.

        Args:
            why: the reason that the script gave.
        """
        replace_json(self.broken_off_file, {"final": final.dump(), "why": why, "at": time.time()})

    def broken_off(self, reference: CheckpointRef) -> str | None:
        """The reason for which the loop was left at this checkpoint, empty if none was given, while what comes after
        the loop is still to be done; None if it was not left there."""
        content = _object(read_json_or_none(self.broken_off_file)) or {}
        if self.done_file.exists() or content.get("final") != reference.dump():
            return None
        return str(content.get("why", ""))

    def mark_done(self, final: CheckpointRef | None, stopped_early: str = "", **facts: Any) -> None:
        """Say that training is complete and which checkpoint is its last; None: whether there is one is not known. What
        was said first stays.

        Args:
            stopped_early: a sentence that begins with STOPPED_EARLY, where fewer steps were taken than announced.
        """
        early = {"stoppedEarly": stopped_early} if stopped_early else {}
        said = {"final": None if final is None else final.dump(), "at": time.time()}
        create_json(self.done_file, {**said, **early, **facts})

    def mark_failed(self, reason: str, message: str, exit_code: int, **facts: Any) -> None:
        """Say that the job has failed for good: a CamelCase reason and a sentence for people. The first one stays.

        Args:
            facts: of the process that failed first, where it is known: `replica`, `rank`, `traceback`.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        said = {"reason": reason, "message": message, "exitCode": exit_code, "at": time.time()}
        create_json(self.failed_file, {**facts, **said})

    def set_aside_failure(self) -> None:
        """Forget that the job has failed, because it is tried again; what was said stays among the logs."""
        self._keep_among_logs(self.failed_file, "failed")

    def reopen(self) -> None:
        """Forget that training is complete, because there is more to do; what was said stays among the logs."""
        self.broken_off_file.unlink(missing_ok=True)
        self._keep_among_logs(self.done_file, "done")

    def _keep_among_logs(self, file: Path, name: str) -> None:
        self.log.mkdir(exist_ok=True)
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

    def ended(self) -> bool:
        """Whether training is over, either way."""
        return self.done_file.exists() or self.failed_file.exists()


def stopped_early(done: Mapping[str, Any] | None) -> str:
    """What DONE says of a run that took fewer steps than announced, in a sentence; empty if it took them all."""
    words = "" if done is None else done.get("stoppedEarly", "")
    return one_line(words)[:MAX_EARLY] if isinstance(words, str) and words.startswith(STOPPED_EARLY) else ""


def _object(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None
