"""Predictions, with operations joined or not, equal the module's in evaluation mode."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from helpers.experiments import IMAGE_MODELS
from helpers.predictions import FLOATS, IMAGES, distance, evaluated, randomised
from torch import Tensor, nn

from fedaux import seeding
from fedaux.core.compute import Compute
from fedaux.core.messages import Weights
from fedaux.core.weights import snapshot
from fedaux.fast.fusion import FusedInference, Untraceable
from fedaux.fast.inference import FastPredictor
from fedaux.models import MODELS


def built(make: Callable[[], nn.Module]) -> nn.Module:
    with seeding.initialisation(0, part="test"):
        return randomised(make())


def model(name: str) -> nn.Module:
    return built(lambda: MODELS[name]((3, 8, 8), 5))


def fused(module: nn.Module, inputs: Tensor = FLOATS, weights: Weights | None = None) -> Tensor:
    listed = FusedInference(module)
    with torch.no_grad():
        return listed(
            listed.fold(snapshot(module) if weights is None else weights, dtype=torch.float32),
            inputs,
        )


@pytest.mark.quickly(
    "resnet8-whole",
    "mobilenetv2-whole",
    "shufflenet-gn-whole",
    "cnn-whole",
    "mlp-features",
    "cnn-features",
)
@pytest.mark.parametrize("part", ["whole", "features"])
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_joined_operations_compute_what_the_module_does(name: str, part: str) -> None:
    module = model(name)
    module = module if part == "whole" else module.get_submodule("features")
    listed = FusedInference(module)
    layers = {path for path, layer in module.named_modules() if isinstance(layer, nn.BatchNorm2d)}
    assert {joined.normalisation for joined in listed._joined.values()} - {None} == layers
    before = snapshot(module)
    assert distance(fused(module), evaluated(module)) < 1e-5
    assert all(torch.equal(before[key], tensor) for key, tensor in snapshot(module).items())
    other = {key: tensor * 1.25 for key, tensor in before.items()}
    changed = copy.deepcopy(module)
    changed.load_state_dict(other)
    assert distance(fused(module, weights=other), evaluated(changed)) < 1e-5
    assert distance(evaluated(changed), evaluated(module)) > 0.01


def test_shortcuts_are_joined_where_a_network_has_them() -> None:
    joined = FusedInference(model("resnet8"))._joined.values()
    assert sum(one.shortcut is not None for one in joined) == 4
    assert sum(one.relu for one in joined) == 9
    joined = FusedInference(model("mobilenetv2"))._joined.values()
    assert not any(one.shortcut is not None for one in joined)  # nothing comes after its sums
    assert {one.most for one in joined if one.relu} == {6.0}
    assert sum(one.relu for one in joined) == 35


class Parts(nn.Module):
    """Two convolutions, two normalisations and a ReLU, for networks that put them together in some
    way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.second = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.one = nn.BatchNorm2d(3)
        self.two = nn.BatchNorm2d(3)
        self.relu = nn.ReLU()
        self.scale = torch.tensor(0.7)


class UsedTwice(Parts):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        output: Tensor = self.relu(self.one(hidden)) + hidden
        return output


class NormalisedTwice(Parts):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.one(self.first(inputs))
        output: Tensor = self.relu(hidden) - self.two(hidden)
        return output


class CalledTwice(Parts):
    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.two(self.first(self.relu(self.one(self.first(inputs)))))
        return output


class ShortcutFirst(Parts):
    def forward(self, inputs: Tensor) -> Tensor:
        shortcut = self.two(self.second(inputs))
        output: Tensor = self.relu(self.one(self.first(inputs)) + shortcut)
        return output


class ShortcutLast(Parts):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.one(self.first(inputs))
        shortcut = torch.sigmoid(inputs)
        output: Tensor = self.relu(hidden + shortcut)
        return output


class ShortcutLarger(Parts):
    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.relu(
            self.one(self.first(inputs.mean(dim=(2, 3), keepdim=True))) + inputs
        )
        return output


