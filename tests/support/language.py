"""A tiny pretrained language model in a folder, with a tokenizer that was trained on the English inside Python."""

from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn

from tandem.job.tasks import Optimizer
from tandem_trainer.language.fine_tuning import FineTuning

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat template of our own: each message ends with a token and a line break."""
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


@cache
def tokenizer_json() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    made.train_from_iterator([topics[name] for name in sorted(topics)[:40]], trainer)
    return made.to_str()


def tokenizer(chat: bool = True) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_json()), eos_token="<|end|>", pad_token="<|pad|>"
    )
    if chat:
        made.chat_template = TEMPLATE
    return made


def config(kind: str = "qwen2", **more: Any) -> Any:
    from transformers import ApertusConfig, LlamaConfig, Qwen2Config, Qwen3Config

    size = {
        "vocab_size": 600,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "dtype": "float32",
        # Larger than usual, so that attention matters at once.
        "initializer_range": 0.2,
    }
    kinds = {
        "qwen2": (Qwen2Config, True),
        "llama": (LlamaConfig, False),
        "qwen3": (Qwen3Config, True),
        "apertus": (ApertusConfig, False),
    }
    made, tied = kinds[kind]
    return made(**{**size, "tie_word_embeddings": tied, **more})


def pretrained(folder: Path, kind: str = "qwen2", chat: bool = True, **more: Any) -> Path:
    """Random weights in a folder, as `save_pretrained` writes them."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config(kind, **more))
    model.save_pretrained(folder)
    tokenizer(chat).save_pretrained(folder)
    return folder


def tuned(made: FineTuning, steps: int = 3) -> nn.Module:
    """Its model after some steps."""
    torch.manual_seed(0)
    model = made.model().train()
    made.initialize(model)
    optimizer = made.optimizer(model, Optimizer(learning_rate=0.01))
    rows = made.data("train")
    for step in range(steps):
        made.loss_sum(model, made.collate([rows[step]]), 1).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return model


def logits(model: nn.Module) -> Tensor:
    """Of forty tokens, by a model in evaluation mode."""
    tokens = torch.arange(5, 45).view(1, 40)
    with torch.inference_mode():
        return model.eval()(input_ids=tokens).logits  # type: ignore[no-any-return]
