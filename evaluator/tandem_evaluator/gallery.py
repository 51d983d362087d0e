"""wrong.json: pictures of the samples that the best checkpoint misclassifies (tandem.rundir.wrong_samples)."""

import base64
from collections.abc import Sequence

from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F

from tandem.rundir import evaluations
from tandem.rundir.durable import read_json_or_none, replace_json
from tandem.rundir.evaluations import Best, merged_file
from tandem.rundir.layout import RunDir
from tandem.rundir.wrong_samples import MAX_BYTES, MAX_PICTURE_PIXELS, MAX_PICTURES, Gallery, WrongPicture, shows
from tandem.wire.status import CheckpointRef
from tandem_evaluator.result import MergedResult, WrongSample


def update(rundir: RunDir, images: Tensor, names: Sequence[str]) -> None:
    """Write wrong.json for the checkpoint that best.json names.

    As with best.json, each writer reads again after it has written, so the last one has seen the newest best.

    Args:
        images: the images of the test data, [N, channels, size, size].
        names: names of the classes.

    Raises:
        OSError: the run directory cannot be read or written.
    """
    while True:
        best = evaluations.best(rundir)
        if best is None or (result := _result(rundir, best)) is None:
            rundir.wrong_file.unlink(missing_ok=True)
            return
        try:
            if shows(Gallery.read(read_json_or_none(rundir.wrong_file, MAX_BYTES)), best):
                return
        except ValidationError:
            pass
        replace_json(rundir.wrong_file, gallery_of(result, images, names).dump(), durable=False)


def gallery_of(result: MergedResult, images: Tensor, names: Sequence[str]) -> Gallery:
    """The gallery of one result's misclassified samples."""
    wrong = [sample for sample in result.wrong[:MAX_PICTURES] if sample.index < len(images)]
    small = _small(images[[sample.index for sample in wrong]])
    return Gallery(
        name=result.checkpoint,
        step=result.step,
        generation=result.generation,
        height=small.shape[1],
        width=small.shape[2],
        pictures=[_picture(sample, pixels, names) for sample, pixels in zip(wrong, small, strict=True)],
    )


def _picture(sample: WrongSample, pixels: Tensor, names: Sequence[str]) -> WrongPicture:
    label, prediction = (
        names[label_index] if label_index < len(names) else str(label_index)
        for label_index in (sample.label, sample.prediction)
    )
    return WrongPicture(
        index=sample.index,
        label=label,
        prediction=prediction,
        confidence=sample.confidence,
        pixels=base64.b64encode(bytes(pixels.flatten().tolist())).decode(),
    )


def _small(images: Tensor) -> Tensor:
    """Convert images to [N, height, width] bytes: the mean of the channels, scaled from each image's darkest to its
    brightest pixel."""
    grey = images.float().mean(dim=1, keepdim=True)
    if max(grey.shape[2:]) > MAX_PICTURE_PIXELS:
        grey = F.interpolate(grey, size=[min(MAX_PICTURE_PIXELS, size) for size in grey.shape[2:]], mode="area")
    low, high = grey.amin(dim=(1, 2, 3), keepdim=True), grey.amax(dim=(1, 2, 3), keepdim=True)
    return ((grey - low) / (high - low).clamp_min(1e-9) * 255).nan_to_num().round().byte()[:, 0]


def _result(rundir: RunDir, best: Best) -> MergedResult | None:
    try:
        reference = CheckpointRef.read(best.dump())
        return MergedResult.read(read_json_or_none(merged_file(rundir, reference)))
    except ValidationError:
        return None