class ShortcutInterleaved(Parts):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        shortcut = self.second(inputs)
        hidden, shortcut = self.one(hidden), self.two(shortcut)
        output: Tensor = self.relu(shortcut + hidden)
        return output


class InPlace(Parts):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.one(self.first(inputs))
        hidden += inputs
        output: Tensor = self.relu(hidden)
        return output


class SumKept(Parts):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.one(self.first(inputs)) + inputs
        output: Tensor = self.relu(hidden) * hidden
        return output


class Doubled(Parts):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.one(self.first(inputs))
        output: Tensor = self.relu(hidden + hidden)
        return output


class Weighed(Parts):
    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.relu(torch.add(inputs, self.one(self.first(inputs)), alpha=3))
        return output


class Shifted(Parts):
    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.relu(self.one(self.first(inputs)) + 0.5)
        return output


class Constants(Parts):
    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.one(self.first(input=inputs)) * self.scale + torch.full((1,), 0.1)
        return output


ARRANGEMENTS: dict[str, Callable[[], nn.Module]] = {
    "convolution alone": lambda: nn.Conv2d(3, 4, 3, bias=False),
    "convolution and ReLU": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU()),
    "bias and normalisation": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
    ),
    "normalisation first": lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)),
    "normalisation after ReLU": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)
    ),
    "normalisation without parameters": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False)
    ),
    "normalisation with another epsilon": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=0.3)
    ),
    "normalisation without statistics": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)
    ),
    "groups and dilation": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3, groups=3, dilation=2), nn.BatchNorm2d(6)
    ),
    "padding by name": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding="same"), nn.BatchNorm2d(4), nn.ReLU()
    ),
    "padding by reflection": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(4), nn.ReLU()
    ),
    "one dimension": lambda: nn.Sequential(
        nn.Flatten(2), nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU()
    ),
    "output used twice": UsedTwice,
    "normalised output used twice": NormalisedTwice,
    "called twice": CalledTwice,
    "shortcut first": ShortcutFirst,
    "shortcut last": ShortcutLast,
    "shortcut larger": ShortcutLarger,
    "shortcut interleaved": ShortcutInterleaved,
    "in place": InPlace,
    "sum used twice": SumKept,
    "added to itself": Doubled,
    "weighted sum": Weighed,
    "number added": Shifted,
    "constants": Constants,
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_every_arrangement_computes_what_the_module_does(arrangement: str) -> None:
    module = built(ARRANGEMENTS[arrangement])
    assert distance(fused(module), evaluated(module)) < 1e-5


