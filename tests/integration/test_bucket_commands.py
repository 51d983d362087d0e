"""Every command that takes a run takes the URL of one in a bucket: it reads it, or says why it cannot."""

import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from tandem.rundir.checkpoint import WEIGHTS
from tandem_cli.main import COMMANDS
from tandem_cli.runs import completed
from tests.support.buckets import BUCKET, CREDENTIALS, moto, place
from tests.support.local_run import LocalRun

pytestmark = pytest.mark.timeout(300)
STEPS = 2 * 23
URL = f"s3://{BUCKET}/digits"
LATEST = f"step-{STEPS:09d}"
CALLS: dict[str, tuple[list[str], int, str]] = {
    "status": ([URL], 0, f"step {STEPS} of {STEPS}"),
    "events": ([URL], 0, "generation 1"),
    "trace": ([URL], 0, "start: the job starts"),
    "report": ([URL, "--to", "HERE/report.html"], 0, "HERE/report.html"),
    "compare": ([URL, URL], 0, "accuracy"),
    "export": ([URL, "--to", "HERE/csv"], 0, "HERE/csv"),
    "verify": ([URL], 0, "each of"),
    "prove": ([URL, "--steps", "24-26"], 0, f"give the checkpoint {LATEST}, bit for bit"),
    "evaluate": ([URL, "latest"], 0, "as recorded"),
    "copy": ([URL, "HERE/copy"], 0, LATEST),
    "checkpoints ls": ([URL], 0, LATEST),
    "checkpoints show": ([URL, "latest"], 0, LATEST),
    "checkpoints verify": ([URL], 0, "sound"),
    "checkpoints diff": ([URL, "23", f"{URL}:latest"], 0, "24 different, 0 equal"),
    "checkpoints export": ([URL, "latest", "--to", "HERE/weights.safetensors"], 0, "verified"),
    "checkpoints push": ([URL, "latest", "me/model", "--dry-run"], 0, "would push"),
    "checkpoints prune": ([URL, "--yes"], 2, f"{URL} is a run in a bucket, "),
    "mv": ([URL, "other"], 2, f"{URL} is a run in a bucket, "),
    "rm": ([URL, "--yes"], 2, f"{URL} is a run in a bucket, "),
    "track": ([URL], 2, f"{URL} is a run in a bucket, "),
    "submit": (["HERE/job.yaml", "--slurm", "--after", URL], 2, f"{URL} is a run in a bucket, "),
    "logs": ([URL], 2, f"{URL} is a run in a bucket, "),
    "open": ([URL], 2, f"{URL} is a run in a bucket, "),
    "debug": ([URL], 2, f"{URL} is a run in a bucket, "),
    "scale": ([URL, "2"], 2, f"{URL} is a run in a bucket, "),
    "stop": ([URL], 2, f"{URL} is a run in a bucket, "),
    "shell": ([URL], 2, "needs a terminal"),
    "ui": ([URL], 2, "is not tracked"),
}
"""Arguments of each command, its exit code, and what it says."""


def commands() -> Iterator[tuple[str, Callable[..., Any]]]:
    """All commands by their names, with their functions."""
    for name in COMMANDS:
        found = getattr(importlib.import_module(f"tandem_cli.commands.{name}"), name)
        if not isinstance(found, typer.Typer):
            yield name, found
            continue
        for part in found.registered_commands:
            assert part.callback is not None
            yield f"{name} {part.name or part.callback.__name__}", part.callback


def takes_a_run(function: Callable[..., Any]) -> bool:
    """Whether an argument or option of a command is completed to runs, or is the source of a copy."""
    facts = [
        fact for parameter in inspect.signature(function).parameters.values() for fact in get_args(parameter.annotation)
    ]
    return any(
        getattr(fact, "autocompletion", None) is completed or getattr(fact, "metavar", None) == "SOURCE"
        for fact in facts
    )


