"""A decoder of transformers in parts, for the stages of a pipeline.

A model is cut whose forward pass is an embedding, layers, a norm and a last layer, and nothing between them. Whether it
is one shows in its own forward pass, with tensors in the place of all of them: that tells, too, with what each layer is
called. Stages pass on hidden states and the places of tokens in their documents, of which each stage makes its mask and
its rotary positions.

Rejected: to know models by their names (the library renames the arguments of layers), and to pass on masks (they grow
with the square of the length).
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tandem_trainer.failure import ConfigurationError
from tandem_trainer.language.head import in_place_of, is_last
from tandem_trainer.language.packing import mask_at
from tandem_trainer.models.parts import Part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MASK, PLACES, TURNS = "mask", "places", "turns"
"""What layers are given that depends on the batch: which tokens see which, places in documents, rotary positions."""


def decoder_parts(model: "PreTrainedModel", with_logits: bool = True) -> dict[str, nn.Module]:
    """The forward pass of a model over packed rows in parts, by the names of their first modules. The first one is
    called with `input_ids` and `position_ids`; the last one returns logits.

    Args:
        with_logits: otherwise the last one returns what the last layer is given, and the loss calls that.

    Raises:
        ConfigurationError: its forward pass is another one.
    """
    base, head = model.base_model, model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding, layers, norm = (getattr(base, name, None) for name in ("embed_tokens", "layers", "norm"))
    if not isinstance(layers, nn.ModuleList) or not all(isinstance(one, nn.Module) for one in (embedding, norm, head)):
        raise _refusal(model, "has another layout than embed_tokens, layers, norm and a last layer")
    if not is_last(model, head):
        raise _refusal(model, "does more with hidden states and logits than to pass them through its last layer")
    assert isinstance(embedding, nn.Module)
    assert isinstance(norm, nn.Module)
    rotary = getattr(base, "rotary_emb", None)
    try:
        calls = _calls(base, embedding, layers, norm, rotary)
    except _IsAnother as error:
        raise _refusal(model, str(error)) from None
    names = {module: name for name, module in model.named_modules()}
    shared = partial(_shared, rotary)
    found: dict[str, nn.Module] = {names[embedding]: Part(partial(_embedded, embedding), embedding)}
    for layer, call in zip(layers, calls, strict=True):
        used = [layer] if rotary is None else [layer, rotary]
        found[names[layer]] = Part(partial(_through, layer, call), *used, shared=shared)
    predicts = partial(_predicted, norm, head) if with_logits else partial(_normed, norm)
    found[names[norm]] = Part(predicts, norm, head, then=None if with_logits else head.forward)
    return found


def _embedded(embedding: nn.Module, input_ids: Tensor, position_ids: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    return embedding(input_ids), position_ids


def _shared(rotary: nn.Module | None, hidden: Tensor, places: Tensor) -> dict[str, Any]:
    """What all layers of a stage are given."""
    return {MASK: mask_at(places), TURNS: None if rotary is None else rotary(hidden, places)}


def _through(
    layer: nn.Module, call: Mapping[str, Callable[[dict[str, Any]], Any]], hidden: Tensor, places: Tensor, **shared: Any
) -> tuple[Tensor, Tensor]:
    known = {**shared, PLACES: places}
    return layer(hidden, **{name: value(known) for name, value in call.items()}), places


def _predicted(norm: nn.Module, head: nn.Module, hidden: Tensor, places: Tensor) -> Tensor:
    logits: Tensor = head(norm(hidden))
    return logits


def _normed(norm: nn.Module, hidden: Tensor, places: Tensor) -> Tensor:
    found: Tensor = norm(hidden)
    return found


class _IsAnother(Exception):  # noqa: N818 - it is what is the case
    """The forward pass is another one than that of the parts."""


Call = dict[str, Callable[[dict[str, Any]], Any]]
"""The arguments of a layer by name, each of what is known of a micro-batch."""


def _calls(
    base: nn.Module, embedding: nn.Module, layers: nn.ModuleList, norm: nn.Module, rotary: nn.Module | None
) -> list[Call]:
    """With what a model calls each of its layers.

    Raises:
        _IsAnother: it does something else besides.
    """
    tokens, places = (torch.zeros(1, 2, dtype=torch.int64) for _ in range(2))
    mask, turns = torch.ones(1, 1, 2, 2, dtype=torch.bool), (torch.zeros(1, 2, 2), torch.zeros(1, 2, 2))
    known = ((mask, MASK), (places, PLACES), (turns, TURNS))
    states: list[Tensor] = []
    found: list[Call] = []

    def embed(given: Tensor) -> Tensor:
        if given is not tokens or states:
            raise _IsAnother("does more with tokens than to embed them once")
        states.append(torch.zeros(1, 2, 4))
        return states[-1]

    def turn(hidden: Tensor, position_ids: Tensor) -> Any:
        if hidden is not states[0] or position_ids is not places:
            raise _IsAnother("has rotary positions of its own")
        return turns

    def run(number: int, hidden: Tensor, **named: Any) -> Tensor:
        if hidden is not states[-1] or number != len(found):
            raise _IsAnother("does more between its layers than to call them one after the other")
        call: Call = {}
        for name, value in named.items():
            role = next((role for one, role in known if one is value), None)
            if role is None and not (value is None or isinstance(value, bool | int | float | str)):
                raise _IsAnother(f"calls its layers with {name}, which no stage could make")
            call[name] = partial(_constant, value) if role is None else partial(_of_batch, role)
        found.append(call)
        states.append(torch.zeros(1, 2, 4))
        return states[-1]

    def end(hidden: Tensor) -> Tensor:
        if hidden is not states[-1] or len(found) != len(layers):
            raise _IsAnother("does more between its layers and its norm than to pass hidden states on")
        states.append(torch.zeros(1, 2, 4))
        return states[-1]

    stand_ins: list[tuple[nn.Module, Callable[..., Any]]] = [(embedding, embed), (norm, end)]
    stand_ins += [(layer, partial(run, number)) for number, layer in enumerate(layers)]
    stand_ins += [] if rotary is None else [(rotary, turn)]
    with ExitStack() as stack:
        for module, stand_in in stand_ins:
            stack.enter_context(in_place_of(module, stand_in))
        try:
            outputs = base(input_ids=tokens, position_ids=places, attention_mask=mask, use_cache=False)[0]
        except (AttributeError, TypeError, ValueError, IndexError, KeyError, RuntimeError) as error:
            raise _IsAnother("has layers that cannot be called one by one") from error
    if outputs is not states[-1]:
        raise _IsAnother("does more with what its norm returns than to pass it on")
    return found


def _constant(value: Any, known: dict[str, Any]) -> Any:
    return value


def _of_batch(role: str, known: dict[str, Any]) -> Any:
    return known[role]


def _refusal(model: nn.Module, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"spec.trainer.loop.strategy: pipeline cannot cut a {type(model).__name__}, which {why}; take strategy: fsdp"
    )
