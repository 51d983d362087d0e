"""No text of a manifest, a run directory or a cluster steers the terminal that a command prints it in."""

import json
import shutil
import subprocess
from pathlib import Path
from unicodedata import category

import pytest
import yaml

from tandem.rundir.checkpoint import FILE, Manifest
from tandem.rundir.durable import replace_json
from tests.support import ROOT, manifests
from tests.support import fake_kubectl as fakes
from tests.support.fake_kubectl import FakeKubectl
from tests.support.processes import tandem
from tests.support.worlds.small_run import SmallRun, messy

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\u2066\rOK\x7f\u200b"
"""A window's title, a cleared screen, a C1 control, letters in reverse, a line that is written over, and nothing."""
FULL = pytest.mark.full("cli")
JOBS = "distributedtrainingjobs.tandem.dev"


def check(result: "subprocess.CompletedProcess[str]", *, shows: str = "") -> None:
    """What was printed is printable, and something of the hostile text is in it."""
    for text in (result.stdout, result.stderr):
        odd = {letter for letter in text if not (letter.isprintable() or letter == "\n" or category(letter) == "Zs")}
        assert not odd, (result.args, text)
    assert "Traceback" not in result.stderr, result.stderr
    assert (shows or "gnp.exe") in result.stdout + result.stderr, (result.args, result.stdout, result.stderr)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    """A run directory in which every text that is free is hostile."""
    run = messy(tmp_path_factory.mktemp("hostile") / "run")
    folder = run.rundir
    folder.set_aside(run.save(160).name, why=f"why {EVIL}\nOK all is well")
    body = json.loads(folder.job_file.read_text())
    body["metadata"]["labels"] = {"a": EVIL}
    del body["spec"]["evaluators"]
    body["spec"]["trainer"] = {"command": ["python", f"train.py {EVIL}"]}
    folder.job_file.write_text(json.dumps(body))
    folder.best_file.write_text(json.dumps({"name": f"best {EVIL}", "metric": EVIL, "value": 0.5, "step": 100}))
    run.read("step-000000400")
    (held,) = folder.leases.iterdir()
    content = json.loads(held.read_text())
    replace_json(held, content | {"holder": f"holder {EVIL}"})
    (folder.generations / f"{EVIL}.json").write_text("{}")
    lines = [
        {"kind": "event", "time": 1.0, "level": "error", "text": EVIL},
        {"kind": "closed", "time": 1.0, "generation": 1, "reason": EVIL, "detail": EVIL},
    ]
    (folder.log / "coordinator.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder.log / f"evaluator-{EVIL}.jsonl").write_text("no JSON\n")
    folder.mark_failed(f"Reason{EVIL}", f"message {EVIL}", 1)
    manifest = folder.checkpoint("step-000000500") / FILE
    sealed = json.loads(manifest.read_text())
    sealed["versions"] = {"tandem": EVIL}
    manifest.write_text(json.dumps(Manifest.read(sealed | {"digest": ""}).sealed()))
    return run


@pytest.mark.parametrize(
    ("words", "shows"),
    [
        (("ls",), "step-000000500"),
        (("show", "step-000000500"), "gnp.exe"),
        pytest.param(("show", "step-000000160.bad"), "gnp.exe", marks=FULL),
        (("verify", "step-000000160.bad"), "gnp.exe"),
        pytest.param(("verify",), "step-000000500", marks=FULL),
        pytest.param(("diff", "step-000000400", "step-000000500"), "gnp.exe", marks=FULL),
        (("prune", "--all", "--keep-last", "1", "--keep-best", "0"), "TO DELETE"),
        pytest.param(("ls", "-o", "json"), "step-000000500", marks=FULL),
    ],
)
def test_checkpoints(hostile: SmallRun, words: tuple[str, ...], shows: str) -> None:
    command, *rest = words
    check(tandem("checkpoints", command, hostile.rundir.path, *rest), shows=shows)


def test_a_report(hostile: SmallRun, tmp_path: Path) -> None:
    check(tandem("report", hostile.rundir.path, "--to", tmp_path / "report.html", "--no-png"))


def test_an_export(hostile: SmallRun, tmp_path: Path) -> None:
    check(
        tandem("checkpoints", "export", hostile.rundir.path, "step-000000200", "--to", tmp_path / "w.safetensors"),
        shows="verified",
    )


@pytest.fixture
def folder(hostile: SmallRun, tmp_path: Path) -> Path:
    """A folder with two such runs, whose jobs differ, under hostile names."""
    runs = tmp_path / "runs"
    for name in ("a", "b"):
        shutil.copytree(hostile.rundir.path, runs / f"{name} {EVIL}")
    job_file = runs / f"b {EVIL}" / "job.json"
    body = json.loads(job_file.read_text())
    body["spec"]["trainer"]["command"].append(f"--other {EVIL}")
    job_file.write_text(json.dumps(body))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "shows"),
    [
        (("ls",), "gnp.exe"),
        pytest.param(("ls", "--all", "-o", "json"), "gnp.exe", marks=FULL),
        (("compare", f"runs/a {EVIL}", f"runs/b {EVIL}"), "--other"),
        pytest.param(("compare", f"runs/a {EVIL}", f"runs/b {EVIL}", "-o", "json"), "--other", marks=FULL),
        (("stop", f"runs/a {EVIL}"), "is not running"),
    ],
    ids=["ls", "ls as data", "compare", "compare as data", "stop"],
)
def test_runs_of_this_machine(folder: Path, words: tuple[str, ...], shows: str) -> None:
    check(tandem(*words, cwd=folder), shows=shows)


