"""Manifests of the version before: `config` is read, with a warning, and `tandem validate --fix` rewrites it."""

import json
from pathlib import Path

import pytest
import yaml

from tandem.errors import UserError
from tandem.job.manifest.reading import apply_overrides, parse_job, read_job
from tandem.job.manifest.rewriting import rewritten
from tandem.job.manifest.source import parse
from tandem.job.tasks import Loop
from tandem_cli.job_words import warnings
from tests.support import EXAMPLES

HEAD = "apiVersion: tandem.dev/v1alpha1\nkind: DistributedTrainingJob\nmetadata: {name: digits}\n"
TRAINER = HEAD + "spec:\n  trainer:\n    task: image-classification\n"
BLOCK = """\
    config:  # what is trained
      # how long
      epochs: 12   # long

      # the model
      model: baby-cnn
      globalBatchSize: 64
      # the data
      data:
        name: digits
      optimizer:
        # slow
        learningRate: 1e-3
    # of the workers
    env: []
"""
REWRITTEN = """\
    parameters:  # what is trained

      # the model
      model: baby-cnn
      # the data
      data:
        name: digits
    loop:
      # how long
      epochs: 12   # long
      globalBatchSize: 64
      optimizer:
        # slow
        learningRate: 1e-3
    # of the workers
    env: []
"""


def test_fields_go_into_two_groups_and_comments_stay_with_them() -> None:
    assert rewritten(TRAINER + BLOCK, "a.yaml") == TRAINER + REWRITTEN


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("    config: {model: cnn, epochs: 3}\n", "    parameters: {model: cnn}\n    loop: {epochs: 3}\n"),
        ("    config: {epochs: 3}\n    env: []\n", "    loop: {epochs: 3}\n    env: []\n"),
        ("    config:\n      epochs: 3", "    loop:\n      epochs: 3"),
        ("    config: {}\n", "    loop: {}\n"),
        ("    config:\n      model: cnn\n  workers: {}\n", "    parameters:\n      model: cnn\n  workers: {}\n"),
        (
            "    config:\n      epochs: 3\n      model: cnn",
            "    parameters:\n      model: cnn\n    loop:\n      epochs: 3",
        ),
        (
            "    'config':\n      epochs: 3\n      model: cnn\n",
            "    'parameters':\n      model: cnn\n    'loop':\n      epochs: 3\n",
        ),
        ("    config: {epochs: 3}  # long\n", "    loop: {epochs: 3}  # long\n"),
        (
            "    config: {initialWeights: 'a #b'}\n    # of the workers\n",
            "    loop: {initialWeights: 'a #b'}\n    # of the workers\n",
        ),
    ],
)
def test_each_form_of_a_group(written: str, expected: str) -> None:
    assert rewritten(TRAINER + written, "a.yaml") == TRAINER + expected


def test_a_manifest_in_one_line() -> None:
    line = "spec: {trainer: {task: image-classification, config: {epochs: 3, model: cnn}, env: []}}\n"
    assert "parameters: {model: cnn}, loop: {epochs: 3}, env: []" in rewritten(HEAD + line, "a.yaml")


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("config", [{"epochs": 3, "model": "cnn", "data": {"name": "digits"}}, {"model": "cnn"}, {}])
def test_json_stays_json(config: dict[str, object], indent: int | None) -> None:
    data = yaml.safe_load(TRAINER)
    data["spec"]["trainer"] |= {"config": config, "env": []}
    trainer = json.loads(rewritten(json.dumps(data, indent=indent), "a.json"))["spec"]["trainer"]
    groups = {name: trainer[name] for name in ("parameters", "loop") if name in trainer}
    assert {name: value for group in groups.values() for name, value in group.items()} == config
    assert list(trainer) == ["task", *groups, "env"]


def test_a_merged_trainer_is_refused() -> None:
    merged = HEAD + "spec:\n  <<: {trainer: {task: image-classification, config: {epochs: 3}}}\n"
    with pytest.raises(UserError, match="a field without a value, and is not rewritten; move its fields"):
        rewritten(merged, "a.yaml")


