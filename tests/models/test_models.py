from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from helpers.experiments import IMAGE_MODELS
from torch import Tensor, nn
from torch.nn import functional

from fedaux import seeding
from fedaux.core.messages import num_bytes
from fedaux.fast.convolutions import (
    FAST,
    accelerate,
    image_matrix,
    make_plain,
    patches,
    pointwise_matrix,
)
from fedaux.models import MODELS, SplitModel, model_options, split_model
from fedaux.models.convolutional import ImageConvolution, PointwiseConvolution, group_norm
from fedaux.models.mobilenet import make_divisible
from fedaux.models.shufflenet import ShuffleUnit, channel_shuffle
from fedaux.models.split import find_head

BATCH_FREE = ("cnn", "mlp", "mobilenetv2-gn", "resnet8-gn", "shufflenet-gn")


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def seeded(name: str, image_shape: tuple[int, int, int], num_classes: int) -> SplitModel:
    with seeding.initialisation(0, part="test"):
        return MODELS[name](image_shape, num_classes)


def images_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", IMAGE_MODELS)
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
    assert num_bytes(parameters) == pytest.approx(
        19.79e6, rel=1e-3
    )  # appendix: 19.79 MB on CIFAR-100
    assert sum(p.numel() for p in MODELS["resnet8"]((3, 32, 32), 10).parameters()) == 4_903_242
    assert model.feature_width == 512


def test_resnet8_uses_the_names_of_common_checkpoints() -> None:
    names = set(MODELS["resnet8"]((3, 32, 32), 10).features.state_dict())
    assert {
        "conv1.weight",
        "bn1.running_mean",
        "layer2.0.downsample.0.weight",
        "layer4.0.bn2.bias",
    } <= names


@pytest.mark.parametrize("name", ["mobilenetv2", "resnet8", "shufflenet"])
def test_a_group_normalised_variant_keeps_size_and_names_and_has_no_buffers(name: str) -> None:
    plain, grouped = (MODELS[name]((3, 32, 32), 10) for name in (name, f"{name}-gn"))
    assert {n: p.shape for n, p in plain.named_parameters()} == {
        n: p.shape for n, p in grouped.named_parameters()
    }
    assert list(plain.buffers())
    assert not list(grouped.buffers())


@pytest.mark.parametrize("name", BATCH_FREE)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8)])
def test_models_without_batch_normalisation_never_look_at_the_batch(
    name: str, shape: tuple[int, int, int]
) -> None:
    model = seeded(name, shape, 10).train()
    images = images_of(3, *shape)
    alone = torch.cat([model(image[None]) for image in images])
    assert torch.allclose(model(images), alone, atol=1e-4)
    assert (alone[0] - alone[1]).abs().max() > 1e-3  # and yet they look at the image


