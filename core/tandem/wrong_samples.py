"""`wrong.json`: pictures of the samples that the best checkpoint misclassifies.

Evaluators have the test data in memory, and the machine that shows a run may not have it at all; so they put a small
picture of each into the run directory, of the best checkpoint alone. It is a hint, as best.json is: replaced
atomically, made again by anybody, and shown only where it is of the checkpoint that best.json names.
"""

from typing import Annotated

from pydantic import Field, ValidationError

from tandem.model import Model, PlainName, Whole
from tandem.rundir import evaluations
from tandem.rundir.durable import read_json_or_none
from tandem.rundir.evaluations import Best
from tandem.rundir.layout import RunDir

MAX_SIZE = 32
"""Pixels of a picture's width and height; a larger image is made smaller."""
MAX_COUNT = 24
MAX_BYTES = 2**18
Word = Annotated[str, Field(max_length=40)]


class WrongPicture(Model):
    """A sample that the model takes for something else."""

    index: Whole
    """Its place in the test data, from 0."""
    label: Word
    """What it is."""
    prediction: Word
    """What it was taken for."""
    confidence: Annotated[float, Field(ge=0, le=1)]
    """The probability that the model gives to that."""
    pixels: Annotated[str, Field(max_length=4 * MAX_SIZE * MAX_SIZE)]
    """Base64 of width × height bytes, row by row; the larger the brighter."""


class Gallery(Model):
    """The wrong samples of one checkpoint of which its model is most sure."""

    name: PlainName
    """Of the checkpoint."""
    step: Whole
    """Its step."""
    generation: Whole
    """The generation that wrote it."""
    width: Annotated[int, Field(ge=1, le=MAX_SIZE)]
    height: Annotated[int, Field(ge=1, le=MAX_SIZE)]
    pictures: Annotated[list[WrongPicture], Field(max_length=MAX_COUNT)]


def gallery(rundir: RunDir) -> Gallery | None:
    """That of the best checkpoint; None if there is none that can be read, or one of another checkpoint."""
    best, data = evaluations.best(rundir), read_json_or_none(rundir.wrong_file, MAX_BYTES)
    try:
        found = Gallery.read(data)
    except ValidationError:
        return None
    return found if best is not None and shows(found, best) else None


def shows(found: Gallery, best: Best) -> bool:
    """Whether it is of the checkpoint that best.json names."""
    return (found.name, found.generation) == (best.name, best.generation)
