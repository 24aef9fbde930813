"""The kernels of a training step, in Triton's interpreter, which needs no GPU; on one: test_gpu_kernels.py."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from helpers.experiments import IMAGE_MODELS
from helpers.interpreting import interpreted, needs_triton
from torch import nn

from fedaux.core.compute import Compute
from fedaux.core.steps import optimizer_state
from fedaux.core.weights import snapshot
from fedaux.fast import triton as kernels
from fedaux.fast.triton.tiling import Shape, split_of, tile_of
from fedaux.models import MODELS
from fedaux.models.resnet import WIDTHS

IMAGES = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)

COMPARE = """
import copy
import numpy as np
import torch
from fedaux import seeding
from fedaux.core.compute import Compute
from fedaux.config import Distillation, Local
from fedaux.core.distillation import distill
from fedaux.fast.batched import BatchedTraining
from fedaux.core.training import Job, Workplace, one_by_one
from fedaux.fast.triton import network, tiling
from fedaux.fast.triton.steps import BatchedSteps, StudentSteps
from fedaux.models import MODELS
from fedaux.core.weights import snapshot

torch.set_num_threads(1)
network.BLOCK, network.ROWS = 2**16, 1024  # a program costs the interpreter more than what it does
POSITIONS = {32: 512, 16: 128, 8: 128, 4: 64}
size_of = lambda shape: {64: 32, 128: 16, 256: 8, 512: 4}[shape.outputs]
tiling.tile_of = lambda shape, direction: tiling.Tile(
    shape.outputs if direction == "forward" else shape.inputs, POSITIONS[size_of(shape)], 4, 3
)
tiling.split_of = lambda shape: tiling.Split(
    shape.outputs, shape.inputs, POSITIONS[size_of(shape)],
    3 if shape.kernel == 3 and shape.outputs != 256 else 1, 2, 4, 3,
)

torch.manual_seed(1)
images = torch.randint(0, 256, (30, 3, 32, 32), dtype=torch.uint8)
labels = torch.randint(0, 10, (30,))
with seeding.initialisation(0, part="resnet8"):
    model = MODELS["resnet8"]((3, 32, 32), 10)
for module in model.modules():  # a scale of one, a shift of zero and fresh statistics would hide mistakes
    if isinstance(module, torch.nn.BatchNorm2d):
        torch.nn.init.uniform_(module.weight, 0.5, 1.5), torch.nn.init.normal_(module.bias, std=0.2)
        torch.nn.init.normal_(module.running_mean, std=0.3), torch.nn.init.uniform_(module.running_var, 0.5, 2.0)
weights = snapshot(model)