def test_groups_divide_the_channels_and_hold_two_of_them() -> None:
    def groups_by_search(channels: int) -> int:
        fitting = [g for g in range(1, 33) if channels % g == 0 and channels // g >= 2]
        return max(fitting, default=1)

    for channels in range(1, 700):
        layer = group_norm(channels)
        assert isinstance(layer, nn.GroupNorm)
        assert layer.num_groups == groups_by_search(channels)
    chosen = {channels: group_norm(channels).num_groups for channels in (1, 8, 48, 50, 53, 64, 512)}
    assert chosen == {1: 1, 8: 4, 48: 24, 50: 25, 53: 1, 64: 32, 512: 32}


def mobilenetv2_layers(num_classes: int) -> Iterator[tuple[int, int]]:
    """Parameters and normalised channels of each layer of MobileNetV2 at half width (Sandler et
    al., 2018, table 2)."""
    yield 3 * 16 * 9, 16
    channels = 16
    # expansion, channels at half width (of 16, 24, 32, 64, 96, 160, 320, in multiples of 8), blocks
    for expansion, width, blocks in (
        (1, 8, 1),
        (6, 16, 2),
        (6, 16, 3),
        (6, 32, 4),
        (6, 48, 3),
        (6, 80, 3),
        (6, 160, 1),
    ):
        for _ in range(blocks):
            hidden = expansion * channels
            if expansion > 1:
                yield channels * hidden, hidden
            yield 9 * hidden, hidden
            yield hidden * width, width
            channels = width
    yield 160 * 1280, 1280
    yield (1280 + 1) * num_classes, 0


def shufflenet_layers(num_classes: int) -> Iterator[tuple[int, int]]:
    """Parameters and normalised channels of each layer of ShuffleNet with two groups (Zhang et al.,
    2018, table 1)."""
    yield 3 * 24 * 9, 24
    channels = 24
    for width, units in ((200, 4), (400, 8), (800, 4)):
        for _ in range(units):
            residual = (
                width if channels == width else width - channels
            )  # the pooled input fills the rest
            yield channels * (width // 4) // (1 if channels == 24 else 2), width // 4
            yield 9 * width // 4, width // 4
            yield width // 4 * residual // 2, residual
            channels = width
    yield (800 + 1) * num_classes, 0


@pytest.mark.parametrize(
    ("name", "layers", "parameters", "feature_width"),
    [
        ("mobilenetv2", mobilenetv2_layers, 700_490, 1280),
        ("shufflenet", shufflenet_layers, 940_858, 800),
    ],
)
def test_sizes_are_those_of_the_published_layers(
    name: str,
    layers: Callable[[int], Iterator[tuple[int, int]]],
    parameters: int,
    feature_width: int,
) -> None:
    normalised = [channels for _, channels in layers(10) if channels]
    assert (
        sum(weights for weights, _ in layers(10)) + 2 * sum(normalised) == parameters
    )  # a scale and a shift each
    model = MODELS[name]((3, 32, 32), 10)
    assert count(model) == parameters
    assert model.feature_width == feature_width
    assert count(MODELS[name]((3, 32, 32), 100)) == parameters + 90 * (feature_width + 1)
    # Sent are parameters, running mean and variance in four bytes, and a counter a layer in
    # eight.
    assert num_bytes(model.state_dict()) == 4 * parameters + 8 * sum(normalised) + 8 * len(
        normalised
    )
    assert num_bytes(MODELS[f"{name}-gn"]((3, 32, 32), 10).state_dict()) == 4 * parameters


def test_mobilenetv2_has_the_size_that_torchvision_states() -> None:
    assert count(MODELS["mobilenetv2"]((3, 32, 32), 1000, width=1.0)) == 3_504_872
    names = set(MODELS["mobilenetv2"]((3, 32, 32), 10).state_dict())
    torchvision = {"features.0.0.weight", "features.1.conv.1.weight", "features.2.conv.1.0.weight"}
    assert torchvision | {"features.17.conv.3.running_var", "features.18.1.bias"} <= names


@pytest.mark.parametrize(
    ("name", "size", "macs", "published"),
    [
        (
            "shufflenet",
            56,
            24 * 27 * (112**2 - 56**2),
            140e6,
        ),  # 224x224 is 56x56 behind the paper's stem (table 1)
        ("mobilenetv2", 224, 0, 97e6),  # the authors' figure for half width
    ],
)
def test_multiplications_are_those_published_for_imagenet(
    name: str, size: int, macs: int, published: float
) -> None:
    """Counted as convolution weights times positions, with the strides that the papers have for
    224x224 images."""
    model = MODELS[name]((3, size, size), 1000).eval()
    convolutions = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    if name == "mobilenetv2":
        convolutions["features.0.0"].stride = convolutions["features.2.conv.1.0"].stride = (2, 2)
    positions: dict[str, int] = {}
    for key, module in convolutions.items():
        module.register_forward_hook(
            lambda _, __, output, key=key: positions.update({key: output[0, 0].numel()})
        )
    with torch.no_grad():
        model(torch.zeros(1, 3, size, size))
    macs += sum(convolutions[key].weight.numel() * number for key, number in positions.items())
    assert macs + model.feature_width * 1000 == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    "name", ["mobilenetv2", "mobilenetv2-gn", "resnet8", "shufflenet", "shufflenet-gn"]
)
@pytest.mark.parametrize(("size", "last"), [(32, 4), (8, 1), (5, 1), (2, 1)])
def test_the_last_map_is_an_eighth_of_the_image(name: str, size: int, last: int) -> None:
    model = seeded(name, (1, size, size), 3).train()
    maps: list[torch.Size] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda _, __, output: maps.append(output.shape))
    logits = model(images_of(2, 1, size, size))
    assert maps[0][2:] == (size, size)  # the stem keeps the size
    assert maps[-1][2:] == (last, last)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(
    ("channels", "divisible"),
    [(1, 8), (12, 16), (16, 16), (18, 24), (11.9, 16), (20, 24), (33, 32)],
)
def test_channels_are_multiples_of_eight(channels: float, divisible: int) -> None:
    assert make_divisible(channels) == divisible


