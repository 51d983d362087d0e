"""Scripts for sbatch: what a person reads, and that nothing of a manifest or a path becomes words of a shell."""

import json
import re
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from tandem.errors import UserError
from tandem.job.manifest.reading import parse_job, read_source
from tandem.job.resource import DistributedTrainingJob
from tandem.rundir.layout import RunDir
from tandem_cli.slurm import submission
from tandem_launcher.slurm import profile as profiles
from tandem_launcher.slurm import scheduler, script
from tandem_launcher.slurm.jobs import NodeAllocation
from tandem_launcher.slurm.process_factory import SlurmProcessFactory
from tandem_launcher.slurm.profile import Profile
from tandem_launcher.slurm.scheduler import SlurmError
from tandem_launcher.slurm.script import ScriptPaths
from tests.support import EXAMPLES, ROOT

HOSTILE = "a b'c\"d$(touch made)`touch made`;touch made\\#%j"
PLACES = ScriptPaths(Path("/shared/runs/digits"), "/shared/venv/bin/python")


def digits(*overrides: str) -> DistributedTrainingJob:
    return parse_job(read_source(str(EXAMPLES / "digits.yaml")), overrides)


def options(text: str) -> list[str]:
    """What sbatch is told."""
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_a_profile_of_a_gpu_cluster_is_what_sbatch_is_told() -> None:
    profile = Profile.model_validate(
        {
            "partition": "gpu",
            "account": "ml",
            "time": "24:00:00",
            "gpus": 4,
            "gpuType": "a100",
            "cpus": 32,
            "memory": "200G",
            "modules": ["cuda/12.4", "gcc"],
            "metricsTargets": "/shared/targets",
            "venv": "/shared/venv",
            "sbatch": ["--constraint=nvlink"],
        }
    )
    job = digits()
    job = digits(*script.fitted_overrides(job, profile))
    assert job.spec.workers.processes == 4
    text = script.training(job, profile, PLACES)
    assert options(text) == [
        "--job-name=digits",
        "--output=logs/digits_%j.out",
        "--open-mode=append",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=32",
        "--mem=200G",
        "--gpus-per-node=a100:4",
        "--partition=gpu",
        "--account=ml",
        "--time=24:00:00",
        "--requeue",
        "--no-kill",
        "--signal=B:TERM@120",
        "--constraint=nvlink",
    ]
    assert "--metrics-targets=/shared/targets" in text
    assert "module load cuda/12.4 gcc\nsource /shared/venv/bin/activate\n" in text
    assert "srun --nodes=1 --ntasks=1 --cpus-per-task=32 --overlap --unbuffered --gpus-per-node=a100:4" in text


@pytest.mark.parametrize(
    ("overrides", "ranks", "asked", "note"),
    [
        ((), 4, "--gpus-per-node=4", ""),
        (("trainer.loop.strategy=dp", "workers.replicas=1"), 1, "--gpus-per-node=4", ""),
        (("trainer.loop.strategy=hogwild", "workers.replicas=1"), 1, "", ""),
        (("workers.processesPerReplica=1",), 1, "--gpus-per-node=4", "so 3 of its GPUs stay idle"),
    ],
)
def test_ranks_use_the_gpus_of_the_profile_as_their_strategy_does_and_idle_ones_are_named(
    overrides: tuple[str, ...], ranks: int, asked: str, note: str
) -> None:
    profile = Profile.model_validate({"gpus": 4})
    job = digits(*overrides, *script.fitted_overrides(digits(*overrides), profile))
    assert job.spec.workers.processes == ranks
    found = [one for one in options(script.training(job, profile, PLACES)) if one.startswith("--gpus")]
    assert found == ([asked] if asked else [])
    assert note in script.describe_idle_gpus(job, profile)
    assert bool(note) == bool(script.describe_idle_gpus(job, profile))


def test_who_warns_earlier_gets_longer_saves(tmp_path: Path) -> None:
    assert "--saving-seconds" not in script.training(digits(), Profile(), PLACES)
    text = script.training(digits(), Profile(warn_seconds=600), PLACES)
    assert "--signal=B:TERM@600" in options(text)
    assert "head train --evaluators --replace-nodes --saving-seconds=525 " in text
    job = digits()
    crew = SlurmProcessFactory(job, RunDir(tmp_path), ["srun"], (), "token-of-this-test", tmp_path, "7", 525.0)
    agent = crew.agent("worker-0", NodeAllocation("7", "n0"), "127.0.0.1", "127.0.0.1:1")
    begin = agent.command.index("tandem_launcher.slurm.step")
    assert agent.command[begin : begin + 4] == ["tandem_launcher.slurm.step", "7", "worker-0", "525.0"]
    assert "--shutdown-timeout=510" in agent.command, "torchrun's ranks have ended before torchrun is ended"


