"""The built-in models are the ones that the documentation names, sized to the data."""

import pytest
import torch
from torch import nn

from tandem_trainer.failure import ConfigurationError
from tandem_trainer.models import BUILDERS, build
from tandem_trainer.strategies.strategy import prepare


def linears(model: nn.Module) -> list[tuple[int, int]]:
    return [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]


def dropouts(model: nn.Module) -> list[float]:
    return [m.p for m in model.modules() if isinstance(m, nn.Dropout)]


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (1, 28), (3, 32)])
def test_every_model_takes_every_data_set(name: str, channels: int, size: int) -> None:
    model = build(name, channels, size, classes=7)
    assert model(torch.randn(2, channels, size, size)).shape == (2, 7)


def test_cnn_is_the_classic_one_on_28_pixels() -> None:
    model = build("cnn", 1, 28, 10)
    convolutions = [(m.in_channels, m.out_channels) for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert convolutions == [(1, 32), (32, 64)]
    assert linears(model) == [(9216, 128), (128, 10)]
    assert dropouts(model) == [0.25, 0.5]


def test_simple_net_is_784_256_256_10_with_dropout() -> None:
    model = build("simple-net", 1, 28, 10)
    assert linears(model) == [(784, 256), (256, 256), (256, 10)]
    assert dropouts(model) == [0.2, 0.2]


def test_resnet_is_torchvisions_for_large_images() -> None:
    from torchvision.models import resnet18

    assert build("resnet-18", 3, 224, 1000).state_dict().keys() == resnet18().state_dict().keys()
    assert build("resnet-18", 1, 28, 10).conv1.stride == (1, 1)


def test_cnn_says_which_images_are_too_small() -> None:
    with pytest.raises(ConfigurationError, match="6×6 pixels, not 5×5"):
        build("cnn", 1, 5, 10)


@pytest.mark.parametrize("name", BUILDERS)
def test_activation_checkpointing_changes_neither_names_nor_gradients(name: str) -> None:
    from tandem.job.tasks import Loop
    from tandem_trainer.process_group import Group

    alone = Group(0, 1, 0, torch.device("cpu"))
    images = torch.randn(4, 1, 8, 8)
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = prepare(build(name, 1, 8, 10), Loop(activation_checkpointing=recompute), alone)
        torch.manual_seed(1)
        model(images).sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name_, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name_])
