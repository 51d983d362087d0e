"""Attention within documents that stand one after the other in a row: no padding, and no mask.

A batch of documents is computed as one row of all their tokens. Everything but attention treats tokens one by one, so
nothing is computed for padding; attention is torch's scaled_dot_product_attention of each document by itself, so its
cost grows with the squares of their lengths, and not with that of a row's.

transformers lets anybody register a function for attention (`AttentionInterface`), and passes a mask of four dimensions
to it as it is. So what travels through a model in the place of a mask is the lengths of the documents, [1, 1, 1,
documents] int64: no model computes masks of integers. All else goes on to the library's own function. That the lengths
arrive in every layer is seen once, when the model is made, over tensors without memory (`stays_within`); of a model
where they do not, rows are padded.

For CPUs, on which ranks train without a GPU and evaluators compute: a call for each document costs little there.

Rejected: a mask of all tokens by all, as transformers makes it of positions that begin anew (its cost grows with the
square of the batch); FlexAttention (no backward pass on CPUs, torch 2.15); nested tensors (on CPUs they are padded
again).
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "sdpa"
"""The name in transformers of attention by torch's scaled_dot_product_attention."""
BIASES = ("position_bias", "softcap", "s_aux")
"""Arguments with which attention is more than a softmax over scaled products."""


def register() -> None:
    """Have the models of this process take lengths of documents in the place of a mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Causal attention within documents, as transformers calls it. With a mask, or without one, it is the library's.

    Args:
        query: [1, heads, tokens, width].
        key: [1, heads of keys, tokens, width]; several heads may share one.
        value: as `key`.
        attention_mask: lengths of the documents, [1, 1, 1, documents] int64, whose sum is `tokens`.
        dropout: probability with which a weight is dropped.
        scaling: of the products; None: the square root of the width, inverted.

    Returns:
        [1, tokens, heads, width].
    """
    if not are_lengths(attention_mask):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        whole: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **rest
        )
        return whole
    assert attention_mask is not None
    lengths = attention_mask.tolist()[0][0][0]
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = (one.repeat_interleave(shared, dim=1) for one in (key, value))
    # One by one they would each leave a gradient as large as the row.
    parts = zip(*(torch.split(one, lengths, dim=2) for one in (query, key, value)), strict=True)
    found = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scaling) for q, k, v in parts
    ]
    return torch.cat(found, dim=2).transpose(1, 2).contiguous(), None


def are_lengths(mask: Tensor | None) -> bool:
    """Whether it is no mask."""
    return mask is not None and mask.dtype is torch.int64


def stays_within(model: "PreTrainedModel") -> bool:
    """Whether each layer of a model is given the lengths of documents, and looks at nothing else of its own.

    Args:
        model: not wrapped yet; with or without its weights.
    """
    if any(isinstance(one, FakeTensor) or one.is_meta for one in model.parameters()):
        return False  # Traced for `tandem plan`, without values.
    from transformers import AttentionInterface

    lengths = torch.tensor([[[[2, 1]]]])
    calls = 0

    def counted(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any) -> Any:
        nonlocal calls
        calls += mask is lengths and not any(rest.get(name) is not None for name in BIASES)
        return attend(module, query, key, value, mask, **rest)

    AttentionInterface.register(ATTENTION, counted)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            tokens = torch.zeros(1, 3, dtype=torch.int64)
            model.base_model(input_ids=tokens, position_ids=tokens, attention_mask=lengths, use_cache=False)
    except (AttributeError, TypeError, ValueError, IndexError, KeyError, RuntimeError, AssertionError):
        return False
    finally:
        register()
    return bool(calls == model.config.num_hidden_layers)