def test_one_more_node_is_like_the_others_and_a_job_that_is_not_requeued() -> None:
    profile = Profile.model_validate({"partition": "gpu", "gpus": 4, "container": ["apptainer"], "sbatch": ["--x=1"]})
    job = digits(*script.fitted_overrides(digits(), profile))
    training, node = script.training(job, profile, PLACES), script.extension(job, profile, PLACES)
    of_the_run = {"--job-name=digits", "--output=logs/digits_%j.out", "--open-mode=append", "--nodes=2"}
    survives = {"--requeue", "--no-kill", "--signal=B:TERM@120"}
    own = {"--job-name=digits-node", "--output=logs/digits-node_%j.out", "--nodes=1", "--no-requeue"}
    assert set(options(node)) - own == set(options(training)) - of_the_run - survives
    assert own <= set(options(node))
    assert node.endswith("-m tandem_launcher.slurm.extension \\\n    --run-dir /shared/runs/digits\n")
    assert " --replace-nodes " in training
    assert "--replace-nodes" not in script.training(job, profile.model_copy(update={"replace_nodes": False}), PLACES)


def test_what_the_manifest_requests_of_a_node_is_requested_of_slurm() -> None:
    requests = "workers.resources={requests: {cpu: 7500m, memory: 10Gi, nvidia.com/gpu: 2}}"
    text = script.training(digits(requests), Profile(), PLACES)
    assert {"--cpus-per-task=8", "--mem=10240M", "--gpus-per-node=2"} <= set(options(text))


def test_evaluators_are_an_array_of_their_own_where_the_profile_has_a_partition_for_them() -> None:
    profile = Profile.model_validate({"account": "ml", "evaluators": {"partition": "cpu", "memory": "4G"}})
    job = digits("evaluators.replicas=3")
    assert script.has_evaluation_job(job, profile)
    assert "--evaluators" not in script.training(job, profile, PLACES)
    text = script.evaluation(job, profile, PLACES)
    wanted = {"--array=0-2", "--cpus-per-task=2", "--mem=4G", "--partition=cpu", "--account=ml"}
    assert wanted <= set(options(text))
    assert not script.has_evaluation_job(digits("evaluators.replicas=0"), profile)


def test_evaluators_beside_the_training_get_cores_there() -> None:
    text = script.training(digits("evaluators.replicas=2"), Profile(), PLACES)
    assert "head train --evaluators" in text
    # One rank, and two evaluator processes on each of two nodes.
    assert "--cpus-per-task=3" in options(text)


