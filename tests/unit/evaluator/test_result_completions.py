"""What language models write for prompts: reported by shards, put together, bounded, and read again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tandem.evaluation import MAX_COMPLETION, MAX_COMPLETIONS, MAX_PROMPT, Checkpoint, Completions, added
from tandem.job.resource import Evaluators
from tandem.job.tasks import Loop
from tandem.rundir import evaluations
from tandem_evaluator.program import _parts
from tandem_evaluator.result import ProgramShard, merge_program
from tandem_evaluator.task_program import TaskEvaluation
from tandem_trainer.causal_lm import CausalLM, CausalLMConfig


def shard(number: int, *texts: tuple[int, str, str], shards: int = 2) -> ProgramShard:
    facts = {"checkpoint": "step-000000001", "step": 1, "generation": 1, "seconds": 1.0, "evaluator": "e", "at": 2.0}
    report = {"loss": {"mean": [1.0, 1]}, **({"texts": Completions(texts).wire()} if texts else {})}
    return ProgramShard.read({**facts, "shard": number, "shards": shards, **_parts(report)})


def test_shards_are_put_together_by_the_number_of_the_prompt() -> None:
    merged = merge_program([shard(1, (1, "b", "B")), shard(0, (0, "a", "A"), (2, "c", "C"))], "loss")
    assert [(one.number, one.prompt, one.text) for one in merged.completions] == [
        (0, "a", "A"),
        (1, "b", "B"),
        (2, "c", "C"),
    ]
    assert evaluations.completions(merged.to_json()) == Completions([(0, "a", "A"), (1, "b", "B"), (2, "c", "C")])
    assert merged.metrics == {"loss": 1.0}
    assert not merged.note


def test_a_result_without_prompts_has_none() -> None:
    merged = merge_program([shard(0), shard(1)], "loss")
    assert merged.completions is None
    assert evaluations.completions(merged.to_json()) == Completions([])


def test_a_prompt_that_two_shards_completed_is_kept_once_and_said() -> None:
    merged = merge_program([shard(0, (0, "a", "A")), shard(1, (0, "a", "Z"))], "loss")
    assert [one.text for one in merged.completions or ()] == ["A"]
    assert "two shards completed 1 prompt; one text of each is left out" in merged.note


def test_texts_are_cut_and_hold_what_utf_8_has() -> None:
    ((_, prompt, text),) = Completions([(0, "p" * 10_000, "\ud800" + "t" * 10_000)]).texts
    assert len(prompt) == MAX_PROMPT
    assert len(text) == MAX_COMPLETION
    assert prompt.endswith("…")
    assert text.encode().startswith(b"?t")


def test_there_are_not_too_many_and_none_twice() -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_COMPLETIONS} completions, not 65"):
        Completions([(number, "a", "b") for number in range(65)])
    with pytest.raises(ValueError, match="prompt 3 was completed twice"):
        added([Completions([(3, "a", "b")]), Completions([(3, "a", "b")])])
    whole = added([Completions([(3, "a", "b")]), Completions([(1, "c", "d")])])
    assert whole == Completions([(1, "c", "d"), (3, "a", "b")])


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ({"a": {"completions": "text"}}, r"a has to be a list of \[number, prompt, text\]"),
        ({"a": {"completions": [[1, "a"]]}}, r"a has to be a list of \[number, prompt, text\]"),
        ({"a": {"completions": []}, "b": {"completions": []}}, "it has completions twice"),
    ],
)
def test_a_report_that_is_none_is_named(report: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _parts(report)


def test_completions_alone_have_no_score() -> None:
    facts = {"checkpoint": "step-000000001", "step": 1, "generation": 1, "seconds": 1.0, "evaluator": "e", "at": 2.0}
    with pytest.raises(ValueError, match="at least one metric beside its completions, which have no score"):
        ProgramShard.read({**facts, "shard": 0, "shards": 1, **_parts({"a": {"completions": [[0, "a", "b"]]}})})


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        3,
        [3],
        [{"number": 0}],
        [{"number": "0", "prompt": "a", "text": "b"}],
        [{"number": 0, "prompt": "a", "text": 7}],
        [{"number": 0, "prompt": "a", "text": "b"}] * 2,
        [{"number": number, "prompt": "a", "text": "b"} for number in range(100)],
    ],
)
def test_what_is_damaged_is_none(damaged: Any) -> None:
    assert evaluations.completions({"completions": damaged}) == Completions([])


def test_a_small_model_completes_its_share_of_the_prompts_and_the_same_again(tmp_path: Path) -> None:
    task = CausalLM(CausalLMConfig.model_validate({"layers": 1, "heads": 1, "width": 8, "length": 8}))
    torch.manual_seed(0)
    save_file(task.model().state_dict(), tmp_path / "weights.safetensors")
    options = {"prompts": ["The import statement", "A loop", "é"], "maxTokens": 4, "temperature": 0.7}
    evaluators = Evaluators.model_validate({"generate": options})
    loop = Loop(micro_batch_size=256)

    def written(number: int, count: int) -> Completions:
        # A text that is small enough for a quick pass.
        made = TaskEvaluation(task, loop, evaluators)
        made._data = torch.utils.data.TensorDataset(task.data("test").tensors[0][:4])
        made._tensors = made._data.tensors
        found = made.run(Checkpoint(tmp_path, tmp_path / "weights.safetensors", 1, number, count))
        assert isinstance(found["completions"], Completions)
        return found["completions"]

    whole = written(0, 1)
    assert [number for number, _, _ in whole.texts] == [0, 1, 2]
    assert added([written(1, 2), written(0, 2)]) == whole
