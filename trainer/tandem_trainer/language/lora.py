"""LoRA: the weights of a pretrained model are frozen, and narrow matrices beside them are trained
(https://arxiv.org/abs/2106.09685). The layers are peft's.

A checkpoint holds the trained matrices, and a digest of the base: of the names, dtypes and values of the pretrained
weights, in whichever files they are. A process that resumes or evaluates a checkpoint reads the base again, and refuses
a checkpoint that belongs to another base before it uses any of it (docs/decisions/0044-lora.md).
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

from tandem.formatting import one_line
from tandem.job.causal_lm import Lora
from tandem_trainer.checkpoint.sharding import is_sharded, split_like, to_local
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.language.nf4 import Nf4Linear, block_of, quantize

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

FIELD = "spec.trainer.parameters.lora"
NAME = "default"
"""Name of the adapter in peft, which can hold several."""
MATRICES = ("lora_A", "lora_B")
"""Names of the trained matrices in peft: from a layer's inputs to the rank, and from the rank to its outputs."""
BASE_LAYER = ".base_layer."
"""Part that peft adds to the names of layers with adapters."""
BASE = "lora_base"
"""Name of the module with the digest of the base."""
DIGEST_BYTES = 16
"""Size of a digest, in bytes: XXH3 with 128 bits."""


def peft_config(lora: Lora, base: str | None = None) -> "LoraConfig":
    """Convert the settings to peft's.

    Args:
        lora: settings of the job.
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
    """Module that identifies the weights under the adapters.

    Args:
        advice: advice for a user with other weights, without a full stop.
    """

    digest: Tensor

    def __init__(self, advice: str) -> None:
        super().__init__()
        self._advice = advice
        self.register_buffer("digest", torch.zeros(DIGEST_BYTES, dtype=torch.uint8))

    def learn(self, weights: Mapping[str, Tensor]) -> None:
        """Record the digest of the weights."""
        self.digest.copy_(torch.frombuffer(bytearray(digest(weights)), dtype=torch.uint8))

    @property
    def is_there(self) -> bool:
        """Whether the weights have been read."""
        return bool(self.digest.any())

    def refusal(self, state: Mapping[str, Tensor]) -> str:
        """Return the reason why adapters do not fit this base; empty if they do.

        Args:
            state: this module's part of the adapters' state.
        """
        adapters_digest, base_digest = (bytes(digest.cpu().tolist()).hex() for digest in (state["digest"], self.digest))
        if adapters_digest == base_digest:
            return ""
        return (
            f"its adapters belong to other pretrained weights (digest {adapters_digest}) than those that are here now "
            f"(digest {base_digest}); {self._advice}"
        )


def adapt(model: "PreTrainedModel", lora: Lora) -> None:
    """Add adapters to a model. Only they are trained, and only they are in its state.

    Raises:
        ConfigurationError: the model has no such layers, or they cannot have adapters.
    """
    from peft import inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    try:
        # Fake tensors are off: a step may be traced without values, and peft moves tensors that are not on the meta
        # device.
        with unset_fake_temporarily(), warnings.catch_warnings():
            # Warnings about layers that are refused below.
            warnings.simplefilter("ignore")
            inject_adapter_in_model(peft_config(lora), model, adapter_name=NAME, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigurationError(f"{FIELD}.targets: {one_line(str(error).splitlines()[0])[:300]}") from error
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    for layer in _layers(model):
        if not isinstance(layer.get_base_layer(), nn.Linear | Conv1D) or layer is head:
            name = next(name for name, module in model.named_modules() if module is layer)
            raise ConfigurationError(
                f"{FIELD}.targets: {name} is not a linear layer inside of the model; only those can have adapters"
            )
        _init_adapter(*(getattr(layer, part)[NAME] for part in MATRICES))
    if lora.quantize_base is not None:
        _quantize(model, head)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_adapter(name))
    field = f"{FIELD.rpartition('.')[0]}.pretrained"
    model.add_module(BASE, Base(f"give {field} the model with which the run began"))
    # Tied weights have several names.
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    exclude_from_state(model, [name for name, _ in tensors if not (_is_adapter(name) or name.startswith(f"{BASE}."))])


def _quantize(model: nn.Module, head: nn.Module | None) -> None:
    """Replace linear layers by layers with weights of four bits, which have no values yet.

    Raises:
        ConfigurationError: the model has none.
    """
    layers = [
        (path, module)
        for path, module in model.named_modules()
        if type(module) is nn.Linear
        and module is not head
        and not _is_adapter(f"{path}.")
        and block_of(module.in_features)
    ]
    if not layers:
        raise ConfigurationError(
            f"{FIELD}.quantizeBase is for linear layers, and {type(model).__name__} has none inside"
        )
    for path, module in layers:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, Nf4Linear(module))


def _init_adapter(first: nn.Linear, second: nn.Linear) -> None:
    """Initialize an adapter as peft does: it adds nothing yet. In float32, whatever dtype the base has: small steps are
    lost in others."""
    first.weight = nn.Parameter(torch.empty(first.weight.shape, dtype=torch.float32))
    second.weight = nn.Parameter(torch.zeros(second.weight.shape, dtype=torch.float32))
    nn.init.kaiming_uniform_(first.weight, a=math.sqrt(5))


def exclude_from_state(model: nn.Module, names: Iterable[str]) -> list[RemovableHandle]:
    """Exclude tensors from the state of a model, until the hooks that are returned are removed."""
    excluded = frozenset(names)

    def drop(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in excluded:
            state.pop(prefix + name, None)

    def forgive(module: nn.Module, incompatible: Any) -> None:
        incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name not in excluded]

    return [
        model.register_state_dict_post_hook(drop),  # type: ignore[no-untyped-call]
        model.register_load_state_dict_post_hook(forgive),  # type: ignore[no-untyped-call]
    ]


def load_base(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load the pretrained weights under the adapters of a model.

    Args:
        model: model with adapters, which may be split over ranks.
        weights: stored weights, by their names without adapters.
    """
    live = {_base_name(name): tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    rounded = {_base_name(f"{path}.weight"): layer for path, layer in _quantized_layers(model)}
    with torch.no_grad():
        for name, stored in weights.items():
            if (rounded[name].packed if name in rounded else live[name]).is_meta:
                continue  # of another stage of a pipeline
            target, tensor = (rounded[name].packed, quantize(stored)) if name in rounded else (live[name], stored)
            to_local(target).copy_(to_local(split_like(target, tensor)) if is_sharded(target) else tensor)
        base = model.get_submodule(BASE)
        assert isinstance(base, Base)
        base.learn(weights)


def has_base(model: nn.Module) -> bool:
    """Whether `load_base` was called with a model."""
    base = model.get_submodule(BASE)
    assert isinstance(base, Base)
    return base.is_there


def digest(weights: Mapping[str, Tensor]) -> bytes:
    """Compute the digest of names, dtypes, shapes and values of tensors, whatever their order."""
    hasher = xxhash.xxh3_128()
    for name, tensor in sorted(weights.items()):
        hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.digest()


def merged(model: nn.Module) -> dict[str, Tensor]:
    """Merge the adapters of a model into its weights; returns these by their names without adapters.

    Args:
        model: model with base and adapters; changed in place.
    """
    for path, rounded in list(_quantized_layers(model)):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, rounded.to_linear())
    for layer in _layers(model):
        layer.merge()
    with_buffers = [*model.named_parameters(), *_persistent(model)]
    return {
        _base_name(name): tensor.detach()
        for name, tensor in with_buffers
        if not (_is_adapter(name) or name == f"{BASE}.digest")
    }


