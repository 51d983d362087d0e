"""The file of `initialWeights`: whether it is there, a safetensors file, and of this model.

Its header alone is read.
"""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tandem import tensor_header
from tandem.architectures import Shapes, plain, shapes
from tandem.errors import enumerated
from tandem.job import DistributedTrainingJob
from tandem.prerequisites.dataset import known
from tandem.prerequisites.site import CONFIG, Site, fault_of_file, is_folder
from tandem.rundir.durable import may_pass
from tandem.tasks import CLASSES
from tandem.unmet import Unmet

FIELD = (*CONFIG, "initialWeights")
FORMS = {
    b"PK\x03\x04": "a file of torch.save",
    b"\x80\x02": "a file of torch.save",
    b"\x80\x04": "a file of pickle",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUM": "a file of NumPy",
    b"\x1f\x8b": "a gzip file",
    b"vers": "a pointer of Git LFS, whose file was not fetched",
}
"""By how they begin, what else people have weights in."""


def weights(job: DistributedTrainingJob, site: Site) -> Iterator[Unmet]:
    """What is wrong with the weights that a job begins with. A run that has checkpoints goes on with those."""
    if job.spec.trainer.task is None or site.resumes:
        return
    settings = job.spec.trainer.settings
    text = settings.initial_weights
    path = site.look(text) if text is not None else None
    if text is None or path is None:
        return
    fault, near = fault_of_file(path, text)
    if is_folder(path):
        inside = path / "weights.safetensors"
        near = str(inside) if inside.is_file() else ""
    if fault:
        yield Unmet(FIELD, fault, suggestion=near)
        return
    try:
        there = _there(path)
    except ValueError as error:
        yield Unmet(FIELD, f"{text} is no safetensors file: {error}")
        return
    except OSError as error:
        if may_pass(error):
            raise
        yield Unmet(FIELD, f"{text} cannot be read: {error.strerror}")
        return
    size = known(settings, site).image_size
    if size is None:
        return
    wanted = shapes(settings.model, 1, size, CLASSES)
    if why := difference(there, wanted):
        yield Unmet(FIELD, f"{text} does not fit model {settings.model} on images of {size}×{size}: {why}")


def _there(path: Path) -> Shapes:
    """Names and shapes of the tensors of a file. Raises ValueError and OSError."""
    with path.open("rb") as file:
        begin = file.read(4)
        for form, what in FORMS.items():
            if begin.startswith(form):
                raise ValueError(f"it is {what}; tandem checkpoints export and safetensors.torch.save_file write one")
        found = tensor_header.tensors(partial(_read, file.fileno()), os.fstat(file.fileno()).st_size)
    return {plain(name): tensor.shape for name, tensor in found.items()}


def _read(descriptor: int, start: int, length: int) -> bytes:
    return os.pread(descriptor, length, start)


def difference(there: Shapes, wanted: Shapes) -> str:
    """In what the tensors of a file differ from those of a model; empty if they do not."""
    if lacking := sorted(wanted.keys() - there.keys()):
        return f"it lacks {enumerated(lacking)}"
    if surplus := sorted(there.keys() - wanted.keys()):
        return f"it has {enumerated(surplus)} too many"
    for name, shape in wanted.items():
        if there[name] != shape:
            return f"{name} is {list(there[name])} there and {list(shape)} in the model"
    return ""
