"""Completions of prompts by a language model, for people who compare checkpoints (`evaluators.generate`).

Prompts are completed one at a time: padding them to one length would change the numbers, and with them now and then a
token, with the number of evaluators. So the same weights write the same text, also if it is drawn.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from tandem.evaluation import MAX_COMPLETIONS, MAX_PROMPT
from tandem.evaluation import truncate_text as shortened
from tandem.job.language_evaluation import Generate
from tandem.rundir.durable import is_transient
from tandem_trainer.failure import ConfigurationError, UnusableInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIELD = "spec.evaluators.generate"


@runtime_checkable
class Completer(Protocol):
    """Protocol of a task whose model completes prompts."""

    def complete(self, model: nn.Module, prompt: str, number: int, options: Generate) -> str:
        """Complete a prompt; returns the completion without the prompt.

        Args:
            model: model in evaluation mode, with the weights of a checkpoint, on the CPU.
            prompt: text to continue.
            number: number of the prompt, from 0.
            options: settings of `evaluators.generate`.

        Raises:
            ConfigurationError: the prompt does not suit the model.
        """


def prompts_of(options: Generate) -> list[str]:
    """Return the prompts of a job.

    Raises:
        UnusableInput: the file of prompts cannot be read, or is empty.
    """
    if options.prompts is not None:
        return options.prompts
    path = Path(options.prompts_file or "").expanduser()
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        if is_transient(error):
            raise
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UnusableInput(f"{FIELD}.promptsFile: {path} cannot be read: {reason}") from error
    if not lines:
        raise UnusableInput(f"{FIELD}.promptsFile: {path} has no prompts")
    prompts = lines[:MAX_COMPLETIONS]
    if path.suffix.lower() == ".jsonl":
        prompts = [_prompt_of_row(path, number, line) for number, line in enumerate(prompts, start=1)]
    return [shortened(prompt, MAX_PROMPT) for prompt in prompts]


def _prompt_of_row(path: Path, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str) or not prompt:
        raise UnusableInput(f'{FIELD}.promptsFile: {path}, line {number} is not like {{"prompt": "…"}}')
    return prompt


def tokens_of(tokenizer: "PreTrainedTokenizerBase", prompt: str, options: Generate) -> list[int]:
    """Encode a prompt as the model gets it.

    Raises:
        ConfigurationError: the tokenizer has no chat template, or refuses the prompt.
    """
    if not options.chat:
        tokens: list[int] = tokenizer(prompt, verbose=False)["input_ids"]
        # Some tokenizers add an end to each text; the model must go on instead.
        return tokens[:-1] if tokens[1:] and tokens[-1] == tokenizer.eos_token_id else tokens
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ConfigurationError(f"{FIELD}.chat: the tokenizer of the model has no chat template; set chat: false")
    messages = [{"role": "user", "content": prompt}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise ConfigurationError(f"{FIELD}.chat: the chat template refuses a prompt: {error}") from error
    chat_tokens: list[int] = tokenizer(str(text), add_special_tokens=False, verbose=False)["input_ids"]
    return chat_tokens


def complete(
    model: Any, tokenizer: "PreTrainedTokenizerBase", ends: Sequence[int], prompt: str, number: int, options: Generate
) -> str:
    """Complete a prompt with a model of transformers. A prompt that is too long for it loses its beginning.

    Args:
        model: model in evaluation mode.
        tokenizer: tokenizer of the model.
        ends: tokens that end a completion.
        prompt: text to continue.
        number: number of the prompt, from 0; part of the seed.
        options: settings of `evaluators.generate`.

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
    is_sampled = options.temperature > 0
    # All settings are given here: those in the model's own file must not change what is compared.
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=options.max_tokens,
        do_sample=is_sampled,
        eos_token_id=list(ends) or None,
        pad_token_id=(list(ends) or [0])[0],
        num_beams=1,
        repetition_penalty=1.0,
        **({"temperature": options.temperature, "top_k": 0, "top_p": 1.0} if is_sampled else {}),
    )
    inputs = torch.tensor([tokens])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed + number)
        output = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=settings)
    return str(tokenizer.decode(output[0, len(tokens) :], skip_special_tokens=True))
