"""A run begins with the weights of another run, of a checkpoint, of a model or of a file, and knows of which."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.initial_weights import load_initial
from tandem_trainer.language.pretrained import Pretrained
from tandem_trainer.process_group import Group
from tests.support.language import pretrained
from tests.support.worlds.small_run import SmallRun

ALONE = Group(0, 1, 0, torch.device("cpu"))
WEIGHTS = {"layer.weight": torch.arange(12.0).reshape(4, 3)}


class Net(nn.Module):
    def __init__(self, rows: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(3, rows, bias=False)


def loaded(path: Path) -> Tensor:
    net = Net()
    load_initial(net, path, ALONE)
    return net.layer.weight.detach()


def with_optimizer(path: Path) -> None:
    optimizer = torch.optim.Adam(Net().parameters())
    torch.save({"epoch": 3, "model_state_dict": WEIGHTS, "optimizer_state_dict": optimizer.state_dict()}, path)


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda path: save_file(WEIGHTS, path), id="safetensors"),
        pytest.param(lambda path: torch.save(WEIGHTS, path), id="state dict"),
        pytest.param(lambda path: torch.save(WEIGHTS, path, _use_new_zipfile_serialization=False), id="older torch"),
        pytest.param(lambda path: torch.save({f"module.{k}": v for k, v in WEIGHTS.items()}, path), id="of DDP"),
        pytest.param(with_optimizer, id="beside an optimizer"),
    ],
)
def test_a_file_is_read_whatever_it_is_called(tmp_path: Path, write: Any) -> None:
    write(tmp_path / "weights")
    assert torch.equal(loaded(tmp_path / "weights"), WEIGHTS["layer.weight"])


def test_a_run_stands_for_its_newest_checkpoint_and_the_origin_names_it(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "first")
    run.begin(1)
    run.save(100)
    # What evaluators read is rounded; a run begins with what was trained.
    newest = run.save(200, weights={"layer.weight": torch.zeros(4, 3)}, full=WEIGHTS)
    net = Net()
    origin = load_initial(net, run.rundir.path, ALONE)
    assert torch.equal(net.layer.weight, WEIGHTS["layer.weight"])
    assert (origin.job, origin.checkpoint) == ("small", newest)
    assert origin.path == str(run.rundir.checkpoint(newest.name))
    assert origin.digest == run.rundir.manifest(newest.name).digest
    assert torch.equal(loaded(run.rundir.checkpoint("step-000000100")), torch.full((4, 3), 100.0))


def test_a_model_in_several_files_and_tied_embeddings_of_a_plain_file_are_put_in(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = pretrained(tmp_path / "model")
    given = AutoModelForCausalLM.from_pretrained(folder)
    given.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    # As torch writes it, with the tied tensor under both of its names.
    assert "lm_head.weight" in given.state_dict()
    torch.save(given.state_dict(), tmp_path / "model.pt")
    for path in (tmp_path / "shards", folder, tmp_path / "model.pt"):
        source = Pretrained(str(folder))
        model = source.model(source.config())
        load_initial(model, path, ALONE)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        for name, tensor in given.state_dict().items():
            assert torch.equal(tensor, dict(model.named_parameters(remove_duplicate=False))[name]), name


class Ran(Exception):  # noqa: N818
    pass


class Code:
    def __reduce__(self) -> Any:
        return exec, ("raise Ran",)


def test_code_in_a_file_of_torch_save_is_not_run(tmp_path: Path) -> None:
    torch.save({"layer.weight": Code()}, tmp_path / "weights.pt")
    with pytest.raises(UnusableInput, match="holds more than tensors, numbers and texts, and code in it is never run"):
        loaded(tmp_path / "weights.pt")


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    save_file({"layer.weight": torch.ones(5, 3)}, tmp_path / "larger")
    with pytest.raises(
        ConfigurationError, match=r"initialWeights .*larger: .*layer.weight is \[5, 3\] there and \[4, 3"
    ):
        loaded(tmp_path / "larger")
    save_file({"other.weight": torch.ones(4, 3)}, tmp_path / "other")
    with pytest.raises(ConfigurationError, match=r"lacks layer\.weight; .* lacks other\.weight"):
        loaded(tmp_path / "other")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"PK\x03\x04" + bytes(50), "not a readable file of torch.save"),
        (b"nonsense" * 20, "not a safetensors file"),
    ],
)
def test_a_damaged_file_is_a_sentence(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "weights").write_bytes(content)
    with pytest.raises(UnusableInput, match=why):
        loaded(tmp_path / "weights")


def test_a_folder_without_weights_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        UnusableInput, match=r"is no run directory, no checkpoint, and no folder with model.safetensors"
    ):
        loaded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a"}}))
    with pytest.raises(UnusableInput, match="does not say which files"):
        loaded(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UnusableInput, match="has no checkpoint that counts"):
        loaded(tmp_path)


def test_numbers_alone_are_no_state(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "weights.pt")
    with pytest.raises(UnusableInput, match="holds no state_dict"):
        loaded(tmp_path / "weights.pt")


def test_an_optimizer_is_taken_over_from_a_checkpoint_alone(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "weights.safetensors")
    with pytest.raises(UnusableInput, match="not a checkpoint, so there is no optimizer for initialOptimizer"):
        load_initial(Net(), tmp_path / "weights.safetensors", ALONE, lambda contents, manifest: None)
