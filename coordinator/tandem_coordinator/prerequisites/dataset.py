"""The data set of a built-in task: whether it exists, is complete, and is as large as the job says.

Only headers are read, and labels; compressed images are read through while READING_SECONDS last, to see that they end
where their header says.

Its header alone is read.
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

from tandem import tensor_header
from tandem.architectures import Shapes, plain, shapes
from tandem.datasets import FILES, NotIdx, Split, find, opened, raw_folder, shape
from tandem.distribution import install
from tandem.errors import Unmet, enumerated
from tandem.job import DistributedTrainingJob
from tandem.rundir.durable import may_pass
from tandem.rundir.initial_weights import is_of_torch, locate
from tandem.tasks import CLASSES, MIN_FOR_CNN, SYNTHETIC_SIZE, ImageClassification
from tandem_coordinator.prerequisites.site import CONFIG, LOOP, Site, fault_of_file, fault_of_folder

READING_SECONDS = 0.5
"""For reading through files; what is not known by then is left to the ranks."""
BLOCK = 2**20
DIGITS_FILE = "sklearn/datasets/data/digits.csv.gz"
SIZES = {"digits": 8, "mnist": 28, "fashion-mnist": 28}
"""Height and width of the images of a data set, where its files do not say otherwise."""

DATA = (*CONFIG, "data")


@dataclass(frozen=True)
class Known:
    """What is known of a job's training data before it is read."""

    samples: int | None = None
    """How many there are."""
    image_size: int | None = None
    """Their height and width, pixels."""


def known(settings: ImageClassification, site: Site) -> Known:
    """What is known of the training data, by its name or by its files."""
    data = settings.data
    if data.name == "synthetic":
        return Known(data.known_samples, data.image_size or SYNTHETIC_SIZE)
    if data.name == "digits":
        return Known(data.known_samples, SIZES[data.name])
    root = _root(settings, site)
    try:
        pair = find(root, data.name, "train") if root is not None else None
        if pair is None:
            return Known(image_size=SIZES[data.name] if data.path is None else None)
        with opened(pair[0]) as file:
            sizes = shape(file, pair[0])
    except (NotIdx, OSError, EOFError, zlib.error):
        return Known()
    return Known(sizes[0], sizes[1]) if len(sizes) == 3 else Known()


def dataset(job: DistributedTrainingJob, site: Site) -> Iterator[Unmet]:
    """What is wrong with the data of a built-in task."""
    if not job.spec.trainer.is_built_in:
        return
    settings = job.spec.trainer.settings
    if settings.data.name == "digits" and site.is_here:
        yield from _digits()
    if settings.data.name not in ("digits", "synthetic"):
        found = list(_files(job, settings, site))
        yield from found
        if found:
            return
    yield from _amounts(settings, known(settings, site))


def _digits() -> Iterator[Unmet]:
    try:
        is_there = Path(str(importlib.metadata.distribution("scikit-learn").locate_file(DIGITS_FILE))).is_file()
    except importlib.metadata.PackageNotFoundError:
        is_there = False
    if not is_there:
        message = f"digits ships with scikit-learn, which is not installed here: {install('trainer')}"
        yield Unmet((*DATA, "name"), message)


def _amounts(settings: ImageClassification, there: Known) -> Iterator[Unmet]:
    """Whether the slice and the batch go together with how much there is."""
    data, samples = settings.data, there.samples
    if settings.model == "cnn" and there.image_size is not None and there.image_size < MIN_FOR_CNN:
        least = f"{MIN_FOR_CNN}×{MIN_FOR_CNN}"
        given = f"{there.image_size}×{there.image_size}"
        yield Unmet((*CONFIG, "model"), f"model cnn needs images of at least {least} pixels, and these have {given}")
    if samples is None:
        return
    held_out = data.held_out(samples)
    if data.validation and held_out in (0, samples):
        purpose = "train" if held_out else "validate"
        message = f"{data.validation:g} of {samples:,} training samples leaves nothing to {purpose} with"
        yield Unmet((*DATA, "validation"), message)
        return
    samples -= held_out
    start, end = data.start or 0, data.end or samples
    if end > samples or start >= end:
        field = "end" if data.end is not None and data.end > samples else "start"
        yield Unmet((*DATA, field), f"{data.name} has {samples:,} training samples, so there is no slice {start}:{end}")
    elif settings.global_batch_size > end - start:
        message = f"globalBatchSize is {settings.global_batch_size:,}, and there are {end - start:,} samples"
        if settings.drop_last:
            yield Unmet((*CONFIG, "globalBatchSize"), f"{message}: dropLast leaves all of them out")
        else:
            yield Unmet((*CONFIG, "globalBatchSize"), f"{message}: each epoch is one step", fails=False)


