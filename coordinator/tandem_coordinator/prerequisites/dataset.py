"""Checks the data set and the initial weights of a built-in task: whether they exist, are complete, and fit the job.

Only headers are read, and labels; compressed images are read through for at most MAX_READ_SECONDS, to see whether they
end where their header says. Of weights, only the header is read.
"""

import importlib.metadata
import math
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tandem.errors import UnmetRequirement, join_names
from tandem.job.architectures import Shapes, shapes, unwrapped_name
from tandem.job.datasets import FILES, NotIdx, Split, find_idx_files, open_maybe_gzip, raw_folder, read_idx_shape
from tandem.job.manifest.fields import LOOP, PARAMETERS
from tandem.job.resource import DistributedTrainingJob
from tandem.job.tasks import CLASSES, MIN_FOR_CNN, SYNTHETIC_SIZE, ImageParameters, Loop
from tandem.processes.distribution import install_command
from tandem.rundir import tensor_header
from tandem.rundir.durable import is_transient
from tandem.rundir.initial_weights import is_torch_file, locate_weights
from tandem_coordinator.prerequisites.site import Site, fault_of_file, fault_of_folder

MAX_READ_SECONDS = 0.5
"""Maximum time for reading through files, in seconds; the rest is left to the ranks."""
BLOCK_BYTES = 2**20
DIGITS_FILE = "sklearn/datasets/data/digits.csv.gz"
IMAGE_SIZES = {"digits": 8, "mnist": 28, "fashion-mnist": 28}
"""Height and width of the images of a data set, if its files do not say otherwise."""

DATA_FIELD = (*PARAMETERS, "data")


@dataclass(frozen=True)
class TrainingData:
    """Properties of a job's training data that are known before it is read."""

    samples: int | None = None
    """Number of samples; None if unknown."""
    image_size: int | None = None
    """Height and width of the images in pixels; None if unknown."""


def training_data(settings: ImageParameters, site: Site) -> TrainingData:
    """Determine the properties of the training data, by its name or from its files."""
    data = settings.data
    if data.name == "synthetic":
        return TrainingData(data.known_samples, data.image_size or SYNTHETIC_SIZE)
    if data.name == "digits":
        return TrainingData(data.known_samples, IMAGE_SIZES[data.name])
    root = _root(settings, site)
    try:
        pair = find_idx_files(root, data.name, "train") if root is not None else None
        if pair is None:
            return TrainingData(image_size=IMAGE_SIZES[data.name] if data.path is None else None)
        with open_maybe_gzip(pair[0]) as file:
            sizes = read_idx_shape(file, pair[0])
    except (NotIdx, OSError, EOFError, zlib.error):
        return TrainingData()
    return TrainingData(sizes[0], sizes[1]) if len(sizes) == 3 else TrainingData()


def dataset(job: DistributedTrainingJob, site: Site) -> Iterator[UnmetRequirement]:
    """Check the data of a built-in task."""
    if not job.spec.trainer.is_built_in:
        return
    settings = job.spec.trainer.images
    if settings.data.name == "digits" and site.is_here:
        yield from _digits()
    if settings.data.name not in ("digits", "synthetic"):
        findings = list(_files(job, settings, site))
        yield from findings
        if findings:
            return
    yield from _amounts(settings, job.spec.trainer.settings_of_loop, training_data(settings, site))


def _digits() -> Iterator[UnmetRequirement]:
    try:
        is_there = Path(str(importlib.metadata.distribution("scikit-learn").locate_file(DIGITS_FILE))).is_file()
    except importlib.metadata.PackageNotFoundError:
        is_there = False
    if not is_there:
        message = f"digits ships with scikit-learn, which is not installed here: {install_command('trainer')}"
        yield UnmetRequirement((*DATA_FIELD, "name"), message)


def _amounts(settings: ImageParameters, loop: Loop, available: TrainingData) -> Iterator[UnmetRequirement]:
    """Check that the slice and the batch fit the number of samples."""
    data, samples = settings.data, available.samples
    if settings.model == "cnn" and available.image_size is not None and available.image_size < MIN_FOR_CNN:
        min_size = f"{MIN_FOR_CNN}×{MIN_FOR_CNN}"
        actual_size = f"{available.image_size}×{available.image_size}"
        yield UnmetRequirement(
            (*PARAMETERS, "model"),
            f"model cnn needs images of at least {min_size} pixels, and these have {actual_size}",
        )
    if samples is None:
        return
    held_out = data.held_out(samples)
    if data.validation and held_out in (0, samples):
        purpose = "train" if held_out else "validate"
        message = f"{data.validation:g} of {samples:,} training samples leaves nothing to {purpose} with"
        yield UnmetRequirement((*DATA_FIELD, "validation"), message)
        return
    samples -= held_out
    start, end = data.start or 0, data.end or samples
    if end > samples or start >= end:
        field = "end" if data.end is not None and data.end > samples else "start"
        yield UnmetRequirement(
            (*DATA_FIELD, field), f"{data.name} has {samples:,} training samples, so there is no slice {start}:{end}"
        )
    elif loop.global_batch_size > end - start:
        message = f"globalBatchSize is {loop.global_batch_size:,}, and there are {end - start:,} samples"
        if loop.drop_last:
            yield UnmetRequirement((*LOOP, "globalBatchSize"), f"{message}: dropLast leaves all of them out")
        else:
            yield UnmetRequirement((*LOOP, "globalBatchSize"), f"{message}: each epoch is one step", fails=False)


