"""A training script of the user's own that uses a session, as real processes."""

import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.processes.exitcode import ExitCode
from tandem.rundir.layout import RunDir
from tandem_trainer.checkpoint.reader import read_weights
from tests.support import ROOT, SCRIPTS, manifests
from tests.support.local_run import LocalRun
from tests.support.ranks import Ranks, kill_when_saved, last_line, losses, records, run, sample_ids
from tests.support.waiting import until

ALL = pytest.mark.full("core", "trainer")
SCRIPT = str(SCRIPTS / "session_script.py")
DIGITS = ("sklearn.datasets",)
"""What the script imports, which takes longer than most of what it does."""
STEPS_PER_EPOCH = 7
"""330 samples in batches of 50; the last one has 30."""


def rundir_of(path: Path, **checkpoint: Any) -> RunDir:
    job = manifests.job("session", trainer={"command": ["python", SCRIPT]}, checkpoint=checkpoint)
    return manifests.run_directory(path, job)


def assert_same_run(ours: RunDir, reference: RunDir) -> None:
    assert sample_ids(ours) == sample_ids(reference)
    expected = losses(reference)
    torch.testing.assert_close([losses(ours)[step] for step in expected], list(expected.values()), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--data", "rows", "--workers", "2"), id="rows-read-ahead-by-two-workers"),
        pytest.param(("--data", "rows"), id="rows", marks=ALL),
        pytest.param(("--data", "stream", "--workers", "1"), id="a-stream-read-ahead", marks=ALL),
        pytest.param(("--data", "stream", "--parts", "7"), id="a-stream-in-parts", marks=ALL),
        pytest.param(("--order", "weighted", "--workers", "2"), id="weighted", marks=ALL),
        pytest.param(("--order", "tokens", "--parts", "9"), id="in-batches-of-so-many-tokens", marks=ALL),
        pytest.param(("--order", "own"), id="in-an-order-of-its-own", marks=ALL),
    ],
)
def test_killed_and_resumed_by_other_numbers_of_ranks_it_is_the_undisturbed_run(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Samples, losses, augmentation, dropout, learning rate, average and the script's own counter."""
    options += ("--epochs", "5")
    undisturbed, rundir = rundir_of(tmp_path / "one"), rundir_of(tmp_path / "killed", everySteps=2, keepLast=100)
    expected = run(undisturbed, 1, SCRIPT, *options, imports=DIGITS)
    steps = 5 * STEPS_PER_EPOCH
    if "--order" in options:
        # Of tokens there are as many batches as it takes; an order of its own has 300 samples and then 280.
        steps = {"weighted": steps, "tokens": len(losses(undisturbed)), "own": 3 * 6 + 2 * 6}[options[1]]
        assert steps > 25
    assert len(losses(undisturbed)) == steps
    for size in (2, 1):
        kill_when_saved(rundir, size, SCRIPT, *options, "--pause", "0.2", imports=DIGITS)
    output = run(rundir, 3, SCRIPT, *options, imports=DIGITS)
    starts = [record["step"] for record in records(rundir, "start")]
    assert starts == sorted(starts)
    assert starts[2] > starts[1] > 0
    assert_same_run(rundir, undisturbed)
    ours, theirs = last_line(output).split("average="), last_line(expected).split("average=")
    assert ours[0] == theirs[0]
    assert float(ours[1]) == pytest.approx(float(theirs[1]), abs=1e-3)


def test_asked_to_leave_it_saves_and_the_code_after_the_loop_waits_for_the_end(tmp_path: Path) -> None:
    rundir = rundir_of(tmp_path, everySeconds=3600)
    with Ranks(rundir, 2, SCRIPT, "--epochs", "20", "--pause", "0.05", imports=DIGITS) as ranks:
        until(lambda: len(losses(rundir)) > 5, "steps")
        ranks.processes[1].send_signal(signal.SIGTERM)
        codes, output = ranks.finish()
    assert codes == [ExitCode.PREEMPTED] * 2, output
    assert "after the loop" not in output
    (saved,) = rundir.committed()
    assert saved.step == max(losses(rundir))
    assert f"steps={20 * STEPS_PER_EPOCH} " in last_line(run(rundir, 1, SCRIPT, "--epochs", "20", imports=DIGITS))
    assert rundir.done() is not None


@ALL
def test_a_loop_left_with_break_has_stopped_early(tmp_path: Path) -> None:
    rundir = rundir_of(tmp_path)
    assert "steps=5 " in last_line(run(rundir, 2, SCRIPT, "--break-at", "4", imports=DIGITS))
    done = rundir.done()
    assert done["totalSteps"] == 5
    assert done["stoppedEarly"].endswith(f"of {2 * STEPS_PER_EPOCH}: the script left its loop")
    assert rundir.committed()[0].step == 5


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("--batch", "25"), "a global batch size of 50, now 25"),
        pytest.param(("--samples", "200"), "330 training samples, now 200", marks=ALL),
        pytest.param(("--drop-last",), "drop_last False, now True", marks=ALL),
    ],
)
def test_other_data_than_the_checkpoint_was_written_with_is_refused(
    tmp_path: Path, changed: tuple[str, ...], said: str
) -> None:
    rundir = rundir_of(tmp_path)
    run(rundir, 1, SCRIPT, "--max-steps", "9", imports=DIGITS)
    rundir.done_file.unlink()
    with Ranks(rundir, 2, SCRIPT, *changed, imports=DIGITS) as ranks:
        codes, output = ranks.finish()
    assert codes == [ExitCode.CONFIGURATION] * 2, output
    assert said in output
    assert "Undo the change" in output
    assert rundir.committed()[0].step == 9
    assert rundir.failed() is not None
    rundir.failed_file.unlink()
    assert f"steps={2 * STEPS_PER_EPOCH} " in last_line(run(rundir, 1, SCRIPT, imports=DIGITS)), (
        "and as it was it goes on"
    )


