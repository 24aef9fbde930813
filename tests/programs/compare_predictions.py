"""Predictions by kernels against the module, in Triton's interpreter.

Arguments: `compare`, `missing` or `predict`; a network; how many channels.
"""

from __future__ import annotations

import sys

import torch
from helpers.predictions import distance, randomised
from torch import Tensor

from fedaux import seeding
from fedaux.core.compute import Compute
from fedaux.core.messages import Weights
from fedaux.core.weights import snapshot
from fedaux.fast import inference
from fedaux.fast import triton as kernels
from fedaux.fast.triton.predictions.networks import StepInference
from fedaux.models import MODELS

PART, NAME, CHANNELS = sys.argv[1], sys.argv[2], int(sys.argv[3])

torch.set_num_threads(1)
torch.set_grad_enabled(False)
with seeding.initialisation(0, part=NAME):
    model = MODELS[NAME]((CHANNELS, 32, 32), 10)
randomised(model)
model.eval()
images = torch.rand(3, CHANNELS, 32, 32, generator=torch.Generator().manual_seed(1))


def large(network: StepInference) -> StepInference:
    for step in (
        network.steps
    ):  # a program costs the interpreter more than what it does; small maps keep their tiles
        size: int = getattr(step, "size")  # noqa: B009  (of every kind of step here)
        if size > 8:
            step.tile = step.tile._replace(positions=2048 if size > 16 else 512)
    return network


def found(network: StepInference, weights: Weights, images: Tensor) -> Tensor:
    folded = network.fold(weights, dtype=torch.float32)
    return network(folded, network.prepared(images, dtype=torch.float32))


def compare() -> None:
    """Predictions are the module's, and what is not finite stays in its image."""
    right, network = model(images), large(StepInference(model))
    network.most_images = 2  # so that the last image comes on its own
    broken = images.clone()
    broken[1, 0, 13, 31] = float("nan")
    outputs = found(network, snapshot(model), broken)
    assert distance(outputs[::2], right[::2]) < 1e-5, distance(outputs[::2], right[::2])
    assert outputs[1].isnan().all()


def missing() -> None:
    """A weight that is NaN shows in the predictions."""
    network = large(StepInference(model))
    names = [
        name
        for name, value in model.state_dict().items()
        if value.ndim == 4 or name.endswith("running_var")
    ]
    for name in names[:: len(names) // 4]:
        weights = snapshot(model)
        weights[name].view(-1)[weights[name].numel() // 2] = float("nan")
        assert found(network, weights, images[:1]).isnan().all(), name


def predict() -> None:
    """A predictor takes the kernels, for many models, for rows and for features."""
    kernels.available = lambda compute: True
    inference.StepInference = lambda module: large(StepInference(module))  # type: ignore[assignment, attr-defined]
    half = Compute(torch.device("cuda"), torch.float16)
    numbers = (255 * images).to(torch.uint8)
    first, second = snapshot(model), {name: 0.9 * value for name, value in snapshot(model).items()}
    predictor = inference.FastPredictor(model, half)
    outputs = predictor.many([first, second], numbers)
    assert isinstance(predictor._by_kernels, StepInference)
    for weights, own in zip((first, second), outputs, strict=True):
        model.load_state_dict(weights)
        assert own.dtype is torch.float32
        assert 1e-6 < distance(own, model(numbers / 255)) < 0.01
    rows = torch.tensor([2, 0])
    assert torch.allclose(
        predictor(second, numbers, rows=rows), outputs[1][rows], rtol=1e-3, atol=1e-4
    )
    alone = inference.FastPredictor(model.features, half)
    features = alone(snapshot(model.features), numbers[:1])
    assert isinstance(alone._by_kernels, StepInference)
    assert distance(features, model.features(numbers[:1] / 255)) < 0.01


{"compare": compare, "missing": missing, "predict": predict}[PART]()
print("compared")
