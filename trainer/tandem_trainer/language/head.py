"""The loss of a language model without the logits of all its tokens at once.

Logits are the largest tensors of a language model: for 4,096 tokens and a vocabulary of 151,936 they take 2.5 GB in
float32, and their gradient as much again. Here the last layer gets only target tokens, a chunk at a time. While the
logits of a chunk are in memory, their gradients are computed, too, so that nothing is computed twice: in the backward
pass, a sum of losses receives one number, by which the gradients are then multiplied.

The model is still called, and in it its last layer, so that the hooks of every strategy run: gradients are averaged,
split weights gathered, and inputs moved as without chunks. A model may do more with the output of its last layer, such
as scaling it. `enable_chunked_loss` checks whether it does, and leaves such a model unchanged
(docs/decisions/0044-lora.md). In a pipeline, whose last stage gets hidden states, the task calls the last layer itself.

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

from tandem_trainer.uncompiled import uncompiled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NO_TARGET = -100
"""Target of a token that is not learned, as in torch's cross_entropy."""
MAX_LOGITS = 2**26
"""Default maximum of logits of a chunk: 256 MiB."""


class Head(nn.Linear):
    """A last layer that also computes losses. Called with hidden states only, it is an ordinary linear layer."""

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

    # A compiler would unroll the loop, for one number of target tokens.
    @uncompiled
    def _loss_sum(self, hidden: Tensor, targets: Tensor) -> Tensor:
        hidden, targets = select_targets(hidden, targets)
        dtype = self._dtype(hidden)
        if dtype is torch.float16:
            # Unscaled, float16 gradients are too small for their dtype, and the scale is known only in the backward
            # pass.
            return F.cross_entropy(super().forward(hidden).float(), targets, reduction="sum")
        with torch.autocast(hidden.device.type, enabled=False):
            total: Tensor = _LossSum.apply(hidden, self.weight, self.bias, targets, dtype, self.chunk)
        return total

    @uncompiled
    def scaled_loss_sum(self, hidden: Tensor, targets: Tensor, scale: float) -> Tensor:
        """Compute the sum of the losses times a number, for a backward pass that begins with 1.

        Gradients of this layer's weights are accumulated in this call already, and are not a part of the backward pass.
        Otherwise each micro-batch of a pipeline between its forward and its backward pass would hold its own, as large
        as the weights; and a schedule may split the backward pass.

        Args:
            hidden: [rows, tokens, width].
            targets: [rows, tokens], int64: the token that follows each, or NO_TARGET.

        Returns:
            Scalar, float32.
        """
        hidden, targets = select_targets(hidden, targets)
        dtype = self._dtype(hidden)
        if dtype is torch.float16:
            return F.cross_entropy(super().forward(hidden).float(), targets, reduction="sum") * scale
        sums = _GradientSums(_gradient_sum_for(self.weight), _gradient_sum_for(self.bias), scale)
        weight, bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        with torch.autocast(hidden.device.type, enabled=False):
            total: Tensor = _LossSum.apply(hidden, weight, bias, targets, dtype, self.chunk, sums)
        for parameter, total_gradient in ((self.weight, sums.weight), (self.bias, sums.bias)):
            if total_gradient is not None and total_gradient is not parameter.grad:
                gradient = total_gradient.to(parameter.dtype)
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return total * scale

    def _dtype(self, hidden: Tensor) -> torch.dtype:
        """Return the dtype of matrix products."""
        kind = hidden.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.weight.dtype


def _gradient_sum_for(parameter: Tensor | None) -> Tensor | None:
    """Return the tensor in which gradients of a parameter are summed, float32: its gradient, or a new tensor if the
    gradient has another dtype. None: no gradient is needed."""
    if parameter is None or not parameter.requires_grad or not torch.is_grad_enabled():
        return None
    if parameter.dtype is not torch.float32:
        return torch.zeros_like(parameter, dtype=torch.float32)
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class _GradientSums(NamedTuple):
    """Tensors in which a forward pass sums gradients of weights."""

    weight: Tensor | None
    """[vocabulary, width], float32; None: no gradient is needed."""
    bias: Tensor | None
    """[vocabulary], float32."""
    scale: float
    """Factor of the gradients before they are added."""


class _LossSum(torch.autograd.Function):
    """Sum of the losses of tokens, whose gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        dtype: torch.dtype,
        chunk: int,
        sums: _GradientSums | None = None,
    ) -> Tensor:
        """
        Args:
            hidden: [tokens, width].
            weight: [vocabulary, width].
            bias: [vocabulary].
            targets: [tokens], int64.
            dtype: dtype of matrix products. Losses and sums of gradients are float32.
            chunk: tokens whose logits are in memory at once.
            sums: tensors to add gradients of weights to; None: the backward pass returns the gradients.
        """
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_gradient = torch.empty_like(hidden) if needs_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_bias else None
        scale = 1.0
        if sums is not None:
            weight_gradient, bias_gradient, scale = sums
        matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for first in range(0, len(hidden), chunk):
            part, chunk_targets = hidden[first : first + chunk].to(dtype), targets[first : first + chunk, None]
            log_probabilities = F.log_softmax(F.linear(part, matrix, offset), dim=1, dtype=torch.float32)
            total -= log_probabilities.gather(1, chunk_targets).sum()
            # The gradient of a loss with respect to its logits: predicted minus true probabilities.
            errors = log_probabilities.exp_()
            errors.scatter_(1, chunk_targets, errors.gather(1, chunk_targets) - 1)
            if bias_gradient is not None:
                bias_gradient.add_(errors.sum(dim=0), alpha=scale)
            errors = errors.to(dtype)
            if hidden_gradient is not None:
                hidden_gradient[first : first + chunk] = errors @ matrix
            if weight_gradient is not None:
                if dtype is torch.float32:
                    weight_gradient.addmm_(errors.T, part, alpha=scale)
                else:
                    weight_gradient.add_(errors.T @ part, alpha=scale)
        ctx.gradients = (
            hidden_gradient,
            None if weight_gradient is None or sums is not None else weight_gradient.to(weight.dtype),
            None if bias_gradient is None or sums is not None or bias is None else bias_gradient.to(bias.dtype),
        )
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        """Scale the gradients, in place: they are as large as the weights."""
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss have been taken already, and are not there any more")
        gradients, ctx.gradients = ctx.gradients, None
        return (
            *(None if gradient is None else gradient.mul_(upstream) for gradient in gradients),
            None,
            None,
            None,
            None,
        )


def select_targets(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Select the tokens that have a target.

    Returns:
        [tokens, width] and [tokens].
    """
    hidden, targets = hidden.flatten(0, 1), targets.flatten()
    if isinstance(targets, FakeTensor):
        # Traced for `tandem plan`, without values: all are.
        return hidden, targets
    chosen = (targets != NO_TARGET).nonzero().squeeze(1)
    return hidden.index_select(0, chosen), targets[chosen]