@pytest.mark.parametrize(
    "written",
    [
        "    config:\n      <<: {epochs: 3}\n      model: cnn\n",
        "    config: &all\n      optimizer: &slow {learningRate: 1e-4}\n      data: {name: digits}\n"
        "    env: [{name: A, value: b}]\n  workers: {template: {x: *all}}\n",
        "    config: {epochs: 3, # long\n      model: cnn}\n",
        "    config: {epochs: 3,# long\n      model: cnn}\n",
        "    config:  # what is trained\n      {epochs: 3}\n",
        "    config:\n      model:\n      epochs: 3\n",
        "    <<: {config: {epochs: 3}}\n",
    ],
)
def test_what_only_a_person_can_resolve_is_refused(written: str) -> None:
    assert parse_job(parse((TRAINER + written).encode(), "a.yaml")).spec.trainer.config is not None
    with pytest.raises(UserError, match="a field without a value, and is not rewritten; move its fields"):
        rewritten(TRAINER + written, "a.yaml")


def test_both_forms_mean_the_same_job_and_only_the_old_one_warns(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(TRAINER + BLOCK)
    (tmp_path / "new.yaml").write_text(TRAINER + REWRITTEN)
    old, new = read_job(tmp_path / "old.yaml"), read_job(tmp_path / "new.yaml")
    fields = set(Loop.model_fields)
    old_loop, new_loop = (job.spec.trainer.settings_of_loop.model_dump(include=fields) for job in (old, new))
    assert old_loop == new_loop | {"rewindOn": "Spikes"}
    assert old.spec.trainer.images == new.spec.trainer.images
    assert old.spec.trainer.rewind_on == new.spec.trainer.rewind_on == "Spikes"
    assert [warning for warning in warnings(old) if "config is deprecated" in warning]
    assert warnings(new) == []


def test_an_older_job_writes_back_what_an_older_version_reads() -> None:
    job = parse_job(parse((TRAINER + BLOCK).encode(), "a.yaml"))
    trainer = job.dump_brief()["spec"]["trainer"]
    assert trainer["config"]["model"] == "baby-cnn"
    assert {"loop", "parameters"} & set(trainer) == set()
    assert "rewindOn" not in trainer["config"]


@pytest.mark.parametrize("loop", ["config", "loop"])
def test_both_forms_rewind_on_spikes_unless_they_say_otherwise(loop: str) -> None:
    text = TRAINER + f"    {loop}: {{rewindOn: NotFinite}}\n"
    assert parse_job(parse(text.encode(), "a.yaml")).spec.trainer.rewind_on == "NotFinite"
    assert parse_job(parse(f"{TRAINER}    {loop}: {{}}\n".encode(), "a.yaml")).spec.trainer.rewind_on == "Spikes"


@pytest.mark.parametrize(
    ("manifest", "setting", "place"),
    [
        (BLOCK, "trainer.loop.epochs=7", ("config", "epochs")),
        (BLOCK, "trainer.parameters.data.name=mnist", ("config", "data", "name")),
        (REWRITTEN, "trainer.config.epochs=7", ("loop", "epochs")),
        (REWRITTEN, "trainer.config.model=cnn", ("parameters", "model")),
    ],
)
def test_a_setting_of_one_form_reaches_a_manifest_of_the_other(
    manifest: str, setting: str, place: tuple[str, ...]
) -> None:
    data = apply_overrides(yaml.safe_load(TRAINER + manifest), [setting])
    value = data["spec"]["trainer"]
    for part in place:
        value = value[part]
    assert str(value) == setting.partition("=")[2]


def test_a_setting_reaches_the_loop_beside_an_empty_config() -> None:
    source = parse(f"{TRAINER}    config:\n    loop: {{epochs: 3}}\n".encode(), "a.yaml")
    assert parse_job(source, ["trainer.loop.epochs=7"]).spec.trainer.settings_of_loop.epochs == 7


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_no_example_has_the_old_form(example: Path) -> None:
    assert read_job(example).spec.trainer.config is None
