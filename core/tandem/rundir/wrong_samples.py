"""`wrong.json`: pictures of the samples that the best checkpoint misclassifies.

Evaluators have the test data in memory, and the machine that shows a run may not have it at all; so they store small
pictures in the run directory, for the best checkpoint only. The file is a hint, like best.json: any evaluator replaces
it atomically, and it is shown only if it belongs to the checkpoint that best.json names.
"""

from typing import Annotated

from pydantic import Field, ValidationError

from tandem.model import Model, PlainName, WholeNumber
from tandem.rundir import evaluations
from tandem.rundir.durable import read_json_or_none
from tandem.rundir.evaluations import Best
from tandem.rundir.layout import RunDir

MAX_PICTURE_PIXELS = 32
"""Maximum width and height of a picture in pixels; a larger image is scaled down."""
MAX_PICTURES = 24
MAX_BYTES = 2**18
Word = Annotated[str, Field(max_length=40)]


class WrongPicture(Model):
    """A misclassified sample."""

    index: WholeNumber
    """Index in the test data, from 0."""
    label: Word
    """Name of its class."""
    prediction: Word
    """Name of the predicted class."""
    confidence: Annotated[float, Field(ge=0, le=1)]
    """Predicted probability of that class."""
    pixels: Annotated[str, Field(max_length=4 * MAX_PICTURE_PIXELS * MAX_PICTURE_PIXELS)]
    """Base64 of width × height bytes, row by row; a larger value is brighter."""


class Gallery(Model):
    """The misclassified samples of one checkpoint with the highest confidence."""

    name: PlainName
    """Name of the checkpoint."""
    step: WholeNumber
    """Step of the checkpoint."""
    generation: WholeNumber
    """The generation that wrote it."""
    width: Annotated[int, Field(ge=1, le=MAX_PICTURE_PIXELS)]
    height: Annotated[int, Field(ge=1, le=MAX_PICTURE_PIXELS)]
    pictures: Annotated[list[WrongPicture], Field(max_length=MAX_PICTURES)]


def gallery(rundir: RunDir) -> Gallery | None:
    """The gallery of the best checkpoint; None if it cannot be read, or belongs to another checkpoint."""
    best, data = evaluations.best(rundir), read_json_or_none(rundir.wrong_file, MAX_BYTES)
    try:
        content = Gallery.read(data)
    except ValidationError:
        return None
    return content if best is not None and shows(content, best) else None


def shows(content: Gallery, best: Best) -> bool:
    """Whether a gallery belongs to the checkpoint that best.json names."""
    return (content.name, content.generation) == (best.name, best.generation)
