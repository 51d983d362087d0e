"""What a job lacks where it runs is known before anything is started, and nothing else is complained of."""

import errno
import gzip
import re
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import ManifestError, Problem, UnmetRequirement
from tandem.job.architectures import shapes
from tandem.job.manifest.reading import parse_job, raise_for_unmet, read_job
from tandem.job.manifest.source import parse
from tandem.job.resource import DistributedTrainingJob
from tandem.rundir.layout import RunDir
from tandem_coordinator.prerequisites import Site, local_site, on_shared_disk, pod, unmet
from tandem_coordinator.prerequisites.language import language
from tandem_coordinator.prerequisites.site import Machine
from tests.support import ROOT
from tests.support.bad_surroundings import CASES, BadSurroundings, idx, safetensors, weights, whole_mnist, written
from tests.support.disks import unreadable
from tests.support.manifests import images, job, run_directory
from tests.support.rights import as_any_user
from tests.support.worlds.small_run import SmallRun

LAPTOP = Machine(cores=2, memory=16 * 2**30, processes=32_768, has_gpu=False)
TASK = {"task": "image-classification"}
FULL = pytest.mark.full("coordinator", "trainer", "examples")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def laptop(of: DistributedTrainingJob, machine: Machine = LAPTOP, **more: Any) -> Site:
    return replace(local_site(of, RunDir(Path("runs") / of.metadata.name), 2, None), machine=machine, **more)


def found(of: DistributedTrainingJob, machine: Machine = LAPTOP, **more: Any) -> list[UnmetRequirement]:
    return unmet(of, laptop(of, machine, **more))


def trains(**config: Any) -> DistributedTrainingJob:
    return job(trainer=images({"data": {"name": "digits"}} | config))


def runs(*words: str) -> DistributedTrainingJob:
    return job(trainer={"command": list(words)})


# What is wrong is told


@pytest.mark.parametrize(
    ("uri", "installed", "lacks"),
    [
        (None, {"mlflow", "sqlalchemy"}, False),
        (None, {"mlflow"}, True),
        ("https://mlflow.example", {"mlflow"}, False),
        ("https://mlflow.example", set(), True),
    ],
)
def test_a_tracked_job_needs_mlflow(
    folder: Path, monkeypatch: pytest.MonkeyPatch, uri: str | None, installed: set[str], lacks: bool
) -> None:
    module = sys.modules["tandem_coordinator.prerequisites.machine"]
    monkeypatch.setattr(module, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    of = job(trainer=images({"data": {"name": "digits"}}), tracking={"mlflow": {"uri": uri} if uri else {}})
    assert [one.field for one in found(of)] == [("spec", "tracking", "mlflow")] * lacks


@pytest.mark.parametrize(("installed", "replicas", "lacks"), [(False, 1, True), (True, 1, False), (False, 0, False)])
def test_tasks_of_the_harness_need_their_library(
    folder: Path, monkeypatch: pytest.MonkeyPatch, installed: bool, replicas: int, lacks: bool
) -> None:
    module = sys.modules["tandem_coordinator.prerequisites.task"]
    monkeypatch.setattr(module, "find_spec", lambda name: name if installed else None)
    # What the trainer's process says of the model is not asked for here.
    monkeypatch.setattr(module.subprocess, "run", lambda *given, **named: SimpleNamespace(returncode=1))
    trainer = {"task": "causal-lm", "parameters": {"pretrained": "model"}}
    of = job(trainer=trainer, evaluators={"replicas": replicas, "harness": {"tasks": ["arc_easy"]}})
    assert [one.field for one in found(of)] == [("spec", "evaluators", "harness")] * lacks


@pytest.mark.parametrize(
    ("has_gpu", "installed", "words"),
    [(False, True, "for GPUs"), (True, False, "liger-kernel is not installed"), (True, True, ""), (None, True, "")],
)
def test_kernels_for_gpus_need_a_gpu_and_their_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool | None, installed: bool, words: str
) -> None:
    module = sys.modules["tandem_coordinator.prerequisites.task"]
    monkeypatch.setattr(module, "find_spec", lambda name: name if installed else None)
    monkeypatch.setattr(module.subprocess, "run", lambda *given, **named: SimpleNamespace(returncode=1))
    parameters = {"pretrained": "model", "kernels": "liger"}
    of = job(trainer={"task": "causal-lm", "parameters": parameters}, evaluators={"replicas": 0})
    told = [one.message for one in found(of, replace(LAPTOP, has_gpu=has_gpu)) if one.field[-1:] == ("kernels",)]
    assert len(told) == bool(words)
    assert all(words in one for one in told)


