"""The architectures of the built-in models, without torch: the name and shape of each tensor.

They give the size of a checkpoint, and show whether weights fit, before anything is started. The models themselves are
in `tandem_trainer.models`; a test compares the two, name by name.
"""

import math
from collections.abc import Iterator

Shapes = dict[str, tuple[int, ...]]
INNER_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Parts of names that the compiler and checkpointing insert."""


def shapes(model: str, channels: int, image_size: int, classes: int) -> Shapes:
    """Parameters and buffers by name, as in the model's state_dict.

    Args:
        image_size: height and width, pixels.
    """
    match model:
        case "cnn":
            side = (image_size - 4) // 2
            return (
                _layer("features.0", 32, channels, 3, 3)
                | _layer("features.2", 64, 32, 3, 3)
                | _layer("classifier.0", 128, 64 * side * side)
                | _layer("classifier.3", classes, 128)
            )
        case "baby-cnn":
            side = image_size // 4
            return (
                _layer("features.0", 8, channels, 3, 3)
                | _layer("features.3", 16, 8, 3, 3)
                | _layer("classifier", classes, 16 * side * side)
            )
        case "simple-net":
            return (
                _layer("hidden.1", 256, channels * image_size * image_size)
                | _layer("hidden.4", 256, 256)
                | _layer("classifier", classes, 256)
            )
        case "resnet-18":
            return dict(_resnet18(channels, image_size, classes))
    raise ValueError(f"no built-in model is called {model}")


def unwrapped_name(name: str) -> str:
    """A name without the parts that wrappers inside the model have inserted."""
    return ".".join(part for part in name.split(".") if part not in INNER_WRAPPERS)


def element_count(tensors: Shapes) -> int:
    """Number of elements of all tensors."""
    return sum(math.prod(shape) for shape in tensors.values())


def _resnet18(channels: int, image_size: int, classes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    stem = 3 if image_size < 64 else 7
    yield "conv1.weight", (64, channels, stem, stem)
    yield from _norm("bn1", 64)
    before = 64
    for stage, width in enumerate((64, 128, 256, 512), start=1):
        for block in range(2):
            name = f"layer{stage}.{block}"
            yield f"{name}.conv1.weight", (width, before, 3, 3)
            yield from _norm(f"{name}.bn1", width)
            yield f"{name}.conv2.weight", (width, width, 3, 3)
            yield from _norm(f"{name}.bn2", width)
            if before != width:
                yield f"{name}.downsample.0.weight", (width, before, 1, 1)
                yield from _norm(f"{name}.downsample.1", width)
            before = width
    yield from _layer("fc", classes, 512).items()


def _layer(name: str, *weight: int) -> Shapes:
    return {f"{name}.weight": weight, f"{name}.bias": weight[:1]}


def _norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part in ("weight", "bias", "running_mean", "running_var"):
        yield f"{name}.{part}", (width,)
    yield f"{name}.num_batches_tracked", ()
