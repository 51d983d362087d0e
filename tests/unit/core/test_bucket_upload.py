"""The process beside the coordinator that uploads a run: while it goes on, when the bucket is away, and at the end."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tandem.rundir import upload
from tandem.rundir.bucket import (
    BucketRecord,
    SupersededWriter,
    claim,
)
from tandem.rundir.upload import Upload, Uploader
from tests.support.buckets import (
    BUCKET,
    Disturbance,
    a_run,
    add_checkpoint,
    disturbed,
    everything,
    get_copy,
    place,
    store,
)
from tests.support.manifests import job
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("credentials")


def test_it_uploads_while_the_run_goes_on_and_completely_at_its_end(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "RECORDS_SECONDS", 0.1)
    monkeypatch.setattr(upload, "LOOK_SECONDS", 0.1)
    here = a_run(tmp_path / "here", steps=(10,))
    uploaded: list[tuple[str, float]] = []
    uploader = Uploader(
        store(url),
        here,
        claim(store(url), here, is_empty=False),
        on_uploaded=lambda manifest, seconds: uploaded.append((manifest.name, seconds)),
    )
    uploader.survey()
    reported: list[str] = []
    process = Upload(uploader, reported.append, threading.Event())
    thread = threading.Thread(target=process.run)
    thread.start()
    # A pass that meets both sends the newest first.
    until(lambda: "step-000000010" in uploader.checkpoints, "the upload of the first checkpoint")
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
    assert [name for name, _ in uploaded] == ["step-000000010", "step-000000020", "step-000000030"]
    assert all(seconds > 0 for _, seconds in uploaded)


def test_it_reports_a_bucket_that_is_away_and_that_it_is_back(
    served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _, prefix = served.partition(" ")
    monkeypatch.setattr(upload, "RECORDS_SECONDS", 0.1)
    monkeypatch.setattr(upload, "LOOK_SECONDS", 0.1)
    here = a_run(tmp_path / "here")
    away = False
    with disturbed(server, Disturbance(lambda number, method, path: "refuse" if away else None)) as proxy:
        through = place(proxy, f"runs/{prefix}", patience=0.5)
        uploader = Uploader(through, here, claim(through, here, is_empty=False))
        uploader.survey()
        reported: list[str] = []
        process = Upload(uploader, reported.append, threading.Event())
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
    assert everything(get_copy(served, tmp_path / "there")) == everything(here)


def test_at_the_end_it_gives_up_a_bucket_that_stays_away(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "FINAL_SECONDS", 0.4)
    here = a_run(tmp_path / "here")
    writer = claim(store(url), here, is_empty=False)
    away = store("http://127.0.0.1:9 " + url.partition(" ")[2], patience=0.2)
    reported: list[str] = []
    process = Upload(Uploader(away, here, writer), reported.append, threading.Event())
    process.ending.set()
    process.run()
    assert "does not answer" in reported[-1]


def test_it_ends_when_another_machine_has_continued_the_run(url: str, tmp_path: Path) -> None:
    here = a_run(tmp_path / "here")
    uploader = Uploader(store(url), here, claim(store(url), here, is_empty=False))
    uploader.survey()
    uploader.upload_records()
    other = store(url)
    current = other.read("job.json")
    assert current is not None
    other.replace("job.json", b"{}", current.version)
    job = here.read_job()
    here.write_job(job)
    process = Upload(uploader, lambda problem: None, threading.Event())
    process.ending.set()
    with pytest.raises(SupersededWriter):
        process.run()


def test_a_defect_is_no_success(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = a_run(tmp_path / "here")
    here.mark_done(None)
    uploader = Uploader(store(url), here, claim(store(url), here, is_empty=False))
    uploader.survey()
    monkeypatch.setattr(Uploader, "_upload_checkpoint", lambda self, manifest: 1 / 0)
    process = Upload(uploader, lambda problem: None, threading.Event())
    with pytest.raises(ZeroDivisionError):
        process.run()
    assert store(url).read("DONE") is None


@pytest.mark.parametrize("ends", ["stdin", "SIGTERM"])
def test_the_process_ends_with_its_parent_and_notes_what_is_missing(served: str, tmp_path: Path, ends: str) -> None:
    server, _, prefix = served.partition(" ")
    place = f"s3://{BUCKET}/runs/{prefix}"
    storage = {"bucket": place, "endpoint": server}
    here = a_run(tmp_path / "here")
    here.write_job(job(checkpoint={"storage": storage}))
    claim(store(served), here, is_empty=False)
    command = [sys.executable, "-m", "tandem.rundir.upload"]
    environment = {**os.environ, "TANDEM_RUN_DIR": str(here.path)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"failing": ""}
        record = BucketRecord.load(here, place)
        assert record is not None
        assert record.missing == "the upload was interrupted"
        if ends == "stdin":
            process.stdin.close()
            assert process.wait(30) == 1
        else:
            here.mark_done(None)
            process.terminate()
            assert process.wait(30) == 0
            record = BucketRecord.load(here, place)
            assert record is not None
            assert record.missing == ""
            assert everything(get_copy(served, tmp_path / "there")) == everything(here)