def near(found, right, start, *, middle=1e-3, largest=0.02):
    assert found.keys() == right.keys()
    far = []
    for name, values in right.items():
        if not values.is_floating_point():
            assert torch.equal(found[name].to(values.dtype), values), name
            continue
        moved = (values - start.get(name, torch.zeros(()))).double().norm()
        assert moved > 0, name
        far.append(float((found[name] - values).double().norm() / moved))
    far.sort()
    # Adam divides by a gradient's size, so that rounding shows in single weights.
    assert far[len(far) // 2] < middle and far[-1] < largest, far


if "training" in PARTS:
    mean, deviation = torch.tensor([0.5, 0.4, 0.6])[:, None, None], torch.tensor([0.2, 0.3, 0.25])[:, None, None]
    compute = Compute(clients_at_once=2, mean=mean, deviation=deviation)
    section = Local(batch_size=3, epochs=2, optimizer_state="kept", weight_decay=1e-3)
    place = Workplace(model, images, labels, section, 0.05, compute, "resnet8")
    # Three clients in two waves, the first with a last batch of one, which batch normalisation has no variance for.
    rows = (slice(0, 4), slice(4, 6), slice(10, 13))
    results = []
    for training in (BatchedTraining(place, capacity=4), one_by_one(place)):
        states, seen = {}, []
        for number in (1, 2)[: ROUNDS]:
            jobs = [
                Job(client, torch.arange(30)[part], np.random.default_rng((client, number)), states.get(client, {}))
                for client, part in enumerate(rows)
            ]
            done = {job.client: (own, trained) for job, own, trained in training(jobs, weights)}
            states = {client: dict(trained.optimizer_state) for client, (_, trained) in done.items()}
            seen.append(done)
        results.append(seen)
    for fast, plain in zip(*results):
        assert fast.keys() == plain.keys()
        for client, (own, trained) in plain.items():
            wide = {"middle": 5e-3, "largest": 0.03}  # after several steps; 2e-3 and 6e-3 were seen
            near(fast[client][0], own, weights, **wide)
            near(dict(fast[client][1].optimizer_state), dict(trained.optimizer_state), {}, **wide)
            assert abs(fast[client][1].loss / trained.loss - 1) < 1e-4

if "distillation" in PARTS:
    targets = torch.softmax(torch.randn(7, 10) * 2, 1)
    targets[:, 3] = 0.0
    targets /= targets.sum(1, keepdim=True)
    section = Distillation(batch_size=4, learning_rate=1e-3, schedule="cosine", weight_decay=1e-3)
    twin = copy.deepcopy(model)
    batched = BatchedSteps(
        twin, images[:7], torch.zeros(10, 7, dtype=torch.float64).T, clients=1, learning_rate=1.0, weight_decay=1e-3,
        compute=Compute(), capacity=7, batch_size=4,
    )
    found, right = (
        distill(
            each, weights, images[:7], targets, section=section, generator=np.random.default_rng(0), steps=steps
        )
        for each, steps in ((twin, StudentSteps(twin, batched)), (model, None))
    )
    near(found, right, weights)
print("compared")
"""


def compared(parts: str, *, rounds: int = 1) -> None:
    interpreted(f"PARTS, ROUNDS = {parts!r}, {rounds}\n{COMPARE}")


@needs_triton
@pytest.mark.slow
def test_a_distillation_by_kernels_is_the_plain_one() -> None:
    compared("distillation")


@needs_triton
def test_what_a_client_is_given_is_what_it_has_and_nobody_else() -> None:
    from fedaux.fast.triton.steps import BatchedSteps

    model = MODELS["resnet8"]((1, 32, 32), 7)
    steps = BatchedSteps(
        model, IMAGES[:, :1], torch.zeros(4, dtype=torch.int64), clients=3, learning_rate=1e-3, compute=Compute(),
        capacity=4, batch_size=5,
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
    assert not any(bool(value.any()) for client in (0, 2) for value in steps.optimizer_state(client).values())
    steps.reset()
    assert not any(bool(value.any()) for value in steps.optimizer_state(1).values())


@needs_triton
@pytest.mark.slow
def test_clients_trained_by_kernels_are_those_of_the_plain_loop() -> None:
    compared("training", rounds=2)


def test_kernels_are_for_resnet8_as_it_is_and_images_of_its_size() -> None:
    found = [name for name in IMAGE_MODELS if kernels.fits(MODELS[name]((3, 32, 32), 10), IMAGES)]
    assert found == ["resnet8"]
    model = MODELS["resnet8"]((1, 32, 32), 100)
    assert kernels.fits(model, IMAGES[:, :1])
    assert not kernels.fits(model, IMAGES)  # the model is for greyscale images
    assert not kernels.fits(MODELS["resnet8"]((3, 64, 64), 10), torch.zeros(4, 3, 64, 64))
    assert not kernels.fits(MODELS["resnet8"]((3, 32, 32), 1000), IMAGES)
    assert not kernels.fits(nn.Linear(3, 2), torch.zeros(4, 3))


def test_a_changed_resnet8_is_trained_in_other_ways() -> None:
    def fits_with(change: str) -> bool:
        model = MODELS["resnet8"]((3, 32, 32), 10)
        if change == "momentum":
            layer = model.features.get_submodule("bn1")
            assert isinstance(layer, nn.BatchNorm2d)
            layer.momentum = 0.2
        elif change == "frozen":
            model.head.requires_grad_(False)
        elif change == "part":
            model.features.add_module("more", nn.Dropout())
        return kernels.fits(model, IMAGES)

    assert [fits_with(change) for change in ("", "momentum", "frozen", "part")] == [True, False, False, False]


def test_without_a_gpu_no_kernel_is_asked_for() -> None:
    model = MODELS["resnet8"]((3, 32, 32), 10)
    compute = Compute(precision=torch.bfloat16, compile=True, clients_at_once=8)
    assert not kernels.possible(model, IMAGES, optimizer="adam", batch_size=32, clients=8, compute=compute)


@pytest.mark.parametrize(
    ("clients", "batch_size", "possible"),
    [(8, 32, True), (1, 8192, True), (256, 32, True), (257, 1, False), (8, 1025, False), (1, 8193, False)],
)
def test_what_32_bits_cannot_count_is_left_to_others(clients: int, batch_size: int, possible: bool) -> None:
    assert kernels.countable(clients, batch_size=batch_size) == possible
    room = kernels.room_for(batch_size)
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
            images = max(1, positions // area)  # a tile is rows of one image, or whole images of one client
            assert room % images == 0
            assert positions % sizes[outputs] == 0