@pytest.mark.full("trainer")
def test_a_stream_goes_on_in_batches_of_another_size(tmp_path: Path) -> None:
    rundir = rundir_of(tmp_path)
    run(rundir, 1, SCRIPT, "--data", "stream", "--max-steps", "4", imports=DIGITS)
    rundir.done_file.unlink()
    rest = run(rundir, 2, SCRIPT, "--data", "stream", "--batch", "30", imports=DIGITS)
    assert f"steps={4 + math.ceil(130 / 30) + 330 // 30} " in last_line(rest)


@ALL
def test_the_last_partial_batch_of_an_epoch_is_left_out_where_the_script_says_so(tmp_path: Path) -> None:
    for data in ("rows", "stream"):
        rundir = rundir_of(tmp_path / data)
        output = run(rundir, 2, SCRIPT, "--data", data, "--drop-last", "--epochs", "3", imports=DIGITS)
        assert f"steps={3 * (330 // 50)} " in last_line(output)
        assert {record["samples"] for record in records(rundir, "step")} == {50}


PAIR = str(SCRIPTS / "pair_script.py")


def test_two_models_that_learn_against_each_other_are_one_run_whatever_the_ranks(tmp_path: Path) -> None:
    """Dropout of both, gradients of both with the last part, a branch that is never used, a kill between."""
    alone, rundir = rundir_of(tmp_path / "one"), rundir_of(tmp_path / "two", everySteps=3, keepLast=100)
    run(alone, 1, PAIR, "--parts", "100")
    kill_when_saved(rundir, 2, PAIR, "--pause", "0.3")
    run(rundir, 3, PAIR)
    assert records(rundir, "start")[1]["step"] > 0
    assert_same_run(rundir, alone)


@ALL
def test_what_distributed_data_parallel_is_told_gets_there(tmp_path: Path) -> None:
    rundir = rundir_of(tmp_path)
    with Ranks(rundir, 2, PAIR, "--lost") as ranks:
        codes, output = ranks.finish()
    assert set(codes) == {ExitCode.FAILED}, output
    assert "find_unused_parameters=True" in output


HOOKED = """
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from tandem_trainer.session import Session

def hook(calls, bucket):
    calls.append(bucket.buffer().numel())
    return allreduce_hook(None, bucket)

with Session(seed=1) as session:
    calls = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model = session.distribute(model, static_graph=True, bucket_cap_mb=1, comm_hook=hook, comm_state=calls)
    frozen = session.distribute(nn.Linear(4, 4).requires_grad_(False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.keep(model, optimizer)
    rows = torch.rand(40, 4)
    for batch in session.batches(rows, 20, epochs=2):
        for part in batch.parts(5):
            part.mean(model(frozen(part.data)).squeeze(1) ** 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    print("world", session.world_size, "averaged", sum(calls), flush=True)
"""


