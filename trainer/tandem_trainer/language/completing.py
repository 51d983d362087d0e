"""Completions of prompts by a language model, for people who compare checkpoints (`evaluators.generate`).

Prompts are completed one at a time: padding them to one length would change the numbers, and with them now and then a
token, by how many evaluators there are. So the same weights write the same text, and a drawn one too.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from tandem.evaluation import MAX_COMPLETIONS, MAX_PROMPT
from tandem.evaluation import cut as shortened
from tandem.language_evaluation import Generate
from tandem.rundir.durable import may_pass
from tandem_trainer.failure import ConfigurationError, UnusableInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIELD = "spec.evaluators.generate"


@runtime_checkable
class Completer(Protocol):
    """A task whose model completes prompts."""

    def complete(self, model: nn.Module, prompt: str, number: int, options: Generate) -> str:
        """What the model writes for a prompt, without the prompt.

        Args:
            model: in evaluation mode, with the weights of a checkpoint, on the CPU.
            number: of the prompt, from 0.

        Raises:
            ConfigurationError: the prompt does not suit the model.
        """


def prompts_of(options: Generate) -> list[str]:
    """The prompts that a job gives.

    Raises:
        UnusableInput: the file cannot be read, or has none.
    """
    if options.prompts is not None:
        return options.prompts
    path = Path(options.prompts_file or "").expanduser()
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        if may_pass(error):
            raise
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise UnusableInput(f"{FIELD}.promptsFile: {path} cannot be read: {why}") from error
    if not lines:
        raise UnusableInput(f"{FIELD}.promptsFile: {path} has no prompts")
    found = lines[:MAX_COMPLETIONS]
    if path.suffix.lower() == ".jsonl":
        found = [_of_row(path, number, line) for number, line in enumerate(found, start=1)]
    return [shortened(one, MAX_PROMPT) for one in found]


def _of_row(path: Path, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str) or not prompt:
        raise UnusableInput(f'{FIELD}.promptsFile: {path}, line {number} is not like {{"prompt": "…"}}')
    return prompt


def tokens_of(tokenizer: "PreTrainedTokenizerBase", prompt: str, options: Generate) -> list[int]:
    """A prompt as the model sees it.

    Raises:
        ConfigurationError: the tokenizer has no chat template, or refuses the prompt.
    """
    if not options.chat:
        found: list[int] = tokenizer(prompt, verbose=False)["input_ids"]
        # Some tokenizers end each text.
        return found[:-1] if found[1:] and found[-1] == tokenizer.eos_token_id else found
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ConfigurationError(f"{FIELD}.chat: the tokenizer of the model has no chat template; say chat: false")
    asked = [{"role": "user", "content": prompt}]
    try:
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise ConfigurationError(f"{FIELD}.chat: the chat template refuses a prompt: {error}") from error
    written: list[int] = tokenizer(str(text), add_special_tokens=False, verbose=False)["input_ids"]
    return written


def complete(
    model: Any, tokenizer: "PreTrainedTokenizerBase", ends: Sequence[int], prompt: str, number: int, options: Generate
) -> str:
    """What a model of transformers writes for a prompt. A prompt that is too long for it loses its beginning.

    Args:
        ends: tokens after which it has nothing more to say.
        number: of the prompt, from 0: of it the seed is made.

    Raises:
        ConfigurationError: the prompt does not suit the model.
    """
    from transformers import GenerationConfig

    tokens = tokens_of(tokenizer, prompt, options)
    if not tokens:
        raise ConfigurationError(f"{FIELD}: prompt {number} has no token")
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None:
        if options.max_tokens >= positions:
            raise ConfigurationError(
                f"{FIELD}.maxTokens: {options.max_tokens} leaves no room for a prompt in the {positions} positions of "
                "the model"
            )
        tokens = tokens[-(positions - options.max_tokens) :]
    draws = options.temperature > 0
    # All of it is said here: what the model's own file says of sampling or penalties must not change what is compared.
    how = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=options.max_tokens,
        do_sample=draws,
        eos_token_id=list(ends) or None,
        pad_token_id=(list(ends) or [0])[0],
        num_beams=1,
        repetition_penalty=1.0,
        **({"temperature": options.temperature, "top_k": 0, "top_p": 1.0} if draws else {}),
    )
    seen = torch.tensor([tokens])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed + number)
        written = model.generate(seen, attention_mask=torch.ones_like(seen), generation_config=how)
    return str(tokenizer.decode(written[0, len(tokens) :], skip_special_tokens=True))
