"""A run in a bucket: who may write it, what an upload that was disturbed leaves, and what a download accepts."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.rundir import bucket, upload
from tandem.rundir.bucket import (
    IDENTITY,
    PIECE_BYTES,
    SEGMENT_BYTES,
    WRITER,
    BucketRecord,
    Occupied,
    SupersededWriter,
    claim,
)
from tandem.rundir.checkpoint import CHUNK_BYTES, FILE, WEIGHTS, Manifest, is_damaged
from tandem.rundir.download import Downloader, continue_run
from tandem.rundir.layout import RunDir
from tandem.rundir.store import Location, StoreAccessError, StoreUnavailableError
from tandem.rundir.upload import Upload, Uploader
from tests.support.buckets import (
    BUCKET,
    CREDENTIALS,
    SERVERS,
    Disturbance,
    a_run,
    add_checkpoint,
    disturbed,
    place,
    server_named,
)
from tests.support.checkpoints import begin
from tests.support.waiting import until


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server_named(request.param, tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def url(server: str, tmp_path: Path) -> str:
    return f"{server} {tmp_path.name}"


def store(url: str, patience: float = 5.0) -> bucket.Store:
    server, _, prefix = url.partition(" ")
    return place(server, f"runs/{prefix}", patience)


def everything(rundir: RunDir) -> dict[str, bytes]:
    """The files of a run directory that a bucket has, too."""
    return {
        path.relative_to(rundir.path).as_posix(): path.read_bytes()
        for path in rundir.path.rglob("*")
        if path.is_file() and path.name != "buckets.json" and "attempt" not in path.parts
    }


def bring(url: str, rundir: RunDir) -> Uploader:
    """Upload a run directory completely, as its writer."""
    place = store(url)
    writer = claim(place, rundir, is_empty=False)
    uploader = Uploader(place, rundir)
    uploader.survey()
    uploader.upload_checkpoints()
    uploader.upload_records()
    writer.renew(has_ended=True)
    return uploader


def get(url: str, folder: Path) -> RunDir:
    """Continue a run of a bucket in a new folder."""
    rundir = RunDir(folder)
    folder.mkdir()
    assert continue_run(store(url), rundir) is not None
    return rundir


def get_copy(url: str, folder: Path) -> RunDir:
    """Read a run of a bucket, as a copy that continues nothing."""
    rundir = RunDir(folder)
    downloader = Downloader(store(url))
    downloader.records(rundir)
    downloader.checkpoints(rundir, ["all"])
    return rundir


def test_a_run_is_the_same_on_the_other_side(url: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here")
    here.mark_done(None)
    bring(url, here)
    there = get(url, tmp_path / "there")
    assert everything(there) == everything(here)
    # It is a copy, and continues the run: what it adds comes back.
    begin(there, 2, there.committed()[0].reference)
    add_checkpoint(there, 40, generation=2)
    bring(url, there)
    assert everything(get(url, tmp_path / "third")) == everything(there)


def test_files_of_several_pieces_and_of_none(url: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here", steps=())
    add_checkpoint(here, 1, size=PIECE_BYTES + CHUNK_BYTES + 5)
    add_checkpoint(here, 2, size=0)
    uploader = bring(url, here)
    assert everything(get_copy(url, tmp_path / "there")) == everything(here)
    # Nothing is sent twice, by the same process or the next one.
    before = uploader.bytes
    uploader.upload_checkpoints()
    uploader.upload_records()
    assert uploader.bytes == before
    assert bring(url, here).bytes < 10_000


def test_logs_grow_in_segments(url: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here", steps=())
    uploader = bring(url, here)
    claim(store(url), here, is_empty=False)
    line = b'{"text": "' + b"x" * 1000 + b'"}\n'
    for _ in range(4):
        with here.coordinator_log.open("ab") as log:
            log.write(line * 600)
        uploader.upload_records()
    names = [entry.name for entry in store(url).entries("log/coordinator.jsonl")]
    assert names == [bucket.segment_name("coordinator.jsonl", SEGMENT_BYTES * number) for number in range(3)]
    there = RunDir(tmp_path / "there")
    Downloader(store(url)).records(there)
    assert there.coordinator_log.read_bytes() == here.coordinator_log.read_bytes()
    # A log that was begun anew.
    here.coordinator_log.write_bytes(line)
    uploader.upload_records()
    Downloader(store(url)).records(there)
    assert there.coordinator_log.read_bytes() == line


def test_what_is_gone_here_goes_there_and_nothing_else(url: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here", steps=(10, 20, 30))
    here.mark_done(None)
    uploader = bring(url, here)
    shutil.rmtree(here.checkpoint("step-000000010"))
    (here.checkpoint("step-000000030") / FILE).write_text("damaged")
    here.reopen()
    uploader.upload_checkpoints()
    uploader.upload_records()
    there = get(url, tmp_path / "there")
    # The one that is damaged here is sound there.
    assert there.checkpoint_names() == ["step-000000020", "step-000000030"]
    assert isinstance(there.manifests()["step-000000030"], Manifest)
    assert there.done() is None
    parts = {entry.name.split("/")[1] for entry in store(url).entries("parts")}
    assert len(parts) == 2


def test_a_run_directory_that_is_gone_deletes_nothing(url: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here")
    uploader = bring(url, here)
    before = [entry.name for entry in store(url).entries()]
    here.path.rename(tmp_path / "unmounted")
    for upload_all in (uploader.upload_records, uploader.upload_checkpoints):
        with pytest.raises(FileNotFoundError):
            upload_all()
    assert [entry.name for entry in store(url).entries()] == before


def test_a_checkpoint_that_is_damaged_on_the_disk_is_not_sent(url: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here")
    file = here.checkpoint("step-000000020") / WEIGHTS
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    uploader = bring(url, here)
    assert list(uploader.damaged.values()) == [
        "step-000000020/weights.safetensors does not match its checksum at byte 0"
    ]
    assert get(url, tmp_path / "there").checkpoint_names() == ["step-000000010"]


def test_a_checkpoint_of_another_generation_takes_the_place_of_one(url: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here")
    uploader = bring(url, here)
    shutil.rmtree(here.checkpoint("step-000000020"))
    begin(here, 2, here.committed()[0].reference)
    add_checkpoint(here, 20, generation=2)
    uploader.upload_checkpoints()
    uploader.upload_records()
    assert everything(get(url, tmp_path / "there")) == everything(here)


# Every point at which an upload can break off


class WriterDiedError(Exception):
    """The process dies here."""


class Breaking(bucket.Store):
    """A store whose writer dies at its N-th write or deletion: before it, or after it has arrived."""

    def __init__(self, original: bucket.Store, at: int, arrives: bool) -> None:
        super().__init__(original.location, original.endpoint, patience=original.patience)
        self.left, self.arrives = at, arrives

    def _guarded(self, operation: Callable[[], object]) -> object:
        self.left -= 1
        if self.left == 0 and not self.arrives:
            raise WriterDiedError
        result = operation()
        if self.left == 0:
            raise WriterDiedError
        return result

    def create(self, name, data):  # type: ignore[no-untyped-def]
        return self._guarded(lambda: super(Breaking, self).create(name, data))

    def _replace(self, name, data, version):  # type: ignore[no-untyped-def]
        return self._guarded(lambda: super(Breaking, self)._replace(name, data, version))

    def put(self, name, data):  # type: ignore[no-untyped-def]
        return self._guarded(lambda: super(Breaking, self).put(name, data))

    def delete(self, names):  # type: ignore[no-untyped-def]
        for name in names:
            self._guarded(lambda name=name: super(Breaking, self).delete([name]))


def pass_over(place: bucket.Store, rundir: RunDir) -> None:
    """All that a new process does."""
    claim(place, rundir, is_empty=False)
    uploader = Uploader(place, rundir)
    uploader.survey()
    uploader.upload_checkpoints()
    uploader.upload_records()


@pytest.mark.parametrize("arrives", [False, True])
def test_an_upload_may_break_off_at_every_write(url: str, tmp_path: Path, arrives: bool) -> None:
    """Whatever arrived is a run of its own, each checkpoint in it is whole, DONE comes last, and the next process
    completes it."""
    here = a_run(tmp_path / "here", steps=(10, 20))
    pass_over(store(url), here)
    # The second life has everything to do: a checkpoint is new, one is gone, a log has grown, the run has ended.
    shutil.rmtree(here.checkpoint("step-000000010"))
    add_checkpoint(here, 30)
    with here.training_log(1).open("ab") as log:
        log.write(b'{"step": 30}\n')
    here.mark_done(None)
    kept = tmp_path / "kept"
    shutil.copytree(here.path, kept)
    broken = 0
    for at in range(1, 60):
        shutil.rmtree(here.path)
        shutil.copytree(kept, here.path)
        prefix = f"{url}-{arrives}-{at}"
        (here.path / "buckets.json").unlink()
        first = a_copy_without(here, tmp_path / f"first-{at}")
        pass_over(store(prefix), first)
        # The record of the bucket belongs to the directory, which goes on as it is now.
        shutil.copy(first.path / "buckets.json", here.path / "buckets.json")
        try:
            pass_over(Breaking(store(prefix), at, arrives), here)
        except WriterDiedError:
            broken += 1
        else:
            break
        seen = RunDir(tmp_path / f"seen-{at}")
        downloader = Downloader(store(prefix))
        downloader.records(seen)
        result = downloader.checkpoints(seen, ["all"])
        assert result.faults == []
        assert result.checkpoints
        for manifest in seen.committed():
            for entry in manifest.files:
                assert not is_damaged(seen.checkpoint(manifest.name), entry, 0)
        if seen.done() is not None:
            assert everything(seen) == everything(here)
        pass_over(store(prefix), here)
        again = RunDir(tmp_path / f"again-{at}")
        downloader = Downloader(store(prefix))
        downloader.records(again)
        downloader.checkpoints(again, ["all"])
        assert everything(again) == everything(here)
    assert broken >= 8


@pytest.mark.parametrize("arrives", [False, True])
def test_a_first_upload_may_break_off_at_every_write(url: str, tmp_path: Path, arrives: bool) -> None:
    here = a_run(tmp_path / "here", steps=(10,))
    for at in range(1, 60):
        (here.path / "buckets.json").unlink(missing_ok=True)
        prefix = f"{url}-new-{arrives}-{at}"
        try:
            pass_over(Breaking(store(prefix), at, arrives), here)
        except WriterDiedError:
            pass_over(store(prefix), here)
            assert everything(get_copy(prefix, tmp_path / f"again-{at}")) == everything(here)
        else:
            break
    assert at > 8


def a_copy_without(rundir: RunDir, folder: Path) -> RunDir:
    """The run directory as it was before: with the checkpoint that is gone by now, and without the new one."""
    shutil.copytree(rundir.path, folder)
    before = RunDir(folder)
    shutil.rmtree(before.checkpoint("step-000000030"))
    add_checkpoint(before, 10)
    before.done_file.unlink()
    return before


@pytest.mark.parametrize("seed", range(3))
def test_a_network_that_disturbs_a_tenth_of_all_requests_loses_nothing(url: str, tmp_path: Path, seed: int) -> None:
    server, _, prefix = url.partition(" ")
    faults = [None] * 27 + ["refuse", "lose", "cut"]

    def fault(number: int, method: str, path: str) -> str | None:
        return faults[hash((seed, number)) % len(faults)]

    disturbance = Disturbance(fault)
    here = a_run(tmp_path / "here", steps=(10, 20, 30), size=100_000)
    with disturbed(server, disturbance) as proxy:
        through = place(proxy, f"runs/{prefix}", patience=30.0)
        pass_over(through, here)
        there = RunDir(tmp_path / "there")
        downloader = Downloader(through)
        downloader.records(there)
        assert downloader.checkpoints(there, ["all"]).faults == []
    assert disturbance.played > 0
    assert everything(there) == everything(here)


# One writer


def test_a_bucket_belongs_to_one_run(url: str, tmp_path: Path) -> None:
    bring(url, a_run(tmp_path / "one"))
    other = a_run(tmp_path / "two")
    with pytest.raises(Occupied, match="holds another run"):
        claim(store(url), other, is_empty=False)
    with pytest.raises(Occupied, match="holds another run"):
        continue_run(store(url), other)


def test_a_directory_that_is_behind_the_bucket_is_refused(url: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here")
    bring(url, here)
    bring(url, get(url, tmp_path / "there"))
    with pytest.raises(Occupied, match=r"was continued by .* after this run directory was written"):
        continue_run(store(url), here)


def test_a_live_writer_is_waited_for_and_left_alone(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "WRITER_SECONDS", 0.1)
    monkeypatch.setattr(bucket, "TAKEOVER_SECONDS", 2.0)
    writer = claim(store(url), a_run(tmp_path / "here"), is_empty=False)
    waited: list[str] = []
    (tmp_path / "there").mkdir()
    with writer.renewing(), pytest.raises(Occupied, match=r"is written by .* now"):
        continue_run(store(url), RunDir(tmp_path / "there"), waited.append)
    assert len(waited) == 1


def test_a_dead_writer_is_replaced_and_its_next_write_fails(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = a_run(tmp_path / "here")
    sleeping = claim(store(url), here, is_empty=False)
    uploader = Uploader(store(url), here)
    uploader.survey()
    uploader.upload_checkpoints()
    uploader.upload_records()
    monkeypatch.setattr(bucket, "TAKEOVER_SECONDS", 0.5)
    began = time.monotonic()
    there = get(url, tmp_path / "there")
    assert time.monotonic() - began >= 0.5
    begin(there, 2, there.committed()[0].reference)
    there.hint_latest(add_checkpoint(there, 40, generation=2))
    here.hint_latest(add_checkpoint(here, 50))
    bring(url, there)
    # It wakes up.
    with pytest.raises(SupersededWriter):
        uploader.upload_records()
    with pytest.raises(SupersededWriter):
        sleeping.renew()
    assert everything(get(url, tmp_path / "third")) == everything(there)


def test_the_writer_of_this_directory_is_replaced_at_once(url: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here")
    claim(store(url), here, is_empty=False)
    began = time.monotonic()
    claim(store(url), here, is_empty=False)
    assert time.monotonic() - began < bucket.TAKEOVER_SECONDS / 2


def test_a_download_that_broke_off_goes_on(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bring(url, a_run(tmp_path / "here"))
    there = RunDir(tmp_path / "there")
    there.path.mkdir()
    original, calls = Downloader._chunk, iter(range(100))

    def breaks(self: Downloader, *arguments: object) -> int:
        if next(calls) == 2:
            raise StoreUnavailableError("the network is away")
        return original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Downloader, "_chunk", breaks)
    with pytest.raises(StoreUnavailableError):
        continue_run(store(url), there)
    record = BucketRecord.load(there, str(store(url).location))
    assert record is not None
    assert not record.complete
    monkeypatch.setattr(Downloader, "_chunk", original)
    assert continue_run(store(url), there) is not None
    assert everything(there) == everything(RunDir(tmp_path / "here"))


def test_an_attempt_that_saved_nothing_is_moved_out_of_the_way(url: str, tmp_path: Path) -> None:
    bring(url, a_run(tmp_path / "here"))
    there = a_run(tmp_path / "there", steps=())
    begin(there, 7)
    assert continue_run(store(url), there) is not None
    assert everything(there) == everything(RunDir(tmp_path / "here"))
    assert (there.path / "attempt" / "generations" / "000007.json").exists()


def test_a_bucket_that_is_away_stops_no_run_that_has_everything(url: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here")
    bring(url, here)
    away = store("http://127.0.0.1:9 " + url.partition(" ")[2], patience=1.0)
    assert continue_run(away, here) is None
    (tmp_path / "new").mkdir()
    with pytest.raises(StoreUnavailableError):
        continue_run(away, RunDir(tmp_path / "new"))


# What a bucket may contain


def test_only_names_of_a_run_directory_are_accepted(url: str, tmp_path: Path) -> None:
    bring(url, a_run(tmp_path / "here"))
    hostile = store(url)
    for name in ("evil.sh", "log/.hidden/0", "code/x.tar.gz", "generations/.x", "checkpoints/loose", "log/loose"):
        hostile.put(name, b"0")
    there = get(url, tmp_path / "there")
    assert everything(there) == everything(RunDir(tmp_path / "here"))


def test_a_part_that_was_altered_or_deleted_is_named_and_not_committed(url: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here", steps=(10, 20, 30))
    bring(url, here)
    altered, deleted = (here.manifest(f"step-0000000{step}").digest for step in (10, 20))
    store(url).put(bucket.piece_name(altered, WEIGHTS, 0), b"x" * 3000)
    store(url).delete([bucket.piece_name(deleted, WEIGHTS, 0)])
    there = RunDir(tmp_path / "there")
    downloader = Downloader(store(url))
    downloader.records(there)
    result = downloader.checkpoints(there, ["all"])
    assert result.checkpoints == ["step-000000030"]
    assert sorted(result.faults) == [
        "step-000000010/weights.safetensors does not match its checksum at byte 0",
        "step-000000020: a part of weights.safetensors is missing in the bucket",
    ]
    assert there.checkpoint_names() == ["step-000000030"]


def test_a_place_without_a_run_is_named(url: str) -> None:
    with pytest.raises(StoreAccessError, match="holds no run of Tandem"):
        Downloader(store(url))


def test_a_run_of_another_format_is_refused(url: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here")
    store(url).put(IDENTITY, json.dumps({"format": 2, "run": "x"}).encode())
    with pytest.raises(Occupied, match="another version"):
        claim(store(url), here, is_empty=False)


# The process beside the coordinator


def test_it_uploads_while_the_run_goes_on_and_completely_at_its_end(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "RECORDS_SECONDS", 0.1)
    monkeypatch.setattr(upload, "LOOK_SECONDS", 0.1)
    here = a_run(tmp_path / "here", steps=(10,))
    claim(store(url), here, is_empty=False)
    uploader = Uploader(store(url), here)
    uploader.survey()
    reported: list[str] = []
    process = Upload(uploader, reported.append)
    thread = threading.Thread(target=process.run)
    thread.start()
    add_checkpoint(here, 20)
    until(lambda: "step-000000020" in uploader.checkpoints, "the upload of the new checkpoint")
    assert store(url).read("DONE") is None
    here.mark_done(None)
    add_checkpoint(here, 30)
    process.ending.set()
    thread.join(30)
    assert not thread.is_alive()
    assert everything(get_copy(url, tmp_path / "there")) == everything(here)
    assert reported == [""]


def test_it_reports_a_bucket_that_is_away_and_that_it_is_back(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _, prefix = url.partition(" ")
    monkeypatch.setattr(upload, "RECORDS_SECONDS", 0.1)
    monkeypatch.setattr(upload, "LOOK_SECONDS", 0.1)
    here = a_run(tmp_path / "here")
    away = False
    with disturbed(server, Disturbance(lambda number, method, path: "refuse" if away else None)) as proxy:
        through = place(proxy, f"runs/{prefix}", patience=0.5)
        claim(through, here, is_empty=False)
        uploader = Uploader(through, here)
        uploader.survey()
        reported: list[str] = []
        process = Upload(uploader, reported.append)
        thread = threading.Thread(target=process.run)
        thread.start()
        until(lambda: reported == [""], "the first upload")
        away = True
        add_checkpoint(here, 30)
        until(lambda: len(reported) > 1, "the problem")
        assert "503 SlowDown" in reported[1]
        away = False
        until(lambda: reported[-1] == "", "that it is solved")
        process.ending.set()
        thread.join(30)
    assert everything(get_copy(url, tmp_path / "there")) == everything(here)


def test_at_the_end_it_gives_up_a_bucket_that_stays_away(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "FINAL_SECONDS", 0.4)
    here = a_run(tmp_path / "here")
    claim(store(url), here, is_empty=False)
    away = store("http://127.0.0.1:9 " + url.partition(" ")[2], patience=0.2)
    reported: list[str] = []
    process = Upload(Uploader(away, here), reported.append)
    process.ending.set()
    process.run()
    assert "does not answer" in reported[-1]


def test_it_ends_when_another_machine_has_continued_the_run(url: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here")
    claim(store(url), here, is_empty=False)
    uploader = Uploader(store(url), here)
    uploader.survey()
    uploader.upload_records()
    other = store(url)
    current = other.read("job.json")
    assert current is not None
    other.replace("job.json", b"{}", current.version)
    job = here.read_job()
    here.write_job(job)
    process = Upload(uploader, lambda problem: None)
    process.ending.set()
    with pytest.raises(SupersededWriter):
        process.run()


def test_the_names_of_a_bucket_are_those_of_the_decision(url: str, tmp_path: Path) -> None:
    bring(url, a_run(tmp_path / "here", steps=(10,)))
    tops = {entry.name.partition("/")[0] for entry in store(url).entries()}
    assert tops == {IDENTITY, WRITER, "job.json", "generations", "evaluations", "log", "checkpoints", "parts"}
    assert store(url).location == Location("s3", BUCKET, f"runs/{url.partition(' ')[2]}")