@ALL
def test_gradients_travel_as_the_script_says_and_with_the_last_part(tmp_path: Path) -> None:
    script = tmp_path / "hooked.py"
    script.write_text(HOOKED)
    parameters, steps = 4 * 4 + 4 + 4 + 1, 4
    # A static graph is recorded in the first step, with both of its parts.
    assert f"world 2 averaged {parameters * (steps + 1)}" in run(rundir_of(tmp_path / "two"), 2, str(script))
    assert "world 1 averaged 0" in run(rundir_of(tmp_path / "one"), 1, str(script))


COLLECTIVE = """
import torch, torch.distributed as dist
from torch import nn
from tandem_trainer.session import Session

class Shared(nn.Module):
    '''Weighs with what all ranks agree on in the forward pass, as synchronised batch normalisation does.'''
    def forward(self, rows):
        ones = torch.ones(())
        if dist.is_initialized():
            dist.all_reduce(ones)
            ones /= dist.get_world_size()
        return rows * ones

with Session(seed=1) as session:
    model = session.distribute(nn.Sequential(nn.Linear(4, 4), Shared(), nn.Dropout(0.5), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.keep(model, optimizer)
    rows = torch.rand(80, 4, generator=torch.Generator().manual_seed(2))
    for batch in session.batches(rows, 33, epochs=2):
        sizes = []
        for part in batch.parts(3 if batch.size < 20 else 16):
            sizes.append(len(part))
            part.mean(model(part.data).squeeze(1) ** 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", batch.step, "sizes", sizes, flush=True)
"""


def test_every_rank_takes_as_many_parts_so_a_forward_pass_may_be_a_collective(tmp_path: Path) -> None:
    script = tmp_path / "collective.py"
    script.write_text(COLLECTIVE)
    alone = rundir_of(tmp_path / "one")
    run(alone, 1, str(script))
    rundir = rundir_of(tmp_path / "two")
    output = run(rundir, 2, str(script))
    assert {"step 0 sizes [8, 8]", "step 0 sizes [8, 9]", "step 2 sizes [2, 2, 3]"} <= set(output.splitlines())
    assert_same_run(rundir, alone)


@pytest.mark.parametrize("data", ["rows", pytest.param("stream", marks=ALL)])
def test_a_useless_loss_goes_back_and_leaves_the_data_out(tmp_path: Path, data: str) -> None:
    rundir = rundir_of(tmp_path / data, everySteps=4, keepLast=100)
    options = ("--data", data, "--epochs", "7")
    with Ranks(rundir, 2, SCRIPT, *options, "--nan-at", "21", imports=DIGITS) as ranks:
        codes, output = ranks.finish()
    assert codes == [ExitCode.REWOUND] * 2, output
    (rewind,) = rundir.rewind_records()
    assert rewind.bad_step == 22
    run(rundir, 1, SCRIPT, *options, imports=DIGITS)
    left_out = rewind.skip_to - rewind.skip_from
    assert max(losses(rundir)) == 7 * STEPS_PER_EPOCH - left_out
    undisturbed = rundir_of(tmp_path / f"{data}-undisturbed")
    run(undisturbed, 1, SCRIPT, *options, imports=DIGITS)
    all_ids = [ids for _, ids in sorted(sample_ids(undisturbed).items())]
    expected = all_ids[: rewind.skip_from] + all_ids[rewind.skip_to :]
    assert [ids for _, ids in sorted(sample_ids(rundir).items())] == expected


@pytest.mark.full("trainer")
def test_a_checkpoint_has_the_running_statistics_of_one_rank_and_not_of_several(tmp_path: Path) -> None:
    """Each rank takes those of its own samples, and each writes a part of the file."""
    rundir = rundir_of(tmp_path)
    output = run(rundir, 2, str(SCRIPTS / "norm_script.py"))
    means = {line.split("mean=")[1] for line in output.splitlines() if "mean=" in line}
    manifest = rundir.committed()[0]
    saved = read_weights(rundir.checkpoint(manifest.name), manifest)["0.running_mean"].tolist()
    assert means == {str(saved)}


