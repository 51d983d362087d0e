"""Completions of prompts by a language model, for people who compare checkpoints (`evaluators.generate`).

Prompts are completed one at a time by default: padding them to one length changes the numbers, and with them now and
then a token, with the number of evaluators. So the same weights write the same text, also if it is drawn. On a GPU,
where several take the time of one, `generate.batch` completes them together.
"""

import json
from collections.abc import Mapping, Sequence
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

    def complete(self, model: nn.Module, prompts: Mapping[int, str], options: Generate) -> list[str]:
        """Complete prompts; returns the completions in their order, without the prompts.

        Args:
            model: model in evaluation mode, with the weights of a checkpoint.
            prompts: texts to continue, at most `options.batch` at once, by their numbers among all prompts.
            options: settings of `evaluators.generate`.

        Raises:
            ConfigurationError: a prompt does not suit the model.
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
    model: Any,
    tokenizer: "PreTrainedTokenizerBase",
    ends: Sequence[int],
    prompts: Mapping[int, str],
    options: Generate,
) -> list[str]:
    """Complete prompts with a model of transformers. A prompt that is too long for it loses its beginning.

    Args:
        model: model in evaluation mode.
        tokenizer: tokenizer of the model.
        ends: tokens that end a completion.
        prompts: texts to continue, by their numbers; the first number is part of the seed.
        options: settings of `evaluators.generate`.

    Raises:
        ConfigurationError: a prompt does not suit the model.
    """
    from transformers import GenerationConfig

    rows = [
        _fitting(model, tokens_of(tokenizer, prompt, options), number, options) for number, prompt in prompts.items()
    ]
    padding = (list(ends) or [0])[0]
    longest = max(map(len, rows))
    # Padded on the left: the new tokens follow the last one of each prompt.
    inputs = torch.tensor([[padding] * (longest - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
    is_sampled = options.temperature > 0
    # All settings are given here: those in the model's own file must not change what is compared.
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=options.max_tokens,
        do_sample=is_sampled,
        eos_token_id=list(ends) or None,
        pad_token_id=padding,
        num_beams=1,
        repetition_penalty=1.0,
        **({"temperature": options.temperature, "top_k": 0, "top_p": 1.0} if is_sampled else {}),
    )
    with torch.random.fork_rng(devices=[] if model.device.type == "cpu" else [model.device]):
        torch.manual_seed(options.seed + next(iter(prompts)))
        output = model.generate(inputs, attention_mask=mask, generation_config=settings)
    return [str(text) for text in tokenizer.batch_decode(output[:, longest:], skip_special_tokens=True)]


def _fitting(model: Any, tokens: list[int], number: int, options: Generate) -> list[int]:
    """The end of a prompt that leaves room for the completion."""
    if not tokens:
        raise ConfigurationError(f"{FIELD}: prompt {number} has no token")
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None:
        return tokens
    if options.max_tokens >= positions:
        raise ConfigurationError(
            f"{FIELD}.maxTokens: {options.max_tokens} leaves no room for a prompt in the {positions} positions of "
            "the model"
        )
    return tokens[-(positions - options.max_tokens) :]
