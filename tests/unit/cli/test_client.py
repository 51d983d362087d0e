"""The Python client: what it takes, what it refuses, and that it uses the platforms of the commands."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import tandem
from tandem import Client, Job, UserError, frame
from tandem.errors import ManifestError
from tandem.job.manifest.reading import parse_job
from tandem.job.manifest.source import parse
from tandem.job.resource import Workers
from tandem.job.trainer import Trainer
from tandem.rundir.download import Downloaded
from tandem.wire.status import Score, Status
from tandem_cli.client import CheckpointScores, RunFailedError, RunHandle, StepLoss, notebook
from tandem_cli.client import run as run_module
from tandem_cli.kubernetes import copying
from tandem_cli.local import platform as local_platform
from tandem_cli.platforms import PlatformError, RunNotFoundError
from tandem_cli.slurm.platform import OnSlurm
from tandem_launcher.slurm import scheduler
from tests.support import ROOT, manifests
from tests.support import fake_kubectl as fakes
from tests.support.checkpoints import begin, commit
from tests.support.fake_kubectl import FakeKubectl
from tests.support.worlds.simulated_run import make_run

JOBS = "distributedtrainingjobs.tandem.dev"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
    (tmp_path / "bin").mkdir()
    made = FakeKubectl(tmp_path / "bin")
    monkeypatch.setenv("PATH", made.path)
    return made


def in_a_process(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


class TestItsImport:
    def test_it_loads_neither_torch_nor_numpy(self) -> None:
        done = in_a_process(
            "import sys; from tandem import AsyncClient, Client, Job, UserError, frame; Client().runs()\n"
            "print(sorted({'torch', 'numpy', 'pandas', 'kubernetes', 'IPython'} & set(sys.modules)))"
        )
        assert (done.stdout, done.stderr) == ("[]\n", "")

    def test_the_package_alone_does_not_load_the_command_line(self) -> None:
        done = in_a_process(
            "import sys, tandem; print([m for m in sys.modules if m.startswith(('tandem_cli', 'pyd'))])"
        )
        assert (done.stdout, done.stderr) == ("[]\n", "")

    @pytest.mark.parametrize("missing", ["tandem_cli", "typer"])
    def test_without_the_command_line_a_sentence_says_what_to_install(self, missing: str) -> None:
        done = in_a_process(f"import sys; sys.modules[{missing!r}] = None\nfrom tandem import Client")
        last = done.stderr.splitlines()[-1]
        assert last == (
            f"ImportError: tandem.Client needs {missing}; install it with: pip install 'tandem-training[cli]'"
        )

    def test_other_names_do_not_exist(self) -> None:
        with pytest.raises(AttributeError, match="module 'tandem' has no attribute 'Clint'"):
            _ = tandem.Clint  # type: ignore[attr-defined]
        assert {"Client", "UserError", "frame", "log"} <= set(dir(tandem))

    def test_its_stub_names_what_it_has(self) -> None:
        stub = (ROOT / "core/tandem/__init__.pyi").read_text()
        assert all(f" as {name}\n" in stub for name in tandem._LAZY)


def refused(job: Any, **more: Any) -> str:
    with pytest.raises(UserError) as error:
        Client().submit(job, **more)
    return str(error.value)


class TestAJobThatCannotBe:
    def test_a_mistake_in_a_text_has_the_sentence_of_the_command_line(self, folder: Path) -> None:
        text = yaml.safe_dump(manifests.manifest(workers={"replica": 2}))
        with pytest.raises(ManifestError) as error:
            parse_job(parse(text.encode(), "<text>"))
        assert refused(text) == str(error.value)
        assert "did you mean replicas?" in str(error.value)
        (folder / "job.yaml").write_text(text)
        assert refused("job.yaml") == str(error.value).replace("<text>", "job.yaml")

    def test_mistakes_in_a_dict_name_fields_and_no_lines(self) -> None:
        assert refused(manifests.manifest(workers={"replica": 2}, evaluators={"policy": "Sometimes"})).splitlines() == [
            "<job>: unknown field replica in spec.workers; did you mean replicas?",
            '<job>: spec.evaluators.policy must be one of Latest, Every, not the text "Sometimes"',
        ]

    @pytest.mark.parametrize(
        ("job", "sentence"),
        [
            (3, "a job is a path, a text, a dict or a Job, and not int"),
            (
                "train.py",
                "train.py is a script; submit takes a manifest, which this command writes: tandem init train.py",
            ),
            ("nowhere.yaml", "nowhere.yaml does not exist"),
            ({"metadata": {1, 2}}, "<job> has a value that no manifest can have: "),
            ({"spec": float("nan")}, "<job> has a value that no manifest can have: "),
        ],
    )
    def test_what_is_no_job_is_refused_in_a_sentence(self, job: Any, sentence: str) -> None:
        assert refused(job).startswith(sentence)

    def test_overrides_are_checked_too(self) -> None:
        assert "did you mean" in refused(manifests.manifest(), overrides={"workers.replcas": 2})
        assert refused(manifests.manifest(), overrides="workers.replicas=2") == (
            'overrides are a dict or a list of texts: overrides=["workers.replicas=2"]'
        )

    def test_what_this_machine_refuses_is_said_as_well(self, capfd: pytest.CaptureFixture[str]) -> None:
        # The process of `tandem run` finds it, not this one.
        job = manifests.manifest(trainer=manifests.images({"initialWeights": "runs/there-is-none"}))
        sentence = refused(job)
        assert "there-is-none" in sentence
        assert not sentence.startswith("error")
        assert tuple(capfd.readouterr()) == ("", ""), "a library prints nothing"

    def test_two_places_at_once_are_none(self) -> None:
        with pytest.raises(UserError, match="give kubernetes= or slurm=, not both"):
            Client(kubernetes="team", slurm=True)
        with pytest.raises(UserError, match="are for this machine and SLURM"):
            Client(kubernetes="team").submit(manifests.manifest(), run_dir="here")


class TestRuns:
    def test_an_unknown_run_is_refused_and_others_are_suggested(self) -> None:
        make_run(Path("runs/other"), steps=10)
        with pytest.raises(UserError, match=r"no run of this machine is called letters\. Runs here: runs/other"):
            Client().run("letters")
        with pytest.raises(UserError, match="runs/letters does not exist"):
            Client().run("runs/letters")

    def test_it_lists_the_runs_of_this_machine(self) -> None:
        make_run(Path("runs/other"), steps=10)
        assert [run.name for run in Client().runs()] == [Client().run("other").name]
        assert Client(slurm=True).runs() == [], "nothing was submitted there"


class TestNumbers:
    def test_each_step_counts_once_although_some_were_repeated(self) -> None:
        make_run(Path("runs/broken"), steps=600, kills={230: "WorkerFailed"}, sizes={1: 1})
        run = Client().run("broken")
        assert [loss.step for loss in run.losses()] == list(range(1, 601))
        scores, best = run.scores(), run.best()
        assert best in scores
        assert best is not None
        assert best.metrics["accuracy"] == max(one.metrics["accuracy"] for one in scores)
        assert run.status().best_checkpoint is None or run.status().best_checkpoint.step == best.step

    def test_a_run_without_anything_has_no_numbers(self) -> None:
        manifests.run_directory(Path("runs/new"), manifests.job())
        run = Client().run("new")
        assert (run.losses(), run.scores(), run.best(), run.checkpoints()) == ([], [], None, [])
        with pytest.raises(UserError, match="runs/new has no checkpoints"):
            run.checkpoint()

    def test_checkpoints_are_named_by_step_or_rank(self) -> None:
        rundir = manifests.run_directory(Path("runs/digits"), manifests.job())
        begin(rundir, 1)
        for step in (5, 10):
            commit(rundir, step, files={"weights.safetensors": b"w"})
        run = Client().run("digits")
        assert [one.step for one in run.checkpoints()] == [5, 10]
        assert run.checkpoint(5).path == rundir.checkpoint("step-000000005")
        assert run.checkpoint("latest").name == "step-000000010"
        with pytest.raises(UserError, match="no best checkpoint"):
            run.checkpoint()
        with pytest.raises(UserError, match=r"has no checkpoint of step 7\. The nearest"):
            run.checkpoint(7)

    def test_a_frame_has_a_column_for_each_metric(self) -> None:
        pytest.importorskip("pandas")
        scores = [CheckpointScores("step-5", 5, {"accuracy": 0.5}, {"accuracy": 0.4})]
        assert list(frame(scores).columns) == ["checkpoint", "step", "accuracy", "validation.accuracy"]
        assert frame([StepLoss(1, 0.5, 0.0, {"lr": 0.1})])["lr"].tolist() == [0.1]

    def test_without_pandas_a_frame_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pandas", None)
        with pytest.raises(UserError, match="a frame needs pandas; install it with: pip install pandas"):
            frame([])


class Platform:
    """A run that has the given phases, one after the other; an error is raised."""

    copies_run_dir = True

    def __init__(self, *states: str | Exception, ended: Sequence[str] = ("Succeeded", "Failed")) -> None:
        self._states, self._ended = list(states), ended

    def view(self, events: object = None) -> Any:
        state = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        if isinstance(state, Exception):
            raise state
        return SimpleNamespace(job=SimpleNamespace(status=Status.parse({"phase": state})))

    def is_over(self, view: Any) -> bool:
        return view.job.status.phase in self._ended


class TestWaiting:
    @pytest.fixture(autouse=True)
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds

        monkeypatch.setattr(run_module, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))

    def handle(self, *states: str | Exception) -> RunHandle:
        platform: Any = Platform(*states)
        return RunHandle(platform, "digits")

    def test_it_returns_the_last_status_also_of_a_failure(self) -> None:
        assert self.handle("Pending", PlatformError("no answer"), "Running", "Failed").wait().phase == "Failed"

    def test_a_failure_is_raised_if_asked(self) -> None:
        with pytest.raises(RunFailedError, match="digits ended: Failed"):
            self.handle("Running", "Failed").wait(check=True)

    @pytest.mark.parametrize("until", ["Running", lambda status: status.phase == "Running"])
    def test_it_ends_at_a_state(self, until: Any) -> None:
        assert self.handle("Pending", "Starting", "Running", "Succeeded").wait(until=until).phase == "Running"

    def test_the_end_ends_it_though_the_state_never_came(self) -> None:
        assert self.handle("Pending", "Succeeded").wait(until="Running").phase == "Succeeded"

    def test_after_its_time_it_raises_and_the_run_goes_on(self) -> None:
        with pytest.raises(TimeoutError, match=r"digits is Running after 2\.5 s; it continues"):
            self.handle("Running").wait(2.5)

    def test_a_platform_that_does_not_answer_at_the_end_is_asked_again(self) -> None:
        run = self.handle("Running", "Succeeded", PlatformError("no answer"), "Succeeded")
        assert run.wait(check=True).phase == "Succeeded"
        with pytest.raises(TimeoutError, match=r"digits is Succeeded after 2\.5 s"):
            self.handle("Succeeded", PlatformError("no answer")).wait(2.5)

    def test_a_deleted_run_is_said(self) -> None:
        with pytest.raises(RunNotFoundError):
            self.handle("Running", RunNotFoundError("digits was deleted")).wait()


class TestInANotebook:
    def test_everything_is_escaped(self) -> None:
        status = Status(
            message="<script>alert(1)</script>", best_checkpoint=Score(name="a", step=1, metric="<b>", value=1)
        )
        page = notebook.html("<i>", status, None, "<u>")
        assert not any(tag in page for tag in ("<script", "<b>&lt;b", "<i>", "<u>"))
        assert "&lt;script&gt;" in page

    def test_it_has_the_state_and_the_curves_with_ids_of_their_own(self) -> None:
        make_run(Path("runs/digits"), steps=100)
        run = Client().run("digits")
        first, second = run._repr_html_(), run._repr_html_()
        assert "Training loss" in first
        assert "phase" in first
        ids = [page.split('aria-labelledby="')[1].split('"')[0] for page in (first, second)]
        assert ids[0] != ids[1]

    @pytest.mark.parametrize("shell", [None, SimpleNamespace(), "missing"])
    def test_only_a_notebook_has_displays(self, shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        module = None if shell == "missing" else SimpleNamespace(get_ipython=lambda: shell)
        monkeypatch.setitem(sys.modules, "IPython", module)
        platform: Any = Platform("Running")
        with pytest.raises(UserError) as error:
            RunHandle(platform, "digits").watch()
        assert str(error.value) == ("only a notebook has displays to update; in a terminal: tandem status NAME --watch")

    def test_what_does_not_answer_is_shown_and_not_raised(self) -> None:
        platform: Any = Platform(PlatformError("the cluster does not answer"))
        assert "the cluster does not answer" in RunHandle(platform, "digits")._repr_html_()


class TestAJobWithTypes:
    def test_it_is_the_manifest_of_its_name_and_spec(self, fake: FakeKubectl) -> None:
        fake.answers("get", JOBS, "--ignore-not-found")
        fake.answers("apply", says=fakes.job())
        job = Job(name="digits", trainer=Trainer(command=["python", "train.py"]), workers=Workers(replicas=2))
        Client(kubernetes="team").submit(job, overrides={"workers.minReplicas": 1})
        (apply,) = [call for call in fake.asked if "apply" in call.words]
        assert json.loads(apply.given) == {
            "apiVersion": "tandem.dev/v1alpha1",
            "kind": "DistributedTrainingJob",
            "metadata": {"name": "digits"},
            "spec": {
                "trainer": {"command": ["python", "train.py"]},
                "workers": {"replicas": 2, "minReplicas": 1},
            },
        }

    def test_a_mistake_is_found_when_it_is_made(self) -> None:
        with pytest.raises(ValueError, match="workrs"):
            Job(name="digits", trainer=Trainer(command=["a"]), workrs=Workers())  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="name"):
            Job(name="My digits", trainer=Trainer(command=["a"]))


class TestOnKubernetes:
    def test_a_dict_is_applied_as_the_user_wrote_it(self, fake: FakeKubectl, capfd: pytest.CaptureFixture[str]) -> None:
        fake.answers("get", JOBS, "--ignore-not-found")
        fake.answers("apply", says=fakes.job())
        job = parse_job(parse(yaml.safe_dump(manifests.manifest()).encode(), "x"))
        client = Client(kubernetes="team", context="prod")
        for given in (manifests.manifest(), job):
            run = client.submit(given, overrides={"workers.replicas": 3})
            (apply,) = [call for call in fake.asked if "apply" in call.words][-1:]
            assert {"--namespace=team", "--context=prod"} <= set(apply.words)
            assert json.loads(apply.given) == manifests.manifest(workers={"replicas": 3}), "and no defaults"
        assert tuple(capfd.readouterr()) == ("", "")
        fake.answers("get", JOBS, "digits", says=fakes.job(phase="Succeeded"))
        fake.answers("get", "pods", says=fakes.items())
        assert run.wait(0).phase == "Succeeded"

    def test_an_unknown_job_is_refused_at_once(self, fake: FakeKubectl) -> None:
        error = f'Error from server (NotFound): {JOBS} "digits" not found'
        fake.answers("get", says=fakes.items())
        fake.answers("get", JOBS, "digits", complains=error)
        with pytest.raises(RunNotFoundError):
            Client(kubernetes="team").run("digits")
        with pytest.raises(UserError, match="is not a job name"):
            Client(kubernetes="team").run("--all")

    def test_its_jobs_are_runs(self, fake: FakeKubectl) -> None:
        fake.answers("get", JOBS, says=fakes.items(fakes.job("a"), fakes.job("b")))
        assert [run.name for run in Client(kubernetes="team").runs()] == ["a", "b"]

    def test_numbers_come_from_a_copy(self, fake: FakeKubectl, monkeypatch: pytest.MonkeyPatch) -> None:
        fake.answers("get", JOBS, "digits", says=fakes.job(phase="Running"))
        fake.answers("get", "pods", says=fakes.items())
        fake.answers("get", "events", says=fakes.items())
        copied: list[list[str]] = []

        def copy(kubectl: Any, name: str, target: Path, checkpoints: list[str], *_: Any) -> Downloaded:
            copied.append(checkpoints)
            if not target.exists():
                make_run(target, steps=100)
            return Downloaded()

        monkeypatch.setattr(copying, "copy", copy)
        run = Client(kubernetes="team").run("digits")
        assert len(run.losses()) == 100
        assert "Training loss" not in run._repr_html_(), "a display does not wait for a copy"
        assert copied == [["none"]]
        assert run.checkpoint(50).step == 50
        assert run.checkpoint("final").is_final
        assert copied[1:] == [["step-000000050"], ["latest"]]


def test_on_slurm_it_submits_the_scripts_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    submitted: list[Path] = []

    def submit(file: Path, options: object, variables: object) -> str:
        submitted.append(file)
        return "4711"

    monkeypatch.setattr(scheduler, "check", lambda: None)
    monkeypatch.setattr(scheduler, "submit", submit)
    job = yaml.safe_load((ROOT / "examples/digits.yaml").read_text())
    run = Client(slurm=True).submit(job, run_dir="there")
    assert submitted[0] == Path("there/slurm/train.sh").resolve()
    assert isinstance(run._run, OnSlurm)
    assert tuple(capfd.readouterr()) == ("", "")
    assert [one.name for one in Client(slurm=True).runs()] == ["digits"]


def test_a_run_is_stopped_although_its_process_is_recorded_a_moment_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    signals: list[int] = []
    process = SimpleNamespace(send_signal=signals.append)
    answers: list[Any] = [None, None, process]
    alive: Callable[[Path], bool] = lambda path: not signals  # noqa: E731
    monkeypatch.setattr(local_platform, "parent_process", lambda path: answers.pop(0))
    monkeypatch.setattr(local_platform, "is_alive", alive)
    local_platform.OnThisMachine(tmp_path).stop(immediately=False)
    assert len(signals) == 1
