"""A session that splits its model over the ranks learns what one rank learns, and goes on from any number of them."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.processes.exitcode import ExitCode
from tandem.rundir.checkpoint import WEIGHTS
from tandem.rundir.layout import RunDir
from tests.support import SCRIPTS, manifests
from tests.support.ranks import Ranks, kill_when_saved, losses, records, run, sample_ids

SCRIPT = str(SCRIPTS / "split_script.py")
DIGITS = ("sklearn.datasets",)
"""What the script imports, which takes longer than most of what it does."""
FULL = pytest.mark.full("trainer")
FSDP = ("--strategy", "fsdp")
TENSOR = (*FSDP, "--tensor", "2")
BY_HAND = ("--by-hand",)
STEPS = 42
"""Six epochs of seven."""


def rundir_of(path: Path, processes: int = 1) -> RunDir:
    job = manifests.job(
        "split",
        trainer={"command": ["python", SCRIPT]},
        workers={"processesPerReplica": processes},
        checkpoint={"everySteps": 5, "keepLast": 100},
    )
    return manifests.run_directory(path, job)


def norms(output: str) -> list[float]:
    return [float(norm) for norm in re.findall(r"^step \d+ norm (\S+)$", output, re.MULTILINE)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, list[float]]:
    """What one rank learns with the whole model, and the norms of its gradients."""
    rundir = rundir_of(tmp_path_factory.mktemp("alone") / "run")
    output = run(rundir, 1, SCRIPT, imports=DIGITS)
    assert losses(rundir)[STEPS] < 0.3 * losses(rundir)[1]
    return rundir, norms(output)


def assert_same(rundir: RunDir, alone: RunDir) -> None:
    assert sample_ids(rundir) == sample_ids(alone)
    assert losses(rundir) == pytest.approx(losses(alone), abs=1e-4)
    found, wanted = (load_file(one.checkpoint(one.committed()[0].name) / WEIGHTS) for one in (rundir, alone))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("options", "ranks", "processes", "mesh"),
    [
        pytest.param((), 2, 1, {"data": 2}, id="ddp", marks=FULL),
        pytest.param(FSDP, 3, 1, {"shard": 3}, id="fsdp", marks=FULL),
        pytest.param(TENSOR, 2, 2, {"tensor": 2}, id="tensor", marks=FULL),
        pytest.param(TENSOR, 4, 2, {"shard": 2, "tensor": 2}, id="tensor-and-fsdp", marks=FULL),
        pytest.param(BY_HAND, 2, 1, {"shard": 2}, id="by-hand", marks=FULL),
    ],
)
def test_it_learns_what_one_rank_alone_learns(
    tmp_path: Path,
    alone: tuple[RunDir, list[float]],
    options: tuple[str, ...],
    ranks: int,
    processes: int,
    mesh: dict[str, int],
) -> None:
    """Losses, norms of gradients, and the average of the weights, which is what is exported."""
    rundir = rundir_of(tmp_path, processes)
    output = run(rundir, ranks, SCRIPT, *options, imports=DIGITS)
    assert_same(rundir, alone[0])
    assert norms(output) == pytest.approx(alone[1], abs=1e-3)
    assert rundir.committed()[0].mesh == mesh


@pytest.mark.full("core", "trainer")
def test_killed_it_goes_on_with_another_strategy_on_other_ranks(
    tmp_path: Path, alone: tuple[RunDir, list[float]]
) -> None:
    rundir = rundir_of(tmp_path, 2)
    for options, ranks in ((TENSOR, 4), (FSDP, 3)):
        kill_when_saved(rundir, ranks, SCRIPT, *options, "--pause", "0.1", imports=DIGITS)
    run(rundir, 1, SCRIPT, imports=DIGITS)
    starts = [record["step"] for record in records(rundir, "start")]
    assert starts == sorted(set(starts))
    assert len(starts) == 3
    assert_same(rundir, alone[0])


@pytest.mark.full("trainer")
def test_parts_are_those_of_one_model_though_ranks_made_others(tmp_path: Path) -> None:
    """A script that draws its weights by rank trains those of rank 0, as with `ddp`."""
    whole, split = rundir_of(tmp_path / "ddp"), rundir_of(tmp_path / "fsdp")
    run(whole, 2, SCRIPT, "--other-weights", imports=DIGITS)
    run(split, 2, SCRIPT, "--other-weights", *FSDP, imports=DIGITS)
    assert losses(split)[1] == pytest.approx(losses(whole)[1], abs=1e-5)


def test_ranks_of_a_worker_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    rundir = rundir_of(tmp_path, 1)
    with Ranks(rundir, 2, SCRIPT, *TENSOR, imports=DIGITS) as group:
        _, output = group.finish()
    assert "Session(tensor_parallel=2) does not divide the 1 processes of a worker" in output


PARTLY = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from tandem_trainer.session import Session

with Session(seed=1) as session:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    fully_shard(model[0], mesh=session.mesh["shard"])
    session.distribute(model)
"""


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        pytest.param(2, "but 1.weight not over those with other samples", id="partly", marks=FULL),
        pytest.param(1, "one process alone has no mesh", id="alone", marks=FULL),
    ],
)
def test_a_split_that_would_not_train_one_model_is_refused(tmp_path: Path, ranks: int, said: str) -> None:
    script = tmp_path / "partly.py"
    script.write_text(PARTLY)
    with Ranks(rundir_of(tmp_path / "run"), ranks, str(script)) as group:
        _, output = group.finish()
    assert said in output