def token_losses(model: nn.Module, inputs: dict[str, Any], targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the loss of each token, and whether it was predicted, without gradients.

    Args:
        model: unwrapped model after `enable_chunked_loss`.
        inputs: arguments of the model.
        targets: [rows, tokens].

    Returns:
        [rows, tokens] each: losses in nats, float32, 0 where nothing is learned; and bool.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    assert isinstance(head, Head)
    hidden = model.base_model(**inputs)[0]  # type: ignore[operator]
    losses = torch.zeros(targets.shape, device=targets.device)
    is_predicted = torch.zeros(targets.shape, dtype=torch.bool, device=targets.device)
    has_target = targets != NO_TARGET
    chunk_losses, chunk_predicted = [], []
    for states, chunk_targets in zip(
        torch.split(hidden[has_target], head.chunk), torch.split(targets[has_target], head.chunk), strict=True
    ):
        logits = head(states).float()
        chunk_losses.append(F.cross_entropy(logits, chunk_targets, reduction="none"))
        chunk_predicted.append(logits.argmax(dim=1) == chunk_targets)
    losses[has_target], is_predicted[has_target] = torch.cat(chunk_losses), torch.cat(chunk_predicted)
    return losses, is_predicted


def enable_chunked_loss(model: "PreTrainedModel", chunk: int | None) -> str:
    """Make a model accept `targets`, and then return the sum of the losses, [1].

    Args:
        model: model of transformers, with or without its weights.
        chunk: tokens whose logits are in memory at once; None: derived from MAX_LOGITS.

    Returns:
        The reason why the model is left unchanged; empty if it accepts targets.
    """
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if type(head) is not nn.Linear:
        return f"its last layer is a {type(head).__name__}"
    if not is_plain_projection(model, head):
        return "it does more with hidden states and logits than to pass them through its last layer"
    # In place, as fully_shard does it: names, hooks and weights stay as they are.
    head.__class__ = Head
    assert isinstance(head, Head)
    head.chunk = chunk or max(1, MAX_LOGITS // head.out_features)
    model.__class__ = _with_targets(type(model))  # type: ignore[assignment, arg-type]
    return ""


@cache
def _with_targets(kind: type[nn.Module]) -> type[nn.Module]:
    """Create a class of models whose forward pass takes `targets`, too."""
    original_forward: Callable[..., Any] = kind.forward

    # The library reads the arguments of a model from this signature.
    @wraps(original_forward)
    def forward(self: "PreTrainedModel", *args: Any, targets: Tensor | None = None, **kwargs: Any) -> Any:
        if targets is None:
            return original_forward(self, *args, **kwargs)
        head: nn.Module = self.get_output_embeddings()  # type: ignore[no-untyped-call]
        assert isinstance(head, Head)
        return head(self.base_model(*args, **kwargs)[0], targets=targets)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def is_plain_projection(model: "PreTrainedModel", head: nn.Linear) -> bool:
    """Whether the logits are the last layer's output for the hidden states, and nothing else: checked with stand-ins
    for all of them, which the model has to pass on unchanged."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    hidden, logits = torch.zeros(1, 2, head.in_features), torch.zeros(1, 2, 3)
    inputs = {name: torch.zeros(1, 2, dtype=torch.int64) for name in ("input_ids", "attention_mask", "position_ids")}
    arguments: list[Any] = []
    head_inputs: list[Tensor] = []

    def blocks(*args: Any, **kwargs: Any) -> Any:
        arguments.extend((*args, *kwargs.values()))
        output = MoeModelOutputWithPast(last_hidden_state=hidden)
        output.cross_attentions = None  # Read by models that could have them, such as GPT-2.
        return output

    def last(states: Tensor) -> Tensor:
        head_inputs.append(states)
        return logits

    with replaced_forward(model.base_model, blocks), replaced_forward(head, last):
        try:
            output = model(**inputs, use_cache=False).logits
        except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
            return False
    if not all(any(value is argument for argument in arguments) for value in inputs.values()):
        return False
    # Some models slice out all of the tokens, which makes a view.
    same = [states is hidden or (states._base is hidden and states.shape == hidden.shape) for states in head_inputs]
    return same == [True] and output is logits


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward method of a module temporarily."""
    # A module with activation checkpointing already has a forward of its own.
    own_forward = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        if own_forward is not None:
            vars(module)["forward"] = own_forward
