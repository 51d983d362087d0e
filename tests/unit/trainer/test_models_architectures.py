"""What core says of the built-in models, without torch, is what they are."""

import pytest

from tandem.job.architectures import element_count, shapes
from tandem_trainer.models import BUILDERS, build


@pytest.mark.parametrize("size", [8, 28, 64])
@pytest.mark.parametrize("model", BUILDERS)
def test_names_and_shapes_are_those_of_the_model(model: str, size: int) -> None:
    state = build(model, 1, size, 10).state_dict()
    assert shapes(model, 1, size, 10) == {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert element_count(shapes(model, 1, size, 10)) == sum(tensor.numel() for tensor in state.values())
