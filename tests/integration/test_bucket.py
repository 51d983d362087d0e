"""`tandem run` with a bucket: the run goes on on another machine, and when the bucket is away."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.buckets import BUCKET, CREDENTIALS, Disturbance, disturbed, moto
from tests.support.local_run import LocalRun

pytestmark = pytest.mark.timeout(300)
SMALL = ["--set", "workers.replicas=1", "--set", "evaluators.processesPerReplica=1"]
STEPS = 40 * 23
LENGTH = ["--set", "trainer.loop.epochs=40", "--set", "checkpoint.everySteps=200"]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with moto() as url:
        yield url


def job(url: str, prefix: str) -> list[str]:
    """Options of a job that is brought into a bucket."""
    place = f"s3://{BUCKET}/{prefix}"
    bucket = ["--set", f"checkpoint.storage.bucket={place}", "--set", f"checkpoint.storage.endpoint={url}"]
    return [*SMALL, *LENGTH, *bucket]


def run(folder: Path, url: str, prefix: str) -> LocalRun:
    folder.mkdir()
    return LocalRun(folder, *job(url, prefix), variables=CREDENTIALS)


def test_a_run_that_was_stopped_goes_on_on_another_machine(server: str, tmp_path: Path) -> None:
    with run(tmp_path / "one", server, "moved") as first:
        first.reaches(400)
        first.interrupt()
        assert first.ends() == 130, first.output
        saved = first.run_dir.committed()[0].step
    with run(tmp_path / "two", server, "moved") as second:
        assert second.ends() == 0, second.output
        assert f"continues the run in s3://{BUCKET}/moved" in second.output
        assert f"resuming from step {saved}" in second.output.replace(",", "")
        # No step is missing and none was taken twice: the log of the first machine came with the run.
        assert [record["step"] for record in second.logged("step")] == list(range(1, STEPS + 1))
    with run(tmp_path / "three", server, "moved") as third:
        assert third.ends() == 0
        assert "nothing left to do" in third.output
    # The first machine's directory is older than the bucket.
    with LocalRun(tmp_path / "one", *job(server, "moved"), variables=CREDENTIALS) as late:
        assert late.ends() == 2
        assert "was continued by" in late.output


@pytest.mark.full("cli", "coordinator", "core")
def test_a_bucket_that_goes_away_stops_no_training(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    away = False
    with (
        disturbed(server, Disturbance(lambda number, method, path: "refuse" if away else None)) as proxy,
        run(tmp_path / "one", proxy, "away") as job_of_one,
    ):
        job_of_one.reaches(200)
        away = True
        assert job_of_one.ends() == 0, job_of_one.output
        assert job_of_one.final_step() == STEPS
        assert f"s3://{BUCKET}/away lacks data (" in job_of_one.output
        away = False
        monkeypatch.setenv("AWS_ENDPOINT_URL", server)
        assert job_of_one.called("copy", str(job_of_one.path), f"s3://{BUCKET}/away").returncode == 0
        assert f"step {STEPS:,} of" in job_of_one.called("status", f"s3://{BUCKET}/away").stdout


def test_a_bucket_that_cannot_be_used_is_one_sentence_at_the_start(server: str, tmp_path: Path) -> None:
    for index, (url, prefix, sentence) in enumerate(
        [
            (server.replace("127.0.0.1", "127.0.0.2"), "a", "does not answer"),
            (server, "a//b", "bucket"),
        ]
    ):
        with run(tmp_path / str(index), url, prefix) as refused:
            assert refused.ends() == 2
            assert sentence in refused.output
            assert "Traceback" not in refused.output
