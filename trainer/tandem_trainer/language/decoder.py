"""A decoder of transformers in parts, for the stages of a pipeline.

A model can be cut if its forward pass is an embedding, layers, a norm and a last layer, with nothing between them. Its
own forward pass shows whether it is, with stand-ins for all of these modules: that also shows the arguments of each
layer. Stages pass on hidden states and the positions of tokens in their documents, from which each stage computes its
mask and its rotary embeddings.

Rejected: a list of models by name (the library renames the arguments of layers), and to pass on masks (they grow with
the square of the length).
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tandem_trainer.failure import ConfigurationError
from tandem_trainer.language.head import is_plain_projection, replaced_forward
from tandem_trainer.language.packing import mask_from_positions
from tandem_trainer.models.parts import Part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MASK, POSITIONS, ROTARY = "mask", "positions", "rotary"
"""Inputs of layers that depend on the batch: attention mask, positions in documents, rotary embeddings."""


def decoder_parts(model: "PreTrainedModel", with_logits: bool = True) -> dict[str, nn.Module]:
    """Return the forward pass of a model over packed rows in parts, by the names of their first modules. The first is
    called with `input_ids` and `position_ids`; the last returns logits.

    Args:
        model: decoder model.
        with_logits: False: the last part returns the hidden states, and the loss calls the last layer.

    Raises:
        ConfigurationError: the forward pass has another form.
    """
    base, head = model.base_model, model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding, layers, norm = (getattr(base, name, None) for name in ("embed_tokens", "layers", "norm"))
    if not isinstance(layers, nn.ModuleList) or not all(
        isinstance(module, nn.Module) for module in (embedding, norm, head)
    ):
        raise _refusal(model, "has another layout than embed_tokens, layers, norm and a last layer")
    if not is_plain_projection(model, head):
        raise _refusal(model, "does more with hidden states and logits than to pass them through its last layer")
    assert isinstance(embedding, nn.Module)
    assert isinstance(norm, nn.Module)
    rotary = getattr(base, "rotary_emb", None)
    try:
        calls = _layer_calls(base, embedding, layers, norm, rotary)
    except _OtherForward as error:
        raise _refusal(model, str(error)) from None
    names = {module: name for name, module in model.named_modules()}
    shared = partial(_shared_inputs, rotary)
    parts: dict[str, nn.Module] = {names[embedding]: Part(partial(_embed, embedding), embedding)}
    for layer, call in zip(layers, calls, strict=True):
        modules = [layer] if rotary is None else [layer, rotary]
        parts[names[layer]] = Part(partial(_run_layer, layer, call), *modules, shared=shared)
    predicts = partial(_logits, norm, head) if with_logits else partial(_final_hidden, norm)
    parts[names[norm]] = Part(predicts, norm, head, then=None if with_logits else head.forward)
    return parts


def _embed(embedding: nn.Module, input_ids: Tensor, position_ids: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return embedding(input_ids), position_ids


def _shared_inputs(rotary: nn.Module | None, hidden: Tensor, positions: Tensor) -> dict[str, Any]:
    """Compute the inputs that all layers of a stage share."""
    return {MASK: mask_from_positions(positions), ROTARY: None if rotary is None else rotary(hidden, positions)}


def _run_layer(
    layer: nn.Module,
    call: Mapping[str, Callable[[dict[str, Any]], Any]],
    hidden: Tensor,
    positions: Tensor,
    **shared: Any,
) -> tuple[Tensor, Tensor]:
    batch_values = {**shared, POSITIONS: positions}
    return layer(hidden, **{name: value(batch_values) for name, value in call.items()}), positions


def _logits(norm: nn.Module, head: nn.Module, hidden: Tensor, positions: Tensor) -> Tensor:
    logits: Tensor = head(norm(hidden))
    return logits


def _final_hidden(norm: nn.Module, hidden: Tensor, positions: Tensor) -> Tensor:
    normed: Tensor = norm(hidden)
    return normed


class _OtherForward(Exception):  # noqa: N818 - it says what the model has
    """The forward pass of a model has another form than that of the parts."""


Call = dict[str, Callable[[dict[str, Any]], Any]]
"""Arguments of a layer by name; each is computed from the values of a micro-batch."""


def _layer_calls(
    base: nn.Module, embedding: nn.Module, layers: nn.ModuleList, norm: nn.Module, rotary: nn.Module | None
) -> list[Call]:
    """Record the arguments with which a model calls each of its layers.

    Raises:
        _OtherForward: the model does something else besides.
    """
    tokens, positions = (torch.zeros(1, 2, dtype=torch.int64) for _ in range(2))
    mask, rotary_values = torch.ones(1, 1, 2, 2, dtype=torch.bool), (torch.zeros(1, 2, 2), torch.zeros(1, 2, 2))
    roles = ((mask, MASK), (positions, POSITIONS), (rotary_values, ROTARY))
    states: list[Tensor] = []
    calls: list[Call] = []

    def embed(input_ids: Tensor) -> Tensor:
        if input_ids is not tokens or states:
            raise _OtherForward("does more with tokens than to embed them once")
        states.append(torch.zeros(1, 2, 4))
        return states[-1]

    def turn(hidden: Tensor, position_ids: Tensor) -> Any:
        if hidden is not states[0] or position_ids is not positions:
            raise _OtherForward("has rotary positions of its own")
        return rotary_values

    def run(number: int, hidden: Tensor, **kwargs: Any) -> Tensor:
        if hidden is not states[-1] or number != len(calls):
            raise _OtherForward("does more between its layers than to call them one after the other")
        call: Call = {}
        for name, value in kwargs.items():
            role = next((role for stand_in, role in roles if stand_in is value), None)
            if role is None and not (value is None or isinstance(value, bool | int | float | str)):
                raise _OtherForward(f"calls its layers with {name}, which no stage could make")
            call[name] = partial(_constant_value, value) if role is None else partial(_batch_value, role)
        calls.append(call)
        states.append(torch.zeros(1, 2, 4))
        return states[-1]

    def end(hidden: Tensor) -> Tensor:
        if hidden is not states[-1] or len(calls) != len(layers):
            raise _OtherForward("does more between its layers and its norm than to pass hidden states on")
        states.append(torch.zeros(1, 2, 4))
        return states[-1]

    stand_ins: list[tuple[nn.Module, Callable[..., Any]]] = [(embedding, embed), (norm, end)]
    stand_ins += [(layer, partial(run, number)) for number, layer in enumerate(layers)]
    stand_ins += [] if rotary is None else [(rotary, turn)]
    with ExitStack() as stack:
        for module, stand_in in stand_ins:
            stack.enter_context(replaced_forward(module, stand_in))
        try:
            outputs = base(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False)[0]
        except (AttributeError, TypeError, ValueError, IndexError, KeyError, RuntimeError) as error:
            raise _OtherForward("has layers that cannot be called one by one") from error
    if outputs is not states[-1]:
        raise _OtherForward("does more with what its norm returns than to pass it on")
    return calls


def _constant_value(value: Any, batch_values: dict[str, Any]) -> Any:
    return value


def _batch_value(role: str, batch_values: dict[str, Any]) -> Any:
    return batch_values[role]


def _refusal(model: nn.Module, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"spec.trainer.loop.strategy: pipeline cannot cut a {type(model).__name__}, which {reason}; use strategy: fsdp"
    )
