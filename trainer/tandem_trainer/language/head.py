"""The loss of a language model without the logits of all its tokens at once.

Logits are the largest tensors of a language model: for 4,096 tokens and a vocabulary of 151,936 they take 2.5 GB in
float32, and their gradient as much again. Here the last layer sees only tokens that are learned, some at a time. While
the logits of a chunk are there, the gradients that follow from them are computed, too, so that nothing is computed
twice: a sum of losses passes on one number in the backward pass, by which they are multiplied then.

What is called is still the model, and in it its last layer, so that every strategy finds its hooks: gradients are
averaged, split weights put together, and inputs moved as without chunks. A model may do more with what its last layer
returns, such as scaling it. `opened` finds out whether it does, and leaves such a model as it is
(docs/decisions/0044-lora.md). In a pipeline, whose last stage is given hidden states, the task calls the last layer
itself.

Rejected: checkpointed chunks (they compute the logits twice), and gradients for a loss of each sample (the gradient of
the weights then depends on numbers that are known only in the backward pass).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NO_TARGET = -100
"""In the place of a token that is not learned, as torch's cross_entropy has it."""
MAX_LOGITS = 2**26
"""Logits of a chunk, where nothing is said: 256 MiB."""


class Head(nn.Linear):
    """A last layer that also computes losses. Called with hidden states alone it is the layer that it was."""

    chunk: int
    """Tokens whose logits are in memory at once."""

    def forward(self, input: Tensor, targets: Tensor | None = None) -> Tensor:
        """
        Args:
            input: [rows, tokens, width].
            targets: [rows, tokens], int64: the token that follows each, or NO_TARGET.

        Returns:
            Logits, [rows, tokens, vocabulary]; with targets the sum of the losses in nats, [1], float32.
        """
        if targets is None:
            return super().forward(input)
        total: Tensor = self._loss_sum(input, targets)
        return total.reshape(1)

    # Its loop would be unrolled, for one number of tokens that are learned.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _loss_sum(self, hidden: Tensor, targets: Tensor) -> Tensor:
        hidden, targets = learned(hidden, targets)
        dtype = self._dtype(hidden)
        if dtype is torch.float16:
            # Its gradients are too small for their type before the loss is scaled.
            return F.cross_entropy(super().forward(hidden).float(), targets, reduction="sum")
        with torch.autocast(hidden.device.type, enabled=False):
            total: Tensor = _LossSum.apply(hidden, self.weight, self.bias, targets, dtype, self.chunk)
        return total

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def scaled_loss_sum(self, hidden: Tensor, targets: Tensor, scale: float) -> Tensor:
        """The sum of the losses times a number, for a backward pass that begins with 1.

        Gradients of this layer's weights are added to those that are there in this call already, and are not a part of
        the backward pass. Otherwise each micro-batch of a pipeline that has passed forward and not yet backward would
        keep its own, as large as the weights; and a schedule may take the backward pass apart.

        Args:
            hidden: [rows, tokens, width].
            targets: [rows, tokens], int64: the token that follows each, or NO_TARGET.

        Returns:
            Scalar, float32.
        """
        hidden, targets = learned(hidden, targets)
        dtype = self._dtype(hidden)
        if dtype is torch.float16:
            return F.cross_entropy(super().forward(hidden).float(), targets, reduction="sum") * scale
        sums = _Sums(_sum_for(self.weight), _sum_for(self.bias), scale)
        weight, bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        with torch.autocast(hidden.device.type, enabled=False):
            total: Tensor = _LossSum.apply(hidden, weight, bias, targets, dtype, self.chunk, sums)
        for parameter, found in ((self.weight, sums.weight), (self.bias, sums.bias)):
            if found is not None and found is not parameter.grad:
                gradient = found.to(parameter.dtype)
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return total * scale

    def _dtype(self, hidden: Tensor) -> torch.dtype:
        """Of matrix products."""
        kind = hidden.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.weight.dtype


def _sum_for(parameter: Tensor | None) -> Tensor | None:
    """What gradients of a parameter are added to, float32: its gradient, or where that has another type a new tensor.
    None: nobody wants them."""
    if parameter is None or not parameter.requires_grad or not torch.is_grad_enabled():
        return None
    if parameter.dtype is not torch.float32:
        return torch.zeros_like(parameter, dtype=torch.float32)
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class _Sums(NamedTuple):
    """To what gradients of weights are added in a forward pass."""

    weight: Tensor | None
    """[vocabulary, width], float32; None: nobody wants them."""
    bias: Tensor | None
    """[vocabulary], float32."""
    scale: float
    """By what they are multiplied before."""