def _persistent(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}".removeprefix("."), buffer


def as_peft(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the adapters among the weights of a checkpoint, by their names in peft's files."""
    return {
        f"base_model.model.{name.replace(f'.{NAME}.', '.')}": tensor
        for name, tensor in weights.items()
        if _is_adapter(name)
    }


def tensor_plan(model: nn.Module, lora: Lora, plan: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Extend a plan for tensor parallelism of a model without adapters to the layers of the adapters.

    If outputs of a layer are split, those of the second matrix are; if inputs are, those of the first one, and their
    dropout. Beside a layer that is not split, the adapter is not split either.

    Raises:
        ConfigurationError: inputs with dropout cannot be split evenly, or weights have four bits.
    """
    if lora.quantize_base is not None:
        raise ConfigurationError(
            f"{FIELD}.quantizeBase does not go together with tensorParallel; fsdp alone splits such weights, by rows"
        )
    # Imported only where matrices are split.
    from tandem_trainer.strategies.tensor import COLWISE, REPLICATED, split_modules

    names = {module: name for name, module in model.named_modules()}
    full_plan = {}
    for _, module, style in split_modules(plan, model):
        name = names[module]
        if not hasattr(module, "base_layer"):
            full_plan[name] = style
            continue
        if style == REPLICATED:
            full_plan |= {f"{name}.base_layer": style, **{f"{name}.{part}.{NAME}": style for part in MATRICES}}
            continue
        if style != COLWISE and lora.dropout:
            inputs: Any = module.in_features
            if inputs % ranks:
                raise ConfigurationError(
                    f"{FIELD}.dropout: tensorParallel: {ranks} does not divide the {inputs} inputs of "
                    f"{name}; set dropout: 0"
                )
            full_plan[f"{name}.lora_dropout.{NAME}"] = style
        split = MATRICES[1] if style == COLWISE else MATRICES[0]
        full_plan |= {f"{name}.base_layer": style, f"{name}.{split}.{NAME}": style}
    return full_plan


def _layers(model: nn.Module) -> list[Any]:
    """Return the layers with adapters."""
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _quantized_layers(model: nn.Module) -> Iterable[tuple[str, Nf4Linear]]:
    return ((path, module) for path, module in model.named_modules() if isinstance(module, Nf4Linear))


def _is_adapter(name: str) -> bool:
    """Whether a tensor of this name belongs to an adapter."""
    return any(f".{part}." in name for part in MATRICES)


def _base_name(name: str) -> str:
    """Return the name of a weight without adapters."""
    return name.replace(BASE_LAYER, ".")
