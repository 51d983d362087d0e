"""An evaluator on a GPU: the scores of one on a CPU, one model on the device, and prompts completed together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.job.language_evaluation import Generate
from tandem.job.tasks import Data, ImageParameters
from tandem_evaluator.device import Compute
from tandem_evaluator.evaluation import Evaluation, Tally
from tandem_trainer import models
from tandem_trainer.language.fine_tuning import FineTuning, FineTuningConfig
from tests.support.language import pretrained

DIGITS = ImageParameters(model="cnn", data=Data(name="digits"))


def weights(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return dict(models.build("cnn", 1, 8, 10).state_dict())


def scored(subject: Evaluation, seed: int) -> Tally:
    tally = subject.run(weights(seed), 0, 1)
    assert tally is not None
    return tally


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-3), ("bfloat16", 3e-2)])
def test_it_scores_as_one_on_a_cpu(device: torch.device, precision: Any, tolerance: float) -> None:
    ours, theirs = Evaluation.load(DIGITS, Compute(device, precision)), Evaluation.load(DIGITS)
    for seed in (0, 1):
        assert scored(ours, seed).loss_sum == pytest.approx(scored(theirs, seed).loss_sum, rel=tolerance)


def test_the_weights_of_the_next_checkpoint_take_no_memory_beside_those_of_the_last(device: torch.device) -> None:
    subject = Evaluation.load(DIGITS, Compute(device))
    scored(subject, 0)
    torch.cuda.reset_peak_memory_stats()
    first = torch.cuda.max_memory_allocated()
    subject._take(weights(1))
    largest = max(tensor.nbytes for tensor in weights(1).values())
    assert torch.cuda.max_memory_allocated() <= first + largest


def test_prompts_are_completed_together(device: torch.device, tmp_path: Path) -> None:
    task = FineTuning(FineTuningConfig.model_validate({"pretrained": str(pretrained(tmp_path)), "length": 64}))
    model = task.model()
    task.initialize(model)
    model = Compute(device).placed(model)
    prompts = {0: "A loop", 1: "The import statement", 2: "Names"}
    options = Generate(prompts=[*prompts.values()], max_tokens=8, batch=3)
    with torch.inference_mode():
        together = task.complete(model, prompts, options)
        assert len(together) == 3
        assert together[0] == task.complete(model, {0: "A loop"}, options)[0]
