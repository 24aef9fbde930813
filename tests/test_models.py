from __future__ import annotations

import pytest
import torch
from torch import nn

from fedaux.clients import num_bytes
from fedaux.models import MODELS, SplitModel, model_options, split_model


@pytest.mark.parametrize("name", MODELS)
def test_forward_is_head_after_features(name: str) -> None:
    model = MODELS[name]((3, 32, 32), 7).eval()
    images = torch.rand(2, 3, 32, 32)
    features = model.features(images)
    assert features.shape == (2, model.feature_width)
    assert torch.equal(model(images), model.head(features))
    assert model(images).shape == (2, 7)


def test_resnet8_has_the_size_that_the_paper_states() -> None:
    model = MODELS["resnet8"]((3, 32, 32), 100)
    parameters = dict(model.named_parameters())
    assert num_bytes(parameters) == pytest.approx(19.79e6, rel=1e-3)  # appendix: 19.79 MB on CIFAR-100
    assert sum(p.numel() for p in MODELS["resnet8"]((3, 32, 32), 10).parameters()) == 4_903_242
    assert model.feature_width == 512


def test_resnet8_uses_the_names_of_common_checkpoints() -> None:
    names = set(MODELS["resnet8"]((3, 32, 32), 10).features.state_dict())
    assert {"conv1.weight", "bn1.running_mean", "layer2.0.downsample.0.weight", "layer4.0.bn2.bias"} <= names


def test_the_group_normalised_resnet8_keeps_size_and_names_and_never_looks_at_the_batch() -> None:
    plain, grouped = (MODELS[name]((3, 32, 32), 10) for name in ("resnet8", "resnet8-gn"))
    assert {n: p.shape for n, p in plain.named_parameters()} == {n: p.shape for n, p in grouped.named_parameters()}
    assert not list(grouped.buffers())
    images = torch.rand(3, 3, 32, 32)
    assert torch.allclose(grouped.train()(images)[:1], grouped(images[:1]), atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_inference_on_an_image_does_not_depend_on_its_batch(name: str) -> None:
    model = MODELS[name]((1, 8, 8), 10).eval()
    images = torch.rand(5, 1, 8, 8)
    assert torch.allclose(model(images)[:1], model(images[:1]), atol=1e-5)


def test_cnn_takes_its_width() -> None:
    assert model_options("cnn") == {"width": 32}
    assert MODELS["cnn"]((1, 8, 8), 10, width=8).feature_width == 64


class Own(nn.Module):
    """A user's network with its head in the middle of its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"out": nn.Linear(6, 3), "in": nn.Linear(4, 6)})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.body["out"](torch.tanh(self.body["in"](inputs)))
        return hidden


def test_any_module_becomes_a_split_model_by_naming_its_head() -> None:
    own = Own()
    example = torch.rand(5, 4)
    model = split_model(own, head="body.out", example=example)
    assert isinstance(model, SplitModel)
    assert model.feature_width == 6
    assert torch.equal(model(example), own(example))
    model.head.weight.data.zero_()  # type: ignore[operator]
    assert own.body["out"].weight.abs().sum() > 0  # type: ignore[operator]


def test_a_head_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no such part; it has body, body\.out, body\.in"):
        split_model(Own(), head="fc", example=torch.rand(2, 4))
    with pytest.raises(ValueError, match="not the last step"):
        split_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), head="0", example=torch.rand(2, 4))
