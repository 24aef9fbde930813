"""Predictions by kernels of our own, on a GPU that has what they need. `make test-gpu` runs
these."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers.gpu_jobs import can
from helpers.predictions import randomised
from torch import Tensor, nn

from fedaux import seeding
from fedaux.core.compute import Compute, to_float
from fedaux.core.messages import Weights
from fedaux.core.weights import snapshot
from fedaux.fast import FastBackend
from fedaux.fast.fusion import FusedInference
from fedaux.fast.inference import FastPredictor
from fedaux.fast.triton.predictions import steps, units
from fedaux.fast.triton.predictions.networks import StepInference
from fedaux.models import MODELS, SplitModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("exact_convolutions"),
    pytest.mark.skipif(not can(), reason="needs a GPU of compute capability 9"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:TensorFloat32"
    ),
]

COMPUTE = Compute(torch.device("cuda"), torch.bfloat16, compile=True)
NETWORKS = ["mobilenetv2", "shufflenet"]


def model(
    name: str, *, channels: int = 3, compute: Compute = COMPUTE, **options: float
) -> SplitModel:
    with seeding.initialisation(0, part=name):
        made = MODELS[name]((channels, 32, 32), 10, **options)
    randomised(made)
    return FastBackend(compute).place(made).eval()


def images(count: int, *, channels: int = 3, size: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    numbers = torch.randint(
        0, 256, (count, channels, size, size), dtype=torch.uint8, generator=generator
    )
    return COMPUTE.place_inputs(numbers)


def by_kernels(predictor: FastPredictor) -> StepInference:
    assert isinstance(predictor._by_kernels, StepInference)
    return predictor._by_kernels


def near(found: Tensor, expected: Tensor) -> bool:
    """Whether outputs agree but for rounding: of a head on batches of other sizes, or of a feature
    to bf16."""
    assert found.shape == expected.shape
    return bool((found - expected).abs().max() <= 0.01 * expected.abs().max())


@torch.no_grad()
def as_near_as_autocast(
    found: Tensor, module: nn.Module, floats: Tensor, *, times: float = 1.5
) -> bool:
    """Whether outputs are about as near to single precision as the module is in half precision."""
    right = torch.cat([module(part) for part in floats.split(1024)])
    with torch.autocast("cuda", torch.bfloat16):
        rounded = torch.cat([module(part).float() for part in floats.split(1024)])
    assert float((rounded - right).norm()) > 1e-4 * float(right.norm())
    assert found.dtype is torch.float32
    return bool((found - right).norm() <= times * (rounded - right).norm())


@pytest.mark.parametrize("part", ["whole", "features"])
@pytest.mark.parametrize("name", NETWORKS)
def test_predictions_are_as_near_the_exact_ones_as_autocast_whatever_the_number_of_images(
    name: str, part: str
) -> None:
    module: nn.Module = model(name) if part == "whole" else model(name).features
    weights, numbers = snapshot(module), images(4097)
    predictor = FastPredictor(module, COMPUTE)
    outputs = predictor(weights, numbers)  # 4096 and 1
    by_kernels(predictor)
    assert as_near_as_autocast(outputs, module, to_float(numbers))
    assert torch.equal(outputs, predictor(weights, numbers))
    for count in (1, 3, 4097):  # an image does not depend on others
        assert near(predictor(weights, numbers[:count], batch_size=5000), outputs[:count])


@pytest.mark.parametrize("name", NETWORKS)
def test_greyscale_images_are_predicted_as_well(name: str) -> None:
    module, numbers = model(name, channels=1), images(100, channels=1)
    predictor = FastPredictor(module, COMPUTE)
    outputs = predictor(snapshot(module), numbers)
    by_kernels(predictor)
    assert as_near_as_autocast(outputs, module, to_float(numbers))


@pytest.mark.parametrize("name", NETWORKS)
def test_many_models_and_rows_are_predicted_as_one_and_all(name: str) -> None:
    module, numbers = model(name), images(300)
    first = snapshot(module)
    second = {
        key: 0.9 * value if value.is_floating_point() else value for key, value in first.items()
    }
    predictor = FastPredictor(module, COMPUTE)
    both = predictor.many([first, second], numbers, batch_size=128)
    by_kernels(predictor)
    assert float((both[0] - both[1]).norm()) > 0.01 * float(both[0].norm())
    for weights, outputs in zip((first, second), both, strict=True):
        assert torch.equal(predictor(weights, numbers, batch_size=128), outputs)
        rows = torch.tensor([7, 2, 2, 299, 0], device="cuda")
        assert near(predictor(weights, numbers, rows=rows, batch_size=2), outputs[rows])
    assert predictor(first, numbers, rows=rows[:0]).shape == (0, 10)
    assert predictor(first, numbers[:0]).shape == (0, 10)
    normalised = Compute(
        torch.device("cuda"), torch.bfloat16, compile=True, mean=torch.full((3, 1, 1), 0.4).cuda()
    )
    outputs = FastPredictor(module, normalised)(first, numbers)
    assert as_near_as_autocast(outputs, module, to_float(numbers) - 0.4)


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_no_number_stays_in_its_image_and_shows_in_weights(name: str) -> None:
    module, floats = model(name), to_float(images(70))
    weights, predictor = snapshot(module), FastPredictor(module, COMPUTE)
    outputs = predictor(weights, floats)
    broken = floats.clone()
    broken[5, 1, 31, 7] = float("nan")
    found = predictor(weights, broken)
    assert bool(found[5].isnan().all())
    others = [place for place in range(70) if place != 5]
    assert torch.equal(found[others], outputs[others])
    names = [
        key for key, value in weights.items() if value.ndim == 4 or key.endswith("running_var")
    ]
    for key in names[::7]:
        missing = {path: value.clone() for path, value in weights.items()}
        missing[key][(len(missing[key]) // 2, *[0] * (missing[key].ndim - 1))] = float("nan")
        assert bool(predictor(missing, floats[:3]).isnan().all()), key
    by_kernels(predictor)


def test_other_networks_and_sizes_take_joined_operations() -> None:
    wide = model("mobilenetv2", width=0.75)
    for module, numbers in ((wide, images(40)), (model("shufflenet"), images(40, size=64))):
        predictor = FastPredictor(module, COMPUTE)
        outputs = predictor(snapshot(module), numbers)
        assert predictor._by_kernels is None
        assert isinstance(predictor._fused, FusedInference)
        assert as_near_as_autocast(outputs, module, to_float(numbers), times=2.0)


@pytest.mark.parametrize("change", ["precision", "compile"])
def test_other_settings_take_other_ways(change: str) -> None:
    module, numbers = model("shufflenet"), images(3)
    compute = Compute(
        torch.device("cuda"),
        torch.float32 if change == "precision" else torch.bfloat16,
        compile=change != "compile",
    )
    predictor = FastPredictor(module, compute)
    predictor(snapshot(module), numbers)
    assert predictor._by_kernels is None


@pytest.mark.parametrize("name", NETWORKS)
def test_kernels_that_do_not_run_leave_predictions_to_joined_operations(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("out of resource: shared memory")

    for part in (steps, units):
        monkeypatch.setattr(part, "launch", refuse)
    module, numbers = model(name), images(40)
    compute = Compute(torch.device("cuda"), torch.bfloat16, compile=True)
    predictor = FastPredictor(module, compute)
    with pytest.warns(
        UserWarning, match=f"{name}: no kernels of our own here, predictions are slower"
    ):
        outputs = predictor(snapshot(module), numbers)
    with warnings.catch_warnings(
        action="error", category=UserWarning
    ):  # once said, nobody tries again
        assert torch.equal(FastPredictor(module, compute)(snapshot(module), numbers), outputs)
    assert as_near_as_autocast(outputs, module, to_float(numbers), times=2.0)
    assert torch.equal(predictor.many([snapshot(module)], numbers)[0], outputs)


def test_more_images_than_32_bits_count_are_taken_in_parts() -> None:
    module, count = model("shufflenet"), 33_000
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free memory")
    numbers, weights, predictor = images(count), snapshot(module), FastPredictor(module, COMPUTE)
    outputs = predictor(weights, numbers)
    assert by_kernels(predictor).most_images < count
    assert near(predictor(weights, numbers, batch_size=count), outputs)


def test_a_step_is_launched_where_its_weights_are() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    def outputs(device: str) -> Tensor:
        compute = Compute(torch.device(device), torch.bfloat16, compile=True)
        module = model("mobilenetv2", compute=compute)
        weights: Weights = snapshot(module)
        predictor = FastPredictor(module, compute)
        found = predictor(weights, images(10).to(device))
        by_kernels(predictor)
        return found.cpu()

    assert near(outputs("cuda:0"), outputs("cuda:1"))
