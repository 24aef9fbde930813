"""Kernels of predictions, in Triton's interpreter, which needs no GPU; on one:
test_gpu_predictions.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.experiments import IMAGE_MODELS
from helpers.interpreting import interpreted, needs_triton
from helpers.predictions import distance, evaluated, randomised
from torch import Tensor, nn

from fedaux import seeding
from fedaux.core.compute import Compute
from fedaux.core.weights import snapshot
from fedaux.fast import triton as kernels
from fedaux.fast.fusion import FusedInference
from fedaux.fast.inference import FastPredictor
from fedaux.fast.triton import predictions
from fedaux.fast.triton.predictions import steps, tiling, units
from fedaux.fast.triton.predictions.networks import StepInference
from fedaux.fast.triton.predictions.packing import filled
from fedaux.fast.triton.predictions.steps import Narrowing, Pointwise, Residual
from fedaux.fast.triton.predictions.units import Opening, Unit
from fedaux.models import MODELS, SplitModel

NETWORKS = {"mobilenetv2": tiling.MOBILENETV2, "shufflenet": tiling.SHUFFLENET}


def compared(part: str, name: str, *, channels: int = 3) -> None:
    interpreted("compare_predictions.py", part, name, str(channels))


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_kernels_predict_what_the_module_does_and_what_is_no_number_stays_in_its_image(
    name: str,
) -> None:
    compared("compare", name)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_greyscale_images_are_predicted_as_well(name: str) -> None:
    compared("compare", name, channels=1)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_weights_that_are_no_numbers_predict_none(name: str) -> None:
    compared("missing", name)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_predictor_takes_the_kernels_for_many_models_for_rows_and_for_features(name: str) -> None:
    compared("predict", name)


def model(name: str, *, channels: int = 3, size: int = 32, **options: Any) -> SplitModel:
    with seeding.initialisation(0, part=name):
        made = MODELS[name]((channels, size, size), 10, **options)
    randomised(made)
    return made


def as_on_a_gpu() -> Compute:
    return Compute(torch.device("cuda"), torch.bfloat16)


def test_kernels_are_for_two_networks_as_they_are() -> None:
    found = {name: predictions.known(model(name)) for name in IMAGE_MODELS}
    expected = {name: predictions.Known(name, channels=3, whole=True) for name in NETWORKS}
    assert {name: other for name, other in found.items() if other is not None} == expected
    for name in NETWORKS:
        assert predictions.known(model(name, channels=1)) == (name, 1, True)
        assert predictions.known(model(name).features) == (name, 3, False)
        assert predictions.known(model(name, channels=4)) is None
    assert predictions.known(model("mobilenetv2", width=1.0)) is None
    assert predictions.known(nn.Linear(3, 2)) is None


def smaller_epsilon(model: SplitModel) -> None:
    next(layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)).eps = 1e-3


def one_part_more(model: SplitModel) -> None:
    model.features.add_module("more", nn.Dropout())


def deeper_head(model: SplitModel) -> None:
    model.head = nn.Sequential(model.head)


def head_without_bias(model: SplitModel) -> None:
    model.head = nn.Linear(model.feature_width, 10, bias=False)


def hooked(model: SplitModel) -> None:
    model.features.register_forward_hook(lambda module, inputs, outputs: 2 * outputs)


def subclass(model: SplitModel) -> None:
    layer = next(layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d))
    layer.__class__ = type(
        "BatchNorm2d", (nn.BatchNorm2d,), {"forward": lambda self, inputs: inputs}
    )


def own_forward(model: SplitModel) -> None:
    model.head.forward = lambda inputs: inputs[:, :10]


def unseen_setting(model: SplitModel) -> None:
    layer = next(layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d))
    layer.unseen = True  # type: ignore[assignment]


CHANGES = [
    smaller_epsilon,
    one_part_more,
    deeper_head,
    head_without_bias,
    hooked,
    subclass,
    own_forward,
    unseen_setting,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", [*NETWORKS, "resnet8"])
def test_a_changed_network_is_another(name: str, change: Callable[[SplitModel], None]) -> None:
    changed = model(name)
    images = torch.zeros(4, 3, 32, 32)
    assert predictions.known(changed) is not None or kernels.fits(changed, images)
    change(changed)
    assert predictions.known(changed) is None
    assert not kernels.fits(changed, images)


def test_settings_that_are_not_printed_count() -> None:
    changed = model("shufflenet")
    next(
        layer for layer in changed.modules() if isinstance(layer, nn.AvgPool2d)
    ).count_include_pad = False
    assert str(changed) == str(model("shufflenet"))
    assert predictions.known(changed) is None


def test_kernels_take_images_of_one_size() -> None:
    network = predictions.Known("shufflenet", channels=3, whole=True)
    assert network.takes(torch.zeros(2, 3, 32, 32))
    for shape in ((2, 1, 32, 32), (2, 5, 32, 32), (2, 3, 64, 64), (2, 3, 32, 16), (2, 3)):
        assert not network.takes(torch.zeros(shape))


def test_without_a_gpu_or_without_compilation_no_kernel_is_asked_for() -> None:
    assert not kernels.available(Compute(precision=torch.bfloat16, compile=True))
    assert not kernels.available(as_on_a_gpu())


@pytest.mark.parametrize("name", NETWORKS)
def test_every_step_has_a_tile_whose_blocks_end_inside_its_matrices(name: str) -> None:
    network = StepInference(model(name))
    assert {step.name: step.tile for step in network.steps} == NETWORKS[name]
    assert len(network.steps) == {"mobilenetv2": 24, "shufflenet": 18}[name]

    def inside(channels: int, block: int, room: int) -> bool:
        return (
            block.bit_count() == 1 and block >= 16 and math.ceil(channels / block) * block <= room
        )

    for step in network.steps:
        tile = step.tile
        assert tile.positions.bit_count() == 1
        if isinstance(step, Pointwise):
            assert inside(step.inputs, min(tile.inner, filled(step.inputs)), filled(step.inputs))
            assert inside(
                step.outputs,
                tile.outer,
                step.outputs if isinstance(step, Opening) else filled(step.outputs),
            )
        elif isinstance(step, Narrowing):
            assert inside(step.hidden, tile.inner, filled(step.hidden))
            assert inside(step.outputs, tile.outer, filled(step.outputs))
        elif isinstance(step, Residual):
            assert inside(step.hidden, tile.inner, filled(step.hidden))
            assert (
                max(step.inputs, step.outputs) <= 256
            )  # of which a program takes all, a power of two
        else:
            assert isinstance(step, Unit)
            half = (step.outputs - step.pooled) // 2
            assert inside(half, tile.outer, filled(half))
        assert tile.positions % (getattr(step, "area", 0) or 1) == 0  # means are of whole images


@pytest.mark.parametrize("name", NETWORKS)
def test_every_weight_has_one_place(name: str) -> None:
    module = model(name)
    network = StepInference(module)
    weights = {
        key: value.abs() + 1.0
        for key, value in snapshot(module).items()
        if value.is_floating_point()
    }
    folded = network.fold(weights, dtype=torch.float32)
    (places,) = network._packing._places.values()
    sources = torch.cat([each.sources for each in places])
    convolutions = sum(
        value.numel() + len(value) for value in weights.values() if value.ndim == 4
    )  # and their biases
    between = sum(
        step.hidden for step in network.steps if isinstance(step, Unit)
    )  # which have become part of others
    assert torch.equal(
        sources[sources > 0].sort().values, torch.arange(1, 1 + convolutions - between).int()
    )
    assert folded.keys() == {*NETWORKS[name], "head"}
    last = {
        key: value.to(memory_format=torch.channels_last) if value.ndim == 4 else value
        for key, value in weights.items()
    }
    half = network.fold(last, dtype=torch.bfloat16)  # the layout of weights on a GPU
    for step in network.steps:
        for argument, value in half[step.name].items():
            assert value.dtype is (torch.float32 if argument in step.single else torch.bfloat16)
            assert value.is_contiguous()
            assert value.storage_offset() * value.element_size() % 16 == 0  # wide loads
            torch.testing.assert_close(
                value.float(), folded[step.name][argument], rtol=0.01, atol=1e-30
            )


def test_what_the_cuts_of_a_whole_block_would_hide_is_in_its_last_bias() -> None:
    module = model("mobilenetv2")
    network = StepInference(module)
    (whole,) = (step for step in network.steps if step.name == "block 5")
    assert isinstance(whole, Residual)

    def bias(name: str, value: float) -> Tensor:
        weights = snapshot(module)
        weights[f"features.{name}"][3] = value
        return network.fold(weights, dtype=torch.float32)[whole.name]["bias"]

    expand, first, project = whole.convolutions
    usual = bias(f"{project}.weight", 0.5)  # which does not change it
    for name in (
        f"{expand}.weight",
        f"{first}.weight",
        "5.conv.0.1.bias",
        "5.conv.1.1.running_mean",
    ):
        assert bool(bias(name, math.nan).isnan().all())
        assert torch.equal(bias(name, 1e30), usual)


@pytest.mark.parametrize("name", NETWORKS)
def test_no_kernel_sees_more_numbers_than_32_bits_count(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []

    def look(kernel: str, programs: int, *arguments: Any, **_: Any) -> None:
        launched.append(
            max(argument.numel() for argument in arguments if isinstance(argument, Tensor))
        )

    for module in (steps, units):
        monkeypatch.setattr(module, "launch", look)
    made = model(name).to("meta")
    network = StepInference(made)
    images = 2 * network.most_images + 1
    patches = network.prepared(torch.empty(images, 3, 32, 32, device="meta"), dtype=torch.bfloat16)
    outputs = network(network.fold(snapshot(made), dtype=torch.bfloat16), patches)
    assert outputs.shape == (images, 10)
    assert len(launched) == 3 * len(network.steps)
    assert max(launched) < 2**31
    assert (
        max(launched) // network.most_images * (network.most_images + 1) >= 2**31
    )  # one image more would be too many
    assert network.most_images == {"mobilenetv2": 65_535, "shufflenet": 32_767}[name]


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("name", NETWORKS)
def test_where_kernels_do_not_run_joined_operations_predict_and_one_line_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kernels, "available", lambda compute: True
    )  # which is not so: no GPU, perhaps no Triton
    module = model(name)
    images = torch.randint(
        0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    compute = as_on_a_gpu()
    predictor = FastPredictor(module, compute)
    with pytest.warns(
        UserWarning, match=f"{name}: no kernels of our own here, predictions are slower"
    ):
        outputs = predictor(snapshot(module), images)
    assert distance(outputs, evaluated(module, images / 255)) < 0.05
    for another in (predictor, FastPredictor(module, compute)):
        (again,) = another.many(
            [snapshot(module)], images
        )  # without another line, which would be an error here
        assert torch.equal(again, outputs)
        assert isinstance(another._inference(images), FusedInference)


def test_other_networks_and_sizes_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda compute: True)
    wide = model("mobilenetv2", width=1.0)
    for module, images in (
        (wide, torch.zeros(1, 3, 32, 32)),
        (model("mobilenetv2"), torch.zeros(1, 3, 64, 64)),
    ):
        assert isinstance(FastPredictor(module, as_on_a_gpu())._inference(images), FusedInference)


def test_what_a_cut_would_hide_is_in_the_last_bias_and_nothing_else() -> None:
    block = next(
        step for step in StepInference(model("mobilenetv2")).steps if isinstance(step, Residual)
    )
    shapes = [
        (block.hidden, block.inputs, 1, 1),
        (block.hidden, 1, 3, 3),
        (block.outputs, block.hidden, 1, 1),
    ]
    parts = {
        name: (torch.full(shape, 3e38), torch.zeros(shape[0]))
        for name, shape in zip(block.convolutions, shapes, strict=True)
    }
    assert torch.equal(
        block.weights(parts)["bias"], torch.zeros(block.outputs)
    )  # however large, they are numbers
    for name in block.convolutions[:2]:
        for kind in range(2):
            broken = {key: (weight.clone(), bias.clone()) for key, (weight, bias) in parts.items()}
            broken[name][kind].view(-1)[-1] = math.nan
            assert bool(block.weights(broken)["bias"].isnan().all())
