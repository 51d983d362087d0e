"""What the coordinator sees of a run gets into its chain, once, whatever happens to it and to its disk."""

import os
import time
from pathlib import Path

import pytest

from tandem.rundir.durable import replace_json
from tandem.rundir.lineage import Rewind
from tandem.rundir.provenance import (
    CheckpointEntry,
    CloseEntry,
    EndEntry,
    JobEntry,
    ProvenanceChain,
    ScoreEntry,
    content_digest,
    read_chain,
    sha256,
)
from tandem_coordinator.provenance_log import ProvenanceLog
from tandem_coordinator.run_watcher import Observed, RunDirectory
from tests.support.worlds.small_run import SmallRun


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    made = SmallRun(tmp_path / "run")
    made.begin(1)
    return made


class Watched:
    """A coordinator's view of a run, with the chain that it writes."""

    def __init__(self, run: SmallRun) -> None:
        job = run.rundir.read_job()
        self.log = ProvenanceLog(run.rundir, job)
        self.directory = RunDirectory(run.rundir, job.spec.evaluation, job=job, provenance=self.log)

    def poll(self) -> Observed:
        return self.directory.poll(time.time())


def chain(run: SmallRun) -> ProvenanceChain:
    made = read_chain(run.rundir.provenance)
    assert not made.problems
    return made


def kinds(run: SmallRun) -> list[str]:
    return [entry.kind for entry in chain(run).entries]


def test_each_thing_is_written_once_in_the_order_in_which_it_came(run: SmallRun) -> None:
    watched = Watched(run)
    first = run.save(50)
    watched.poll()
    run.evaluate(first, 0.5)
    watched.poll()
    watched.log.closed(1, "WorkerFailed", "rank 1 was killed", "worker-1")
    run.begin(2, first)
    run.rundir.record_rewind(Rewind(number=1, generation=2, bad_step=60, resume_before=51, skip_from=50, skip_to=70))
    watched.poll()
    run.rundir.mark_done(run.save(100, 2))
    seen = watched.poll()
    watched.poll()
    assert kinds(run) == [
        *("job", "generation", "checkpoint", "score", "close", "generation", "rewind", "checkpoint", "end")
    ]
    made = chain(run)
    assert seen.provenance is not None
    assert (seen.provenance.entries, seen.provenance.head) == (9, made.head)


def test_entries_have_the_digests_of_the_files(run: SmallRun) -> None:
    reference = run.save(50, accuracy=0.5)
    Watched(run).poll()
    made, manifest = chain(run), run.rundir.manifest(reference.name)
    (checkpoint,) = (entry for entry in made.entries if isinstance(entry, CheckpointEntry))
    assert (checkpoint.digest, checkpoint.content) == (manifest.digest, content_digest(manifest))
    assert checkpoint.weights == manifest.weights_digest
    (score,) = (entry for entry in made.entries if isinstance(entry, ScoreEntry))
    result = run.rundir.evaluations / reference.name / "g000001.json"
    assert score.digest == sha256(result.read_bytes())
    assert score.metrics is not None
    assert score.metrics["accuracy"] == 0.5


def test_the_content_of_a_checkpoint_does_not_depend_on_who_wrote_it(run: SmallRun, tmp_path: Path) -> None:
    other = SmallRun(tmp_path / "other")
    other.begin(1)
    here, there = (made.rundir.manifest(made.save(50).name) for made in (run, other))
    assert here.digest != there.digest
    assert content_digest(here) == content_digest(there)


def test_the_next_coordinator_goes_on_where_the_first_has_ended(run: SmallRun) -> None:
    run.save(50, accuracy=0.5)
    Watched(run).poll()
    before = run.rundir.provenance.read_bytes()
    Watched(run).poll()
    assert run.rundir.provenance.read_bytes() == before
    run.save(100)
    Watched(run).poll()
    assert run.rundir.provenance.read_bytes().startswith(before)
    assert kinds(run) == ["job", "generation", "checkpoint", "score", "checkpoint"]


def test_another_job_is_an_entry_of_its_own(run: SmallRun) -> None:
    Watched(run).poll()
    job = run.rundir.read_job().dump()
    job["spec"]["checkpoint"]["keepLast"] = 9
    replace_json(run.rundir.job_file, job)
    Watched(run).poll()
    assert kinds(run) == ["job", "generation", "job"]
    newest = chain(run).entries[-1]
    assert isinstance(newest, JobEntry)
    assert newest.job["spec"]["checkpoint"]["keepLast"] == 9


def test_a_line_that_a_crash_has_torn_is_cut_off(run: SmallRun) -> None:
    Watched(run).poll()
    before = run.rundir.provenance.read_bytes()
    run.rundir.provenance.write_bytes(before + b'{"kind":"checkpoint","ti')
    run.save(50)
    Watched(run).poll()
    assert run.rundir.provenance.read_bytes().startswith(before)
    assert kinds(run) == ["job", "generation", "checkpoint"]


def test_a_full_disk_is_reported_once_and_nothing_is_lost(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(run)
    watched.poll()
    room = [40]
    write = os.write

    def scarce(descriptor: int, data: bytes) -> int:
        part = data[: room[0]]
        room[0] -= len(part)
        if not part:
            raise OSError(28, "No space left on device")
        return write(descriptor, part)

    monkeypatch.setattr("tandem_coordinator.provenance_log.os.write", scarce)
    run.save(50)
    # Everything else is observed all the same.
    assert watched.poll().saved is not None
    watched.poll()
    (problem,) = watched.directory.take_problems()
    assert problem == "the provenance of the run cannot be written: [Errno 28] No space left on device"
    room[0] = 10**9
    run.save(100)
    watched.poll()
    assert watched.directory.take_problems() == []
    assert kinds(run) == ["job", "generation", "checkpoint", "checkpoint"]


def test_a_failure_names_its_cause_and_its_replica(run: SmallRun) -> None:
    watched = Watched(run)
    watched.log.closed(1, "Hung", "rank 1 hung for 300 s", "")
    watched.poll()
    run.rundir.mark_failed("Hung", "rank 1 hung for 300 s", 1)
    watched.poll()
    close, end = chain(run).entries[-2:]
    assert isinstance(close, CloseEntry)
    assert isinstance(end, EndEntry)
    assert (close.reason, close.message, close.replica) == ("Hung", "rank 1 hung for 300 s", None)
    assert (end.failed, end.reason, end.generation) == (True, "Hung", 1)


def test_a_chain_that_another_process_went_on_with_is_read_again(run: SmallRun) -> None:
    first, second = Watched(run), Watched(run)
    first.poll()
    run.save(50)
    second.poll()
    run.save(100)
    first.poll()
    assert kinds(run) == ["job", "generation", "checkpoint", "checkpoint"]
