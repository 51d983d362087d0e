"""Ranks that write into one copy of the weights: each sample once, whole checkpoints, and other numbers of ranks."""

import json
import os
import signal
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem.processes.exitcode import ExitCode
from tandem.rundir.checkpoint import WEIGHTS
from tandem.rundir.layout import RunDir
from tandem_trainer.checkpoint.file_names import FULL_WEIGHTS
from tests.support import EXAMPLES, manifests
from tests.support.local_run import LocalRun
from tests.support.ranks import Ranks, losses, records, run, sample_ids
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(300)

RANKS = 3
SAMPLES = 60
BATCH = 12
EPOCHS = 4
DECAY = 0.5
COUNTING = """
    import os
    import time
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    from tandem_trainer.checkpoint.staging import Staging
    from tandem_trainer.task import Task

    RANK = int(os.environ["RANK"])
    copy = Staging.copy

    def slow_copy(self, *what):
        # A rank that did not wait would take steps meanwhile.
        time.sleep(0.2)
        copy(self, *what)

    Staging.copy = slow_copy

    class Seen(nn.Module):
        '''A row of numbers for each sample and each rank, which alone changes it.'''

        def __init__(self):
            super().__init__()
            self.ranks = nn.ParameterList(nn.Parameter(torch.zeros(60, 50)) for _ in range(3))

        def forward(self, ids):
            return self.ranks[RANK][ids].sum(1)

    class Counting(Task):
        def model(self):
            return Seen()

        def data(self, split):
            return TensorDataset(torch.arange(60))

        def loss(self, model, batch):
            (ids,) = batch
            return -model(ids)
"""


def job(path: Path, loop: dict[str, Any], processes: int, **spec: Any) -> RunDir:
    """A run directory with a job that trains a language model on a page of text."""
    text = path.parent / "text"
    text.write_text("the quick brown fox jumps over the lazy dog, and " * 40)
    trainer = {
        "task": "causal-lm",
        "parameters": {"width": 32, "layers": 2, "heads": 4, "length": 16, "dropout": 0.1, "text": str(text)},
        "loop": {"maxSteps": 150, "epochs": 50, "globalBatchSize": 9, "gradientClipNorm": 1.0, "emaDecay": 0.9}
        | {"optimizer": {"name": "adamw", "learningRate": 0.003}}
        | loop,
    }
    checkpoint = {"everySteps": 5, "keepLast": 100}
    workers = {"processesPerReplica": processes}
    spec = {"trainer": trainer, "workers": workers, "checkpoint": checkpoint} | spec
    return manifests.run_directory(path, manifests.job("test", **spec))