@pytest.mark.parametrize("name", ["mobilenetv2", "mobilenetv2-gn"])
def test_mobilenetv2_takes_its_width(name: str) -> None:
    assert model_options(name) == {"width": 0.5}
    assert count(MODELS[name]((1, 8, 8), 10, width=0.25)) < count(MODELS[name]((1, 8, 8), 10))
    assert MODELS[name]((1, 8, 8), 10, width=0.01).feature_width == 1280
    assert MODELS[name]((1, 8, 8), 10, width=1).feature_width == 1280
    assert MODELS[name]((1, 8, 8), 10, width=1.1).feature_width == 1408
    for wrong in (0, -0.5, float("nan"), float("inf"), True, "half"):
        with pytest.raises(ValueError, match=rf"width = {wrong!r}: should be a positive number"):
            MODELS[name]((1, 8, 8), 10, width=wrong)


def test_mlp_takes_its_width_and_any_shape() -> None:
    assert model_options("mlp") == {"width": 256}
    model = MODELS["mlp"]((2, 3, 5), 7, width=11)
    assert model.feature_width == 11
    assert count(model) == (30 * 11 + 11) + (11 * 11 + 11) + (11 * 7 + 7)
    assert model(torch.rand(4, 2, 3, 5)).shape == (4, 7)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_channel_shuffle_deals_the_groups_out(
    groups: int, memory_format: torch.memory_format
) -> None:
    inputs = images_of(2, 12, 3, 5).contiguous(memory_format=memory_format)
    expected = torch.empty_like(inputs)
    for group in range(groups):
        for index in range(12 // groups):
            expected[:, index * groups + group] = inputs[:, group * (12 // groups) + index]
    shuffled = channel_shuffle(inputs, groups=groups)
    assert torch.equal(shuffled, expected)
    assert shuffled.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("stride", [1, 2])
def test_the_shuffle_lets_each_output_of_a_unit_see_all_inputs(stride: int) -> None:
    out_channels = 16 if stride == 1 else 32
    with seeding.initialisation(0, part="test"):
        unit = ShuffleUnit(16, out_channels, stride=stride, norm=lambda _: nn.Identity())
    unit.relu = nn.Softplus()  # type: ignore[assignment]  # whose gradient is never zero
    inputs = images_of(1, 16, 1, 1)
    jacobian = torch.func.jacrev(unit)(inputs).view(out_channels, 16)
    assert (jacobian[-16:] != 0).all()  # at stride 2 the pooled inputs come first


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_a_gradient_reaches_every_parameter(name: str) -> None:
    # In inference mode, because batch statistics take out again what a shift before a convolution
    # adds.
    model = seeded(name, (3, 32, 32), 10).eval()
    functional.cross_entropy(model(images_of(4, 3, 32, 32)), torch.arange(4)).backward()
    without = [
        key
        for key, p in model.named_parameters()
        if p.grad is None or not p.grad.abs().max() > 1e-7
    ]
    assert not without


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_a_batch_can_be_learned_by_heart(name: str) -> None:
    model = seeded(name, (1, 8, 8), 4).train()
    images, labels = images_of(8, 1, 8, 8), torch.arange(8) % 4
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(12):
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.7  # guessing costs log 4 = 1.39


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8)])
def test_features_have_a_sound_scale_before_any_training(
    name: str, shape: tuple[int, int, int]
) -> None:
    features = seeded(name, shape, 10).eval().features(images_of(8, *shape))
    norms = features.norm(dim=1)
    assert (norms > 0.1).all()
    assert (norms < 300).all()
    assert ((features - features.mean(dim=0)).norm(dim=1) > 0.01 * norms).all()


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_initial_weights_come_from_the_stream(name: str) -> None:
    first, second = (seeded(name, (1, 8, 8), 10).state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    other = MODELS[name]((1, 8, 8), 10).state_dict()
    differing = [
        key for key in first if first[key].ndim > 1 and not torch.equal(first[key], other[key])
    ]
    assert differing == [key for key in first if first[key].ndim > 1]


@pytest.mark.parametrize("name", [name for name in IMAGE_MODELS if name != "mlp"])
def test_a_network_in_channels_last_format_stays_in_it(name: str) -> None:
    model = seeded(name, (3, 32, 32), 10).eval()
    images = images_of(2, 3, 32, 32)
    expected = model(images)
    layouts: list[bool] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(
                lambda _, __, output: layouts.append(
                    output.is_contiguous(memory_format=torch.channels_last)
                )
            )
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    logits = model(images.contiguous(memory_format=torch.channels_last))
    assert torch.allclose(logits, expected, rtol=1e-3, atol=1e-3)
    assert layouts
    assert all(layouts)


@pytest.mark.parametrize("name", IMAGE_MODELS)
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


def test_a_module_whose_outputs_have_logits_can_be_split() -> None:
    class Outputs(NamedTuple):
        logits: Tensor
        attentions: Tensor

    class Other(Own):
        def forward(self, inputs: Tensor) -> Outputs:  # type: ignore[override]
            return Outputs(super().forward(inputs), inputs)

    own, example = Other(), torch.rand(5, 4)
    assert find_head(own, example=example) == "body.out"
    model = split_model(own, head="body.out", example=example)
    assert torch.equal(model(example), own(example).logits)
    assert torch.equal(model.head(model.features(example)), own(example).logits)
    with pytest.raises(ValueError, match="returns a tuple; should return logits"):
        find_head(nn.LSTM(4, 4), example=example)


def test_a_head_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no such part; it has body, body\.out, body\.in"):
        split_model(Own(), head="fc", example=torch.rand(2, 4))
    with pytest.raises(ValueError, match="should be the last step"):
        split_model(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), head="0", example=torch.rand(2, 4)
        )


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels", [1, 3, 8])
def test_patches_times_the_matrix_are_the_convolution(channels: int, stride: int) -> None:
    layer = ImageConvolution(channels, 16, 3, stride=stride, padding=1).double()
    images = torch.rand(
        5, channels, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    rows = patches(layer, images)
    assert rows.shape[-1] % 8 == 0
    product = functional.linear(rows, image_matrix(layer.weight), layer.bias).permute(0, 3, 1, 2)
    torch.testing.assert_close(product, layer(images))


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_matrix_with_groups_as_blocks_is_the_convolution(groups: int) -> None:
    layer = PointwiseConvolution(12, 6, groups=groups)
    images = images_of(2, 12, 5, 4)
    product = images.permute(0, 2, 3, 1) @ pointwise_matrix(layer.weight, groups=groups).t()
    torch.testing.assert_close(product.permute(0, 3, 1, 2), layer(images))


@pytest.mark.parametrize("name", ["cnn", "resnet8", "mobilenetv2", "shufflenet"])
def test_faster_layers_are_the_same_layers(name: str) -> None:
    """On a CPU they compute what the plain ones do; names, weights and what they print stay."""
    with seeding.initialisation(0, part=name):
        model = MODELS[name]((3, 16, 16), 4).eval()
    images, before = images_of(2, 3, 16, 16), (str(model), [type(part) for part in model.modules()])
    outputs, weights = model(images), model.state_dict()
    accelerate(model, torch.device("cpu"))
    assert any(type(part) in FAST.values() for part in model.modules())
    assert str(model) == before[0]
    assert all(torch.equal(tensor, weights[key]) for key, tensor in model.state_dict().items())
    assert torch.equal(model(images), outputs)
    make_plain(model)
    assert [type(part) for part in model.modules()] == before[1]
