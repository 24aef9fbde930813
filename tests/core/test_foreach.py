from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedaux.core.messages import surely_finite
from fedaux.core.weights import clones, load, snapshot, zero
from fedaux.models import MODELS


def test_copies_keep_type_and_layout_and_stand_on_their_own() -> None:
    tensors = {
        "image": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "count": torch.tensor(7),
        "half": torch.rand(3).half(),
        "empty": torch.zeros(0, 4),
    }
    copies = clones(tensors)
    assert list(copies) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(copies[name], tensor)
        assert copies[name].dtype is tensor.dtype
        assert copies[name].stride() == tensor.stride()
    tensors["image"].zero_()
    assert copies["image"].count_nonzero() > 0


def test_zero_takes_tensors_of_several_types() -> None:
    tensors = [
        torch.ones(3),
        torch.ones(2, dtype=torch.int64),
        torch.ones(()),
        torch.ones(2).half(),
    ]
    zero(iter(tensors))
    assert not any(bool(tensor.any()) for tensor in tensors)
    zero([])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_none_is_found(bad: float) -> None:
    tensors = [torch.rand(5), torch.rand(3, 4), torch.zeros(0), torch.rand(2).half()]
    assert surely_finite(tensors)
    tensors[1][2, 3] = bad
    assert not surely_finite(tensors)
    assert surely_finite([])
    assert not surely_finite(
        [torch.full((4,), 1e30)]
    )  # merely huge: who asks has to look more closely


def test_weights_are_loaded_in_place_and_those_of_another_model_refused() -> None:
    model = MODELS["resnet8"]((3, 8, 8), 10)
    other = {name: tensor + 1 for name, tensor in snapshot(model).items()}
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    load(model, other)
    assert all(torch.equal(tensor, other[name]) for name, tensor in model.state_dict().items())
    assert places == {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    assert all(parameter.requires_grad for parameter in model.parameters())
    before = snapshot(model)
    narrow = dict(other) | {"head.weight": torch.zeros(3, 512), "head.bias": torch.zeros(3)}
    for wrong in (
        narrow,
        {**other, "more": torch.zeros(1)},
        {k: v for k, v in other.items() if k != "head.bias"},
    ):
        with pytest.raises(RuntimeError, match=r"head|more"):
            load(copy.deepcopy(model), wrong)
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot(model).items())


def test_tied_weights_are_loaded_once_for_both() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    weights = {name: tensor + 1 for name, tensor in snapshot(model).items()}
    load(model, weights)
    assert second.weight is first.weight
    assert torch.equal(first.weight, weights["0.weight"])
