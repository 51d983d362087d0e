"""Where a job is tracked."""

from pathlib import Path

import pytest

from tandem.job.tracking import FILE, FOLDER, URI, Mlflow, tracking_uri, without_password
from tandem.rundir.durable import replace_json

SERVER, OTHER = "https://mlflow.example", "http://other:5000"


@pytest.mark.parametrize(
    ("given", "variable", "noted", "found"),
    [
        (SERVER, OTHER, OTHER, SERVER),
        (None, OTHER, SERVER, OTHER),
        (None, None, SERVER, SERVER),
        (None, None, None, "sqlite:///{parent}/mlflow.db"),
        (None, None, "sqlite:////before/it/was/moved/mlflow.db", "sqlite:///{parent}/mlflow.db"),
    ],
)
def test_the_manifest_goes_before_the_variable_and_that_before_where_the_run_was_sent_already(
    tmp_path: Path, given: str | None, variable: str | None, noted: str | None, found: str
) -> None:
    if noted:
        (tmp_path / "run" / FOLDER).mkdir(parents=True)
        replace_json(tmp_path / "run" / FOLDER / FILE, {"uri": noted})
    environment = {URI: variable} if variable else {}
    assert tracking_uri(Mlflow(uri=given), tmp_path / "run", environment) == found.format(parent=tmp_path)


def test_on_a_cluster_there_is_no_local_store(tmp_path: Path) -> None:
    assert tracking_uri(Mlflow(), tmp_path / "run", {}, on_cluster=True) is None


def test_passwords_are_not_shown() -> None:
    assert without_password("https://me:secret@mlflow.example/x") == "https://mlflow.example/x"
    assert without_password("sqlite:////data/mlflow.db") == "sqlite:////data/mlflow.db"