def test_words_reach_the_head_as_they_are_whatever_signs_they_have(tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE
    (folder / "venv" / "bin").mkdir(parents=True)
    (folder / "venv" / "bin" / "activate").write_text("")
    python = folder / "venv" / "bin" / "python"
    python.write_text(
        '#!/usr/bin/python3\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ["WORD"]]))\n'
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    profile = Profile.model_validate({"venv": str(folder / "venv"), "env": {"WORD": HOSTILE}, "container": [HOSTILE]})
    places = ScriptPaths(folder / "run", "unused", folder / "job.yaml", [f"trainer.env={HOSTILE}"])
    file = tmp_path / "script.sh"
    file.write_text(script.training(digits(), profile, places))
    done = subprocess.run(["bash", file], capture_output=True, text=True, cwd=tmp_path, check=True)
    words, word = json.loads(done.stdout)
    assert word == HOSTILE
    assert words[words.index("--run-dir") + 1] == str(folder / "run")
    assert words[words.index("--manifest") + 1] == str(folder / "job.yaml")
    assert words[words.index("--set") + 1] == f"trainer.env={HOSTILE}"
    assert f"--container={HOSTILE}" in words
    assert "srun" in words
    on_a_node = [*script.python_on_a_node(profile.model_copy(update={"container": []}), places), HOSTILE]
    done = subprocess.run(on_a_node, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert json.loads(done.stdout) == [[HOSTILE], HOSTILE]
    assert not (tmp_path / "made").exists()


def test_nothing_of_a_manifest_but_its_name_and_numbers_is_in_the_scripts() -> None:
    hostile = json.dumps([{"name": "KEY", "value": HOSTILE}])
    job = digits(f"trainer.env={hostile}", f"evaluators.env={hostile}")
    assert script.training(job, Profile(), PLACES) == script.training(digits(), Profile(), PLACES)
    profile = Profile.model_validate({"evaluators": {"partition": "cpu"}})
    assert script.evaluation(job, profile, PLACES) == script.evaluation(digits(), profile, PLACES)


@pytest.mark.parametrize(
    "wrong",
    [
        {"partition": "gpu --uid=0"},
        {"partition": "gpu\n#SBATCH --uid=0"},
        {"account": "$(id)"},
        {"time": "1; id"},
        {"modules": ["cuda\nid"]},
        {"env": {"A;id;B": "1"}},
        {"env": {"A": "1\nid"}},
        {"sbatch": ["--comment=a\nid"]},
        {"sbatch": ["id"]},
        {"memory": "1G "},
        {"warnSeconds": 5},
    ],
)
def test_a_profile_with_what_is_no_value_is_refused(
    wrong: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, monkeypatch, {"profiles": {"gpu": wrong}})
    with pytest.raises(UserError, match=f"slurm.yaml: profiles.gpu.{next(iter(wrong))}"):
        profiles.profile()


def written(folder: Path, monkeypatch: pytest.MonkeyPatch, content: object) -> None:
    """Have this as the user's profiles."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    (folder / "tandem").mkdir()
    (folder / "tandem" / "slurm.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


def test_a_profile_is_chosen_by_name_by_default_or_because_it_is_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = {"profiles": {"gpu": {"partition": "gpu"}, "cpu": {"partition": "cpu"}}}
    written(tmp_path, monkeypatch, two)
    assert profiles.profile("cpu").partition == "cpu"
    with pytest.raises(UserError, match="several profiles and no default; choose one with --profile: gpu, cpu"):
        profiles.profile()
    with pytest.raises(UserError, match="has no profile gpus; it has: gpu, cpu; did you mean gpu"):
        profiles.profile("gpus")
    profiles.file().write_text(yaml.safe_dump({**two, "default": "gpu"}))
    assert profiles.profile().partition == "gpu"
    profiles.file().write_text(yaml.safe_dump({"profiles": {"only": {"partition": "p"}}}))
    assert profiles.profile().partition == "p"
    profiles.file().unlink()
    assert profiles.profile() == Profile()
    with pytest.raises(UserError, match="there is no profile gpu"):
        profiles.profile("gpu")


def test_the_profiles_that_the_page_shows_are_profiles() -> None:
    page = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
    smallest, typical = (yaml.safe_load(part.partition("```")[0]) for part in page.split("```yaml\n")[1:3])
    assert profiles.Profiles.model_validate(smallest).profiles["gpu"].modules == ["python/3.11"]
    assert profiles.Profiles.model_validate(typical).profiles["gpu"].evaluators.partition == "cpu"
    named = {field.alias for field in Profile.model_fields.values()}
    told = set(re.findall(r"`([a-zA-Z]+)`", page.partition("| field | meaning |")[2].partition("\n\n")[0]))
    assert named <= told


@pytest.mark.parametrize("cancels", [True, False])
def test_of_a_job_that_is_refused_nothing_stays_or_the_refusal_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancels: bool
) -> None:
    numbers = iter(["17"])

    def submit(*_: object) -> str:
        try:
            return next(numbers)
        except StopIteration:
            raise SlurmError("sbatch: the partition cpu is down") from None

    def cancel(job: str) -> None:
        assert job == "17"
        if not cancels:
            raise SlurmError("scancel: no answer")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scheduler, "submit", submit)
    monkeypatch.setattr(scheduler, "cancel", cancel)
    job = digits("evaluators.replicas=2")
    RunDir(tmp_path / "run").create()
    with pytest.raises(UserError) as refused:
        submission.submit(tmp_path / "run", job, Profile.model_validate({"evaluators": {"partition": "cpu"}}))
    remains = "" if cancels else "; what was submitted remains: scancel 17"
    assert str(refused.value) == f"sbatch: the partition cpu is down; evaluate.sh requests partition cpu{remains}"
