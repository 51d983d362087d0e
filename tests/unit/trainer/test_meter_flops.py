"""What a sample costs, and how much a GPU can do."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tandem.job.tasks import ImageParameters
from tandem_trainer.meter import Cost, cost_of, peak, per_sample
from tandem_trainer.models import BUILDERS, build


@pytest.mark.parametrize("name", BUILDERS)
def test_a_forward_pass_is_counted_as_torch_counts_it_and_a_backward_pass_as_two(name: str) -> None:
    config = ImageParameters.model_validate({"model": name, "data": {"name": "digits"}})
    with FlopCounterMode(display=False) as counter:
        build(name, 3, 32, 10).eval()(torch.zeros(1, 3, 32, 32))
    assert per_sample(config, 3, 32, 10) == 3 * counter.get_total_flops()


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_the_peak_is_that_of_the_gpu_s_name(name: str, most: float | None) -> None:
    assert peak(name) == most


def test_nothing_is_said_where_it_is_not_well_defined() -> None:
    assert cost_of("bfloat16", lambda: 1.0, torch.device("cpu")) == Cost()