def test_each_sample_counts_once_and_a_checkpoint_has_all_ranks_at_one_step(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(dedent(COUNTING))
    # A script's folder is in the path of a process that starts warm; a variable would come too late.
    (tmp_path / "train.py").write_text("import runpy\n\nrunpy.run_module('tandem_trainer', run_name='__main__')\n")
    loop = {"strategy": "hogwild", "epochs": EPOCHS, "globalBatchSize": BATCH, "rewindOn": "Never", "emaDecay": DECAY}
    loop |= {"optimizer": {"name": "sgd", "learningRate": float(BATCH), "momentum": 0.0}}
    trainer = {"task": "counting:Counting", "parameters": {}, "loop": loop}
    rundir = job(tmp_path / "run", {}, RANKS, trainer=trainer, checkpoint={"everySteps": 5, "keepLast": 100})
    run(rundir, RANKS, str(tmp_path / "train.py"))
    committed = {one.step: one for one in rundir.committed()}
    assert EPOCHS * SAMPLES // BATCH in committed
    assert len(committed) > 1
    for step, manifest in committed.items():
        rows = torch.stack([*load_file(rundir.checkpoint(manifest.name) / FULL_WEIGHTS).values()])
        # An update is by the mean over a rank's part: ranks / batch, times the learning rate.
        seen = rows / RANKS
        assert torch.equal(seen, seen[:, :, :1].expand_as(seen)), f"part of an update is in the checkpoint of {step}"
        assert seen[:, :, 0].sum(1).tolist() == [step * BATCH / RANKS] * RANKS, "each rank has taken so many steps"
        whole, rest = divmod(step * BATCH, SAMPLES)
        assert sorted(seen[:, :, 0].sum(0).tolist()) == [whole] * (SAMPLES - rest) + [whole + 1] * rest
        assert manifest.world_size == RANKS
        # Rank 0 averages once in each of its steps, and nobody else does.
        average = 0.0
        for number in range(1, step + 1):
            average = DECAY * average + (1 - DECAY) * number * BATCH / RANKS
        averaged = load_file(rundir.checkpoint(manifest.name) / WEIGHTS)["ranks.0"][:, 0].sum() / RANKS
        assert float(averaged) == pytest.approx(average, rel=1e-5)


def test_killed_it_goes_on_with_another_number_of_ranks_and_then_under_ddp(tmp_path: Path) -> None:
    path, hogwild = tmp_path / "run", {"strategy": "hogwild"}
    for ranks in (2, 3):
        rundir = job(path, hogwild, ranks)
        known = len(rundir.checkpoint_names())
        with Ranks(rundir, ranks) as group:
            until(lambda had=known, of=rundir: len(of.checkpoint_names()) > had + 1, "checkpoints")
            os.kill(group.processes[-1].pid, signal.SIGKILL)
            # Those that are left would wait in their next vote for as long as there is a coordinator to end them.
            for process in group.processes:
                process.kill()
            group.finish()
        assert not rundir.ended()
    halfway = max(losses(rundir))
    run(job(path, {}, 2), 2)
    starts = records(rundir, "start")
    assert [record["worldSize"] for record in starts] == [2, 3, 2]
    assert all(record["step"] > 0 for record in starts[1:])
    found = losses(rundir)
    assert sorted(found) == [*range(1, 151)]
    assert found[150] < min(0.8 * found[1], found[halfway] + 0.5)
    alone = job(tmp_path / "alone", {}, 1)
    run(alone)
    assert sample_ids(rundir) == sample_ids(alone)
    newest = rundir.checkpoint(rundir.committed()[0].name)
    weights, average = load_file(newest / FULL_WEIGHTS), load_file(newest / WEIGHTS)
    assert weights.keys() == average.keys()
    assert any(not torch.equal(weights[name], average[name]) for name in weights), "it is averaged"


@pytest.mark.full("trainer")
def test_a_useless_loss_sends_all_ranks_back(tmp_path: Path) -> None:
    loop = {"strategy": "hogwild", "optimizer": {"name": "sgd", "learningRate": 1e30}, "gradientClipNorm": None}
    rundir = job(tmp_path / "run", loop, 2)
    with Ranks(rundir, 2) as ranks:
        codes, output = ranks.finish()
    assert codes == [ExitCode.REWOUND] * 2, output
    assert len(rundir.rewind_records()) == 1


@pytest.mark.full("trainer", "cli")
def test_the_digits_are_learned_under_tandem_run(tmp_path: Path) -> None:
    with LocalRun(tmp_path, manifest=EXAMPLES / "digits-hogwild.yaml") as started:
        assert started.ends() == 0, started.output
        assert "digits-hogwild is complete: 690 steps in " in started.output
        assert json.loads(started.run_dir.best_file.read_text())["value"] > 0.96
        assert started.leavings() == {}


def test_strategies_for_several_gpus_train_on_a_processor_and_say_so(tmp_path: Path) -> None:
    theirs, *ours = (job(tmp_path / name, {"strategy": name, "maxSteps": 20}, 1) for name in ("ddp", "dp", "model"))
    run(theirs)
    for one in ours:
        assert f"strategy={one.path.name} has one device, cpu" in run(one)
        assert losses(one) == losses(theirs)
        names = [load_file(of.checkpoint(of.committed()[0].name) / WEIGHTS).keys() for of in (one, theirs)]
        assert names[0] == names[1]
