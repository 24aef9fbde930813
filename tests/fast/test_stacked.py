"""Clients trained in one stack on a CPU end where the plain loop ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.experiments import IMAGE_MODELS
from helpers.federations import simulated
from torch import Tensor, nn

from fedaux import seeding
from fedaux.config import Local
from fedaux.core.algorithms import METHODS, asks_of
from fedaux.core.backend import ClientJob, TrainContext, Training, TrainResult
from fedaux.core.compute import Compute
from fedaux.core.messages import ClientState, TrainRequest, Weights
from fedaux.core.objectives import OBJECTIVES
from fedaux.core.plain_backend import one_by_one
from fedaux.core.weights import snapshot
from fedaux.fast import stacked
from fedaux.fast.stacked import StackedTraining, can_stack
from fedaux.models import MODELS, SplitModel

SIZES = (13, 4, 1, 9, 8, 5, 2)
"""Examples of seven clients: one alone, remainders of one and more, and whole batches of four."""
POISON = sum(SIZES)
"""A row that is nobody's."""
CLASSES = 5
SHAPE = (1, 8, 8)

ADAM: dict[str, Any] = {"optimizer": "adam", "learning_rate": 1e-3}
SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.05}
MOMENTUM: dict[str, Any] = SGD | {"momentum": 0.9, "weight_decay": 0.01}

Results = dict[int, tuple[Weights, TrainResult]]


def model(name: str) -> SplitModel:
    options = {"mlp": {"width": 16}, "cnn": {"width": 4}}.get(name, {})
    with seeding.initialisation(0, part=name):
        return MODELS[name](SHAPE, CLASSES, **options)


def place(
    name: str = "mlp",
    *,
    proximal: float = 0.0,
    compute: Compute | None = None,
    label: int = 0,
    **settings: Any,
) -> TrainContext:
    generator = np.random.default_rng(0)
    images = torch.from_numpy(generator.integers(0, 256, (POISON + 1, *SHAPE), dtype=np.uint8))
    labels = torch.from_numpy(generator.integers(0, CLASSES, POISON + 1))
    images[POISON], labels[POISON] = 255, label
    return TrainContext(
        model=model(name),
        inputs=images,
        labels=labels,
        section=Local(**({"batch_size": 4} | ADAM | settings)),
        proximal=proximal,
        compute=Compute(clients_at_once=3) if compute is None else compute,
        key=name,
    )


def jobs(
    states: Mapping[int, Mapping[str, Tensor]] | None = None,
    *,
    round: int = 1,
    clients: Sequence[int] | None = None,
) -> list[ClientJob]:
    rows = torch.arange(POISON).split(SIZES)
    return [
        ClientJob(
            client,
            rows[client],
            seeding.generator(0, "local", round=round, client=client),
            (states or {}).get(client, {}),
        )
        for client in (range(len(SIZES)) if clients is None else clients)
    ]


def trained(training: Training, work: Sequence[ClientJob], weights: Weights) -> Results:
    results = {job.client: (own, trained) for job, own, trained in training(work, weights)}
    assert results.keys() == {job.client for job in work}
    return results


