"""wrong.json: pictures of the samples that the best checkpoint takes for something else (tandem.wrong_samples)."""

import base64
from collections.abc import Sequence

from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F

from tandem.rundir import evaluations
from tandem.rundir.durable import read_json_or_none, replace_json
from tandem.rundir.evaluations import Best, merged_file
from tandem.rundir.layout import RunDir
from tandem.status import CheckpointRef
from tandem.wrong_samples import MAX_BYTES, MAX_COUNT, MAX_SIZE, Gallery, WrongPicture, shows
from tandem_evaluator.result import MergedResult, WrongSample


def update(rundir: RunDir, images: Tensor, names: Sequence[str]) -> None:
    """Make wrong.json what best.json and the merged result that it names say.

    As with best.json, each writer looks again after it has written, so the last one has seen the newest best.

    Args:
        images: [N, channels, size, size], of the test data.
        names: of the classes.

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
        replace_json(rundir.wrong_file, made(result, images, names).dump(), durable=False)


def made(result: MergedResult, images: Tensor, names: Sequence[str]) -> Gallery:
    """The pictures of one result's wrong samples."""
    wrong = [sample for sample in result.wrong[:MAX_COUNT] if sample.index < len(images)]
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
        names[which] if which < len(names) else str(which) for which in (sample.label, sample.prediction)
    )
    return WrongPicture(
        index=sample.index,
        label=label,
        prediction=prediction,
        confidence=sample.confidence,
        pixels=base64.b64encode(bytes(pixels.flatten().tolist())).decode(),
    )


def _small(images: Tensor) -> Tensor:
    """[N, height, width], bytes: each image from its darkest to its brightest, of all channels the mean."""
    grey = images.float().mean(dim=1, keepdim=True)
    if max(grey.shape[2:]) > MAX_SIZE:
        grey = F.interpolate(grey, size=[min(MAX_SIZE, size) for size in grey.shape[2:]], mode="area")
    low, high = grey.amin(dim=(1, 2, 3), keepdim=True), grey.amax(dim=(1, 2, 3), keepdim=True)
    return ((grey - low) / (high - low).clamp_min(1e-9) * 255).nan_to_num().round().byte()[:, 0]


def _result(rundir: RunDir, best: Best) -> MergedResult | None:
    try:
        reference = CheckpointRef.read(best.dump())
        return MergedResult.read(read_json_or_none(merged_file(rundir, reference)))
    except ValidationError:
        return None
