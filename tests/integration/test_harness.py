"""lm-evaluation-harness on a model in memory, with tasks of one's own and without a network."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.confidence import mean_interval, share_interval
from tandem.evaluation import Mean, added
from tandem.job.language_evaluation import Harness
from tandem_evaluator.harness import HarnessTasks, metric_of
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.language.fine_tuning import FineTuning, FineTuningConfig
from tests.support.language import pretrained

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.full("evaluator", "trainer"),
    # The library's and those of what it imports.
    pytest.mark.filterwarnings("ignore"),
]
CHOICE = {
    "task": "what_follows",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
WRITTEN = {
    **{"task": "written", "dataset_path": "json", "test_split": "test", "output_type": "loglikelihood_rolling"},
    **{"doc_to_text": "", "doc_to_target": "{{question}}"},
    "metric_list": [{"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks, of seven samples."""
    found = tmp_path_factory.mktemp("tasks")
    data = found / "questions.jsonl"
    samples = [{"question": f"What follows {n}?", "choices": ["A", "B"], "answer": n % 2} for n in range(7)]
    data.write_text("".join(json.dumps(one) + "\n" for one in samples))
    for task in (CHOICE, WRITTEN):
        described = {**task, "dataset_kwargs": {"data_files": {"test": str(data)}}}
        (found / f"{task['task']}.yaml").write_text(json.dumps(described))
    return found


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> FineTuning:
    model = pretrained(tmp_path_factory.mktemp("pretrained"))
    return FineTuning(FineTuningConfig.model_validate({"pretrained": str(model), "length": 64}))


@pytest.fixture(scope="module")
def model(task: FineTuning) -> Any:
    made = task.model().eval()
    task.initialize(made)
    return made


@pytest.fixture(autouse=True)
def away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the hub, and without what an earlier test has cached."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def test_shards_of_a_task_add_up_to_one_pass_over_its_samples(folder: Path, task: FineTuning, model: Any) -> None:
    subject = HarnessTasks(Harness(tasks=["what_follows"], include=str(folder)), model, task.tokenizer)
    whole = subject.run(0, 1)["what_follows_acc"]
    assert whole.count == 7
    assert 0 <= whole.total <= 7
    assert mean_interval(whole) == share_interval(whole.total, 7)
    assert added([subject.run(shard, 3)["what_follows_acc"] for shard in range(3)]) == whole
    assert subject.run(8, 9) == {}, "a shard without samples"

    few = HarnessTasks(Harness(tasks=["what_follows"], include=str(folder), max_samples=2), model, task.tokenizer)
    assert few.run(0, 1)["what_follows_acc"].count == 2


def test_a_model_that_prefers_an_answer_has_the_score_of_that(folder: Path, task: FineTuning, model: Any) -> None:
    subject = HarnessTasks(Harness(tasks=["what_follows"], include=str(folder), chat=True), model, task.tokenizer)
    totals = []
    for answer in ("A", "B"):
        (token,) = task.tokenizer(answer)["input_ids"]
        bias = torch.zeros(600).index_fill(0, torch.tensor([token]), 1000.0)
        hook = model.lm_head.register_forward_hook(lambda _, __, logits, bias=bias: logits + bias)
        totals.append(subject.run(0, 1)["what_follows_acc"].total)
        hook.remove()
    assert totals == [4, 3], "the first choice is the answer to four of the seven questions"


def test_a_metric_that_is_no_mean_needs_one_evaluator(folder: Path, task: FineTuning, model: Any) -> None:
    subject = HarnessTasks(Harness(tasks=["written"], include=str(folder)), model, task.tokenizer)
    assert isinstance(subject.run(0, 1)["written_word_perplexity"], Mean)
    with pytest.raises(ConfigurationError, match="word_perplexity of written is no mean over samples, so shards of it"):
        subject.run(0, 2)


def test_a_task_that_is_not_there_is_named(folder: Path, task: FineTuning, model: Any) -> None:
    with pytest.raises(UnusableInput, match=r"harness\.tasks: what_else cannot be loaded: "):
        HarnessTasks(Harness(tasks=["what_else"], include=str(folder)), model, task.tokenizer)


@pytest.mark.parametrize(
    ("task", "metric", "kind", "name"),
    [
        ("arc_easy", "acc_norm", "none", "arc_easy_acc_norm"),
        ("gsm8k", "exact_match", "strict-match", "gsm8k_exact_match_strict-match"),
        ("2048 game", "acc", "", "t2048_game_acc"),
        ("t" * 80, "acc", "", "t" * 63),
    ],
)
def test_a_metric_has_a_name_that_prometheus_and_people_read(task: str, metric: str, kind: str, name: str) -> None:
    assert metric_of(task, metric, kind) == name