def _root(settings: ImageClassification, site: Site) -> Path | None:
    path = settings.data.path
    return site.data_folder() if path is None else site.look(path, expands=True)


def _files(job: DistributedTrainingJob, settings: ImageClassification, site: Site) -> Iterator[Unmet]:
    """The IDX files of MNIST and its like."""
    data, root = settings.data, _root(settings, site)
    if root is None:
        return
    path = (*DATA, "path") if data.path is not None else (*DATA, "name")
    if str(root).startswith("~"):
        yield Unmet(
            path, f"there is no user {root.parts[0].removeprefix('~')}, whose home folder {root.parts[0]} would be"
        )
        return
    try:
        if root.exists() and not root.is_dir():
            yield Unmet(path, f"{data.path} is a file; a folder is needed")
            return
        if not root.exists() and data.path is not None and not data.download:
            yield Unmet(path, f"there is no folder {data.path}; {_how_to_provide(settings)}")
            return
        evaluation = job.spec.evaluation
        is_tested = evaluation.processes > 0 and evaluation.command is None
        splits: list[Split] = ["train", "test"] if is_tested else ["train"]
        deadline = time.monotonic() + READING_SECONDS
        for split in splits:
            pair = find(root, data.name, split)
            if pair is None:
                yield from _missing(settings, root, split, path)
                return
            if data.download and pair[0].parent == raw_folder(root, data.name):
                continue  # what is damaged of a download is downloaded again
            if fault := _fault(pair, settings, split, deadline):
                yield Unmet(path, fault)
                return
    except OSError as error:
        if may_pass(error):
            raise
        yield Unmet(path, f"{root} cannot be read: {error.strerror}")


def _missing(settings: ImageClassification, root: Path, split: Split, path: tuple[str, ...]) -> Iterator[Unmet]:
    data = settings.data
    if data.download:
        if fault := fault_of_folder(root):
            yield Unmet(path, f"{data.name} cannot be downloaded to {root}: {fault}")
        return
    names = [name for name in FILES[split] if not any((root / f"{name}{end}").is_file() for end in ("", ".gz"))]
    what = "the test data, which the evaluators need" if split == "test" else "the training data"
    yield Unmet(path, f"{root} lacks {what}: {' and '.join(names)}; {_how_to_provide(settings)}")


def _how_to_provide(settings: ImageClassification) -> str:
    if settings.data.path is None:
        return "name the folder of its four IDX files in data.path, or set download: true"
    return f"put the four IDX files of {settings.data.name} there, or set download: true"


def _fault(pair: tuple[Path, Path], settings: ImageClassification, split: Split, deadline: float) -> str:
    """What is wrong with images and labels, in a sentence; empty if nothing is, as far as one can see in time."""
    images, labels = pair
    sizes = []
    for path in (labels, images):
        try:
            with opened(path) as file:
                sizes.append(shape(file, path))
        except NotIdx as error:
            return str(error)
        except (OSError, EOFError, zlib.error) as error:
            if may_pass(error):
                raise
            why = error.strerror if isinstance(error, PermissionError) else error
            return f"{path} cannot be read as an IDX file: {why}"
    of_labels, of_images = sizes
    if len(of_images) != 3 or len(of_labels) != 1:
        return f"{images} and {labels} are not images and labels of the same samples"
    if of_images[0] != of_labels[0]:
        counts = f"{of_images[0]:,} images and {of_labels[0]:,} labels"
        return f"{images} and {labels} are not images and labels of the same samples: there are {counts}"
    if not math.prod(of_images):
        return f"{images} holds no images"
    if of_images[1] != of_images[2] and settings.model != "resnet-18":
        return f"{images} has images of {of_images[1]}×{of_images[2]} pixels; model {settings.model} needs square ones"
    largest = 0
    for path, size in ((labels, of_labels[0]), (images, math.prod(of_images))):
        count, most, fault = _read(path, size, deadline, wants_largest=path is labels)
        if fault:
            return fault
        if count is not None and count < size:
            return f"{path} is cut short: {count:,} of {size:,} bytes"
        largest = max(largest, most)
    if largest >= CLASSES:
        return f"{labels} has the label {largest}; labels are 0 to {CLASSES - 1}"
    return ""


