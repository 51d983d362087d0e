"""A run in a bucket: who may write it, what an upload that was disturbed leaves, and what a download accepts."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.rundir import bucket
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
from tandem.rundir.checkpoint import CHUNK_BYTES, FILE, WEIGHTS, Manifest, _digest, is_damaged
from tandem.rundir.download import CheckpointReader, Downloader, continue_run
from tandem.rundir.layout import RunDir
from tandem.rundir.store import Location, StoreAccessError, StoreUnavailableError
from tandem.rundir.upload import Uploader
from tests.support.buckets import (
    BUCKET,
    Disturbance,
    a_run,
    add_checkpoint,
    bring,
    disturbed,
    everything,
    get,
    get_copy,
    place,
    store,
)
from tests.support.checkpoints import begin

pytestmark = pytest.mark.usefixtures("credentials")
FULL = pytest.mark.full("core")


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
    there = get_copy(url, tmp_path / "there")
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
    assert everything(get_copy(url, tmp_path / "there")) == everything(here)


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
    uploader = Uploader(place, rundir, claim(place, rundir, is_empty=False))
    uploader.survey()
    uploader.upload_checkpoints()
    uploader.upload_records()


@pytest.mark.parametrize("arrives", [pytest.param(False, marks=FULL), True])
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


@pytest.mark.parametrize("arrives", [False, pytest.param(True, marks=FULL)])
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


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=FULL) for seed in (1, 2))])
def test_a_network_that_disturbs_a_tenth_of_all_requests_loses_nothing(served: str, tmp_path: Path, seed: int) -> None:
    server, _, prefix = served.partition(" ")
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
    uploader = Uploader(store(url), here, sleeping)
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
    # It wakes up, with a checkpoint to send and one to delete.
    before = {entry.name: entry.version for entry in store(url).entries()}
    add_checkpoint(here, 60)
    shutil.rmtree(here.checkpoint("step-000000010"))
    for upload_all in (uploader.upload_checkpoints, uploader.upload_records):
        with pytest.raises(SupersededWriter):
            upload_all()
    assert {entry.name for entry in store(url).entries("checkpoints")} <= set(before)
    assert set(before) <= {entry.name for entry in store(url).entries()}
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
    original, calls = CheckpointReader._chunk, iter(range(100))

    def breaks(self: Downloader, *arguments: object) -> int:
        if next(calls) == 2:
            raise StoreUnavailableError("the network is away")
        return original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointReader, "_chunk", breaks)
    with pytest.raises(StoreUnavailableError):
        continue_run(store(url), there)
    record = BucketRecord.load(there, str(store(url).location))
    assert record is not None
    assert not record.complete
    monkeypatch.setattr(CheckpointReader, "_chunk", original)
    assert continue_run(store(url), there).downloaded is not None
    assert everything(there) == everything(RunDir(tmp_path / "here"))


def test_a_directory_with_a_record_and_nothing_saved_takes_over_everything(url: str, tmp_path: Path) -> None:
    """It has failed five times before its first save; meanwhile another machine has saved."""
    first = a_run(tmp_path / "first", steps=())
    bring(url, first)
    second = RunDir(tmp_path / "second")
    second.path.mkdir()
    continue_run(store(url), second)
    add_checkpoint(second, 40)
    bring(url, second)
    for generation in range(2, 6):
        begin(first, generation)
    assert continue_run(store(url), first).downloaded is not None
    assert everything(first) == everything(second)
    bring(url, first)
    assert get_copy(url, tmp_path / "copy").checkpoint_names() == ["step-000000040"]


def test_a_claim_that_got_no_answer_twice_is_the_directorys_own(served: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here")
    bring(served, here)
    server, _, prefix = served.partition(" ")
    faults: list[str] = []

    def fault(number: int, method: str, path: str) -> str | None:
        return faults[-1] if path.endswith(WRITER) and method == "PUT" else None

    with disturbed(server, Disturbance(fault)) as proxy:
        for kind in ("lose", "refuse"):
            faults.append(kind)
            with pytest.raises(StoreUnavailableError):
                claim(place(proxy, f"runs/{prefix}", 0.5), here, is_empty=False)
    claim(store(served), here, is_empty=False)


def test_an_attempt_that_saved_nothing_is_moved_out_of_the_way(url: str, tmp_path: Path) -> None:
    bring(url, a_run(tmp_path / "here"))
    there = a_run(tmp_path / "there", steps=())
    begin(there, 7)
    assert continue_run(store(url), there).downloaded is not None
    assert everything(there) == everything(RunDir(tmp_path / "here"))
    assert (there.path / "attempt" / "generations" / "000007.json").exists()


def test_a_bucket_that_is_away_stops_no_run_that_has_everything(url: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here")
    bring(url, here)
    away = store("http://127.0.0.1:9 " + url.partition(" ")[2], patience=1.0)
    assert continue_run(away, here).downloaded is None
    (tmp_path / "new").mkdir()
    with pytest.raises(StoreUnavailableError):
        continue_run(away, RunDir(tmp_path / "new"))


# What a bucket may contain


def test_a_prefix_with_other_objects_is_refused_and_left_alone(url: str, tmp_path: Path) -> None:
    other = store(url)
    other.put("images/cat.jpg", b"cat")
    with pytest.raises(Occupied, match=r"is not empty \(it has images/cat.jpg\)"):
        claim(other, a_run(tmp_path / "here"), is_empty=False)


def test_objects_of_others_that_came_later_are_left_alone(url: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here")
    bring(url, here)
    for name in ("images/cat.jpg", "log/loose", "notes.txt"):
        store(url).put(name, b"x")
    bring(url, here)
    names = {entry.name for entry in store(url).entries()}
    assert {"images/cat.jpg", "log/loose", "notes.txt"} <= names


def test_a_run_within_another_one_is_refused(url: str, tmp_path: Path) -> None:
    bring(url, a_run(tmp_path / "here"))
    inner = store(f"{url}/inner")
    with pytest.raises(Occupied, match="lies within the run in"):
        claim(inner, a_run(tmp_path / "other"), is_empty=False)


@pytest.mark.parametrize("damage", ["part", "format"])
def test_a_run_does_not_start_without_a_checkpoint_that_it_would_then_delete(
    url: str, tmp_path: Path, damage: str
) -> None:
    here = a_run(tmp_path / "here")
    bring(url, here)
    manifest = here.manifest("step-000000020")
    if damage == "part":
        store(url).put(bucket.piece_name(manifest.digest, WEIGHTS, 0), b"x" * 3000)
    else:
        body = {**manifest.dump(), "format": 5}
        body["digest"] = _digest(body)
        store(url).put(f"checkpoints/step-000000020/{FILE}", json.dumps(body).encode())
    (tmp_path / "there").mkdir()
    with pytest.raises(StoreAccessError, match="To continue without it, delete its manifest"):
        continue_run(store(url), RunDir(tmp_path / "there"))
    assert len(list(store(url).entries("checkpoints"))) == 2


def test_a_damaged_checkpoint_that_is_set_aside_stays_in_the_bucket(url: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here")
    uploader = bring(url, here)
    here.set_aside("step-000000020", why="a flipped bit")
    uploader.upload_checkpoints()
    assert get_copy(url, tmp_path / "copy").checkpoint_names() == ["step-000000010", "step-000000020"]


def test_a_log_that_was_replaced_by_a_longer_one_is_sent_anew(url: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here", steps=())
    log = here.log / "worker-0.txt.1"
    log.write_bytes(b"a" * (2 * SEGMENT_BYTES))
    uploader = bring(url, here)
    for content in (b"b" * (3 * SEGMENT_BYTES - 5), b"c" * (3 * SEGMENT_BYTES + 5)):
        log.unlink()
        uploader.upload_records()
        log.write_bytes(content)
        uploader.upload_records()
        assert (get_copy(url, tmp_path / f"copy-{len(content)}").log / log.name).read_bytes() == content
    # By the next process, too.
    log.write_bytes(b"d" * (4 * SEGMENT_BYTES))
    bring(url, here)
    assert (get_copy(url, tmp_path / "copy").log / log.name).read_bytes() == b"d" * (4 * SEGMENT_BYTES)


def test_a_deletion_whose_response_was_lost_is_no_other_writer(url: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here")
    here.mark_done(None)
    uploader = bring(url, here)
    store(url).delete(["DONE"])
    here.reopen()
    here.mark_done(None)
    uploader.upload_records()
    assert store(url).read("DONE") is not None


def test_a_view_has_what_the_bucket_has(url: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here")
    uploader = bring(url, here)
    view = RunDir(tmp_path / "view")
    Downloader(store(url)).records(view)
    Downloader(store(url)).manifests(view)
    shutil.rmtree(here.checkpoint("step-000000010"))
    shutil.rmtree(here.evaluations / "step-000000010")
    uploader.upload_checkpoints()
    uploader.upload_records()
    Downloader(store(url)).records(view)
    Downloader(store(url)).manifests(view)
    assert view.checkpoint_names() == ["step-000000020"]
    assert not (view.evaluations / "step-000000010" / "g000001.json").exists()


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


def test_the_names_of_a_bucket_are_those_of_the_decision(url: str, tmp_path: Path) -> None:
    bring(url, a_run(tmp_path / "here", steps=(10,)))
    tops = {entry.name.partition("/")[0] for entry in store(url).entries()}
    assert tops == {IDENTITY, WRITER, "job.json", "generations", "evaluations", "log", "checkpoints", "parts"}
    assert store(url).location == Location("s3", BUCKET, f"runs/{url.partition(' ')[2]}")
