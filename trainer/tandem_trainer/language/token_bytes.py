"""How many bytes of text each token of a model's tokenizer stands for, for scores that compare models of other tokens.

Two kinds of tokenizers say it of each token alone: byte-level ones, whose tokens are written with one letter for each
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
    """Bytes of each token; special ones have none.

    Args:
        vocabulary: tokens that the model knows, which may be more than the tokenizer has.

    Returns:
        [vocabulary], int64; None: this kind of tokenizer does not say it.
    """
    kinds = _decoders(tokenizer)
    if "ByteLevel" in kinds:
        is_byte_level = True
    elif "Metaspace" in kinds or "ByteFallback" in kinds:
        is_byte_level = False
    else:
        return None
    found = torch.zeros(vocabulary, dtype=torch.int64)
    special, added = set(tokenizer.all_special_ids), tokenizer.added_tokens_decoder
    for text, number in tokenizer.get_vocab().items():
        if number in special or number >= vocabulary or (number in added and added[number].special):
            continue
        if number in added:
            found[number] = len(text.encode())
        elif is_byte_level:
            found[number] = len(text)
        else:
            found[number] = 1 if _is_a_byte(text) else len(text.replace(SPACE, " ").encode())
    return found


def _is_a_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _decoders(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """Kinds of the steps that make a text of tokens again."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return set()
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    return {step["type"] for step in state.get("decoders", [state])}