class _LossSum(torch.autograd.Function):
    """The sum of the losses of tokens, whose gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        dtype: torch.dtype,
        chunk: int,
        sums: _Sums | None = None,
    ) -> Tensor:
        """
        Args:
            hidden: [tokens, width].
            weight: [vocabulary, width].
            bias: [vocabulary].
            targets: [tokens], int64.
            dtype: of matrix products. Losses are computed in float32, and gradients of weights added up in it.
            sums: where gradients of weights go; None: to the backward pass.
        """
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wants_bias else None
        scale = 1.0
        if sums is not None:
            of_weight, of_bias, scale = sums
        matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for first in range(0, len(hidden), chunk):
            part, mine = hidden[first : first + chunk].to(dtype), targets[first : first + chunk, None]
            logs = F.log_softmax(F.linear(part, matrix, offset), dim=1, dtype=torch.float32)
            total -= logs.gather(1, mine).sum()
            # The gradient of a loss by its logits: what was predicted, less what is true.
            errors = logs.exp_()
            errors.scatter_(1, mine, errors.gather(1, mine) - 1)
            if of_bias is not None:
                of_bias.add_(errors.sum(dim=0), alpha=scale)
            errors = errors.to(dtype)
            if of_hidden is not None:
                of_hidden[first : first + chunk] = errors @ matrix
            if of_weight is not None:
                if dtype is torch.float32:
                    of_weight.addmm_(errors.T, part, alpha=scale)
                else:
                    of_weight.add_(errors.T @ part, alpha=scale)
        ctx.gradients = (
            of_hidden,
            None if of_weight is None or sums is not None else of_weight.to(weight.dtype),
            None if of_bias is None or sums is not None or bias is None else of_bias.to(bias.dtype),
        )
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        """Scale the gradients, in place: they are as large as the weights."""
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss have been taken already, and are not there any more")
        gradients, ctx.gradients = ctx.gradients, None
        return (*(None if one is None else one.mul_(upstream) for one in gradients), None, None, None, None)


def learned(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that are learned.

    Returns:
        [tokens, width] and [tokens].
    """
    hidden, targets = hidden.flatten(0, 1), targets.flatten()
    if isinstance(targets, FakeTensor):
        # Traced for `tandem plan`, without values: all are.
        return hidden, targets
    chosen = (targets != NO_TARGET).nonzero().squeeze(1)
    return hidden.index_select(0, chosen), targets[chosen]


def judged(model: nn.Module, inputs: dict[str, Any], targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each token, and whether it was predicted, without gradients.

    Args:
        model: one that is `opened`, and not wrapped.
        inputs: what it is called with.
        targets: [rows, tokens].

    Returns:
        [rows, tokens] each: losses in nats, float32, 0 where nothing is learned; and bool.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    assert isinstance(head, Head)
    hidden = model.base_model(**inputs)[0]  # type: ignore[operator]
    losses = torch.zeros(targets.shape, device=targets.device)
    right = torch.zeros(targets.shape, dtype=torch.bool, device=targets.device)
    chosen = targets != NO_TARGET
    found_losses, found_right = [], []
    for states, mine in zip(
        torch.split(hidden[chosen], head.chunk), torch.split(targets[chosen], head.chunk), strict=True
    ):
        logits = head(states).float()
        found_losses.append(F.cross_entropy(logits, mine, reduction="none"))
        found_right.append(logits.argmax(dim=1) == mine)
    losses[chosen], right[chosen] = torch.cat(found_losses), torch.cat(found_right)
    return losses, right


def opened(model: "PreTrainedModel", chunk: int | None) -> str:
    """Have a model take `targets`, and return the sum of the losses then, [1].

    Args:
        model: of transformers, with or without its weights.
        chunk: tokens whose logits are in memory at once; None: as many as make MAX_LOGITS.

    Returns:
        Why the model is left as it is; empty where it is not.
    """
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if type(head) is not nn.Linear:
        return f"its last layer is a {type(head).__name__}"
    if not is_last(model, head):
        return "it does more with hidden states and logits than to pass them through its last layer"
    # In place, as fully_shard does it: names, hooks and weights stay as they are.
    head.__class__ = Head
    assert isinstance(head, Head)
    head.chunk = chunk or max(1, MAX_LOGITS // head.out_features)
    model.__class__ = _with_targets(type(model))  # type: ignore[assignment, arg-type]
    return ""


@cache
def _with_targets(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of models whose forward pass takes `targets`, too."""
    logits: Callable[..., Any] = kind.forward

    # The library reads from the signature what a model takes.
    @wraps(logits)
    def forward(self: "PreTrainedModel", *given: Any, targets: Tensor | None = None, **named: Any) -> Any:
        if targets is None:
            return logits(self, *given, **named)
        head: nn.Module = self.get_output_embeddings()  # type: ignore[no-untyped-call]
        assert isinstance(head, Head)
        return head(self.base_model(*given, **named)[0], targets=targets)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def is_last(model: "PreTrainedModel", head: nn.Linear) -> bool:
    """Whether the logits are what the last layer makes of the hidden states, and nothing else: seen with tensors in
    the place of all of them, which the model has to pass on as they are."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    hidden, logits = torch.zeros(1, 2, head.in_features), torch.zeros(1, 2, 3)
    inputs = {name: torch.zeros(1, 2, dtype=torch.int64) for name in ("input_ids", "attention_mask", "position_ids")}
    passed_on: list[Any] = []
    read: list[Tensor] = []

    def blocks(*given: Any, **named: Any) -> Any:
        passed_on.extend((*given, *named.values()))
        found = MoeModelOutputWithPast(last_hidden_state=hidden)
        found.cross_attentions = None  # Asked for by models that could have them, such as GPT-2.
        return found

    def last(states: Tensor) -> Tensor:
        read.append(states)
        return logits

    with in_place_of(model.base_model, blocks), in_place_of(head, last):
        try:
            found = model(**inputs, use_cache=False).logits
        except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
            return False
    if not all(any(one is other for other in passed_on) for one in inputs.values()):
        return False
    # Some cut out all of the tokens, which makes a view.
    same = [one is hidden or (one._base is hidden and one.shape == hidden.shape) for one in read]
    return same == [True] and found is logits


@contextmanager
def in_place_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Have a module do something else for a while."""
    # One that computes its activations again has a forward of its own already.
    before = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        if before is not None:
            vars(module)["forward"] = before
