"""State of any shape goes into JSON and tensors, and comes back as it was."""

import json
import math
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tandem.rundir.checkpoint import Broken
from tandem_trainer.checkpoint.state import CheckpointMismatch, join, put_back, split
from tandem_trainer.checkpoint.train_state import TrainState

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
states = st.recursive(
    plain,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=20,
)


def there_and_back(state: object) -> Any:
    tree, tensors = split("state", state)
    return join(json.loads(json.dumps(tree, allow_nan=False)), tensors)


class Sums(NamedTuple):
    """As a script may have it."""

    first: torch.Tensor
    count: int


@given(states)
def test_what_is_split_is_joined_as_it_was(state: object) -> None:
    found = there_and_back(state)
    assert found == state
    assert type(found) is type(state)


def test_tensors_and_arrays_travel_beside_the_json_under_names_of_their_own() -> None:
    state = {"a/b": torch.ones(2), "a": {"b": torch.zeros(3, dtype=torch.int64)}, "c": np.arange(4.0)}
    tree, tensors = split("mine", state)
    assert sorted(tensors) == ["mine/a/b", "mine/a/b'", "mine/c"]
    found = join(tree, tensors)
    assert torch.equal(found["a/b"], torch.ones(2))
    assert torch.equal(found["a"]["b"], torch.zeros(3, dtype=torch.int64))
    assert isinstance(found["c"], np.ndarray)
    np.testing.assert_array_equal(found["c"], np.arange(4.0))


def test_tensors_come_back_to_a_device_of_the_kind_they_were_on() -> None:
    meta = torch.device("meta")
    state = {"there": torch.ones(2, device=meta), "here": torch.ones(3)}
    tree, tensors = split("mine", state)
    tensors = {name: torch.ones(tensor.shape) for name, tensor in tensors.items()}
    found = join(json.loads(json.dumps(tree)), tensors, meta)
    assert (found["there"].device, found["here"].device.type) == (meta, "cpu")
    assert join(tree, tensors)["there"].device.type == "cpu"


def test_what_is_joined_is_a_copy() -> None:
    tree, tensors = split("mine", {"a": torch.zeros(2), "b": np.zeros(2)})
    found = join(tree, tensors)
    found["a"] += 1
    found["b"] += 1
    assert all(not tensor.any() for tensor in tensors.values())


def test_numbers_that_json_does_not_know() -> None:
    found = there_and_back([math.inf, -math.inf, math.nan, np.float32(0.5), np.int64(3)])
    assert found[:2] == [math.inf, -math.inf]
    assert math.isnan(found[2])
    assert found[3:] == [0.5, 3]


@pytest.mark.parametrize("state", [{"at": object()}, {"at": b"bytes"}, {"at": {1, 2}}])
def test_what_cannot_be_held_is_named(state: object) -> None:
    with pytest.raises(TypeError, match=r"mine/at is a \w+, which a checkpoint cannot hold"):
        split("mine", state)


def test_state_that_holds_itself_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(TypeError, match="does it hold itself"):
        split("mine", state)


@pytest.mark.parametrize(
    "tree",
    [{"tensor": "gone"}, {"what": 1}, {"dict": 3}, {"a": 1, "b": 2}, {"pairs": [[1]]}, {"number": "seven"}, {}],
)
def test_a_tree_that_is_none_is_broken(tree: object) -> None:
    with pytest.raises(Broken, match="is inconsistent"):
        join(tree, {})


def test_what_a_script_knows_by_another_name_is_put_back_too() -> None:
    ema, table, seen, weight = torch.zeros(2), np.zeros(3), [torch.zeros(1)], nn.Parameter(torch.zeros(2))
    inner: defaultdict[str, Any] = defaultdict(list, mean=ema)
    into: dict[str, Any] = {"gone": 1, "inner": inner, "table": table, "seen": seen, "sums": Sums(weight, 0), "n": 1}
    first = seen[0]
    saved = {
        "inner": {"mean": torch.ones(2), "new": torch.ones(5)},
        "table": np.ones(3),
        "seen": [torch.ones(1), 7],
        "sums": Sums(torch.ones(2), 4),
        "n": 2,
    }
    put_back(into, there_and_back(saved))
    assert list(into) == ["inner", "table", "seen", "sums", "n"]
    assert into["inner"] is inner
    assert inner["mean"] is ema
    assert torch.equal(ema, torch.ones(2))
    assert torch.equal(inner["new"], torch.ones(5))
    assert inner["another"] == []
    assert into["table"] is table
    assert table.tolist() == [1, 1, 1]
    assert into["seen"] is seen
    assert seen[0] is first
    assert seen == [torch.ones(1), 7]
    assert isinstance(into["sums"], Sums)
    assert into["sums"].first is weight
    assert weight.requires_grad
    assert weight.tolist() == [1, 1]
    assert (into["sums"].count, into["n"]) == (4, 2)


@pytest.mark.parametrize(
    "old",
    [torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(1).expand(2), np.zeros(2), [0.0], None],
    ids=["another shape", "another type", "expanded", "an array", "a list", "nothing"],
)
def test_what_cannot_hold_the_state_is_replaced(old: Any) -> None:
    into = {"at": old}
    put_back(into, {"at": torch.ones(2)})
    assert torch.equal(into["at"], torch.ones(2))


def test_an_array_that_cannot_be_written_is_replaced() -> None:
    fixed = np.zeros(2)
    fixed.flags.writeable = False
    into = {"at": fixed}
    put_back(into, {"at": np.ones(2)})
    assert (into["at"].tolist(), fixed.tolist()) == ([1, 1], [0, 0])


class TestKept:
    def make(self, **others: Any) -> tuple[nn.Module, torch.optim.Optimizer, TrainState]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        return model, optimizer, TrainState(model, optimizer, nn.Linear(2, 1), others, hyperparameters=True)

    def test_all_of_it_comes_back(self) -> None:
        counter = {"seen": 3, "sums": torch.ones(2)}
        model, optimizer, kept = self.make(counter=counter)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.25
        contents = kept.contents({"health": {}})
        assert contents.average is not None
        assert contents.evaluated is contents.average

        others: dict[str, Any] = {}
        model_2, optimizer_2, kept_2 = self.make(counter=others)
        kept_2.load(contents)
        assert torch.equal(model_2.weight, model.weight)  # type: ignore[arg-type]
        assert optimizer_2.param_groups[0]["lr"] == 0.25
        assert optimizer_2.state_dict()["state"][0]["step"].item() == 1
        assert others["seen"] == 3
        assert torch.equal(others["sums"], torch.ones(2))

    def test_a_schedule_that_is_of_another_kind_is_refused(self) -> None:
        _, optimizer, _ = self.make()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        contents = TrainState(nn.Linear(2, 1), None, None, {"schedule": OrderedDict(last_epoch=1)}).contents({})
        with pytest.raises(CheckpointMismatch, match="the state of 'schedule' does not fit it"):
            TrainState(nn.Linear(2, 1), None, None, {"schedule": schedule}).load(contents)

    def test_the_running_statistics_of_an_average_are_each_ranks_own_as_those_of_the_model_are(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        average = torch.optim.swa_utils.AveragedModel(model)
        kept = TrainState(model, None, average)
        model(torch.randn(8, 2))
        average.update_parameters(model)
        local = {tensor.data_ptr() for tensor in kept.local()}
        for batch_norm in (model[1], average.module[1]):
            assert {batch_norm.running_mean.data_ptr(), batch_norm.running_var.data_ptr()} <= local
        assert not local & {one.data_ptr() for one in [*model.parameters(), *average.parameters()]}
