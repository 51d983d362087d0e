"""Values that are probably secrets: a warning, and nothing of them where people look."""

from pathlib import Path

import pytest

from tandem.job import DistributedTrainingJob
from tandem.launch import environment, evaluator_environment
from tandem.rundir.layout import RunDir
from tandem.secrecy import HIDDEN, hidden, looks_secret
from tandem_cli.job_words import warnings
from tandem_cli.kubernetes.references import references
from tandem_coordinator.prerequisites import Site, here, unmet
from tandem_coordinator.prerequisites.site import Machine
from tests.support import manifests

REFERENCE = {"secretKeyRef": {"name": "hub", "key": "token"}}


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("WANDB_API_KEY", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("apikey", True),
        ("DB_PASSWORD", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("MONKEY", False),
        ("OMP_NUM_THREADS", False),
        ("KEYBOARD", False),
    ],
)
def test_what_looks_like_a_secret(name: str, secret: bool) -> None:
    assert looks_secret(name) == secret


def test_a_manifest_is_shown_without_them() -> None:
    env = [{"name": "HF_TOKEN", "value": "hf_abc"}, {"name": "LEVEL", "value": "3"}]
    shown = hidden({"spec": {"trainer": {"env": env}}})
    assert shown["spec"]["trainer"]["env"] == [{"name": "HF_TOKEN", "value": HIDDEN}, env[1]]
    assert env[0]["value"] == "hf_abc"


def test_what_comes_from_elsewhere_is_no_part_of_what_is_written() -> None:
    script = {"command": ["train.py"], "env": [{"name": "HF_TOKEN", "valueFrom": REFERENCE}]}
    job = manifests.job("digits", trainer=script)
    assert "HF_TOKEN" not in environment(job, Path("run"), "worker-0")
    assert job.spec.trainer.env[0].dump()["valueFrom"]["secretKeyRef"]["name"] == "hub"


def test_on_a_laptop_the_value_is_the_users_own_or_its_lack_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def job(optional: bool) -> DistributedTrainingJob:
        source = {"secretKeyRef": {"name": "hub", "key": "token", "optional": optional}}
        script = {"command": ["train.py"], "env": [{"name": "HF_TOKEN", "valueFrom": source}]}
        return manifests.job("digits", trainer=script)

    def lacks(optional: bool) -> list[str]:
        wanted = job(optional)
        Path("train.py").touch()
        return [one.message for one in unmet(wanted, here(wanted, RunDir(tmp_path / "run"), 2, None))]

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert lacks(optional=True) == []
    (why,) = lacks(optional=False)
    assert "set HF_TOKEN and try again" in why
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    assert lacks(optional=False) == []


def test_validate_warns_of_them() -> None:
    script = {"command": ["train.py"], "env": [{"name": "HF_TOKEN", "value": "hf_abc"}, {"name": "A", "value": "b"}]}
    (warning,) = warnings(manifests.job("digits", trainer=script))
    assert "spec.trainer.env[0].value: HF_TOKEN looks like a secret" in warning
    assert "hf_abc" not in warning


def test_variables_of_the_evaluators_are_looked_at_like_those_of_the_trainer() -> None:
    env = [{"name": "HF_TOKEN", "valueFrom": REFERENCE}, {"name": "API_KEY", "value": "abc"}]
    job = manifests.job("digits", trainer={"command": ["train.py"]}, evaluators={"command": ["score.py"], "env": env})
    assert "HF_TOKEN" not in evaluator_environment(job, Path("run"), "evaluator-0")
    assert [one.name for one in references(job)] == ["hub"]
    (warning,) = warnings(job)
    assert warning.startswith("spec.evaluators.env[1].value: API_KEY looks like a secret")
    lacks = unmet(job, Site(RunDir("run"), Machine(cores=2), variables={}))
    assert any("spec.evaluators.env: HF_TOKEN comes from a Secret" in one.message for one in lacks)