def test_tensor_parallelism_without_fsdp_is_refused(tmp_path: Path) -> None:
    rundir = rundir_of(tmp_path, 2)
    with Ranks(rundir, 2, SCRIPT, "--tensor", "2", imports=DIGITS) as group:
        _, output = group.finish()
    assert 'tensor parallelism in a session needs distribute(…, strategy="fsdp")' in output


NORMED = """
import sys
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from tandem_trainer.session import Session

LAYERS = {"0": "colwise", "1": "replicated_with_grad_allreduce", "2": "rowwise"}

class Narrow(nn.Module):
    # A weight that is the same for all outputs of the layer before it, whichever rank has them.
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, rows):
        return rows * self.weight

with Session(seed=1, tensor_parallel=2 if sys.argv[1:] else 1) as session:
    model = nn.Sequential(nn.Linear(4, 8), Narrow(), nn.Linear(8, 1))
    # The loss of the first steps says nothing of the layers before the last one.
    nn.init.zeros_(model[2].weight)
    plan = {name: style for name, style in LAYERS.items() if name in sys.argv[1:]}
    model = session.distribute(model, strategy="fsdp", tensor_plan=plan or None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = nn.Parameter(torch.zeros(()))
    other.grad = torch.ones(())
    probe = torch.optim.SGD([other], lr=0.1)
    session.keep(model, optimizer)
    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    for batch in session.batches([(row, row.sum()) for row in rows], 16, epochs=2):
        inputs, wanted = batch.data
        batch.mean((model(inputs).squeeze(1) - wanted) ** 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if session.rank == 0:
            probe.step()
assert not _global_optimizer_pre_hooks, "what was there for the session has gone with it"
"""


@pytest.fixture
def normed(tmp_path: Path) -> str:
    (tmp_path / "normed.py").write_text(NORMED)
    return str(tmp_path / "normed.py")


def test_a_plan_of_a_script_that_lacks_a_layer_fails_the_job(tmp_path: Path, normed: str) -> None:
    """Each rank has a part of the gradient of a weight between split matrices: in the second step, for at first it is
    zero."""
    rundir = rundir_of(tmp_path / "run", 2)
    with Ranks(rundir, 2, normed, "0", "2") as group:
        codes, output = group.finish()
    assert ExitCode.CONFIGURATION in codes, output
    assert "the ranks have different gradients of 1.weight, between matrices that are split" in output
    assert rundir.checkpoint_names() == []


def test_with_that_layer_in_the_plan_a_script_learns_what_one_rank_learns(tmp_path: Path, normed: str) -> None:
    alone, split = rundir_of(tmp_path / "alone"), rundir_of(tmp_path / "split", 2)
    run(alone, 1, normed)
    run(split, 2, normed, "0", "1", "2")
    assert_same(split, alone)