def test_a_batch_that_was_not_used_is_a_mistake_and_is_said(tmp_path: Path) -> None:
    rundir = rundir_of(tmp_path)
    with Ranks(rundir, 1, SCRIPT, "--forget", imports=DIGITS) as ranks:
        codes, output = ranks.finish()
    assert codes == [ExitCode.FAILED]
    assert "call batch.mean(losses)" in output


def test_a_stream_is_not_divided_over_workers(tmp_path: Path) -> None:
    rundir = rundir_of(tmp_path)
    with Ranks(rundir, 1, SCRIPT, "--data", "stream", "--workers", "2", imports=DIGITS) as ranks:
        codes, output = ranks.finish()
    assert codes == [ExitCode.CONFIGURATION]
    assert "a stream is read by one process" in output


OUTSIDE = """
import torch
from tandem_trainer.session import Session

session = Session(checkpoint={"everySteps": "often"})
"""


def test_a_mistake_outside_of_the_loop_ends_the_job_at_once(tmp_path: Path) -> None:
    rundir = rundir_of(tmp_path / "run")
    (tmp_path / "outside.py").write_text(OUTSIDE)
    with Ranks(rundir, 2, str(tmp_path / "outside.py")) as ranks:
        codes, output = ranks.finish()
    assert codes == [ExitCode.CONFIGURATION] * 2, output
    failed = rundir.failed()
    assert failed["exitCode"] == ExitCode.CONFIGURATION
    assert failed["message"].startswith("Session(checkpoint=…): spec.checkpoint.everySteps must be")


TWICE = """
import torch
from tandem_trainer.session import Session

for fold in range(2):
    with Session(f"runs/{fold}") as session:
        model = session.distribute(torch.nn.Linear(4, 1))
        session.keep(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in session.batches(torch.rand(8, 4), 4):
            batch.mean(model(batch.data).squeeze(1) ** 2).backward()
    print("fold", fold, "done")
"""


def test_a_second_session_of_a_script_is_for_another_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rundir = rundir_of(tmp_path / "run")
    (tmp_path / "twice.py").write_text(TWICE)
    with Ranks(rundir, 2, str(tmp_path / "twice.py")) as ranks:
        codes, output = ranks.finish()
    assert codes == [ExitCode.CONFIGURATION] * 2, output
    assert "fold 0 done" in output
    failed = rundir.failed()
    assert failed["message"].startswith("the script begins a second session, and a job has one")
    subprocess.run([sys.executable, "twice.py"], cwd=tmp_path, check=True, timeout=120)
    assert capfd.readouterr().out == "fold 0 done\nfold 1 done\n", "outside of a job each has a folder"


ALONE = """
import torch
from tandem_trainer.session import Session

with Session("runs/Mine", seed=1) as session:
    model = session.distribute(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.keep(model, optimizer)
    for batch in session.batches(torch.rand(40, 4), 8, epochs=2):
        batch.mean(model(batch.data).squeeze(1) ** 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    print("done")
"""


@pytest.mark.full("trainer")
def test_without_tandem_around_it_a_folder_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    for _ in range(2):
        subprocess.run([sys.executable, "alone.py"], cwd=tmp_path, check=True, timeout=120)
    assert capfd.readouterr().out == "done\ndone\n"
    rundir = RunDir(tmp_path / "runs" / "Mine")
    assert rundir.read_job().metadata.name == "mine"
    assert [record["step"] for record in records(rundir, "start")] == [0, 10]
    assert len(records(rundir, "step")) == 10