@pytest.mark.parametrize(
    ("parameters", "field", "words"),
    [
        ({"pretrained": "./modle"}, ("pretrained",), "there is no folder ./modle"),
        ({"pretrained": "./empty"}, ("pretrained",), "./empty has no config.json"),
        ({"pretrained": "org/model", "data": {"path": "dta.jsonl"}}, ("data", "path"), "there is no file dta.jsonl"),
        (
            {"pretrained": "org/model", "data": {"path": "data.jsonl", "test": "test.jsonl"}},
            ("data", "test"),
            "there is no file test.jsonl",
        ),
        (
            {"pretrained": "org/model", "data": {"mixture": [{"path": "data.jsonl"}, {"path": "b.jsonl"}]}},
            ("data", "mixture", 1, "path"),
            "there is no file b.jsonl",
        ),
        ({"text": "corpus.txt"}, ("text",), "there is no file corpus.txt"),
        ({"tokenizer": "bpe", "tokenizerFile": "t.json"}, ("tokenizerFile",), "there is no file t.json"),
        ({"shards": {"train": "s3://bucket/a", "test": "b"}}, ("shards", "test"), "there is no folder b"),
        ({"shards": {"train": ".", "test": "s3://bucket/b"}}, ("shards", "train"), ". has no index.json"),
        ({"pretrained": "org/model", "data": {"dataset": {"id": "org/data"}, "test": "validation"}}, (), ""),
        ({"pretrained": "./model", "data": {"path": "data.jsonl"}}, (), ""),
    ],
)
def test_files_of_a_language_model_are_looked_for(
    folder: Path, parameters: dict[str, Any], field: tuple[str | int, ...], words: str
) -> None:
    """Otherwise a rank finds it, a minute later."""
    for name in ("model", "empty"):
        (folder / name).mkdir()
    (folder / "model" / "config.json").touch()
    (folder / "data.jsonl").touch()
    of = job(trainer={"task": "causal-lm", "parameters": parameters})
    told = list(language(of, laptop(of)))
    assert [one.field for one in told] == [("spec", "trainer", "parameters", *field)] * bool(words)
    assert all(words in one.message for one in told)


def test_what_is_no_checkpoint_has_no_optimizer_to_take_over(folder: Path) -> None:
    of = trains(initialWeights="digits.safetensors", initialOptimizer="Moments")
    (folder / "digits.safetensors").write_bytes(weights())
    (told,) = found(of)
    assert told.field == ("spec", "trainer", "loop", "initialOptimizer")
    assert "no run and no checkpoint" in told.message


def the_problem(case: BadSurroundings, folder: Path) -> Problem:
    text = yaml.safe_dump(case.job(folder), sort_keys=False)
    source = parse(text.encode(), "job.yaml")
    with pytest.raises(ManifestError) as caught:
        raise_for_unmet(as_any_user(lambda: found(parse_job(source))), source)
    (problem,) = caught.value.problems
    if problem.line:
        assert problem.excerpt == text.splitlines()[problem.line - 1]
    return problem


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_surroundings_get_one_message_at_the_field_it_is_about(case: BadSurroundings, folder: Path) -> None:
    problem = the_problem(case, folder)
    assert problem.field == case.field
    assert re.search(case.words, problem.message), problem.message
    assert problem.suggestion.removeprefix(f"{folder}/") == case.suggestion
    assert bool(problem.line) == bool(case.field)


def test_there_are_enough_of_them() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 40


def test_a_setting_from_the_command_line_is_blamed_where_it_is_one(folder: Path) -> None:
    source = parse((ROOT / "examples/digits.yaml").read_bytes(), "digits.yaml")
    settings = ["trainer.loop.precision=float16"]
    with pytest.raises(ManifestError) as caught:
        raise_for_unmet(found(parse_job(source, settings)), source, settings)
    assert [(one.file, one.column) for one in caught.value.problems] == [("--set", 24)]


def test_ports_of_which_none_is_free_are_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (one,) = found(job(workers={"storePorts": {"first": port, "last": port}}))
    assert one.field == ("spec", "workers", "storePorts")


def test_two_checkpoints_have_to_have_room(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    of = trains(model="resnet-18")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=200 * 2**20))
    (one,) = found(of)
    assert (one.field, one.message.startswith("two checkpoints need 268 MB")) == ((), True)
    assert not found(trains(model="cnn"))


