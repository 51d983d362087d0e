"""Writes the weights of a checkpoint as one file that does not need Tandem. Run by `tandem checkpoints export`.

    python -m tandem_trainer.export --checkpoint FOLDER --digest SHA256 --to FILE --form safetensors --dtype bfloat16

Every byte is verified before it is used, and nothing is unpickled. The result is one JSON line on standard output:
`tensors`, `parameters` and `dtypes` of the file, and the files `beside` it, or `refused` with a sentence for the user.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tandem.rundir.checkpoint import Broken, Manifest
from tandem.rundir.layout import RunDir
from tandem_trainer.checkpoint.reader import read_full_weights, read_weights
from tandem_trainer.failure import ConfigurationError

if TYPE_CHECKING:
    from tandem_trainer.language.fine_tuning import FineTuning

FORMS = ("safetensors", "state-dict", "peft")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CannotExport(Exception):  # noqa: N818 - it says what happened
    """The weights cannot be written in this form; the message has the reason."""


def export(
    checkpoint: Path, digest: str, target: Path, form: str, dtype: torch.dtype | None, task: "FineTuning | None" = None
) -> dict[str, Any]:
    """Read the weights of a checkpoint, cast them, and write them.

    Args:
        checkpoint: folder of the checkpoint.
        digest: digest of the expected manifest: the name may stand for another checkpoint meanwhile.
        target: file to write.
        form: one of FORMS.
        dtype: dtype of the written floating-point tensors; None: unchanged.
        task: converts the weights to the form of transformers or peft; None: they are written as in the checkpoint.

    Raises:
        CannotExport: the checkpoint is gone or damaged, a value does not fit the dtype, or the disk does not take the
            file.
    """
    try:
        manifest = Manifest.load(checkpoint)
        if manifest.digest != digest:
            raise CannotExport(f"{checkpoint.name} was replaced by another checkpoint meanwhile; try again")
        weights = reader_for(dtype)(checkpoint, manifest)
    except FileNotFoundError as error:
        raise CannotExport(
            f"{checkpoint.name} was deleted while it was read, as retention does; export a newer one"
        ) from error
    except Broken as error:
        raise CannotExport(f"{checkpoint.name} is damaged and was not exported: {error}") from error
    except OSError as error:
        raise CannotExport(f"{checkpoint.name} cannot be read: {error.strerror or error}") from error
    if task is not None:
        with _errors_as("the weights cannot be written as those of the model"):
            weights = task.adapter(weights) if form == "peft" else task.exported(weights, _name(dtype))
    if dtype is not None:
        weights = {name: cast(name, tensor, dtype) for name, tensor in weights.items()}
    try:
        write(weights, target, form)
    except (OSError, SafetensorError, RuntimeError) as error:
        # torch and safetensors have errors of their own for a full disk.
        raise CannotExport(f"{target.parent} does not take the copy: {error}") from error
    return {
        "tensors": len(weights),
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "dtypes": sorted(
            {str(_name(tensor.dtype)) for tensor in weights.values()},
            key=lambda name: (not name.endswith(("16", "32", "64")) or name.startswith("int"), name),
        ),
    }


def reader_for(dtype: torch.dtype | None) -> Callable[[Path, Manifest], dict[str, Tensor]]:
    """Choose the weights to read: the evaluated ones, unless the dtype holds more than they may have."""
    return read_weights if dtype in (None, torch.bfloat16) else read_full_weights


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor to another floating-point dtype; integers stay unchanged.

    Raises:
        CannotExport: a finite value is too large for the type.
    """
    if not tensor.is_floating_point():
        return tensor
    converted = tensor.to(dtype)
    if not torch.equal(tensor.isfinite(), converted.isfinite()):
        largest = tensor[tensor.isfinite()].abs().max().item()
        raise CannotExport(f"{name} holds {largest:.4g}, which {_name(dtype)} cannot; use bfloat16")
    return converted


def write(weights: dict[str, Tensor], target: Path, form: str) -> None:
    """Write a new file; not synced."""
    if form != "state-dict":
        # transformers refuses a file that does not say which framework it is for.
        save_file(weights, target, metadata={"format": "pt"})
        # The library makes files that only their owner may read, whatever the umask is.
        mask = os.umask(0)
        os.umask(mask)
        target.chmod(0o666 & ~mask)
    else:
        torch.save(weights, target)


def task_of_run(run: Path) -> "FineTuning":
    """Create the task of a run that fine-tunes a pretrained model.

    Raises:
        CannotExport: the pretrained model does not exist any more.
    """
    from tandem_trainer.language.fine_tuning import FineTuning
    from tandem_trainer.task import task_in

    with _errors_as("the job of the run cannot be read"):
        task = task_in(RunDir(run))
    assert isinstance(task, FineTuning)
    return task


def write_beside(task: "FineTuning", form: str, folder: Path, dtypes: list[str]) -> list[str]:
    """Write the files that transformers or peft needs to open a folder with exported weights.

    Args:
        task: task of the run.
        form: one of FORMS.
        folder: folder with the weights.
        dtypes: dtypes of the written weights, the most frequent one first.

    Returns:
        Names of the files.

    Raises:
        CannotExport: the pretrained model does not exist any more, or the disk does not take the files.
    """
    with _errors_as("the configuration and the tokenizer of the model cannot be written"):
        if form == "peft":
            return task.write_adapter_config(folder)
        return task.write_beside(folder, next(iter(dtypes), None))


@contextmanager
def _errors_as(description: str) -> Iterator[None]:
    """Convert errors of the block.

    Raises:
        CannotExport: the block fails.
    """
    try:
        yield
    except (ConfigurationError, OSError, ValueError) as error:
        raise CannotExport(f"{description}: {error}") from error


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def main() -> None:
    """Run the export, and print its result."""
    parser = argparse.ArgumentParser(description="Write a checkpoint's weights; started by tandem checkpoints export.")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--digest", required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--form", choices=FORMS, required=True)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--beside", type=Path, metavar="RUN", help="with configuration and tokenizer of its model")
    args = parser.parse_args()
    try:
        dtype = DTYPES[args.dtype] if args.dtype else None
        task = None if args.beside is None else task_of_run(args.beside)
        result = export(args.checkpoint, args.digest, args.to, args.form, dtype, task)
        if task is not None:
            result["beside"] = write_beside(task, args.form, args.to.parent, result["dtypes"])
    except CannotExport as error:
        result = {"refused": str(error)}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
