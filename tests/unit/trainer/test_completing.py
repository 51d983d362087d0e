"""A pretrained model completes prompts: as transformers does, the same again, and as a chat where it is one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.job.language_evaluation import Generate
from tandem_trainer.causal_lm import CausalLM
from tandem_trainer.causal_lm import CausalLMConfig as SmallConfig
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.language.completing import Completer, prompts_of, tokens_of
from tandem_trainer.language.fine_tuning import FineTuning, FineTuningConfig
from tests.support.language import pretrained, tokenizer


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> FineTuning:
    folder = pretrained(tmp_path_factory.mktemp("pretrained"))
    return FineTuning(FineTuningConfig.model_validate({"pretrained": str(folder), "length": 64}))


@pytest.fixture(scope="module")
def model(task: FineTuning) -> Any:
    made = task.model().eval()
    task.initialize(made)
    return made


def options(**given: Any) -> Generate:
    return Generate.model_validate({"prompts": ["one"], "maxTokens": 8, **given})


def test_it_takes_the_most_likely_token_each_time_whatever_was_drawn_before(task: FineTuning, model: Any) -> None:
    assert isinstance(task, Completer)
    words = task.tokenizer
    seen = torch.tensor([words("The import statement")["input_ids"]])
    with torch.inference_mode():
        for _ in range(8):
            seen = torch.cat([seen, model(input_ids=seen).logits[:, -1:].argmax(dim=-1)], dim=1)
        begin = len(words("The import statement")["input_ids"])
        expected = words.decode(seen[0, begin:], skip_special_tokens=True)
        for seed in (1, 2):
            torch.manual_seed(seed)
            state = torch.get_rng_state()
            assert task.complete(model, {0: "The import statement"}, options()) == [expected]
            assert torch.equal(torch.get_rng_state(), state)


def test_a_drawn_text_follows_from_seed_and_number_alone(task: FineTuning, model: Any) -> None:
    def drawn(number: int, seed: int = 5) -> str:
        (text,) = task.complete(model, {number: "A loop"}, options(temperature=1.0, seed=seed, maxTokens=16))
        return text

    first = drawn(0)
    torch.rand(7)
    assert drawn(0) == first
    assert len({first, drawn(1), drawn(2), drawn(0, seed=99)}) == 4


def test_prompts_of_a_batch_are_completed_as_each_alone(task: FineTuning, model: Any) -> None:
    prompts = {0: "A loop", 3: "The import statement finds a module", 4: "Names", 7: "x = 1"}
    alone = [text for number, prompt in prompts.items() for text in task.complete(model, {number: prompt}, options())]
    assert task.complete(model, prompts, options(batch=4)) == alone


def test_the_end_of_a_turn_ends_the_text(task: FineTuning, model: Any) -> None:
    end = task.tokenizer.eos_token_id
    with torch.no_grad():
        kept = model.lm_head.weight.clone()
        model.lm_head.weight[end] = 0
        hidden = model.model(input_ids=torch.tensor([task.tokenizer("A loop")["input_ids"]])).last_hidden_state[0, -1]
        model.lm_head.weight[end] = 100 * hidden
        assert task.complete(model, {0: "A loop"}, options()) == [""]
        model.lm_head.weight.copy_(kept)


def test_a_chat_prompt_stands_in_the_template(task: FineTuning) -> None:
    found = tokens_of(task.tokenizer, "Who are you?", options(chat=True))
    assert task.tokenizer.decode(found) == "<|user|>Who are you?<|end|>\n<|assistant|>"
    plain = tokens_of(task.tokenizer, "Who are you?", options())
    assert task.tokenizer.decode(plain) == "Who are you?"


def test_a_prompt_that_is_too_long_loses_its_beginning_and_no_room_is_refused(task: FineTuning, model: Any) -> None:
    long = "The import statement finds a module. " * 60
    assert task.complete(model, {0: long}, options()) == task.complete(model, {0: "x" * 500 + long}, options())
    with pytest.raises(ConfigurationError, match="maxTokens: 128 leaves no room for a prompt in the 128 positions"):
        task.complete(model, {0: "A loop"}, options(maxTokens=128))


def test_a_model_without_a_chat_template_has_no_chat() -> None:
    with pytest.raises(ConfigurationError, match="has no chat template; set chat: false"):
        tokens_of(tokenizer(chat=False), "Who?", options(chat=True))
    small = CausalLM(SmallConfig())
    with pytest.raises(ConfigurationError, match="trained from the beginning has no chat template"):
        small.complete(small.model(), {0: "Who?"}, options(chat=True))


def test_prompts_come_from_a_file_of_lines_or_of_json(tmp_path: Path) -> None:
    plain, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_text("one\n\n  two\n" + "more\n" * 100)
    lines.write_text("".join(json.dumps({"prompt": text, "id": 7}) + "\n" for text in ("a\nb", "c" * 3000)))
    assert prompts_of(Generate(prompts_file=str(plain)))[:3] == ["one", "  two", "more"]
    assert len(prompts_of(Generate(prompts_file=str(plain)))) == 64
    assert [len(one) for one in prompts_of(Generate(prompts_file=str(lines)))] == [3, 2000]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.txt", None, "gone.txt cannot be read: No such file"),
        ("empty.txt", b"\n \n", "empty.txt has no prompts"),
        ("bytes.txt", b"\xff\xfe\xff", "is not UTF-8 text"),
        ("a.jsonl", b'{"prompt": "a"}\n{"text": "b"}\n', "line 2 is not like"),
        ("b.jsonl", b"plain\n", "line 1 is not like"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UnusableInput, match=words):
        prompts_of(Generate(prompts_file=str(tmp_path / name)))
