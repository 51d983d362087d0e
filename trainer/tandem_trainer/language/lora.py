"""LoRA: the weights of a pretrained model stay as they are, and beside its matrices narrow ones learn
(https://arxiv.org/abs/2106.09685). The layers are peft's.

A checkpoint holds what learns, and a digest of the base: of the names, types and values of the pretrained weights, in
whichever files they are. Whoever resumes a checkpoint or evaluates it reads the base anew, and a checkpoint that
belongs to another base is refused before anything of it is used (docs/decisions/0044-lora.md).
"""

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.hooks import RemovableHandle

from tandem.causal_lm import Lora
from tandem.formatting import one_line
from tandem_trainer.checkpoint.sharding import here, is_sharded, split_like
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.language.nf4 import Nf4Linear, block_of, quantized

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

FIELD = "spec.trainer.parameters.lora"
NAME = "default"
"""Of the adapter, for peft, which can hold several."""
PARTS = ("lora_A", "lora_B")
"""What peft calls the matrices that learn: from a layer's inputs to its rank, and from there to its outputs."""
INSIDE = ".base_layer."
"""What peft puts into the names of the layers that have adapters."""
BASE = "lora_base"
"""Name of the module that knows the base."""
WIDTH = 16
"""Bytes of a digest: XXH3 with 128 bits."""


def peft_config(lora: Lora, base: str | None = None) -> "LoraConfig":
    """The same for peft.

    Args:
        base: name of the model.
    """
    from peft import LoraConfig, TaskType

    alpha = 2 * lora.rank if lora.alpha is None else lora.alpha
    return LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=lora.targets or "all-linear",
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=base,
    )


class Base(nn.Module):
    """Knows which weights lie under the adapters.

    Args:
        advice: what a user does who has others, without a full stop.
    """

    digest: Tensor

    def __init__(self, advice: str) -> None:
        super().__init__()
        self._advice = advice
        self.register_buffer("digest", torch.zeros(WIDTH, dtype=torch.uint8))

    def learn(self, weights: Mapping[str, Tensor]) -> None:
        """Take the digest of the weights."""
        self.digest.copy_(torch.frombuffer(bytearray(digest(weights)), dtype=torch.uint8))

    @property
    def is_there(self) -> bool:
        """Whether the weights have been read."""
        return bool(self.digest.any())

    def refusal(self, state: Mapping[str, Tensor]) -> str:
        """Why adapters are not for this base; empty if they are.

        Args:
            state: this module's part of theirs.
        """
        theirs, ours = (bytes(one.cpu().tolist()).hex() for one in (state["digest"], self.digest))
        if theirs == ours:
            return ""
        return (
            f"its adapters belong to other pretrained weights (digest {theirs}) than those that are here now (digest "
            f"{ours}); {self._advice}"
        )


def adapt(model: "PreTrainedModel", lora: Lora) -> None:
    """Give a model adapters, which alone learn, and are all of its state.

    Raises:
        ConfigurationError: it has no such layers, or they cannot have adapters.
    """
    from peft import inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    try:
        # A step may be traced without values, and peft moves what it does not find on the meta device.
        with unset_fake_temporarily(), warnings.catch_warnings():
            # Of layers that are refused below.
            warnings.simplefilter("ignore")
            inject_adapter_in_model(peft_config(lora), model, adapter_name=NAME, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigurationError(f"{FIELD}.targets: {one_line(str(error).splitlines()[0])[:300]}") from error
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    for layer in _layers(model):
        if not isinstance(layer.get_base_layer(), nn.Linear | Conv1D) or layer is head:
            name = next(name for name, module in model.named_modules() if module is layer)
            raise ConfigurationError(
                f"{FIELD}.targets: {name} is no linear layer inside of the model; only those can have adapters"
            )
        _begin(*(getattr(layer, part)[NAME] for part in PARTS))
    if lora.quantize_base is not None:
        _quantize(model, head)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_learns(name))
    field = f"{FIELD.rpartition('.')[0]}.pretrained"
    model.add_module(BASE, Base(f"give {field} the model with which the run began"))
    # Tied weights have several names.
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    leave_out(model, [name for name, _ in named if not (_learns(name) or name.startswith(f"{BASE}."))])


def _quantize(model: nn.Module, head: nn.Module | None) -> None:
    """Put layers with weights of four bits in the place of linear ones; they have no values yet.

    Raises:
        ConfigurationError: there are none.
    """
    found = [
        (path, module)
        for path, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and not _learns(f"{path}.") and block_of(module.in_features)
    ]
    if not found:
        raise ConfigurationError(
            f"{FIELD}.quantizeBase is for linear layers, and {type(model).__name__} has none inside"
        )
    for path, module in found:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, Nf4Linear(module))


def _begin(first: nn.Linear, second: nn.Linear) -> None:
    """Give an adapter weights to begin with, as peft does, that add nothing yet. In float32, whatever the base has:
    small steps are lost in other types."""
    first.weight = nn.Parameter(torch.empty(first.weight.shape, dtype=torch.float32))
    second.weight = nn.Parameter(torch.zeros(second.weight.shape, dtype=torch.float32))
    nn.init.kaiming_uniform_(first.weight, a=math.sqrt(5))


