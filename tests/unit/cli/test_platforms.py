"""What the platforms do alike."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.errors import UserError
from tandem_cli.kubernetes import platform
from tandem_cli.runs import find_run, in_folder
from tandem_cli.slurm.platform import OnSlurm
from tandem_launcher.slurm import jobs
from tandem_launcher.slurm.jobs import Submission
from tests.support import fake_kubectl as fakes
from tests.support.fake_kubectl import FakeKubectl

JOBS = "distributedtrainingjobs.tandem.dev"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
    monkeypatch.chdir(tmp_path)
    made = FakeKubectl(tmp_path)
    monkeypatch.setenv("PATH", made.path)
    return made


def test_a_job_on_kubernetes_is_stopped_once_it_has_no_pods(fake: FakeKubectl, monkeypatch: pytest.MonkeyPatch) -> None:
    after = [
        lambda: fake.answers("get", JOBS, "digits", says=fakes.job(phase="Draining")),
        lambda: fake.answers(
            *("get", JOBS, "digits"),
            says=fakes.job(phase="Suspended", latestCheckpoint={"name": "step-1200", "step": 1200, "generation": 1}),
        ),
        lambda: fake.answers("get", "pods", says={"items": []}),
    ]
    monkeypatch.setattr(platform, "time", SimpleNamespace(sleep=lambda _: after.pop(0)()))
    fake.answers("get", JOBS, "digits", says=fakes.job(phase="Running"))
    fake.answers("get", "pods", says={"items": [fakes.pod("worker", 0)]})
    fake.answers("patch", JOBS, "digits", says="patched")
    assert find_run("digits", "team").stop(immediately=False) == (
        "digits is suspended; saved at step 1,200. To resume it: kubectl patch dtj digits --type=merge "
        """-p '{"spec":{"runPolicy":{"suspend":false}}}' -n team"""
    )
    assert not after
    (patched,) = [call.words for call in fake.asked if "patch" in call.words]
    assert '{"spec":{"runPolicy":{"suspend":true}}}' in patched


@pytest.mark.parametrize("phase", ["Suspended", "Succeeded", "Failed"])
def test_what_does_not_run_is_not_stopped(fake: FakeKubectl, phase: str) -> None:
    fake.answers("get", JOBS, "digits", says=fakes.job(phase=phase))
    with pytest.raises(UserError, match=rf"digits is not running \({phase}\)"):
        find_run("digits", "team").stop(immediately=False)


def test_a_job_on_kubernetes_always_saves(fake: FakeKubectl) -> None:
    with pytest.raises(UserError, match="--now is for local runs and runs on SLURM"):
        find_run("digits", "team").stop(immediately=True)
    assert not fake.asked


def test_a_job_on_kubernetes_is_scaled_by_kubectl(fake: FakeKubectl) -> None:
    fake.answers("get", JOBS, "digits", says=fakes.job(phase="Running"))
    fake.answers("scale", says="scaled")
    assert find_run("digits", "team").scale(3) == "digits scaled to 3 workers, if the cluster has room"
    (scaled,) = [call.words for call in fake.asked if "scale" in call.words]
    assert [f"{JOBS}/digits", "--replicas=3"] == [word for word in scaled if "digits" in word or "replicas" in word]
    fake.answers("get", JOBS, "digits", says=fakes.job(phase="Succeeded"))
    with pytest.raises(UserError, match=r"digits has ended \(Succeeded\)"):
        find_run("digits", "team").scale(3)


def test_a_run_of_this_machine_says_how_it_gets_other_workers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tandem stop .*, then tandem run with --set workers.replicas=3"):
        in_folder(tmp_path).scale(3)
    jobs.record_submission(tmp_path, Submission("4711"))
    with pytest.raises(UserError, match="is not running; submit it with --set workers"):
        in_folder(tmp_path).scale(3)


def test_a_run_that_slurm_has_is_one_on_slurm(tmp_path: Path) -> None:
    assert not isinstance(in_folder(tmp_path), OnSlurm)
    jobs.record_submission(tmp_path, Submission("4711"))
    assert isinstance(in_folder(tmp_path), OnSlurm)
