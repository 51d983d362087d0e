"""Values that are probably secrets: a warning, and nothing of them where people look."""

from pathlib import Path

import pytest

from tandem.job.resource import DistributedTrainingJob
from tandem.job.secrecy import HIDDEN, hide_secrets, looks_secret
from tandem.processes.launch import environment, evaluator_environment
from tandem.rundir.layout import RunDir
from tandem_cli.job_words import summary, warnings
from tandem_cli.kubernetes.references import references
from tandem_coordinator.prerequisites import Site, local_site, unmet
from tandem_coordinator.prerequisites.site import Machine
from tandem_coordinator.tracking.mlflow_run import parameters
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
        ("MYSQL_PWD", True),
        ("GITHUB_PAT", True),
        ("PWD", False),
        ("OLDPWD", False),
        ("PATH", False),
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
    shown = hide_secrets({"spec": {"trainer": {"env": env}}})
    assert shown["spec"]["trainer"]["env"] == [{"name": "HF_TOKEN", "value": HIDDEN}, env[1]]
    assert env[0]["value"] == "hf_abc"


SECRETS = [
    ("https://ci:s3cr3t@index.example/simple", "https://ci:(hidden)@index.example/simple"),
    ("postgres://u:s3cr3t@db:5432/x?y=1", "postgres://u:(hidden)@db:5432/x?y=1"),
    ("http://:s3cr3t@proxy:3128", "http://:(hidden)@proxy:3128"),
    ("hf_abcdefghijklmnopqrs3cr3t", "(hidden)"),
    ("use ghp_abcdefghijklmnops3cr3t now", "use (hidden) now"),
    ("-----BEGIN RSA PRIVATE KEY-----\ns3cr3t", "(hidden)"),
]
PLAIN = ["https://me@index.example/simple", "s3://bucket/a:b", "localhost:7070", "hf_short", "a:b@c", "$HF_TOKEN"]


@pytest.mark.parametrize(("value", "shown"), SECRETS)
def test_values_are_judged_as_well_as_names(value: str, shown: str) -> None:
    assert hide_secrets({"env": [{"name": "LEVEL", "value": value}]}) == {"env": [{"name": "LEVEL", "value": shown}]}
    (warning,) = warnings(
        manifests.job("digits", trainer={"command": ["a.py"], "env": [{"name": "A", "value": value}]})
    )
    assert warning.startswith("spec.trainer.env[0].value: A looks like a secret")
    assert "s3cr3t" not in warning


@pytest.mark.parametrize("value", PLAIN)
def test_addresses_and_words_that_hold_none_stay(value: str) -> None:
    assert hide_secrets([value, {"value": value, "name": "A"}]) == [value, {"value": value, "name": "A"}]


def test_options_of_commands_are_judged_by_their_names() -> None:
    command = ["python", "t.py", "--api-key=s3cr3t", "--token", "s3cr3t", "--lr=1", "--hf-token", "--keep", "3"]
    shown = ["python", "t.py", "--api-key=(hidden)", "--token", "(hidden)", "--lr=1", "--hf-token", "--keep", "3"]
    assert hide_secrets({"command": command})["command"] == shown
    found = warnings(manifests.job("digits", trainer={"command": command}))
    assert [one.partition(" looks")[0] for one in found] == [f"spec.trainer.command[{at}]: this" for at in (2, 4)]
    text = ["--pad-token", "<pad>", "--eos_token=</s>", "--token-limit", "512", "--key", "label", "--token-ids=3"]
    assert hide_secrets(text) == text, "tokens of a text, keys of a record"


def test_options_in_the_line_of_a_shell_are_judged_too() -> None:
    job = manifests.job("a", trainer={"command": ["bash", "-c", "python t.py --api-key s3cr3t --password=s3cr3t -v"]})
    assert "python t.py --api-key (hidden) --password=(hidden) -v" in summary(job)
    (warning,) = warnings(job)
    assert warning.startswith("spec.trainer.command[2]: this looks like a secret")


def test_nothing_of_them_is_sent_to_mlflow() -> None:
    script = {"command": ["t.py", "--api-key=s3cr3t"], "args": ["https://a:s3cr3t@b"]}
    assert "s3cr3t" not in str(parameters(manifests.job("digits", trainer=script)))


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
        return [one.message for one in unmet(wanted, local_site(wanted, RunDir(tmp_path / "run"), 2, None))]

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
