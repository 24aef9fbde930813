"""The kernels of a training step, in Triton's interpreter, which needs no GPU; on one:
test_gpu_kernels.py."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from helpers.experiments import IMAGE_MODELS
from helpers.interpreting import interpreted
from torch import nn

from fedaux.core.compute import Compute
from fedaux.core.steps import optimizer_state
from fedaux.core.weights import snapshot
from fedaux.fast import triton as kernels
from fedaux.fast.triton.tiling import Shape, split_of, tile_of
from fedaux.models import MODELS, SplitModel
from fedaux.models.resnet import WIDTHS

IMAGES = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)


@pytest.mark.kernels
def test_a_distillation_by_kernels_is_the_plain_one() -> None:
    interpreted("compare_training.py", "distillation")


def test_what_a_client_is_given_is_what_it_has_and_nobody_else() -> None:
    pytest.importorskip("triton", reason="needs Triton, which comes with torch for GPUs")
    from fedaux.fast.triton.steps import BatchedSteps

    model = MODELS["resnet8"]((1, 32, 32), 7)
    steps = BatchedSteps(
        model, IMAGES[:, :1], torch.zeros(4, dtype=torch.int64), clients=3,
        learning_rate=1e-3, compute=Compute(), capacity=4, batch_size=5,
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(3, 1, 32, 32)).sum().backward()
    optimizer.step()
    weights, state = snapshot(model), optimizer_state(optimizer, model)
    steps.load(weights)
    for own in steps.weights():
        assert list(own) == list(weights)
        assert all(torch.equal(own[name], value) for name, value in weights.items())
    steps.restore_optimizer(1, state)
    assert steps.optimizer_state(1).keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in steps.optimizer_state(1).items())
    assert not any(
        bool(value.any()) for client in (0, 2) for value in steps.optimizer_state(client).values()
    )
    steps.reset()
    assert not any(bool(value.any()) for value in steps.optimizer_state(1).values())


@pytest.mark.kernels
def test_clients_trained_by_kernels_are_those_of_the_plain_loop() -> None:
    interpreted("compare_training.py", "training")


@pytest.mark.kernels
def test_adjusted_logits_and_rehearsed_rows_by_kernels_are_those_of_the_plain_loop() -> None:
    interpreted("compare_training.py", "objectives")


def test_kernels_are_for_resnet8_as_it_is_and_images_of_its_size() -> None:
    found = [name for name in IMAGE_MODELS if kernels.fits(MODELS[name]((3, 32, 32), 10), IMAGES)]
    assert found == ["resnet8"]
    model = MODELS["resnet8"]((1, 32, 32), 100)
    assert kernels.fits(model, IMAGES[:, :1])
    assert not kernels.fits(model, IMAGES)  # the model is for greyscale images
    assert not kernels.fits(MODELS["resnet8"]((3, 64, 64), 10), torch.zeros(4, 3, 64, 64))
    assert not kernels.fits(MODELS["resnet8"]((3, 32, 32), 1000), IMAGES)
    assert not kernels.fits(nn.Linear(3, 2), torch.zeros(4, 3))


def other_momentum(model: SplitModel) -> None:
    layer = model.features.get_submodule("bn1")
    assert isinstance(layer, nn.BatchNorm2d)
    layer.momentum = 0.2


def frozen_head(model: SplitModel) -> None:
    model.head.requires_grad_(False)


def one_part_more(model: SplitModel) -> None:
    model.features.add_module("more", nn.Dropout())


def deeper_head(model: SplitModel) -> None:
    model.head = nn.Sequential(model.head)


def head_without_bias(model: SplitModel) -> None:
    model.head = nn.Linear(model.feature_width, 10, bias=False)


def hooked(model: SplitModel) -> None:
    model.features.register_forward_hook(lambda module, inputs, outputs: 2 * outputs)


def subclass(model: SplitModel) -> None:
    layer = model.features.get_submodule("bn1")
    layer.__class__ = type(
        "BatchNorm2d", (nn.BatchNorm2d,), {"forward": lambda self, inputs: inputs}
    )


def own_forward(model: SplitModel) -> None:
    model.head.forward = lambda inputs: inputs[:, :10]


def unseen_setting(model: SplitModel) -> None:
    layer = model.features.get_submodule("bn1")
    layer.unseen = True  # type: ignore[assignment]
    assert str(model) == str(MODELS["resnet8"]((3, 32, 32), 10))


CHANGES = [
    other_momentum,
    frozen_head,
    one_part_more,
    deeper_head,
    head_without_bias,
    hooked,
    subclass,
    own_forward,
    unseen_setting,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_resnet8_is_trained_in_other_ways(change: Callable[[SplitModel], None]) -> None:
    model = MODELS["resnet8"]((3, 32, 32), 10)
    assert kernels.fits(model, IMAGES)
    change(model)
    assert not kernels.fits(model, IMAGES)


def test_without_a_gpu_no_kernel_is_asked_for() -> None:
    model = MODELS["resnet8"]((3, 32, 32), 10)
    compute = Compute(precision=torch.bfloat16, compile=True, clients_at_once=8)
    assert not kernels.possible(
        model, IMAGES, optimizer="adam", batch_size=32, clients=8, compute=compute
    )


@pytest.mark.parametrize(
    ("clients", "batch_size", "possible"),
    [
        (8, 32, True),
        (1, 8192, True),
        (256, 32, True),
        (257, 1, False),
        (8, 1025, False),
        (1, 8193, False),
    ],
)
def test_what_32_bits_cannot_count_is_left_to_others(
    clients: int, batch_size: int, possible: bool
) -> None:
    assert kernels.countable(clients, batch_size=batch_size) == possible
    room = kernels.padded_batch_size(batch_size)
    assert batch_size <= room < batch_size + 8
    if possible:
        weights = sum(values.numel() for values in MODELS["resnet8"]((3, 32, 32), 256).parameters())
        assert clients * weights < 2**31
        assert clients * room * 32 * 32 * WIDTHS[0] < 2**31


@pytest.mark.parametrize("clients", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("room", [8, 16, 24, 32, 128, 136, 512])
def test_every_product_is_cut_into_whole_tiles(clients: int, room: int) -> None:
    sizes = dict(zip(WIDTHS, (32, 16, 8, 4), strict=True))
    convolutions = [(64, 64, 3, 1)]
    for inputs, outputs in pairwise(WIDTHS):
        convolutions += [(inputs, outputs, 3, 2), (outputs, outputs, 3, 1), (inputs, outputs, 1, 2)]
    for inputs, outputs, kernel, stride in convolutions:
        area = sizes[outputs] ** 2
        shape = Shape(clients, room * area, outputs, inputs, kernel, stride)
        tiles = [tile_of(shape, "forward"), tile_of(shape, "backward")]
        split = split_of(shape)
        for width, tile in zip((outputs, inputs), tiles, strict=True):
            assert width % tile.channels == 0
            assert shape.positions % tile.positions == 0
        assert outputs % split.outputs == 0
        assert inputs % split.inputs == 0
        assert kernel % split.taps == 0
        assert split.splits >= 1
        for positions in (*(tile.positions for tile in tiles), split.positions):
            images = max(
                1, positions // area
            )  # a tile is rows of one image, or whole images of one client
            assert room % images == 0
            assert positions % sizes[outputs] == 0
