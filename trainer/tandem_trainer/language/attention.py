"""Attention within documents that are concatenated in one row: no padding, and no mask.

A batch of documents is computed as one row of all their tokens. Everything but attention treats tokens one by one, so
nothing is computed for padding; attention is torch's scaled_dot_product_attention of each document by itself, so its
cost grows with the squares of the documents' lengths, and not with the square of the row's.

transformers has a registry of attention functions (`AttentionInterface`), and passes a mask of four dimensions to them
unchanged. So the lengths of the documents, [1, 1, 1, documents] int64, travel through a model in place of a mask: no
model computes masks of integers. Calls with another mask go to the library's own function. Whether the lengths arrive
in every layer is checked once, when the model is made, over tensors without memory (`stays_within`); for a model where
they do not, rows are padded.

For CPUs, on which ranks without a GPU and evaluators compute: a call for each document costs little there.

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
"""Name of attention by torch's scaled_dot_product_attention in transformers."""
BIASES = ("position_bias", "softcap", "s_aux")
"""Arguments that make attention more than a softmax over scaled products."""


def register() -> None:
    """Make the models of this process take lengths of documents in place of a mask."""
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
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within documents, as transformers calls it. With a mask, or without one, it calls the
    library's function.

    Args:
        query: [1, heads, tokens, width].
        key: [1, heads of keys, tokens, width]; several heads may share one.
        value: as `key`.
        attention_mask: lengths of the documents, [1, 1, 1, documents] int64, whose sum is `tokens`.
        dropout: probability with which a weight is dropped.
        scaling: factor of the products; None: the inverse square root of the width.

    Returns:
        [1, tokens, heads, width].
    """
    # A mask of this type is in fact the lengths of documents.
    if attention_mask is None or attention_mask.dtype is not torch.int64:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return result
    assert attention_mask is not None
    lengths = attention_mask.tolist()[0][0][0]
    heads_per_key = query.shape[1] // key.shape[1]
    if heads_per_key > 1:
        key, value = (tensor.repeat_interleave(heads_per_key, dim=1) for tensor in (key, value))
    # Split once: slices one by one would each leave a gradient as large as the row.
    parts = zip(*(torch.split(tensor, lengths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scaling) for q, k, v in parts
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def stays_within(model: "PreTrainedModel") -> bool:
    """Whether each layer of a model gets the lengths of documents, and attends to nothing else.

    Args:
        model: unwrapped model, with or without its weights.
    """
    if any(isinstance(parameter, FakeTensor) or parameter.is_meta for parameter in model.parameters()):
        return False  # Traced for `tandem plan`, without values.
    from transformers import AttentionInterface

    lengths = torch.tensor([[[[2, 1]]]])
    calls = 0

    def count_calls(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        nonlocal calls
        calls += mask is lengths and not any(options.get(name) is not None for name in BIASES)
        return attend(module, query, key, value, mask, **options)

    AttentionInterface.register(ATTENTION, count_calls)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            tokens = torch.zeros(1, 3, dtype=torch.int64)
            model.base_model(input_ids=tokens, position_ids=tokens, attention_mask=lengths, use_cache=False)
    except (AttributeError, TypeError, ValueError, IndexError, KeyError, RuntimeError, AssertionError):
        return False
    finally:
        register()
    return bool(calls == model.config.num_hidden_layers)