MISTAKES = """
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from tandem_trainer.session import Session

class Sized(IterableDataset):
    def __len__(self): return 3
    def __iter__(self): yield from torch.rand(3, 4)

session = Session("runs/mistakes")
model = nn.Linear(4, 1)
elsewhere = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
rows = torch.rand(40, 4)

def tried(what):
    try:
        what()
    except Exception as error:
        print(type(error).__name__, error)

tried(lambda: Session("mistakes.py"))
tried(lambda: Session("runs/other", checkpoint={"everyStep": 5, "keepLast": 0}))
tried(lambda: Session("runs/other", checkpoint=5))
tried(lambda: session.batches(rows, 8))
tried(lambda: session.distribute(model, find_unused_parameter=True))
tried(lambda: session.keep(model, elsewhere))
tried(lambda: session.keep(model, other=object()))
tried(lambda: session.keep(model, other={"seen": {1, 2}}))
session.keep(model, torch.optim.SGD(model.parameters(), lr=0.1))
tried(lambda: session.batches(rows, 0))
tried(lambda: session.batches(rows[:0], 8))
tried(lambda: session.batches(rows, 41, drop_last=True))
tried(lambda: session.batches(DataLoader(rows), 8))
tried(lambda: session.batches(iter(rows), 8))
tried(lambda: session.batches(rows))
tried(lambda: session.batches(Sized(), 2, order=lambda seed, epoch: [0]))
tried(lambda: session.batches(rows, 2, order=lambda seed, epoch: [40]))
batches = session.batches(Sized(), 2)
tried(lambda: session.batches(rows, 8))
batch = next(batches)
tried(lambda: batch.mean(torch.ones(2, 3)))
"""


def test_mistakes_are_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    result = subprocess.run(
        [sys.executable, "mistakes.py"], cwd=tmp_path, check=True, timeout=120, capture_output=True, text=True
    )
    said = [
        f"ConfigurationError the run directory {tmp_path / 'mistakes.py'} cannot be used",
        "ConfigurationError Session(checkpoint=…): unknown field everyStep in spec.checkpoint; did you mean "
        "everySteps?; spec.checkpoint.keepLast must be",
        'ConfigurationError Session(checkpoint=…) takes a dictionary such as {"everySteps": 100}, not 5',
        "RuntimeError call session.keep(model, optimizer) before session.batches(...)",
        "TypeError distribute(…, find_unused_parameter=…): DistributedDataParallel has no such option",
        "ValueError the optimizer has 2 parameters that are not the model's",
        "TypeError other has no state_dict and load_state_dict, and is not a dictionary",
        "TypeError other/seen is a set, which a checkpoint cannot hold",
        "ConfigurationError global_batch_size=0: it must be at least 1",
        "ConfigurationError the data set is empty",
        "ConfigurationError drop_last leaves out all of the 40 samples, because global_batch_size=41 is more",
        "ConfigurationError pass the data set itself to session.batches and not a DataLoader",
        "ConfigurationError a tuple_iterator can be read only once",
        "ConfigurationError set global_batch_size, the number of samples in a step",
        "ConfigurationError order= needs a data set with indices",
        "ConfigurationError order <lambda> gives ids from 40 to 40 in epoch 0; the data set has those from 0 to 39",
        "RuntimeError session.batches(...) was called already",
        "ValueError losses have the shape (2, 3); give one number for each of the 2 samples",
    ]
    lines = result.stdout.splitlines()
    assert len(lines) == len(said), result.stdout
    for line, beginning in zip(lines, said, strict=True):
        assert line.startswith(beginning)


EXAMPLE = ROOT / "examples" / "language-model.yaml"


@pytest.mark.timeout(400)
@pytest.mark.full("core", "cli", "coordinator", "trainer", "examples")
def test_the_example_survives_a_killed_rank_and_saves_when_asked_to_stop(tmp_path: Path) -> None:
    """As a job it shows its steps, restarts where its checkpoint stands, and Ctrl-C loses nothing."""
    words = ["--set", 'trainer.args=[--steps, "240"]', "--set", "checkpoint.everySteps=10"]
    with LocalRun(tmp_path, *words, manifest=EXAMPLE) as first:
        first.reaches(15)
        until(first.run_dir.checkpoint_names, "a checkpoint")
        rank = first.rank_of("worker-1")
        rank.kill()
        until(lambda: len(first.logged("start")) == 2, "another start")
        seen = max(record["step"] for record in first.logged("step"))
        until(lambda: first.logged("step")[-1]["step"] > seen, f"what comes after step {seen}")
        first.interrupt()
        assert first.ends() == ExitCode.INTERRUPTED, first.output
    starts = first.logged("start")
    assert len(starts) == 2
    assert starts[1]["step"] >= 10
    saved = first.run_dir.committed()[0].step
    assert saved == max(record["step"] for record in first.logged("step"))
    with LocalRun(tmp_path, *words, manifest=EXAMPLE) as second:
        assert second.ends(300) == 0, second.output
        assert "language-model is complete: 240 steps" in second.output
        assert second.logged("start")[-1]["step"] == saved
        assert second.leavings() == {}