def test_no_command_that_takes_a_run_is_forgotten() -> None:
    assert {name for name, function in commands() if takes_a_run(function)} == CALLS.keys()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    folder = tmp_path_factory.mktemp("bucket")
    with moto() as server, pytest.MonkeyPatch.context() as monkeypatch:
        variables = {**CREDENTIALS, "AWS_ENDPOINT_URL": server, "XDG_CACHE_HOME": str(folder / "cache")}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        settings = {
            "workers.replicas": "1",
            "evaluators.processesPerReplica": "1",
            "trainer.loop.epochs": "2",
            "checkpoint.everySteps": "23",
            "checkpoint.storage.bucket": URL,
            "checkpoint.storage.endpoint": server,
        }
        options = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        (folder / "run").mkdir()
        with LocalRun(folder / "run", *options, variables=CREDENTIALS) as run:
            assert run.ends() == 0, run.output
            yield run


@pytest.mark.parametrize("name", CALLS)
def test_a_command_reads_a_url_or_says_why_it_cannot(trained: LocalRun, tmp_path: Path, name: str) -> None:
    arguments, code, text = CALLS[name]
    (tmp_path / "job.yaml").write_text("metadata: {name: digits}\nspec: {trainer: {command: [train.py]}}\n")
    done = trained.called(*name.split(), *(word.replace("HERE", str(tmp_path)) for word in arguments))
    assert done.returncode == code, done.stdout + done.stderr
    assert text.replace("HERE", str(tmp_path)) in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    cache = Path(os.environ["XDG_CACHE_HOME"])
    assert list(cache.rglob("*.safetensors")) == [], "no checkpoint stays on the disk"


def test_what_is_exported_from_a_bucket_is_what_was_saved(trained: LocalRun, tmp_path: Path) -> None:
    for source, name in ((URL, "there"), (str(trained.path), "here")):
        done = trained.called("checkpoints", "export", source, "latest", "--to", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()


def test_a_run_is_copied_into_another_bucket(trained: LocalRun) -> None:
    second = f"s3://{BUCKET}/second"
    copied = trained.called("copy", str(trained.path), second)
    assert copied.returncode == 0, copied.stderr
    assert f"step {STEPS} of {STEPS}" in trained.called("status", second).stdout
    missing = trained.called("status", f"s3://{BUCKET}/nothing")
    assert missing.returncode == 2
    assert "holds no run of Tandem" in missing.stderr


def test_damage_in_a_bucket_is_found_there_and_nothing_is_made_of_it(trained: LocalRun, tmp_path: Path) -> None:
    bucket = place(os.environ["AWS_ENDPOINT_URL"], "digits")
    digest = trained.run_dir.manifest(LATEST).digest
    (part,) = [entry for entry in bucket.entries(f"parts/{digest[:32]}/") if WEIGHTS in entry.name]
    content = bucket.read(part.name)
    assert content is not None
    bucket.put(part.name, bytes(part.size))
    try:
        verified = trained.called("checkpoints", "verify", URL)
        assert verified.returncode == 1
        assert f"{LATEST}/{WEIGHTS} does not match its checksum" in verified.stdout
        exported = trained.called("checkpoints", "export", URL, "latest", "--to", str(tmp_path / "weights"))
        assert exported.returncode == 2
        assert "does not match its checksum" in exported.stderr
        assert not (tmp_path / "weights").exists()
    finally:
        bucket.put(part.name, content.data)


def test_requests_are_counted_and_shown_here_and_from_the_bucket(trained: LocalRun, tmp_path: Path) -> None:
    for source in (str(trained.path), URL):
        status = trained.called("status", source)
        assert re.search(r"bucket +\d+ requests \(listings \d+, reads \d+, writes \d+", status.stdout), status.stdout
    page = tmp_path / "report.html"
    assert trained.called("report", URL, "--to", str(page), "--no-png").returncode == 0
    assert re.search(r"Bucket: \d+ requests", page.read_text())
