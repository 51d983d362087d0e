"""`tandem prove` on a run of real processes: its steps are the same again, bit for bit, and a lie about it shows."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tandem.rundir.layout import RunDir
from tandem.rundir.provenance import KEY, START, JobEntry, chained, read_chain, sha256
from tests.support.local_run import LocalRun
from tests.support.processes import tandem

pytestmark = pytest.mark.timeout(300)
SHORT = ["--set", "trainer.loop.epochs=4", "--set", "checkpoint.everySteps=40", "--set", "evaluators.replicas=0"]


def test_steps_are_the_same_again_and_a_record_written_anew_shows(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    private, public = tmp_path / "key.pem", tmp_path / "public.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    with LocalRun(tmp_path, *SHORT, variables={KEY: str(private)}) as run:
        assert run.process.wait(200) == 0, run.output
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    shown = prove(run.run_dir, "--key", str(public), "--steps", "45-54", TMPDIR=str(scratch))
    assert shown.returncode == 0, shown.stdout + shown.stderr
    lines = shown.stdout.splitlines()
    assert "replay    steps 45 to 54 of generation 1, with 2 ranks, from step-000000040" in lines
    assert "losses    10 of 10 are the same, with the same samples" in lines
    # A save that is due while the one before is still being written is skipped; the last one is not.
    (state,) = (line for line in lines if line.startswith("state "))
    assert re.fullmatch(r"state     (40|52) steps again give the checkpoint step-0000000(80|92), bit for bit", state)
    # Nothing is left behind, and the run is as it was.
    assert list(scratch.iterdir()) == []
    assert run.run_dir.newest_generation() == 1

    # Another job, for which the whole record is written anew: it needs the key, or takes other steps.
    lie_about(run.run_dir, learning_rate=0.002)
    shown = prove(run.run_dir, "--key", str(public), "--steps", "none")
    assert (shown.returncode, "problem   entry 1 is not signed" in shown.stdout) == (1, True)


def prove(rundir: RunDir, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return tandem("prove", str(rundir.path), *words, variables=variables)


def lie_about(rundir: RunDir, learning_rate: float) -> None:
    """Write a chain, unsigned, in which the job had another learning rate."""
    made: list[bytes] = []
    for number, entry in enumerate(read_chain(rundir.provenance).entries, 1):
        if isinstance(entry, JobEntry):
            job = json.loads(json.dumps(entry.job))
            job["spec"]["trainer"]["loop"]["optimizer"] = {"name": "adamw", "learningRate": learning_rate}
            entry = entry.model_copy(update={"job": job, "public_key": None})
        made.append(chained(entry, number, sha256(made[-1]) if made else START))
    rundir.provenance.write_bytes(b"".join(line + b"\n" for line in made))


@pytest.mark.full("cli", "core", "coordinator", "trainer")
def test_a_job_that_was_changed_afterwards_takes_other_steps(tmp_path: Path) -> None:
    with LocalRun(tmp_path, *SHORT) as run:
        assert run.process.wait(200) == 0, run.output
    lie_about(run.run_dir, learning_rate=0.002)
    shown = prove(run.run_dir, "--steps", "45", "-o", "json")
    assert shown.returncode == 1
    shown = json.loads(shown.stdout)
    assert shown["replay"]["sameState"] is False
    assert [problem[:14] for problem in shown["problems"]] == ["step 45: loss ", "other files: s"]
