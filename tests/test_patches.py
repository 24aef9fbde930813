"""Convolutions as products of patches, against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional

from fedaux.compute import Compute
from fedaux.models import MODELS, convolutional, patches
from fedaux.models.convolutional import ImageConvolution, SmallConvolution

WALKS = [
    # size, kernel, stride, padding
    ((8, 8), (3, 3), (1, 1), (1, 1)),
    ((8, 8), (3, 3), (2, 2), (1, 1)),
    ((7, 5), (3, 2), (2, 3), (0, 1)),
    ((4, 4), (4, 4), (1, 1), (0, 0)),
    ((6, 6), (1, 1), (3, 3), (0, 0)),
    ((3, 4), (5, 5), (1, 2), (2, 3)),
]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(name: str) -> nn.Module:
    return MODELS[name]((1, 8, 8), 5).train()


def names_behind(output: Tensor) -> str:
    """The names of the operations that an output was computed with."""
    names, nodes = [], [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            names.append(node.name())
            nodes += [before for before, _ in node.next_functions]
    return " ".join(names)


@pytest.fixture
def by_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an ARM processor."""
    monkeypatch.setattr(convolutional, "ARM", True)


@pytest.mark.parametrize(("size", "kernel", "stride", "padding"), WALKS)
def test_convolution_and_gradients_are_those_of_torch(
    size: patches.Pair, kernel: patches.Pair, stride: patches.Pair, padding: patches.Pair
) -> None:
    maps, weight = drawn(3, 2, *size).requires_grad_(), drawn(4, 2, *kernel, seed=1).requires_grad_()
    found = patches.convolve(maps, weight, stride=stride, padding=padding)
    expected = functional.conv2d(maps, weight, stride=stride, padding=padding)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    above = drawn(*expected.shape, seed=2)
    own, others = (torch.autograd.grad(output, (maps, weight), above) for output in (found, expected))
    torch.testing.assert_close(own, others, rtol=0, atol=1e-11)


def test_gradients_are_those_of_finite_differences() -> None:
    maps, weight = drawn(2, 2, 4, 3).requires_grad_(), drawn(3, 2, 3, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *given: patches.convolve(*given, stride=(2, 1), padding=(1, 1)), (maps, weight)
    )


def test_no_maps_are_no_maps() -> None:
    maps = drawn(0, 2, 8, 8).requires_grad_()
    found = patches.convolve(maps, drawn(4, 2, 3, 3), stride=(2, 2), padding=(1, 1))
    assert found.shape == (0, 4, 4, 4)
    found.sum().backward()
    assert maps.grad is not None
    assert maps.grad.shape == maps.shape


def test_models_side_by_side_are_those_one_by_one() -> None:
    maps, weights = drawn(3, 5, 2, 6, 6), drawn(3, 4, 2, 3, 3, seed=1)

    def loss(maps: Tensor, weight: Tensor) -> Tensor:
        return patches.convolve(maps, weight, stride=(2, 2), padding=(1, 1)).square().sum()

    patches._places.cache_clear()  # what is made inside a transformation must be of use outside
    found = vmap(grad(loss, argnums=(0, 1)), in_dims=(0, 0))(maps, weights)
    swapped = vmap(grad(loss, argnums=(0, 1)), in_dims=(2, 0))(maps.movedim(0, 2), weights)
    for number in range(3):
        alone = grad(loss, argnums=(0, 1))(maps[number], weights[number])
        torch.testing.assert_close((found[0][number], found[1][number]), alone)
        torch.testing.assert_close((swapped[0][number], swapped[1][number]), alone)
    torch.testing.assert_close(
        loss(maps[0], weights[0]), functional.conv2d(maps[0], weights[0], None, 2, 1).square().sum()
    )


@pytest.mark.usefixtures("by_products")
@pytest.mark.parametrize("kind", [SmallConvolution, ImageConvolution])
def test_layers_train_by_products_and_predict_as_torch_does(kind: type[SmallConvolution]) -> None:
    layer, maps = kind(1, 3, 3, stride=2, padding=1), drawn(4, 1, 8, 8).float().requires_grad_()
    expected = functional.conv2d(maps, layer.weight, layer.bias, stride=2, padding=1)
    assert "Convolution" in names_behind(expected)
    trained = layer(maps)
    assert "_Rows" in names_behind(trained)
    assert "Convolution" not in names_behind(trained)
    torch.testing.assert_close(trained, expected)
    with torch.no_grad():
        assert torch.equal(layer(maps), expected)


@pytest.mark.usefixtures("by_products")
@pytest.mark.parametrize(
    "settings", [{"groups": 2}, {"dilation": 2}, {"padding": "same"}, {"padding": 1, "padding_mode": "circular"}]
)
def test_what_has_no_patches_is_left_to_torch(settings: dict[str, Any]) -> None:
    layer, maps = SmallConvolution(4, 4, 3, **settings), drawn(2, 4, 8, 8).float()
    assert torch.equal(layer(maps), nn.Conv2d.forward(layer, maps))


@pytest.mark.usefixtures("by_products")
@pytest.mark.parametrize("shape", [(2, 4, 2, 2), (2, 4, 0, 5), (2, 3, 8, 8)])
def test_what_is_wrong_is_told_by_torch(shape: tuple[int, ...]) -> None:
    layer = SmallConvolution(4, 4, 3)
    for forward in (layer, lambda maps: nn.Conv2d.forward(layer, maps)):
        with pytest.raises(RuntimeError, match=r"Kernel size|expected input|non-empty"):
            forward(torch.zeros(shape))


@pytest.mark.usefixtures("by_products")
def test_a_network_is_still_compiled_in_one_piece(compilations: list[Any]) -> None:
    model, maps = network("cnn"), drawn(2, 1, 8, 8).float()
    compiled = Compute(compile=True).compiled("cnn", lambda: lambda maps: model(maps).sum())
    torch.testing.assert_close(compiled(maps), model(maps).sum())
    assert len(compilations) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own
def test_derivatives_forwards_are_those_of_torch() -> None:
    maps, weight, along = drawn(2, 2, 4, 4), drawn(3, 2, 3, 3, seed=1), drawn(2, 2, 4, 4, seed=2)
    expected = functional.conv2d(along, weight, stride=2, padding=1)
    found = jvp(lambda maps: patches.convolve(maps, weight, stride=(2, 2), padding=(1, 1)), (maps,), (along,))
    torch.testing.assert_close(found[1], expected)


def test_a_whole_network_has_the_same_gradients_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("cnn")
    maps, labels = drawn(6, 1, 8, 8).float(), torch.arange(6) % 5

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(functional_call(model, parameters, (maps,)), labels)

    results = []
    for arm in (False, True):
        monkeypatch.setattr(convolutional, "ARM", arm)
        results.append(grad(loss)({name: value.detach() for name, value in model.named_parameters()}))
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-5)