def _root(settings: ImageParameters, site: Site) -> Path | None:
    path = settings.data.path
    return site.data_folder() if path is None else site.resolve(path, expands=True)


def _files(job: DistributedTrainingJob, settings: ImageParameters, site: Site) -> Iterator[UnmetRequirement]:
    """Check the IDX files of MNIST and similar data sets."""
    data, root = settings.data, _root(settings, site)
    if root is None:
        return
    path = (*DATA_FIELD, "path") if data.path is not None else (*DATA_FIELD, "name")
    if str(root).startswith("~"):
        yield UnmetRequirement(
            path, f"there is no user {root.parts[0].removeprefix('~')}, whose home folder {root.parts[0]} would be"
        )
        return
    try:
        if root.exists() and not root.is_dir():
            yield UnmetRequirement(path, f"{data.path} is a file; a folder is needed")
            return
        if not root.exists() and data.path is not None and not data.download:
            yield UnmetRequirement(path, f"there is no folder {data.path}; {_advice(settings)}")
            return
        evaluation = job.spec.evaluation
        is_tested = evaluation.processes > 0 and evaluation.command is None
        splits: list[Split] = ["train", "test"] if is_tested else ["train"]
        deadline = time.monotonic() + MAX_READ_SECONDS
        for split in splits:
            pair = find_idx_files(root, data.name, split)
            if pair is None:
                yield from _missing(settings, root, split, path)
                return
            if data.download and pair[0].parent == raw_folder(root, data.name):
                continue  # what is damaged of a download is downloaded again
            if fault := _fault(pair, settings, split, deadline):
                yield UnmetRequirement(path, fault)
                return
    except OSError as error:
        if is_transient(error):
            raise
        yield UnmetRequirement(path, f"{root} cannot be read: {error.strerror}")


def _missing(settings: ImageParameters, root: Path, split: Split, path: tuple[str, ...]) -> Iterator[UnmetRequirement]:
    data = settings.data
    if data.download:
        if fault := fault_of_folder(root):
            yield UnmetRequirement(path, f"{data.name} cannot be downloaded to {root}: {fault}")
        return
    names = [name for name in FILES[split] if not any((root / f"{name}{end}").is_file() for end in ("", ".gz"))]
    missing_data = "the test data, which the evaluators need" if split == "test" else "the training data"
    yield UnmetRequirement(path, f"{root} lacks {missing_data}: {' and '.join(names)}; {_advice(settings)}")


def _advice(settings: ImageParameters) -> str:
    if settings.data.path is None:
        return "name the folder of its four IDX files in data.path, or set download: true"
    return f"put the four IDX files of {settings.data.name} there, or set download: true"


def _fault(pair: tuple[Path, Path], settings: ImageParameters, split: Split, deadline: float) -> str:
    """The fault of images and labels, as a sentence; empty if none is found in time."""
    images, labels = pair
    sizes = []
    for path in (labels, images):
        try:
            with open_maybe_gzip(path) as file:
                sizes.append(read_idx_shape(file, path))
        except NotIdx as error:
            return str(error)
        except (OSError, EOFError, zlib.error) as error:
            if is_transient(error):
                raise
            reason = error.strerror if isinstance(error, PermissionError) else error
            return f"{path} cannot be read as an IDX file: {reason}"
    label_shape, image_shape = sizes
    if len(image_shape) != 3 or len(label_shape) != 1:
        return f"{images} and {labels} are not images and labels of the same samples"
    if image_shape[0] != label_shape[0]:
        counts = f"{image_shape[0]:,} images and {label_shape[0]:,} labels"
        return f"{images} and {labels} are not images and labels of the same samples: there are {counts}"
    if not math.prod(image_shape):
        return f"{images} holds no images"
    if image_shape[1] != image_shape[2] and settings.model != "resnet-18":
        return (
            f"{images} has images of {image_shape[1]}×{image_shape[2]} pixels; model {settings.model} needs square ones"
        )
    max_label = 0
    for path, size in ((labels, label_shape[0]), (images, math.prod(image_shape))):
        count, max_value, fault = _read(path, size, deadline, wants_max=path is labels)
        if fault:
            return fault
        if count is not None and count < size:
            return f"{path} is cut short: {count:,} of {size:,} bytes"
        max_label = max(max_label, max_value)
    if max_label >= CLASSES:
        return f"{labels} has the label {max_label}; labels are 0 to {CLASSES - 1}"
    return ""