@pytest.mark.parametrize(
    ("changes", "words", "fails"),
    [
        ({"open_files": 24}, "a process may open 24 files, and needs 32; this is the hard limit (ulimit -Hn)", True),
        ({"address_space": 2**31}, "a process may use 2.1 GB of address space, and torch alone needs about", False),
    ],
)
def test_limits_with_which_nothing_starts_are_named(
    changes: dict[str, int], words: str, fails: bool, folder: Path
) -> None:
    (problem,) = found(runs("true"), replace(LAPTOP, **changes))
    assert problem.message.startswith(words)
    assert problem.fails is fails


# What can run is let alone


LIKE_MINIGPT = ("minigpt-", "fine-tune-")
"""Beginnings of names of examples that differ by their strategy from `minigpt` and `fine-tune`."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=FULL if path.stem.startswith(LIKE_MINIGPT) else ())
        for path in sorted((ROOT / "examples").glob("*.yaml"))
    ],
)
def test_nothing_is_said_of_the_examples(path: Path, folder: Path) -> None:
    (folder / "examples").symlink_to(ROOT / "examples")
    # examples/small_qwen2.py makes it.
    written(folder, {"runs/small-qwen2/documents.jsonl": "", "runs/small-qwen2/config.json": "{}"})
    assert found(read_job(path), Machine(cores=4, memory=16 * 2**30)) == []


@pytest.mark.parametrize(
    "words",
    [
        ["python", "a.py"],
        ["python3", "a.py", "--data", "nowhere"],
        ["python", "-u", "a.py"],
        ["python", "-c", "pass"],
        ["python", "-u", "-m", "pack.inner"],
        ["python", "-"],
        ["python", "-m", "pack"],
        ["python", "-m", "json.tool"],
        ["-m", "pack"],
        ["a.py"],
        ["python", "-u", "pack"],
        ["python3.99", "a.py"],
        ["bash", "a.sh"],
        ["bash", "-c", "python train.py"],
        ["./a.sh"],
        ["env", "A=1", "python", "train.py"],
        ["true"],
        ["python", "-m", "dynamic.made_up"],
    ],
    ids=" ".join,
)
def test_a_command_that_can_start_is_let_alone(words: list[str], folder: Path) -> None:
    written(folder, {"a.py": "print('x')\n", "pack/__main__.py": "", "pack/__init__.py": "", "pack/inner.py": ""})
    written(folder, {"a.sh": "#!/usr/bin/env bash\n", "dynamic/__init__.py": "__path__ = []\n"}, executable=True)
    if words[0] != "python3.99":
        assert found(runs(*words)) == []
    else:
        assert [one.message for one in found(runs(*words))] == ["there is no program python3.99 in the folders of PATH"]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["python train.py"], "[python, train.py]"),
        (["python -u train.py --epochs 3"], '[python, -u, train.py, --epochs, "3"]'),
        (["python", "train.py --fast"], "train.py, --fast"),
    ],
)
def test_a_command_line_in_one_word_is_taken_apart(words: list[str], meant: str, folder: Path) -> None:
    (folder / "train.py").touch()
    assert [one.suggestion for one in found(runs(*words))] == [meant]


GROUP = "import torch.distributed as dist\ndef rank(n): dist.init_process_group('gloo')\n"


@pytest.mark.parametrize(
    ("script", "warned"),
    [
        ("import torch.multiprocessing as mp\n" + GROUP + "mp.spawn(rank)", True),
        ("import torch\n" + GROUP + "torch.multiprocessing.spawn(rank)", True),
        ("from torch import multiprocessing\n" + GROUP + "multiprocessing.spawn(rank)", True),
        ("from torch.multiprocessing import spawn as go\n" + GROUP + "go(rank)", True),
        ("import torch.multiprocessing as mp\ndef rank(n): pass\nmp.spawn(rank)", False),
        ("import torch.multiprocessing as mp\n" + GROUP + "mp.start_processes(rank)", True),
        ("import torch.multiprocessing as mp\n" + GROUP + "mp.Process(target=rank)", True),
        ("import multiprocessing\n" + GROUP + "multiprocessing.get_context('spawn').Process(target=rank)", True),
        ("import multiprocessing as mp\n" + GROUP + "def logger(): pass\nmp.Process(target=logger)", False),
        ("import subprocess as mp\n" + GROUP + "mp.spawn(rank)", False),
        (
            "import os, torch.multiprocessing as mp\nos.environ['TORCHELASTIC_USE_AGENT_STORE'] = 'False'\n"
            + GROUP
            + "mp.spawn(rank)",
            False,
        ),
    ],
)
def test_a_script_that_spawns_its_ranks_itself_is_warned_of(folder: Path, script: str, warned: bool) -> None:
    """They would wait for each other for ever, and nobody would say why."""
    (folder / "train.py").write_text(script)
    told = found(runs("python", "train.py"))
    assert [(one.field, one.fails) for one in told] == [(("spec", "trainer", "command", 1), False)] * warned
    assert all("workers.processesPerReplica" in one.message for one in told)


ADAPTED = "from tandem_trainer.adapters.transformers import elastic\n"
HF, LOADS_BEST = "from transformers import TrainingArguments\n", "load_best_model_at_end=True"


@pytest.mark.parametrize(
    ("script", "refused"),
    [
        (ADAPTED + HF + f"TrainingArguments(output_dir='a', {LOADS_BEST})", f"line 3: {LOADS_BEST}"),
        (ADAPTED + f"import transformers as tf\ntf.TrainingArguments({LOADS_BEST})", f"line 3: {LOADS_BEST}"),
        (ADAPTED + f"from trl import SFTConfig as C\nC(\n  max_length=9,\n  {LOADS_BEST},\n)", f"line 5: {LOADS_BEST}"),
        (
            ADAPTED + HF + "TrainingArguments(average_tokens_across_devices=False)",
            "average_tokens_across_devices=False",
        ),
        (ADAPTED + HF + "TrainingArguments(optim='lomo')", "optim='lomo'"),
        (ADAPTED + "from trl import GRPOTrainer\nGRPOTrainer()", "GRPOTrainer"),
        (
            "from tandem_trainer.adapters.lightning import Elastic\nimport lightning.pytorch as pl\n"
            "pl.Trainer(max_time='00:01:00', callbacks=[pl.callbacks.BatchSizeFinder()])",
            "max_time='00:01:00'",
        ),
        # Without the adapter, the library alone decides.
        (HF + f"TrainingArguments({LOADS_BEST})", ""),
        (ADAPTED + "from accelerate import Accelerator\nAccelerator(fsdp_plugin='x')", ""),
        (ADAPTED + HF + "TrainingArguments(load_best_model_at_end=False, fsdp=None, fsdp_config={})", ""),
        (ADAPTED + HF + "TrainingArguments(train_sampling_strategy='random', optim='adamw_torch')", ""),
        # What is not known before it runs.
        (ADAPTED + HF + "TrainingArguments(load_best_model_at_end=best, resume_from_checkpoint='out/last')", ""),
        (ADAPTED + HF + "TrainingArguments(**{'load_best_model_at_end': True}, fsdp={[]: 1})", ""),
    ],
)
def test_what_the_adapter_of_a_script_refuses_is_said_before_a_library_is_imported(
    folder: Path, script: str, refused: str
) -> None:
    (folder / "train.py").write_text(script)
    told = found(runs("python", "train.py"))
    assert [one.fails for one in told] == [False] * (2 if "BatchSizeFinder" in script else bool(refused))
    assert all(one.field == ("spec", "trainer", "command", 1) for one in told)
    assert refused in " ".join(one.message for one in told)
    assert all("is refused when training starts: " in one.message for one in told)


def test_what_the_adapter_refuses_among_the_arguments_is_said_at_its_place(folder: Path) -> None:
    (folder / "train.py").write_text(ADAPTED + "from transformers import HfArgumentParser\n")
    args = ["--optim", "adamw_torch", "--load_best_model_at_end", "True", "--fsdp=false", "--auto_find_batch_size"]
    told = found(job(trainer={"command": ["python", "train.py", "--deepspeed", "z.json"], "args": args}))
    assert [one.field[2:] for one in told] == [("command", 2), ("args", 2), ("args", 5)]
    assert "tandem checkpoints export" in told[1].message
    (folder / "train.py").write_text(ADAPTED)
    assert found(job(trainer={"command": ["python", "train.py"], "args": args})) == []


def test_a_script_is_not_compiled_that_another_python_runs(folder: Path) -> None:
    written(folder, {"a.py": "print 'of Python 2'\n"})
    written(folder, {"python2": "#!/bin/sh\n"}, executable=True)
    assert found(runs("./python2", "a.py")) == []


def test_pythonpath_of_the_job_counts(folder: Path) -> None:
    written(folder, {"lib/mine.py": ""})
    env = [{"name": "PYTHONPATH", "value": "lib"}]
    assert found(job(trainer={"command": ["python", "-m", "mine"], "env": env})) == []


WORDS = st.sampled_from(
    ["python", "python3", "-m", "-u", "-X", "-c", "bash", "env", "a.py", "json.tool", "~", "..", "/"]
)


@given(
    st.lists(
        WORDS | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20), min_size=1
    )
)
def test_no_command_is_a_reason_for_a_stack_trace(words: list[str]) -> None:
    assert all(
        one.message and one.field[:2] == ("spec", "trainer") for one in unmet(runs(*words[:64]), laptop(runs("a")))
    )


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=300))
def test_no_path_is_a_reason_for_a_stack_trace(path: str) -> None:
    of = trains(data={"name": "mnist", "path": path, "download": False}, initialWeights=path)
    assert found(of)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_sound_data_is_let_alone(folder: Path, ending: str) -> None:
    whole_mnist(folder, count=100)
    if ending:
        for path in list((folder / "data").iterdir()):
            path.with_name(path.name + ending).write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    assert found(trains(data={"name": "mnist", "path": "data", "download": False, "end": 100})) == []


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_disk_that_fails_says_nothing_about_data(folder: Path, ending: str) -> None:
    whole_mnist(folder, count=100)
    (folder / "data" / "train-labels-idx1-ubyte").unlink()
    unreadable(folder / "data" / f"train-labels-idx1-ubyte{ending}")
    assert found(trains(data={"name": "mnist", "path": "data", "download": False})) == []


def test_a_disk_that_fails_says_nothing_about_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = unreadable(folder / "weights.safetensors")
    assert found(trains(initialWeights=str(path))) == []

    def stale(path: Path, **_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    of = trains(initialWeights=str(path))
    site = laptop(of)
    monkeypatch.setattr(Path, "stat", stale)
    assert unmet(of, site) == []


def test_data_that_can_be_downloaded_need_not_be_there(folder: Path) -> None:
    assert found(trains(data={"name": "mnist", "path": "data"})) == []


def test_a_download_that_is_damaged_is_downloaded_again(folder: Path) -> None:
    raw = folder / "data/MNIST/raw"
    raw.mkdir(parents=True)
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        (raw / name).write_bytes(b"garbage")
    assert found(trains(data={"name": "mnist", "path": "data"})) == []
    assert found(trains(data={"name": "mnist", "path": "data", "download": False})) != []


def test_without_evaluators_nobody_needs_test_data(folder: Path) -> None:
    whole_mnist(folder, count=100)
    for path in (folder / "data").glob("t10k*"):
        path.unlink()
    config = {"data": {"name": "mnist", "path": "data", "download": False}}
    assert found(job(trainer=images(config), evaluators={"replicas": 0})) == []
    assert found(job(trainer=images(config))) != []


@pytest.mark.parametrize("model", ["cnn", "baby-cnn", "simple-net", "resnet-18"])
def test_weights_of_the_same_model_fit(folder: Path, model: str) -> None:
    written(folder, {"w": weights(model)})
    assert found(trains(model=model, initialWeights="w")) == []


def test_weights_of_a_run_and_of_a_file_of_torch_are_found_as_the_ranks_find_them(folder: Path) -> None:
    written(folder, {"w.pt": b"PK\x03\x04" + bytes(100), "model/model.safetensors": weights("cnn")})
    first = SmallRun(folder / "first")
    first.begin(1)
    first.save(100)
    assert found(trains(initialWeights="w.pt")) == []
    assert found(trains(initialWeights="model")) == []
    for path in ("first", "first/checkpoints/step-000000100"):
        (one,) = found(trains(initialWeights=path))
        assert one.message.startswith(f"{path} does not fit model cnn on images of 8×8: it lacks")


def test_weights_of_a_run_that_the_job_waits_for_need_not_be_there(folder: Path) -> None:
    for path in ("first", f"{folder}/first", "first/checkpoints/step-000000100"):
        of = trains(initialWeights=path)
        run_dir = RunDir(Path("runs/digits"))
        assert unmet(of, on_shared_disk(of, run_dir))
        assert not unmet(of, on_shared_disk(of, run_dir, awaited=Path("first")))
        assert unmet(of, on_shared_disk(of, run_dir, awaited=Path("other")))


def test_what_the_compiler_puts_into_names_is_no_difference(folder: Path) -> None:
    wrapped = {f"_orig_mod.{name}": shape for name, shape in shapes("cnn", 1, 8, 10).items()}
    written(folder, {"w": safetensors(**wrapped)})
    assert found(trains(initialWeights="w")) == []


def test_a_run_with_checkpoints_needs_no_initial_weights(folder: Path) -> None:
    of = trains(initialWeights="gone")
    rundir = run_directory(Path("runs/digits"), of)
    assert found(of) != []
    (rundir.checkpoints / "step-000000010").mkdir()
    assert found(of) == []
    assert found(of, is_fresh=True) != []


def test_more_ranks_than_cores_are_slow_and_no_mistake() -> None:
    (one,) = found(job(workers={"replicas": 10}))
    assert not one.fails
    assert found(job(workers={"replicas": 8})) == []


def test_ranks_that_import_torch_each_by_itself_need_more_memory(folder: Path) -> None:
    hundred, cold = {"replicas": 100}, {"warmStart": False}
    (slow,) = found(job(workers=hundred))
    assert not slow.fails
    (refused,) = found(job(workers=hundred, elasticity=cold))
    assert refused.fails
    assert refused.message == "100 replicas take 33.7 GB of memory at least, and this machine has 17.2 GB on 2 cores"


def test_of_a_cold_script_only_its_agents_are_known_to_import_torch(folder: Path) -> None:
    of = {"trainer": {"command": ["true"]}, "elasticity": {"warmStart": False}}
    (slow,) = found(job(workers={"replicas": 80}, **of))
    assert not slow.fails
    assert found(job(workers={"replicas": 100}, **of))[0].fails


def test_a_batch_larger_than_the_data_is_one_step_and_no_mistake() -> None:
    (one,) = found(trains(globalBatchSize=5_000))
    assert not one.fails


@pytest.mark.parametrize("has_gpu", [True, None])
def test_half_precision_is_let_alone_where_there_may_be_a_gpu(has_gpu: bool | None) -> None:
    assert found(trains(precision="float16"), replace(LAPTOP, has_gpu=has_gpu)) == []


@pytest.mark.parametrize(
    ("of", "field"),
    [
        ({"strategy": "dp"}, "strategy"),
        ({"strategy": "model"}, "strategy"),
        ({"strategy": "fsdp", "fsdp": {"cpuOffload": True}}, "cpuOffload"),
        ({"syncBatchNorm": True}, "syncBatchNorm"),
    ],
)
def test_what_is_for_gpus_alone_is_told_where_there_are_none(of: dict[str, Any], field: str) -> None:
    (one,) = found(trains(**of))
    assert (one.field[-1], one.fails) == (field, False)
    assert "training runs on CPUs here" in one.message
    assert found(trains(**of), replace(LAPTOP, has_gpu=None)) == []


# On a cluster


def on_volume(of: DistributedTrainingJob, volume: Path) -> list[UnmetRequirement]:
    return unmet(of, pod(RunDir(volume / of.metadata.name), of))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_coordinator_says_nothing_of_what_only_workers_can_see(
    case: BadSurroundings, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    of = DistributedTrainingJob.parse(case.job(folder))
    if case.name == "module-unnamed":  # which is wrong wherever it runs
        return
    assert [one for one in on_volume(of, tmp_path_factory.mktemp("volume")) if one.fails] == []


def test_a_coordinator_sees_what_lies_on_the_volume(tmp_path: Path) -> None:
    whole_mnist(tmp_path)
    (tmp_path / "data/train-labels-idx1-ubyte").write_bytes(idx(20, content=b"\x0b" * 20))
    data = {"name": "mnist", "path": str(tmp_path / "data"), "download": False}
    of = trains(data=data, initialWeights=str(tmp_path / "gone"))
    assert [one.field[-1] for one in on_volume(of, tmp_path)] == ["path", "initialWeights"]
    (one,) = on_volume(runs("python", str(tmp_path / "train.py")), tmp_path)
    assert one.field == ("spec", "trainer", "command", 1)


def test_a_coordinator_does_not_see_through_what_workers_mount_over_the_volume(tmp_path: Path) -> None:
    mount = {"name": "code", "mountPath": str(tmp_path / "code")}
    template = {"spec": {"containers": [{"name": "worker", "volumeMounts": [mount]}]}}
    command = ["python", str(tmp_path / "code/train.py")]
    assert on_volume(job(trainer={"command": command}), tmp_path) != []
    assert on_volume(job(trainer={"command": command}, workers={"template": template}), tmp_path) == []
