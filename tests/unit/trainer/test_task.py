"""A task: its class is found, its configuration is checked, and whatever its data is, a step sees the same samples."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

from tandem.job.tasks import Loop
from tandem.job.trainer import Trainer
from tandem_trainer.causal_lm import CausalLM
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.image_classification import ImageTask
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.strategy import Strategy
from tandem_trainer.task import Split, Task, class_named, configured, sentence, task_of
from tandem_trainer.train import examples_of, order_of, samples_of, supply_of
from tests.support.manifests import images


@dataclass
class Part:
    size: int = 1


@dataclass
class Plain:
    width: int
    parts: list[Part] = field(default_factory=list)


class Checked(BaseModel):
    width: int = Field(default=1, ge=1)


class Open(BaseModel, extra="allow"):
    width: int = 1


class Rows(Dataset[Any]):
    """The same samples as a TensorDataset, to be asked for one by one."""

    def __init__(self, tensors: TensorDataset) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: int) -> Any:
        return self._tensors[index]


class Regression(Task[Plain]):
    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def data(self, split: Split) -> Any:
        return TensorDataset(torch.arange(46.0).view(23, 2), torch.arange(23))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        losses: Tensor = model(batch[0]).square().squeeze(1)
        return losses


class Derived(Regression):
    """Has the configuration of its base."""


class Unconfigured(Regression, Task[None]):
    pass


class Modelled(Regression, Task[Checked]):  # type: ignore[misc]
    pass


class Lenient(Regression, Task[Open]):  # type: ignore[misc]
    pass


class Mean(Regression):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch).mean()


CASES: list[tuple[type[Task[Any]], dict[str, Any], list[str]]] = [
    (Regression, {"width": 3, "parts": [{"size": 2}]}, []),
    (Derived, {"width": "3"}, ['parameters.width: input should be a valid integer, not "3"']),
    (Regression, {}, ["parameters.width: a value is missing"]),
    (Regression, {"width": 3, "depth": 1}, ["parameters.depth: Plain has no parameter depth; it has width, parts"]),
    (Regression, {"width": 3, "parts": [{"sise": 2}]}, ["parameters.parts[0].sise: there is no parameter sise here"]),
    (Modelled, {"width": 0}, ["parameters.width: input should be greater than or equal to 1, not 0"]),
    (Modelled, {"with": 1}, ["parameters.with: Checked has no parameter with; it has width"]),
    (Lenient, {"anything": 1}, []),
    (Unconfigured, {}, []),
    (Unconfigured, {"width": 1}, ["parameters.width: ", "takes no parameters"]),
]


@pytest.mark.parametrize(("kind", "parameters", "words"), CASES)
def test_the_type_of_its_configuration_checks_what_a_task_is_given(
    kind: type[Task[Any]], parameters: dict[str, Any], words: list[str]
) -> None:
    config, wrong = configured(kind, parameters)
    said = "; ".join(sentence(path, message) for path, message in wrong)
    assert bool(wrong) == bool(words), said
    for word in words:
        assert word in said
    if not wrong and kind is Regression:
        assert config == Plain(3, [Part(2)])


MODULE = """
    import torch
    from tandem_trainer.task import Task

    class Half(Task):
        def model(self):
            return torch.nn.Linear(1, 1)

    class Whole(Half):
        data = loss = None

        def __init__(self, config):
            raise ValueError("no luck")

    other = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where modules of a user's lie."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "a_task.py").write_text(dedent(MODULE))
    (tmp_path / "broken_task.py").write_text("import math\nmath.nothing\n")
    (tmp_path / "unfinished_task.py").write_text("def f(:\n")
    (tmp_path / "needy_task.py").write_text("import no_such_package_at_all\n")
    yield tmp_path
    for name in ("a_task", "broken_task", "unfinished_task", "needy_task"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("no_task:A", UnusableInput, "finds no module no_task in"),
        ("needy_task:A", UnusableInput, "imports no_such_package_at_all, which is not installed"),
        ("broken_task:A", ConfigurationError, "cannot be imported: AttributeError: module 'math' has no attribute"),
        ("broken_task:A", ConfigurationError, "(broken_task.py, line 2)"),
        ("unfinished_task:A", ConfigurationError, "cannot be imported: SyntaxError: "),
        ("a_task:Hole", ConfigurationError, "no class Hole; did you mean a_task:Half?"),
        ("a_task:other", ConfigurationError, "other is not a task; derive it from tandem_trainer.task.Task"),
        ("a_task:Half", ConfigurationError, "Half does not implement data and loss"),
        ("a_task:Whole", ConfigurationError, "cannot be made: ValueError: no luck (a_task.py, line 13)"),
    ],
)
def test_what_is_no_task_is_told_in_one_sentence(
    folder: Path, name: str, kind: type[ConfigurationError], words: str
) -> None:
    with pytest.raises(kind) as told:
        task_of(Trainer.parse({"task": name}))
    assert type(told.value) is kind
    assert words in str(told.value)
    assert "\n" not in str(told.value)
    assert str(told.value).startswith("spec.trainer.task: ")


