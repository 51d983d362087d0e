"""What tests on a GPU share. Where there is none, each of them is skipped and says so."""

import pytest
import torch


@pytest.fixture(autouse=True)
def gpus() -> int:
    """How many GPUs there are."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return torch.cuda.device_count()


@pytest.fixture
def device(gpus: int) -> torch.device:
    """The first GPU, for tests that compute in this process."""
    found = torch.device("cuda", 0)
    torch.cuda.set_device(found)
    return found
