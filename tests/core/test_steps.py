from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedaux.config import Local
from fedaux.core.compute import Compute
from fedaux.core.messages import Weights
from fedaux.core.steps import (
    OPTIMIZERS,
    Steps,
    batch_sizes,
    optimizer_state,
    reset,
    restore_optimizer,
    running_statistics_for_one,
)
from fedaux.core.weights import snapshot
from fedaux.fast.capture import loss_of_weights
from fedaux.fast.fallback import compiled

RNG = np.random.default_rng(0)
IMAGES = torch.from_numpy(RNG.integers(0, 256, (11, 1, 2, 2), dtype=np.uint8))
LABELS = torch.from_numpy(RNG.integers(0, 3, 11))
ORDER = torch.from_numpy(RNG.permutation(11))
SETTINGS: list[dict[str, Any]] = [
    {"optimizer": "adam", "learning_rate": 0.01, "weight_decay": 0.1},
    {"optimizer": "sgd", "learning_rate": 0.1},
    {"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.1},
]


def classifier() -> Any:
    """A network with batch normalisation, whose parts are looked at by their numbers.

    Without the bias before it, whose gradient is 0 but for rounding, Adam does not make much of
    rounding.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)
        )


def steps(model: nn.Module, settings: dict[str, Any], **how: Any) -> Steps:
    section = Local(**settings)
    made = Steps(
        model,
        IMAGES,
        LABELS,
        loss=functional.cross_entropy,
        optimizer=lambda parameters: OPTIMIZERS[section.optimizer](parameters, section),
        compute=Compute(),
        **how,
    )
    made.start()
    return made


def equal(first: Weights, second: Weights) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def test_batches_are_full_but_the_last() -> None:
    assert list(batch_sizes(11, 4)) == [4, 4, 3]
    assert list(batch_sizes(8, 4)) == [4, 4]
    assert list(batch_sizes(3, 4)) == [3]
    assert list(batch_sizes(0, 4)) == []


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("proximal", [0.0, 0.7])
def test_steps_are_a_plain_loop(settings: dict[str, Any], proximal: float) -> None:
    """Eleven rows in batches of five, the last one a single row; the loss is counted without the
    proximal term.

    Bit for bit; where there is a proximal term, which can be differentiated in two ways, to 1e-6.
    """
    found = classifier()
    taken = steps(found, settings, proximal=proximal)
    taken.run(ORDER, batch_size=5)

    model = classifier().train()
    start = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = OPTIMIZERS[settings["optimizer"]](model.parameters(), Local(**settings))
    total = 0.0
    for batch in (ORDER[:5], ORDER[5:10], ORDER[10:]):
        model[2].train(len(batch) > 1)
        loss = functional.cross_entropy(model(IMAGES[batch].float() / 255.0), LABELS[batch])
        total += float(loss.detach()) * len(batch)
        if proximal > 0:
            pairs = zip(model.parameters(), start, strict=True)
            loss = (
                loss
                + 0.5
                * proximal
                * torch.stack([(new - old).square().sum() for new, old in pairs]).sum()
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    expected = snapshot(model)
    if proximal > 0:
        assert all(
            torch.allclose(tensor, expected[name], atol=1e-6)
            for name, tensor in snapshot(found).items()
        )
    else:
        assert equal(snapshot(found), expected)
    assert float(taken.total) == pytest.approx(total, rel=1e-5)
    assert not torch.equal(found[1].weight, classifier()[1].weight)


def test_starting_again_counts_the_loss_anew_and_moves_the_anchor() -> None:
    model = classifier()
    taken = steps(model, SETTINGS[1], proximal=0.7)
    taken.run(ORDER, batch_size=5)
    middle = snapshot(model)
    taken.start()
    assert float(taken.total) == 0
    taken.run(ORDER, batch_size=5)

    again = classifier()
    again.load_state_dict(middle)
    other = steps(again, SETTINGS[1], proximal=0.7)
    other.run(ORDER, batch_size=5)
    assert equal(snapshot(model), snapshot(again))
    assert torch.equal(taken.total, other.total)


def test_parameters_that_are_frozen_stay() -> None:
    model = classifier()
    model[1].requires_grad_(False)
    steps(model, SETTINGS[0]).run(ORDER, batch_size=5)
    assert torch.equal(model[1].weight, classifier()[1].weight)
    assert not torch.equal(model[4].weight, classifier()[4].weight)


def test_a_proximal_term_does_not_mind_parameters_that_are_not_used() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nobody = nn.Parameter(torch.ones(7))
            self.network = classifier()

        def forward(self, inputs: Tensor) -> Tensor:
            logits: Tensor = self.network(inputs)
            return logits

    model, plain = Unused(), classifier()
    for one in (model, plain):
        steps(one, SETTINGS[1], proximal=0.7).run(ORDER, batch_size=5)
    assert equal(snapshot(model.network), snapshot(plain))
    assert torch.equal(model.nobody, torch.ones(7))


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_restored_optimizer_goes_on_as_if_nothing_had_been(settings: dict[str, Any]) -> None:
    whole = classifier()
    uninterrupted = steps(whole, settings)
    uninterrupted.run(ORDER, batch_size=4)
    middle, state = snapshot(whole), optimizer_state(uninterrupted.optimizer, whole)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    uninterrupted.run(ORDER.flip(0), batch_size=4)
    assert equal(state, kept)  # copies: training goes on without them

    def continued(state: Weights, *, used: bool) -> Weights:
        model = classifier()
        taken = steps(model, settings)
        if used:  # an optimizer that already has tensors gets the values, not other tensors
            taken.run(ORDER[:4], batch_size=4)
        before = optimizer_tensors(taken.optimizer)
        model.load_state_dict(middle)
        restore_optimizer(taken.optimizer, model, state)
        after = optimizer_tensors(taken.optimizer)
        assert all(tensor is after[place] for place, tensor in before.items())
        taken.run(ORDER.flip(0), batch_size=4)
        return snapshot(model)

    for used in (False, True):
        assert equal(continued(state, used=used), snapshot(whole))
    assert equal(state, kept)
    has_state = settings["optimizer"] == "adam" or "momentum" in settings
    assert bool(state) == has_state
    if has_state:
        assert not equal(continued({}, used=False), snapshot(whole))


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], Tensor]:
    return {
        (index, key): value
        for index, state in enumerate(optimizer.state.values())
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def test_the_state_is_named_by_parameter_and_moment() -> None:
    model = classifier()
    taken = steps(model, SETTINGS[0])
    assert optimizer_state(taken.optimizer, model) == {}
    taken.run(ORDER, batch_size=4)
    state = optimizer_state(taken.optimizer, model)
    moments = ("exp_avg", "exp_avg_sq", "step")
    assert state.keys() == {
        f"{name}/{moment}" for name, _ in model.named_parameters() for moment in moments
    }
    assert float(state["1.weight/step"]) == 3
    assert state["4.weight/exp_avg"].shape == model[4].weight.shape


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_reset_optimizer_is_a_new_one(settings: dict[str, Any]) -> None:
    model, weights = classifier(), snapshot(classifier())
    taken = steps(model, settings)
    taken.run(ORDER, batch_size=4)
    model.load_state_dict(weights)
    before = optimizer_tensors(taken.optimizer)
    reset(taken.optimizer)
    after = optimizer_tensors(taken.optimizer)
    assert all(
        tensor is after[place] for place, tensor in before.items()
    )  # captured steps hold on to the tensors
    taken.run(ORDER.flip(0), batch_size=4)
    new = classifier()
    steps(new, settings).run(ORDER.flip(0), batch_size=4)
    assert equal(snapshot(model), snapshot(new))


def test_a_batch_of_one_is_normalised_by_running_statistics_which_stay() -> None:
    model = classifier()
    model[2].running_mean.fill_(0.3)
    model[2].running_var.fill_(2.0)
    inference = copy.deepcopy(model).eval()
    model.train()
    one, two = IMAGES[:1].float(), IMAGES[:2].float()
    before = snapshot(model)
    with running_statistics_for_one(model, batch_size=1):
        assert torch.equal(model(one), inference(one))
        assert model[0].training  # nothing else changes its mode
    assert model[2].training
    assert equal(snapshot(model), before)
    with running_statistics_for_one(model, batch_size=2):
        assert not torch.allclose(model(two), inference(two), atol=1e-3)
    assert not torch.equal(model[2].running_mean, before["2.running_mean"])


def test_modes_come_back_as_they_were_also_after_an_error() -> None:
    model = classifier().train()
    with (
        pytest.raises(RuntimeError, match="shape"),
        running_statistics_for_one(model, batch_size=1),
    ):
        model(torch.zeros(1, 7))
    assert model[2].training
    model[2].eval()  # frozen by somebody
    with running_statistics_for_one(model, batch_size=1):
        pass
    assert not model[2].training


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_step_is_compiled_once_for_the_weights_of_all(
    batch_size: int, compilations: list[Any]
) -> None:
    """Also the layers of the original model."""
    compute = Compute(compile=True)
    models = [classifier().eval() for _ in range(3)]  # as a server's model is before it is trained
    for number, model in enumerate(models):
        nn.init.constant_(model[1].weight[0], number)
        model[2].running_mean.fill_(number)
    plain = copy.deepcopy(models)
    inputs, targets = IMAGES[:batch_size].float(), LABELS[:batch_size]
    for model, other in zip(models, plain, strict=True):
        forward = compiled(
            compute,
            "step",
            partial(
                loss_of_weights,
                model,
                loss=functional.cross_entropy,
                compute=compute,
                batch_size=batch_size,
            ),
        )
        loss = forward(dict(model.named_parameters()), dict(model.named_buffers()), inputs, targets)
        loss.backward()
        with running_statistics_for_one(other.train(), batch_size=batch_size):
            expected = functional.cross_entropy(other(inputs), targets)
        expected.backward()
        assert torch.allclose(loss, expected)
        for own, its in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.allclose(own.grad, its.grad)
        assert equal(snapshot(model), snapshot(other))  # running statistics
    assert len(compilations) == 1