def test_the_built_in_task_is_an_ordinary_one() -> None:
    config = {"data": {"name": "digits", "start": 100, "end": 200}, "model": "baby-cnn"}
    task = task_of(Trainer.parse(images(config)))
    assert type(task) is ImageTask is class_named("tandem_trainer.image_classification:ImageTask")
    whole, start, end = samples_of(task)
    assert (len(whole), start, end) == (1442, 100, 200), "samples of a slice keep their ids"
    model, batch = task.model(), [tensor[100:120] for tensor in whole.tensors]
    torch.testing.assert_close(task.loss(model, batch).sum(), task.loss_sum(model, batch, 20))
    assert sum(map(sum, task.metrics(model, batch)["confusion"].counts)) == 20


def test_the_language_model_has_a_name_and_is_found_by_its_class_as_well() -> None:
    parameters = {"layers": 2, "width": 32, "heads": 2}
    named, by_class = (
        task_of(Trainer.parse({"task": name, "parameters": parameters}))
        for name in ("causal-lm", "tandem_trainer.causal_lm:CausalLM")
    )
    assert type(named) is type(by_class) is CausalLM
    assert named.config == by_class.config
    with pytest.raises(
        ConfigurationError, match=r"^spec\.trainer\.parameters\.depth: CausalLMConfig has no parameter depth"
    ):
        task_of(Trainer.parse({"task": "causal-lm", "parameters": {"depth": 2}}))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_step_has_the_same_samples_however_they_are_stored(ranks: int) -> None:
    """Ten in a batch: the last of an epoch has three, for which three ranks are too many."""
    loop, task = Loop(global_batch_size=10), Regression(Plain(1))
    tensors = task.data("train")
    for rank in range(ranks):
        group = Group(0, 1, 0, torch.device("cpu"))
        group.rank, group.world_size = rank, ranks
        order = order_of(loop, 0, len(tensors))
        resident, read = (
            supply_of(task, data, order, loop, Strategy(loop, group), iter(range(4)))
            for data in (tensors, Rows(tensors))
        )
        assert type(resident) is not type(read)
        for step in range(4):
            ours, theirs = resident.read(step), read.read(step)
            assert torch.equal(ours.ids, theirs.ids)
            assert ours.samples == theirs.samples
            cuts = [(0, ours.samples), *([(0, 1), (1, 2)] if ours.samples > 1 else [])]
            for start, end in cuts:
                (batch, ids), (other, other_ids) = ours.part(start, end), theirs.part(start, end)
                assert torch.equal(ids, other_ids)
                assert all(torch.equal(one, two) for one, two in zip(batch, other, strict=True))
                assert torch.equal(batch[1], ids)


def test_what_is_put_into_batches_in_its_own_way_is_not_cut_from_tensors() -> None:
    class Own(Regression):
        def collate(self, samples: list[Any]) -> Any:
            return {"all": torch.stack([one[0] for one in samples])}

    task, loop = Own(Plain(1)), Loop(global_batch_size=10)
    supply = supply_of(
        task,
        task.data("train"),
        order_of(loop, 0, 23),
        loop,
        Strategy(loop, Group(0, 1, 0, torch.device("cpu"))),
        iter([0]),
    )
    batch, ids = supply.read(0).part(3, 5)
    assert batch["all"].shape == (2, 2)
    assert torch.equal(batch["all"][:, 0], 2.0 * ids)


def test_a_batch_to_try_a_model_with_has_the_first_samples_of_the_slice_however_they_are_stored() -> None:
    class Counting(Rows):
        asked = 0

        def __getitem__(self, index: int) -> Any:
            self.asked += 1
            return super().__getitem__(index)

    task = Regression(Plain(1))
    tensors = task.data("train")
    rows = Counting(tensors)
    for data in (tensors, rows):
        assert examples_of(task, data, 20, 23, 5)[1].tolist() == [20, 21, 22, 20, 21]
        assert examples_of(task, data, 3, 23, 2)[1].tolist() == [3, 4]
        assert examples_of(task, data, 0, 23, 40)[1].tolist() == [*range(16), *range(16), *range(8)]
    assert rows.asked == 3 + 2 + 16, "each once, and no more than are different"


def test_a_mean_of_losses_is_refused_because_its_gradient_would_be_too_small() -> None:
    task = Mean(Plain(1))
    batch = [torch.ones(4, 2), torch.ones(4)]
    with pytest.raises(ConfigurationError, match=r"Mean.loss returned a value of the shape \(\) for 4 samples; .*none"):
        task.loss_sum(task.model(), batch, 4)


def test_data_without_numbers_is_refused() -> None:
    class Empty(Regression):
        def data(self, split: Split) -> Any:
            return Subset(super().data(split), range(0))

    class Streaming(Regression):
        def data(self, split: Split) -> Any:
            return iter(range(3))

    with pytest.raises(ConfigurationError, match="is empty"):
        samples_of(Empty(Plain(1)))
    with pytest.raises(ConfigurationError, match="which has no __len__ and __getitem__"):
        samples_of(Streaming(Plain(1)))
