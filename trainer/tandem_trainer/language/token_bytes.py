"""Bytes of text that each token of a model's tokenizer stands for, for scores that compare models with different
tokens.

Two kinds of tokenizers tell it for each token: byte-level ones, whose tokens are written with one letter for each
byte, and those of SentencePiece, which write a space as ▁ and a byte that is no text as <0x0A>.
"""

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE = "▁"


def token_bytes(tokenizer: "PreTrainedTokenizerBase", vocabulary: int) -> Tensor | None:
    """Return the bytes of each token; special tokens have none.

    Args:
        tokenizer: tokenizer of the model.
        vocabulary: tokens of the model, which may be more than the tokenizer has.

    Returns:
        [vocabulary], int64; None: this kind of tokenizer does not tell.
    """
    kinds = _decoders(tokenizer)
    if "ByteLevel" in kinds:
        is_byte_level = True
    elif "Metaspace" in kinds or "ByteFallback" in kinds:
        is_byte_level = False
    else:
        return None
    sizes = torch.zeros(vocabulary, dtype=torch.int64)
    special, added = set(tokenizer.all_special_ids), tokenizer.added_tokens_decoder
    for text, number in tokenizer.get_vocab().items():
        if number in special or number >= vocabulary or (number in added and added[number].special):
            continue
        if number in added:
            sizes[number] = len(text.encode())
        elif is_byte_level:
            sizes[number] = len(text)
        else:
            sizes[number] = 1 if _is_a_byte(text) else len(text.replace(SPACE, " ").encode())
    return sizes


def _is_a_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _decoders(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """Return the kinds of the decoder's steps, which turn tokens into text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return set()
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    return {step["type"] for step in state.get("decoders", [state])}