class Branching(nn.Module):
    """Looks at the values, so its operations cannot be listed."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.normalisation = nn.BatchNorm2d(4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.normalisation(self.convolution(inputs))
        return hidden if float(hidden.sum()) > 0 else -hidden


class TwoInputs(nn.Module):
    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return inputs if mask is None else inputs * mask


HALF = Compute(torch.device("cuda"), torch.bfloat16)
"""As on a GPU; operations follow the tensors, which are not there."""


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_what_cannot_be_listed_is_run_operation_by_operation() -> None:
    for make in (Branching, TwoInputs):
        with pytest.raises(Untraceable):
            FusedInference(built(make))
    module = built(Branching)
    outputs = FastPredictor(module, HALF)(snapshot(module), IMAGES)
    assert distance(outputs, evaluated(module)) < 0.02


@pytest.mark.parametrize("name", ["resnet8", "shufflenet", "cnn", "mlp"])
def test_half_precision_is_joined_and_close(name: str) -> None:
    module = model(name)
    predictor = FastPredictor(module, HALF)
    assert predictor._fused is not None
    outputs = predictor(snapshot(module), IMAGES, batch_size=4)
    assert outputs.dtype == torch.float32
    assert 1e-6 < distance(outputs, evaluated(module)) < 0.05 or name == "mlp"
    assert FastPredictor(module, Compute())._fused is None


@pytest.fixture(scope="module")
def normalised() -> nn.Module:
    """A network with batch normalisation, and with dropout, which must not be active."""
    return built(
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Flatten(),
            nn.Linear(216, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, 4),
        )
    )


def test_predictions_are_those_of_evaluation_mode_whatever_the_batch_size(
    normalised: nn.Module,
) -> None:
    predictor, weights = FastPredictor(normalised, Compute()), snapshot(normalised)
    expected = evaluated(normalised)
    assert torch.equal(predictor(weights, IMAGES), expected)
    for batch_size in (1, 4, 11, 100):
        assert torch.allclose(
            predictor(weights, IMAGES, batch_size=batch_size), expected, atol=1e-5
        )
    doubled = {name: tensor * 2 for name, tensor in weights.items()}
    assert distance(predictor(doubled, IMAGES), expected) > 0.1
    assert torch.equal(predictor(weights, IMAGES), expected)  # nothing is left of the other weights


@pytest.mark.parametrize("compute", [Compute(), HALF], ids=["plain", "joined"])
def test_rows_are_picked_in_their_order(compute: Compute, normalised: nn.Module) -> None:
    predictor, weights = FastPredictor(normalised, compute), snapshot(normalised)
    everything = predictor(weights, IMAGES)
    rows = torch.tensor([7, 2, 2, 10, 0])
    for batch_size in (None, 2):
        found = predictor(weights, IMAGES, rows=rows, batch_size=batch_size)
        assert distance(found, everything[rows]) < (
            1e-5 if compute.precision is torch.float32 else 0.02
        )
    nobody = predictor(weights, IMAGES, rows=torch.zeros(0, dtype=torch.int64))
    assert nobody.shape == (0, 4)
    assert nobody.dtype == torch.float32
    assert predictor(weights, IMAGES[:0]).shape == (0, 4)
    assert [outputs.shape for outputs in predictor.many([weights] * 2, IMAGES[:0])] == [(0, 4)] * 2


@pytest.mark.parametrize("compute", [Compute(), HALF], ids=["plain", "joined"])
def test_the_prediction_of_an_image_does_not_depend_on_others(
    compute: Compute, normalised: nn.Module
) -> None:
    predictor, weights = FastPredictor(normalised, compute), snapshot(normalised)
    before = predictor(weights, IMAGES, batch_size=4)
    changed = IMAGES.clone()
    changed[1:] = 255 - changed[1:]
    after = predictor(weights, changed, batch_size=4)
    assert torch.equal(after[0], before[0])
    assert not torch.allclose(after[1:], before[1:], atol=1e-3)


def test_prediction_changes_neither_the_module_nor_its_mode_nor_the_weights(
    normalised: nn.Module,
) -> None:
    for training in (True, False):
        module = copy.deepcopy(normalised).train(training)
        module[1].eval()  # type: ignore[index]
        modes = [part.training for part in module.modules()]
        weights = snapshot(module)
        given = {name: tensor * 2 for name, tensor in weights.items()}
        kept = {name: tensor.clone() for name, tensor in given.items()}
        predictor = FastPredictor(module, Compute())
        assert not predictor(given, IMAGES, batch_size=4).requires_grad
        assert [part.training for part in module.modules()] == modes
        assert all(torch.equal(weights[name], tensor) for name, tensor in snapshot(module).items())
        assert all(torch.equal(kept[name], tensor) for name, tensor in given.items())


def test_images_are_normalised_before_they_are_predicted() -> None:
    module = model("cnn")
    mean, deviation = torch.full((3, 1, 1), 0.4), torch.full((3, 1, 1), 0.2)
    for compute in (
        Compute(mean=mean, deviation=deviation),
        Compute(HALF.device, HALF.precision, mean=mean, deviation=deviation),
    ):
        found = FastPredictor(module, compute)(snapshot(module), IMAGES)
        assert distance(found, evaluated(module, (FLOATS - 0.4) / 0.2)) < 0.03
        assert distance(found, evaluated(module)) > 0.1