def test_a_manifest(tmp_path: Path) -> None:
    sound = tmp_path / "sound.yaml"
    trainer = {"command": ["python", f"-c\nOK {EVIL}"], "args": [EVIL]}
    sound.write_text(yaml.safe_dump(manifests.manifest(trainer=trainer)))
    check(tandem("validate", sound))
    assert len(tandem("validate", sound).stdout.splitlines()) == 1, "no line that looks like ours"
    wrong = tmp_path / f"{EVIL}.yaml"
    wrong.write_text(yaml.safe_dump(manifests.manifest(trainer={"task": EVIL, EVIL: EVIL})))
    check(tandem("validate", wrong))


@FULL
def test_a_run_that_fails(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    script = f"import sys; print({EVIL!r}); sys.exit({EVIL!r})"
    whole = manifests.manifest(
        "evil", trainer={"command": ["python", "-c", script]}, elasticity={"maxRestarts": 0, "warmStart": False}
    )
    file.write_text(yaml.safe_dump(whole))
    result = tandem("run", file, "--run-dir", tmp_path / "run")
    check(result)
    assert result.returncode == 1


def test_a_run_that_somebody_else_has_marked_as_failed(hostile: SmallRun, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(json.loads(hostile.rundir.job_file.read_text())))
    check(tandem("run", file, "--run-dir", hostile.rundir.path))


@pytest.fixture
def fake(tmp_path: Path) -> FakeKubectl:
    fake = FakeKubectl(tmp_path)
    waiting = {"waiting": {"reason": EVIL, "message": EVIL}}
    logs = fakes.pod("worker", 1)
    status = {
        "phase": "Running",
        "message": EVIL,
        "conditions": [{"type": "Running", "status": "True", "reason": EVIL, "message": EVIL}],
        "workers": {"desired": 2, "ready": 1, "summary": EVIL},
        "bestCheckpoint": {"name": "best", "step": 5, "metric": EVIL, "value": 0.5},
        "progress": {"step": 5, "totalSteps": 10},
        "loss": 0.5,
    }
    whole = fakes.job(**status)
    evil_job = fakes.job(f"x{EVIL}", **status)
    fake.answers("get", JOBS, "-o", "json", says=fakes.items(whole, evil_job))
    fake.answers("get", JOBS, "digits", says=whole)
    fake.answers("get", JOBS, "digitz", complains=f"Error from server (NotFound): {EVIL} not found")
    fake.answers("get", "pods", says=fakes.items(fakes.pod("worker", 0, waiting, name=f"p{EVIL}", node=EVIL), logs))
    fake.answers("get", "events", says=fakes.items(fakes.event("DistributedTrainingJob", "digits", EVIL, EVIL)))
    fake.answers("logs", says=f"2026-11-21T12:00:02Z {EVIL}\n")
    fake.answers("apply", says=whole | {"metadata": whole["metadata"] | {"namespace": EVIL}}, complains="", code=0)
    return fake


@pytest.mark.parametrize(
    ("words", "shows"),
    [
        pytest.param(("status",), "gnp.exe", marks=FULL),
        (("status", "digits"), "gnp.exe"),
        pytest.param(("status", "digits", "-o", "json"), "gnp.exe", marks=FULL),
        (("status", "digitz"), "did you mean digits?"),
        (("events", "digits"), "gnp.exe"),
        (("logs", "digits"), "worker-1    │ OK"),
        (("submit", str(ROOT / "examples/digits.yaml")), "gnp.exe"),
    ],
)
def test_a_cluster(fake: FakeKubectl, words: tuple[str, ...], shows: str) -> None:
    check(tandem(*words, cwd=fake.folder, variables={"PATH": fake.path}), shows=shows)


def test_on_a_terminal_nothing_but_styles_is_added(fake: FakeKubectl) -> None:
    result = tandem("status", "digits", cwd=fake.folder, variables={"PATH": fake.path, "FORCE_COLOR": "1"})
    assert "\x1b]" not in result.stdout
    assert "\x1b[2J" not in result.stdout
    assert "\x1b[" in result.stdout
