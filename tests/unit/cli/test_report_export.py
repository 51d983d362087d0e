"""The numbers of a run as CSV files and as TensorBoard reads them."""

import csv
import warnings
from pathlib import Path

import pytest

from tandem.errors import UserError
from tandem_cli.commands.export import TableFormat, export
from tandem_cli.report.reading import read
from tandem_cli.report.run import RunData
from tandem_cli.report.run_export import _points, write_csv, write_tensorboard
from tests.support.worlds.simulated_run import add_base, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return read(make_run(tmp_path_factory.mktemp("run"), steps=100, every=20, evaluation_seconds=0.05))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_kind_of_thing_has_a_file_with_all_of_it(run: RunData, tmp_path: Path) -> None:
    for _ in range(2):
        written = {path.name: rows(path) for path in write_csv(run, tmp_path / "csv")}
    assert {path.name for path in (tmp_path / "csv").iterdir()} == {*written}
    steps, evaluations = written["steps.csv"], written["evaluations.csv"]
    assert [int(row["step"]) for row in steps] == run.model_steps.step.tolist()
    assert [float(row["loss"]) for row in steps] == pytest.approx(run.model_steps.loss.tolist())
    assert len(written["throughput.csv"]) == len(run.rates)
    assert len(written["generations.csv"]) == len(run.generations)
    assert {row["process"] for row in written["processes.csv"]} >= {use.name for use in run.uses}
    assert [row["checkpoint"] for row in evaluations if row["best"] == "1"] == [run.best.name]
    assert not [cell for rows_ in written.values() for row in rows_ for cell in row.values() if cell == "nan"]


def test_what_a_script_logs_beside_its_loss_is_a_column(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=100)
    with (path / "log/train-g000001.jsonl").open("a") as log:
        print('{"kind": "values", "time": 1.0, "step": 7, "values": {"perplexity": 12.5}}', file=log)
    found = read(path)
    write_csv(found, tmp_path / "csv")
    steps = rows(tmp_path / "csv/steps.csv")
    assert {row["step"]: row["perplexity"] for row in steps if row["perplexity"]} == {"7": "12.5"}
    assert ("training/perplexity", 12.5, 7) in [(tag, value, step) for tag, value, step, _ in _points(found)]


def test_scores_on_validation_data_have_columns_of_their_own(tmp_path: Path) -> None:
    found = read(make_run(tmp_path / "run", steps=100, every=50, holds_out=True))
    write_csv(found, tmp_path / "csv")
    first, last = rows(tmp_path / "csv/evaluations.csv")
    assert [float(row["validationAccuracy"]) for row in (first, last)] == pytest.approx([0.7, 0.5])
    assert (first["validationLoss"], first["validationMacroF1"]) == ("0.5", "0.5")
    assert float(first["accuracy"]) < float(last["accuracy"])
    assert (first["best"], last["best"]) == ("1", "0")


def test_without_validation_data_there_are_none(run: RunData, tmp_path: Path) -> None:
    write_csv(run, tmp_path / "csv")
    assert "validation" not in (tmp_path / "csv/evaluations.csv").read_text()


@pytest.fixture
def fine_tuned(tmp_path: Path) -> RunData:
    """A run with a base model."""
    path = make_run(tmp_path / "run", steps=100, every=50)
    add_base(path, {"accuracy": 0.25, "loss": 2.0})
    return read(path)


def test_the_base_model_is_a_row_before_the_checkpoints(fine_tuned: RunData, tmp_path: Path) -> None:
    write_csv(fine_tuned, tmp_path / "csv")
    base, *others = rows(tmp_path / "csv/evaluations.csv")
    assert {name: base[name] for name in ("checkpoint", "step", "counts", "best")} == {
        "checkpoint": "base", "step": "0", "counts": "0", "best": "0"
    }  # fmt: skip
    assert (base["accuracy"], base["loss"]) == ("0.25", "2.0")
    assert [(row["step"], row["counts"]) for row in others] == [("50", "1"), ("100", "1")]


def test_tensorboard_draws_the_base_model_beside_the_checkpoints(fine_tuned: RunData, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
    count = write_tensorboard(fine_tuned, tmp_path / "log")
    found = EventMultiplexer(size_guidance={"tensors": 0}).AddRunsFromDirectory(str(tmp_path / "log")).Reload()
    curves = {
        run: [(event.step, event.tensor_proto.float_val[0]) for event in found.Tensors(run, "evaluation/accuracy")]
        for run in found.Runs()
    }
    assert curves["base-model"] == [(0, 0.25), (50, 0.25), (100, 0.25)]
    assert [step for step, _ in curves["."]] == [50, 100]
    tags = [(run, tag) for run, known in found.Runs().items() for tag in known["tensors"]]
    assert sum(len(found.Tensors(run, tag)) for run, tag in tags) == count


def test_without_a_base_model_there_is_nothing_of_one(run: RunData, tmp_path: Path) -> None:
    write_csv(run, tmp_path / "csv")
    assert "base" not in (tmp_path / "csv/evaluations.csv").read_text()
    write_tensorboard(run, tmp_path / "log")
    assert not (tmp_path / "log/base-model").exists()


def test_tensorboard_reads_steps_scores_and_times(run: RunData, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    count = write_tensorboard(run, tmp_path / "log")
    found = EventAccumulator(str(tmp_path / "log"), size_guidance={"tensors": 0})
    found.Reload()
    tags = found.Tags()["tensors"]
    assert {"training/loss", "training/samplesPerSecond", "evaluation/accuracy"} <= {*tags}
    assert sum(len(found.Tensors(tag)) for tag in tags) == count
    losses = found.Tensors("training/loss")
    assert [event.step for event in losses] == run.model_steps.step.tolist()
    assert [event.wall_time for event in losses] == pytest.approx(run.model_steps.time.tolist())
    assert [event.tensor_proto.float_val[0] for event in losses] == pytest.approx(run.model_steps.loss.tolist())


def test_tensorboard_has_scores_on_validation_data(tmp_path: Path) -> None:
    found = read(make_run(tmp_path / "run", steps=100, every=50, holds_out=True))
    told = [point for point in _points(found) if point[0] == "validation/accuracy"]
    assert [(step, value) for _, value, step, _ in told] == [(50, pytest.approx(0.7)), (100, pytest.approx(0.5))]


def test_a_folder_with_something_in_it_is_not_mixed_with_a_log(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=20, every=20, evaluation_seconds=0.05)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "events.out.tfevents.1").touch()
    with pytest.raises(UserError, match="mine is not empty"):
        export(path, TableFormat.TENSORBOARD, tmp_path / "mine")
    for _ in range(2):
        export(path, TableFormat.TENSORBOARD, None)
    assert len(list((path / "tensorboard").iterdir())) == 1, "a second export takes the place of the first"