def _read(path: Path, size: int, deadline: float, wants_max: bool) -> tuple[int | None, int, str]:
    """Read a file; returns the number of bytes after the header (None if unknown), the largest of them, and the
    error."""
    count = max_value = 0
    try:
        with open_maybe_gzip(path) as file:
            header = 4 + 4 * len(read_idx_shape(file, path))
            if path.suffix != ".gz" and not wants_max:
                return min(size, path.stat().st_size - header), 0, ""
            while count < size and (block := file.read(min(BLOCK_BYTES, size - count))):
                count += len(block)
                if wants_max:
                    max_value = max(max_value, max(block))
                if time.monotonic() > deadline:
                    return None, max_value, ""
    except (OSError, EOFError, zlib.error) as error:
        if is_transient(error):
            raise
        return count, max_value, f"{path} is damaged: {error}"
    return count, max_value, ""


WEIGHTS_FIELD = (*LOOP, "initialWeights")
FILE_SIGNATURES = {
    b"\x80\x04": "a file of pickle",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUM": "a file of NumPy",
    b"\x1f\x8b": "a gzip file",
    b"vers": "a pointer of Git LFS, whose file was not fetched",
}
"""Other formats in which people have weights, by the first bytes of their files."""


def weights(job: DistributedTrainingJob, site: Site) -> Iterator[UnmetRequirement]:
    """Check the weights that a job begins with. A run that has checkpoints resumes from those."""
    trainer = job.spec.trainer
    if trainer.task is None or site.resumes:
        return
    field = WEIGHTS_FIELD
    text = trainer.settings_of_loop.initial_weights
    path = site.resolve(text) if text is not None else None
    if text is None or path is None:
        return
    try:
        located = locate_weights(path)
        files = located.files
        for file in files:
            fault, suggestion = fault_of_file(file, text if file == path else str(file))
            if fault:
                yield UnmetRequirement(field, fault, suggestion=suggestion)
                return
    except ValueError as error:
        yield UnmetRequirement(field, str(error).replace(str(path), text, 1))
        return
    except OSError as error:
        if is_transient(error):
            raise
        yield UnmetRequirement(field, f"{text} cannot be read: {error.strerror}")
        return
    if trainer.settings_of_loop.initial_optimizer != "Fresh" and located.checkpoint is None:
        message = f"{text} is no run and no checkpoint, so it has no optimizer for initialOptimizer to take over"
        yield UnmetRequirement((*field[:-1], "initialOptimizer"), message)
        return
    if is_torch_file(files[0]):
        return  # Only torch can look into it.
    try:
        file_shapes = {name: shape for file in files for name, shape in _tensor_shapes(file).items()}
    except ValueError as error:
        yield UnmetRequirement(field, f"{text} is no safetensors file: {error}")
        return
    except OSError as error:
        if is_transient(error):
            raise
        yield UnmetRequirement(field, f"{text} cannot be read: {error.strerror}")
        return
    if not trainer.is_built_in:
        return
    settings = trainer.images
    size = training_data(settings, site).image_size
    if size is None:
        return
    model_shapes = shapes(settings.model, 1, size, CLASSES)
    if problem := difference(file_shapes, model_shapes):
        yield UnmetRequirement(
            field, f"{text} does not fit model {settings.model} on images of {size}×{size}: {problem}"
        )


def _tensor_shapes(path: Path) -> Shapes:
    """Read the names and shapes of the tensors of a file. Raises ValueError and OSError."""
    with path.open("rb") as file:
        head = file.read(4)
        for signature, description in FILE_SIGNATURES.items():
            if head.startswith(signature):
                raise ValueError(
                    f"it is {description}; tandem checkpoints export and safetensors.torch.save_file write one"
                )
        tensors = tensor_header.tensors(partial(_read_at, file.fileno()), os.fstat(file.fileno()).st_size)
    return {unwrapped_name(name): tensor.shape for name, tensor in tensors.items()}


def _read_at(descriptor: int, start: int, length: int) -> bytes:
    return os.pread(descriptor, length, start)


def difference(file_shapes: Shapes, model_shapes: Shapes) -> str:
    """Describe how the tensors of a file differ from those of a model; empty if they do not."""
    if missing := sorted(model_shapes.keys() - file_shapes.keys()):
        return f"it lacks {join_names(missing)}"
    if surplus := sorted(file_shapes.keys() - model_shapes.keys()):
        return f"it has {join_names(surplus)} too many"
    for name, size in model_shapes.items():
        if file_shapes[name] != size:
            return f"{name} is {list(file_shapes[name])} there and {list(size)} in the model"
    return ""
