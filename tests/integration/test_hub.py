"""A model and a data set are read from a hub by its real clients: again if it is busy, and the same commit later."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import DatasetCommit
from tests.support import manifests
from tests.support.hub import Hub, Repository, environment, files_of, local_hub
from tests.support.language import pretrained
from tests.support.processes import tandem
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.timeout(300), pytest.mark.full("trainer", "cli")]

MODEL, DATA = "org/small", "org/talk"
WORDS = [{"text": f"after {number} comes {number + 1}, and then {number + 2}. " * 4} for number in range(40)]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a model and a data set, for the processes of this test."""
    lines = "".join(json.dumps(one) + "\n" for one in WORDS)
    with local_hub() as made:
        made.repositories[MODEL] = Repository(True, {"main": files_of(pretrained(tmp_path / "model"))})
        made.repositories[f"datasets/{DATA}"] = Repository(True, {"main": {"data/train.jsonl": lines.encode()}})
        here = environment(made) | {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        for name, value in here.items():
            monkeypatch.setenv(name, value)
        yield made


def job(path: Path, steps: int, **parameters: Any) -> RunDir:
    parameters = {"pretrained": MODEL, "length": 64, "data": {"dataset": {"id": DATA}}} | parameters
    trainer = {"task": "causal-lm", "parameters": parameters, "loop": {"maxSteps": steps, "globalBatchSize": 4}}
    return manifests.run_directory(path, manifests.job("test", trainer=trainer))


def trained(rundir: RunDir, ranks: int = 1) -> tuple[list[int], str]:
    rundir.done_file.unlink(missing_ok=True)
    # Not warm: the clients read their settings when they are imported.
    with Ranks(rundir, ranks, cold=True) as group:
        return group.finish(200)


def test_a_run_reads_both_though_the_hub_is_busy_and_keeps_to_the_commit_it_has_begun_with(
    tmp_path: Path, hub: Hub
) -> None:
    repository = hub.repositories[MODEL]
    repository.remember()
    (commit,) = repository.history
    hub.failures += [(f"/api/models/{MODEL}", 503), ("config.json", 503), ("train.jsonl", 503)]
    rundir = job(tmp_path / "run", 3)
    codes, output = trained(rundir, 2)
    assert codes == [0, 0], output
    assert not hub.failures
    (record,) = rundir.generation_records()
    assert (record.origin.path, record.origin.revision) == (MODEL, commit)
    talk = hub.repositories[f"datasets/{DATA}"]
    (of_data,) = talk.history
    assert record.datasets == [DatasetCommit(id=DATA, commit=of_data)]
    shown = tandem("checkpoints", "show", str(rundir.path), "final")
    told = f"from the weights of {MODEL} at commit {commit}; data of {DATA} at commit {of_data}"
    assert told in " ".join(shown.stdout.split())

    # Somebody pushes another tokenizer and other data, and the cache is another one.
    repository.branches["main"] = repository.branches["main"] | {"tokenizer.json": b"{}"}
    talk.branches["main"] = {"data/train.jsonl": b'{"text": "something else"}\n' * 90}
    hub.requests.clear()
    rundir = job(rundir.path, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path / "another-cache"))
        codes, output = trained(rundir)
    assert codes == [0], output
    for name, known in ((MODEL, commit), (DATA, of_data)):
        asked = [one for one in hub.requests if f"/{name}/resolve/" in one]
        assert asked
        assert all(f"/resolve/{known}/" in one for one in asked), asked
    assert rundir.generation_records()[-1].datasets == record.datasets
    shown = tandem("checkpoints", "show", str(rundir.path), "final")
    assert shown.stdout.count(of_data) == 1, "it is told where it begins"


READ = """
from tandem.job.causal_lm import TextSource
from tandem_trainer.failure import UnusableInput
from tandem_trainer.language.pretrained import Pretrained
from tandem_trainer.language.reading import read_rows
try:
    Pretrained("org/small").pinned().config()
    list(read_rows(TextSource.model_validate({"dataset": {"id": "org/nothing"}}), None))
except UnusableInput as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        pytest.param({}, "data.dataset: org/nothing (train) cannot be loaded: the hub does not have it", id="no data"),
        pytest.param({"HF_TOKEN": ""}, f"pretrained: {MODEL} is no folder here, and the hub does not have", id="token"),
        pytest.param({"HF_HUB_OFFLINE": "1"}, "and the hub could not be asked for it", id="offline"),
    ],
)
def test_what_keeps_them_away_is_told_in_one_sentence(hub: Hub, variables: dict[str, str], words: str) -> None:
    told = subprocess.run([sys.executable, "-c", READ], env=os.environ | variables, capture_output=True, text=True)
    assert words in told.stdout, told.stdout + told.stderr
    assert told.stdout.count("\n") == 1