def difference(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The largest |difference| of any number."""
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """|first - second|: Adam turns the rounding of a tiny gradient into a whole step of one
    weight, which the largest difference would show and nothing else would."""
    assert first.keys() == second.keys()
    return math.sqrt(sum(float((first[name] - second[name]).square().sum()) for name in first))


def assert_same(
    found: Results, expected: Results, weights: Weights, *, share: float = 1e-6
) -> None:
    """In double precision, numbers differ by at most a millionth of the client's largest step,
    losses by 1e-9 of themselves.

    The sums of a batch are made in another order; Adam divides by roots of small squares, in which
    that shows.
    """
    assert found.keys() == expected.keys()
    for client, (own, result) in expected.items():
        moved = difference(own, weights)
        assert moved > 1e-4
        assert difference(found[client][0], own) < share * moved, client
        assert found[client][1].loss == pytest.approx(result.loss, rel=1e-9)


CASES: list[Any] = [
    ("mlp", {}),
    ("mlp", {"weight_decay": 0.1, "epochs": 3}),
    ("mlp", SGD),
    ("mlp", MOMENTUM | {"epochs": 2}),
    ("mlp", SGD | {"proximal": 0.5, "epochs": 2}),
    ("mlp", {"proximal": 0.5, "epochs": 2}),
    ("mlp", {"batch_size": 1}),
    ("mlp", {"batch_size": 64}),
    ("cnn", {"epochs": 2}),
    ("cnn", MOMENTUM | {"proximal": 0.3}),
    pytest.param(
        "resnet8-gn", SGD | {"momentum": 0.9, "learning_rate": 0.01}, marks=pytest.mark.slow
    ),
]


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_a_stack_of_clients_equals_one_by_one(name: str, settings: dict[str, Any]) -> None:
    here = place(name, **settings)
    weights = snapshot(here.model)
    before = {key: tensor.clone() for key, tensor in weights.items()}
    found = trained(StackedTraining(here), jobs(), weights)
    assert_same(found, trained(one_by_one(here), jobs(), weights), weights)
    assert difference(weights, before) == 0
    assert all(not result.optimizer_state for _, result in found.values())


@pytest.mark.usefixtures("double_precision")
def test_a_stack_equals_one_by_one_on_normalised_images_and_on_features() -> None:
    here = place(
        compute=Compute(
            clients_at_once=3, mean=torch.full((1, 1, 1), 0.4), deviation=torch.full((1, 1, 1), 0.2)
        )
    )
    weights = snapshot(here.model)
    found = trained(StackedTraining(here), jobs(), weights)
    assert_same(found, trained(one_by_one(here), jobs(), weights), weights)
    assert difference(found[0][0], trained(StackedTraining(place()), jobs(), weights)[0][0]) > 1e-4

    features = torch.from_numpy(np.random.default_rng(1).normal(size=(POISON + 1, 6))).float()
    head = SplitModel(nn.Identity(), nn.Linear(6, CLASSES), feature_width=6)
    linear = replace(here, model=head, inputs=features)
    weights = snapshot(head)
    assert_same(
        trained(StackedTraining(linear), jobs(), weights),
        trained(one_by_one(linear), jobs(), weights),
        weights,
    )


@pytest.mark.usefixtures("bf16")
def test_a_stack_computes_in_the_precision_that_is_asked_for() -> None:
    """In half precision a stack moves as the plain loop does, to a fiftieth, and not as in single
    precision."""
    half = place(compute=Compute(precision=torch.bfloat16, clients_at_once=3), **SGD)
    weights = snapshot(half.model)
    expected = trained(one_by_one(half), jobs(), weights)
    single = trained(one_by_one(place(**SGD)), jobs(), weights)
    for client, (own, result) in trained(StackedTraining(half), jobs(), weights).items():
        moved = difference(expected[client][0], weights)
        assert difference(own, expected[client][0]) < 0.02 * moved
        assert difference(own, single[client][0]) > 2e-3 * moved
        assert result.loss == pytest.approx(expected[client][1].loss, rel=0.02)
        assert all(tensor.dtype == torch.float32 for tensor in own.values())


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    "settings", [ADAM | {"weight_decay": 0.1}, MOMENTUM], ids=["adam", "momentum"]
)
def test_a_second_round_goes_on_from_kept_states_of_different_ages(
    settings: dict[str, Any],
) -> None:
    """Client 3 joins in round 2, and the others have taken different numbers of steps."""
    here = place(optimizer_state="kept", epochs=2, **settings)
    weights = snapshot(here.model)
    first = [0, 1, 2, 4, 5, 6]
    states: list[dict[int, Mapping[str, Tensor]]] = []
    results = []
    for training in (one_by_one(here), StackedTraining(here)):
        one = trained(training, jobs(clients=first), weights)
        states.append({client: result.optimizer_state for client, (_, result) in one.items()})
        results.append(trained(training, jobs(states[-1], round=2), weights))
    for client, state in states[0].items():
        for name, tensor in state.items():
            found = states[1][client][name]
            assert found.shape == tensor.shape
            assert found.dtype == tensor.dtype or name.endswith("/step")  # torch's default type
            assert torch.allclose(found.to(tensor), tensor, rtol=1e-6, atol=1e-9), (client, name)
        assert state.keys() == states[1][client].keys()
    assert_same(results[1], results[0], weights)
    anew = trained(one_by_one(here), jobs(round=2), weights)
    assert difference(anew[3][0], results[0][3][0]) == 0
    assert difference(anew[0][0], results[0][0][0]) > 1e-4
    if settings["optimizer"] == "adam":
        steps = {
            client: float(result.optimizer_state["head.bias/step"])
            for client, (_, result) in results[1].items()
        }
        assert steps == {0: 16, 1: 4, 2: 4, 3: 6, 4: 8, 5: 8, 6: 4}


@pytest.mark.usefixtures("double_precision")
def test_states_cross_from_one_way_of_training_to_the_other() -> None:
    here = place(optimizer_state="kept")
    weights = snapshot(here.model)
    plain, fast = one_by_one(here), StackedTraining(here)
    expected = trained(plain, jobs(states_of(trained(plain, jobs(), weights)), round=2), weights)
    for first, second in ((plain, fast), (fast, plain)):
        states = states_of(trained(first, jobs(), weights))
        assert_same(trained(second, jobs(states, round=2), weights), expected, weights)


def states_of(results: Results) -> dict[int, Mapping[str, Tensor]]:
    return {client: result.optimizer_state for client, (_, result) in results.items()}


def test_what_a_client_kept_is_not_changed_by_its_next_round() -> None:
    here = place(optimizer_state="kept")
    weights = snapshot(here.model)
    states = states_of(trained(StackedTraining(here), jobs(), weights))
    before = {
        client: {name: tensor.clone() for name, tensor in state.items()}
        for client, state in states.items()
    }
    trained(StackedTraining(here), jobs(states, round=2), weights)
    assert all(difference(states[client], before[client]) == 0 for client in states)


@pytest.mark.usefixtures("double_precision")
def test_neither_the_order_of_jobs_nor_the_width_of_the_stack_matters() -> None:
    here = place(epochs=2, proximal=0.2, **MOMENTUM)
    weights = snapshot(here.model)
    expected = trained(StackedTraining(here), jobs(), weights)
    for order in (range(6, -1, -1), (2, 5, 0, 1, 6, 3, 4)):
        found = trained(StackedTraining(here), jobs(clients=list(order)), weights)
        assert all(difference(own, expected[client][0]) == 0 for client, (own, _) in found.items())
        assert all(result.loss == expected[client][1].loss for client, (_, result) in found.items())
    for width in (2, 7, 50):
        wide = replace(here, compute=Compute(clients_at_once=width))
        assert_same(trained(StackedTraining(wide), jobs(), weights), expected, weights)


class Scaled(nn.Module):
    """Features with a parameter that is a single number, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    "settings", [ADAM | {"weight_decay": 0.1}, MOMENTUM | {"proximal": 0.5}], ids=["adam", "sgd"]
)
def test_parameters_can_be_single_numbers_and_unused(settings: dict[str, Any]) -> None:
    features = torch.from_numpy(np.random.default_rng(1).normal(size=(POISON + 1, 6))).float()
    model = SplitModel(Scaled(), nn.Linear(6, CLASSES), feature_width=6)
    here = replace(
        place(optimizer_state="kept", epochs=2, **settings), model=model, inputs=features
    )
    weights = snapshot(model)
    assert can_stack(model)
    found = trained(StackedTraining(here), jobs(), weights)
    expected = trained(one_by_one(here), jobs(), weights)
    assert_same(found, expected, weights)
    assert found[0][0]["features.scale"].shape == ()
    assert torch.equal(found[0][0]["features.unused"], torch.ones(3))
    again = trained(StackedTraining(here), jobs(states_of(expected), round=2), weights)
    assert_same(
        again, trained(one_by_one(here), jobs(states_of(expected), round=2), weights), weights
    )


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_what_fills_up_a_batch_counts_for_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever row is taken for it, of whatever label, even one that the model finds impossible."""
    plain = place(name, **MOMENTUM)
    weights = snapshot(plain.model)
    weights["head.bias"][4] = -1e4  # class 4 has a loss of about 10,000
    expected = trained(StackedTraining(plain), jobs(clients=[0, 2, 5, 6]), weights)
    filled = stacked._filled
    replaced = []

    def poisoned(batches: Sequence[Tensor], batch_size: int) -> tuple[Tensor, Tensor]:
        rows, present = filled(batches, batch_size)
        replaced.append(int((present == 0).sum()))
        return torch.where(present > 0, rows, POISON), present

    monkeypatch.setattr(stacked, "_filled", poisoned)
    for label in (0, 4):
        found = trained(
            StackedTraining(place(name, label=label, **MOMENTUM)),
            jobs(clients=[0, 2, 5, 6]),
            weights,
        )
        for client, (own, result) in expected.items():
            assert difference(found[client][0], own) == 0
            assert found[client][1].loss == result.loss
    assert sum(replaced) > 0


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_models_in_which_examples_see_each_other_are_not_stacked(name: str) -> None:
    normalised = any(isinstance(layer, nn.BatchNorm2d) for layer in model(name).modules())
    assert can_stack(model(name)) == (not normalised)


def test_what_cannot_be_stacked_otherwise() -> None:
    assert can_stack(nn.Linear(2, 2))
    assert not can_stack(
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    )
    assert not can_stack(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    frozen = nn.Linear(2, 2)
    frozen.bias.requires_grad_(False)
    assert not can_stack(frozen)


QUICK: dict[str, Any] = {
    "auxiliary": {"size": 60},
    "split": {"num_clients": 10, "alpha": 0.5},
    "participation_rate": 0.9,
    "local": {"proximal": 0.1, "epochs": 2},
    "bayesian": {"samples": 2},
    "distillation": {"batch_size": 16},
}


QUICKLY = ("fedavg", "fedprox", "fedbe+p", "fedaux+m")
"""Methods that train, teach and remember in all ways that there are."""
FROM_H0 = {f"{name}+p" for name in METHODS} - {*QUICKLY}
"""Methods that differ from another in their start alone."""


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=() if name in QUICKLY else pytest.mark.slow)
        for name in METHODS
        if name not in FROM_H0
        and asks_of(name).trains
        and not asks_of(name).is_bound  # the others have no clients side by side
    ],
)
def test_rounds_side_by_side_equal_rounds_one_by_one(method: str, tmp_path: Path) -> None:
    """Two rounds of nine clients, more than one stack holds. Objectives with terms are
    trained one by one."""
    stacks = not any(OBJECTIVES[name].term for name in asks_of(method).objectives)
    results = []
    for clients_at_once in (8, 1):
        server, start, clients = simulated(
            tmp_path, clients_at_once=clients_at_once, method=method, **QUICK
        )
        state, row = server.play_round(start)
        state, row = server.play_round(state)
        results.append((start, state, row))
        (training,) = clients._training.values()
        assert isinstance(training, StackedTraining) == (stacks and clients_at_once == 8)
    (start, fast, fast_row), (other_start, plain, plain_row) = results
    assert difference(start.models["cnn"], other_start.models["cnn"]) == 0
    moved = distance(plain.models["cnn"], start.models["cnn"])
    assert moved > 1e-3
    assert distance(fast.models["cnn"], plain.models["cnn"]) < 1e-6 * moved
    for measured in ("loss", "local_loss"):
        assert fast_row[measured] == pytest.approx(plain_row[measured], rel=1e-6)
    assert fast_row["accuracy"] == pytest.approx(plain_row["accuracy"])
    same = ("clients_asked", "clients_answered", "clients_remembered", "bytes_up", "bytes_down")
    assert all(fast_row[name] == plain_row[name] for name in same)
    assert len(fast_row["clients_answered"]) == 9


@pytest.mark.quickly("fedaux")
@pytest.mark.parametrize("method", ["fedavg", "fedaux", "fedaux+m"])
def test_the_plain_backend_is_the_fast_one_without_what_makes_it_fast(
    method: str, tmp_path: Path
) -> None:
    """One client at a time on a CPU, there is nothing to speed up: the two agree to the last
    bit."""
    results = []
    for plain in (True, False):
        server, state, clients = simulated(
            tmp_path, clients_at_once=1, plain=plain, method=method, **QUICK
        )
        state, row = server.play_round(state)
        results.append((state, {**row, "seconds": None}))
        assert clients.present() == sorted(state.releases) or method == "fedavg"
    (one, one_row), (other, other_row) = results
    assert difference(one.models["cnn"], other.models["cnn"]) == 0
    assert one_row == other_row


@pytest.mark.usefixtures("double_precision")
def test_linear_rounds_and_kept_optimizers_side_by_side_equal_one_by_one(tmp_path: Path) -> None:
    changes = QUICK | {
        "local": {"optimizer": "adam", "optimizer_state": "kept"},
        "participation_rate": 0.6,
    }
    for mode in ("linear", "full"):
        kept: list[Mapping[int, ClientState]] = []
        states = []
        for clients_at_once in (8, 1):
            server, state, clients = simulated(
                tmp_path / mode,
                clients_at_once=clients_at_once,
                method="fedavg+p",
                mode=mode,
                **changes,
            )
            begin = state
            last: dict[int, int] = {}
            for number in (1, 2):
                state, row = server.play_round(state)
                last |= dict.fromkeys(row["clients_answered"], number)
            states.append(state)
            kept.append(clients.client_states())
            assert {client: stamped.round for client, stamped in kept[-1].items()} == last
            assert set(last.values()) == {1, 2}  # some were there in the first round only
        moved = difference(states[1].models["cnn"], begin.models["cnn"])
        assert difference(states[0].models["cnn"], states[1].models["cnn"]) < 1e-6 * moved
        for client, stamped in kept[1].items():
            assert difference(kept[0][client].tensors, stamped.tensors) < 1e-6


@pytest.mark.usefixtures("double_precision")
def test_models_with_batch_normalisation_are_trained_one_by_one(tmp_path: Path) -> None:
    prototypes = [
        {"name": "normalised", "model": "mobilenetv2", "options": {"width": 0.1}, "clients": [0]},
        {"name": "plain", "model": "mlp", "options": {"width": 4}},
    ]
    results = []
    for clients_at_once in (8, 1):
        _, start, clients = simulated(
            tmp_path,
            clients_at_once=clients_at_once,
            method="fedavg",
            prototypes=prototypes,
            split={"num_clients": 60, "alpha": 100.0},
        )
        request = TrainRequest(1, start.models, Local(batch_size=16), 0.0, 0)
        results.append({update.client: update for update in clients.train([0, 1, 2], request)})
        kinds = {
            prototype: type(training) for (prototype, *_), training in clients._training.items()
        }
        assert kinds["normalised"] is not StackedTraining
        assert (kinds["plain"] is StackedTraining) == (clients_at_once == 8)
    assert difference(results[0][0].weights, results[1][0].weights) == 0
    assert all(
        difference(results[0][client].weights, results[1][client].weights) < 1e-9
        for client in (1, 2)
    )


def test_a_request_is_carried_out_as_it_says_not_as_the_first_one_did(tmp_path: Path) -> None:
    _, start, clients = simulated(tmp_path, clients_at_once=8, method="fedavg")

    def weights(local: Local) -> Weights:
        (update,) = clients.train([0], TrainRequest(1, start.models, local, 0.0, 0))
        return update.weights

    first = weights(Local(learning_rate=1e-3))
    assert difference(weights(Local(learning_rate=1e-2)), first) > 1e-3
    assert difference(weights(Local(learning_rate=1e-3)), first) == 0


@pytest.mark.quickly("fedavg", "fedaux+m")
@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("method", ["fedavg", "fedprox+p", "feddf+m", "fedbe", "fedaux+m"])
def test_rounds_of_several_workers_equal_those_of_one(method: str, tmp_path: Path) -> None:
    results = []
    for workers in (1, 3):
        server, state, _ = simulated(
            tmp_path / str(workers), clients_at_once=8, workers=workers, method=method
        )
        for _ in range(2):
            state, _row = server.play_round(state)
        results.append(state.models["cnn"])
    moved = max(float(tensor.abs().max()) for tensor in results[0].values())
    for name, tensor in results[0].items():
        assert float((tensor - results[1][name]).abs().max()) < 1e-6 * moved
    assert torch.get_num_threads() == 1  # as the tests set it