def leave_out(model: nn.Module, names: Iterable[str]) -> list[RemovableHandle]:
    """Have the state of a model be without these tensors, until the hooks that are returned are removed."""
    left_out = frozenset(names)

    def drop(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in left_out:
            state.pop(prefix + name, None)

    def forgive(module: nn.Module, incompatible: Any) -> None:
        incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name not in left_out]

    return [
        model.register_state_dict_post_hook(drop),  # type: ignore[no-untyped-call]
        model.register_load_state_dict_post_hook(forgive),  # type: ignore[no-untyped-call]
    ]


def load_base(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put the pretrained weights under the adapters of a model.

    Args:
        model: one that is `adapt`ed, and may be split over ranks.
        weights: by the names that they have without adapters, as they were stored.
    """
    live = {_plain(name): one for name, one in [*model.named_parameters(), *model.named_buffers()]}
    rounded = {_plain(f"{path}.weight"): layer for path, layer in _of_four_bits(model)}
    with torch.no_grad():
        for name, given in weights.items():
            if (rounded[name].packed if name in rounded else live[name]).is_meta:
                continue  # of another stage of a pipeline
            mine, tensor = (rounded[name].packed, quantized(given)) if name in rounded else (live[name], given)
            here(mine).copy_(here(split_like(mine, tensor)) if is_sharded(mine) else tensor)
        base = model.get_submodule(BASE)
        assert isinstance(base, Base)
        base.learn(weights)


def has_base(model: nn.Module) -> bool:
    """Whether `load_base` was called with a model."""
    base = model.get_submodule(BASE)
    assert isinstance(base, Base)
    return base.is_there


def digest(weights: Mapping[str, Tensor]) -> bytes:
    """Of names, types, shapes and values of tensors, whatever their order."""
    found = xxhash.xxh3_128()
    for name, tensor in sorted(weights.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()


def merged(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model into which its adapters are added, by the names that they have without them.

    Args:
        model: with base and adapters; it is changed.
    """
    for path, rounded in list(_of_four_bits(model)):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, rounded.plain())
    for layer in _layers(model):
        layer.merge()
    with_buffers = [*model.named_parameters(), *_persistent(model)]
    return {_plain(name): one.detach() for name, one in with_buffers if not (_learns(name) or name == f"{BASE}.digest")}


def _persistent(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}".removeprefix("."), buffer


def as_peft(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters among the weights of a checkpoint, by the names that peft gives them in a file."""
    return {f"base_model.model.{name.replace(f'.{NAME}.', '.')}": one for name, one in weights.items() if _learns(name)}


def tensor_plan(model: nn.Module, lora: Lora, plan: Mapping[str, str], ranks: int) -> dict[str, str]:
    """A plan for tensor parallelism of a model without adapters, for the layers in them.

    Where outputs are split, those of the second matrix are; where inputs are, those of the first one, and what is
    dropped of them. Beside a layer that is whole all of the adapter is.

    Raises:
        ConfigurationError: inputs that are dropped cannot be split evenly, or weights have four bits.
    """
    if lora.quantize_base is not None:
        raise ConfigurationError(
            f"{FIELD}.quantizeBase does not go together with tensorParallel; fsdp alone splits such weights, by rows"
        )
    # Imported by those alone that split matrices.
    from tandem_trainer.strategies.tensor import COLWISE, REPLICATED, split_modules

    names = {module: name for name, module in model.named_modules()}
    found = {}
    for _, module, style in split_modules(plan, model):
        name = names[module]
        if not hasattr(module, "base_layer"):
            found[name] = style
            continue
        if style == REPLICATED:
            found |= {f"{name}.base_layer": style, **{f"{name}.{part}.{NAME}": style for part in PARTS}}
            continue
        if style != COLWISE and lora.dropout:
            inputs: Any = module.in_features
            if inputs % ranks:
                raise ConfigurationError(
                    f"{FIELD}.dropout: tensorParallel: {ranks} does not divide the {inputs} inputs of "
                    f"{name}; say dropout: 0"
                )
            found[f"{name}.lora_dropout.{NAME}"] = style
        split = PARTS[1] if style == COLWISE else PARTS[0]
        found |= {f"{name}.base_layer": style, f"{name}.{split}.{NAME}": style}
    return found


def _layers(model: nn.Module) -> list[Any]:
    """The layers with adapters."""
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _of_four_bits(model: nn.Module) -> Iterable[tuple[str, Nf4Linear]]:
    return ((path, module) for path, module in model.named_modules() if isinstance(module, Nf4Linear))


def _learns(name: str) -> bool:
    """Whether a tensor of this name is one of an adapter's."""
    return any(f".{part}." in name for part in PARTS)


def _plain(name: str) -> str:
    """The name of a weight as it is without adapters."""
    return name.replace(INSIDE, ".")
