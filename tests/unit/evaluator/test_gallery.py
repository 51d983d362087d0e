"""Pictures of the best checkpoint's wrong samples: of the right checkpoint, small, and harmless when damaged."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.rundir.durable import read_json, replace_json
from tandem.rundir.layout import RunDir
from tandem.rundir.wrong_samples import Gallery, gallery
from tandem.wire.status import CheckpointRef
from tandem_cli.report.writing import write
from tandem_coordinator.charts.gallery import tiles
from tandem_coordinator.page.timeline import Timeline
from tandem_evaluator.gallery import update
from tests.support.worlds.small_run import SmallRun

NAMES = ("cat", "dog")
IMAGES = torch.arange(6 * 16, dtype=torch.float32).reshape(6, 1, 4, 4).sub_(7.0)


def evaluated(run: SmallRun, step: int, *indices: int) -> CheckpointRef:
    reference = run.save(step)
    wrong = [{"index": index, "label": 0, "prediction": 1, "confidence": 0.75} for index in indices]
    told: dict[str, Any] = {"checkpoint": reference.name, "step": step, "generation": 1, "wrong": wrong}
    run.evaluate(reference, 0.9, perClassF1=[None, None], startedAt=1.0, finishedAt=2.0, **told)
    return reference


def is_best(run: SmallRun, reference: CheckpointRef) -> None:
    replace_json(run.rundir.best_file, {**reference.dump(), "metric": "accuracy", "value": 0.9})


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    found = SmallRun(tmp_path / "run")
    found.begin(1)
    return found


def test_are_of_the_best_and_follow_it(run: SmallRun) -> None:
    first, second = evaluated(run, 10, 3, 5), evaluated(run, 20, 1)
    is_best(run, first)
    update(run.rundir, IMAGES, NAMES)
    found = gallery(run.rundir)
    assert [(one.index, one.label, one.prediction) for one in found.pictures] == [(3, "cat", "dog"), (5, "cat", "dog")]
    before = run.rundir.wrong_file.stat().st_mtime_ns
    update(run.rundir, IMAGES, NAMES)
    assert run.rundir.wrong_file.stat().st_mtime_ns == before, "what is right is not written again"

    is_best(run, second)
    assert gallery(run.rundir) is None, "it is of another checkpoint"
    update(run.rundir, IMAGES, NAMES)
    found = gallery(run.rundir)
    assert (found.step, [one.index for one in found.pictures]) == (20, [1])
    run.rundir.best_file.unlink()
    update(run.rundir, IMAGES, NAMES)
    assert not run.rundir.wrong_file.exists()


def test_reach_from_the_darkest_to_the_brightest_pixel(run: SmallRun) -> None:
    is_best(run, evaluated(run, 10, 2))
    update(run.rundir, IMAGES, NAMES)
    found = gallery(run.rundir)
    assert found is not None
    (tile,) = tiles(found)
    assert list(tile.pixels) == [17 * pixel for pixel in range(16)]
    assert (tile.label, tile.prediction) == ("cat", "→ dog, 75 %")


@pytest.mark.parametrize("size", [(32, 32), (33, 40), (512, 512)])
def test_of_large_images_are_made_smaller(run: SmallRun, size: tuple[int, int]) -> None:
    is_best(run, evaluated(run, 10, *range(6)))
    update(run.rundir, torch.rand(6, 3, *size), NAMES)
    found = gallery(run.rundir)
    assert (found.height, found.width) == (32, 32)
    assert len(tiles(found)) == 6


def test_of_what_is_not_in_the_data_any_more_or_not_finite_harm_nothing(run: SmallRun) -> None:
    is_best(run, evaluated(run, 10, 0, 77))
    update(run.rundir, torch.full((1, 1, 4, 4), torch.nan), NAMES)
    found = gallery(run.rundir)
    assert [one.index for one in found.pictures] == [0]


def damaged(content: dict[str, Any], how: str) -> str:
    picture = content["pictures"][0]
    if how == "garbage":
        return "{" * 10_000
    if how == "no base64":
        picture["pixels"] = "*" * 8
    elif how == "too few pixels":
        picture["pixels"] = base64.b64encode(b"123").decode()
    elif how == "too large":
        content["width"] = 10**6
    elif how == "long words":
        picture["label"] = "x" * 10**6
    return json.dumps(content)


@pytest.mark.parametrize("how", ["garbage", "no base64", "too few pixels", "too large", "long words"])
def test_that_are_damaged_are_not_shown_and_are_made_again(run: SmallRun, how: str) -> None:
    is_best(run, evaluated(run, 10, 3))
    update(run.rundir, IMAGES, NAMES)
    run.rundir.wrong_file.write_text(damaged(read_json(run.rundir.wrong_file), how))
    found = gallery(run.rundir)
    assert found is None or not tiles(found)
    if found is None:
        update(run.rundir, IMAGES, NAMES)
        assert isinstance(gallery(run.rundir), Gallery)


def test_stand_on_the_report_and_on_the_live_page(run: SmallRun) -> None:
    is_best(run, evaluated(run, 10, 3, 5))
    update(run.rundir, IMAGES, NAMES)
    page = write(run.rundir.path, png=False).page.read_text()
    assert "What the best checkpoint takes for something else" in page
    assert page.count("<title>sample 5: cat, taken for dog, 75 % sure</title>") == 2
    record = Timeline(RunDir(run.rundir.path))
    record.follow(10.0, rest_factor=0.0)
    assert [tile.label for tile in record.wrong] == ["cat", "cat"]
    run.rundir.wrong_file.unlink()
    record.follow(10.0, rest_factor=0.0)
    assert record.wrong == []
    assert "takes for something else" not in write(run.rundir.path, png=False).page.read_text()