def _read(path: Path, size: int, deadline: float, wants_largest: bool) -> tuple[int | None, int, str]:
    """How many of the bytes after the header are there (None: not known), the largest of them, and what goes wrong."""
    count = largest = 0
    try:
        with opened(path) as file:
            header = 4 + 4 * len(shape(file, path))
            if path.suffix != ".gz" and not wants_largest:
                return min(size, path.stat().st_size - header), 0, ""
            while count < size and (block := file.read(min(BLOCK, size - count))):
                count += len(block)
                if wants_largest:
                    largest = max(largest, max(block))
                if time.monotonic() > deadline:
                    return None, largest, ""
    except (OSError, EOFError, zlib.error) as error:
        if may_pass(error):
            raise
        return count, largest, f"{path} is damaged: {error}"
    return count, largest, ""


FIELD = (*CONFIG, "initialWeights")
FORMS = {
    b"\x80\x04": "a file of pickle",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUM": "a file of NumPy",
    b"\x1f\x8b": "a gzip file",
    b"vers": "a pointer of Git LFS, whose file was not fetched",
}
"""By how they begin, what else people have weights in."""


def weights(job: DistributedTrainingJob, site: Site) -> Iterator[Unmet]:
    """What is wrong with the weights that a job begins with. A run that has checkpoints goes on with those."""
    trainer = job.spec.trainer
    if trainer.task is None or site.resumes:
        return
    field = FIELD if trainer.is_built_in else (*LOOP, FIELD[-1])
    text = trainer.settings_of_loop.initial_weights
    path = site.look(text) if text is not None else None
    if text is None or path is None:
        return
    try:
        found = locate(path)
        files = found.files
        for file in files:
            fault, near = fault_of_file(file, text if file == path else str(file))
            if fault:
                yield Unmet(field, fault, suggestion=near)
                return
    except ValueError as error:
        yield Unmet(field, str(error).replace(str(path), text, 1))
        return
    except OSError as error:
        if may_pass(error):
            raise
        yield Unmet(field, f"{text} cannot be read: {error.strerror}")
        return
    if trainer.settings_of_loop.initial_optimizer != "Fresh" and found.checkpoint is None:
        message = f"{text} is no run and no checkpoint, so it has no optimizer for initialOptimizer to take over"
        yield Unmet((*field[:-1], "initialOptimizer"), message)
        return
    if is_of_torch(files[0]):
        return  # Only torch can look into it.
    try:
        there = {name: shape for file in files for name, shape in _there(file).items()}
    except ValueError as error:
        yield Unmet(field, f"{text} is no safetensors file: {error}")
        return
    except OSError as error:
        if may_pass(error):
            raise
        yield Unmet(field, f"{text} cannot be read: {error.strerror}")
        return
    settings = trainer.settings
    size = known(settings, site).image_size if trainer.is_built_in else None
    if size is None:
        return
    wanted = shapes(settings.model, 1, size, CLASSES)
    if why := difference(there, wanted):
        yield Unmet(field, f"{text} does not fit model {settings.model} on images of {size}×{size}: {why}")


def _there(path: Path) -> Shapes:
    """Names and shapes of the tensors of a file. Raises ValueError and OSError."""
    with path.open("rb") as file:
        begin = file.read(4)
        for form, what in FORMS.items():
            if begin.startswith(form):
                raise ValueError(f"it is {what}; tandem checkpoints export and safetensors.torch.save_file write one")
        found = tensor_header.tensors(partial(_read_at, file.fileno()), os.fstat(file.fileno()).st_size)
    return {plain(name): tensor.shape for name, tensor in found.items()}


def _read_at(descriptor: int, start: int, length: int) -> bytes:
    return os.pread(descriptor, length, start)


def difference(there: Shapes, wanted: Shapes) -> str:
    """In what the tensors of a file differ from those of a model; empty if they do not."""
    if lacking := sorted(wanted.keys() - there.keys()):
        return f"it lacks {enumerated(lacking)}"
    if surplus := sorted(there.keys() - wanted.keys()):
        return f"it has {enumerated(surplus)} too many"
    for name, size in wanted.items():
        if there[name] != size:
            return f"{name} is {list(there[name])} there and {list(size)} in the model"
    return ""
