from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.experiments import tiny
from helpers.federations import Wrapped, federation
from torch import Tensor, nn
from torch.nn import functional

import fedaux
from fedaux import seeding
from fedaux.config import Local
from fedaux.core.backend import ClientJob, TrainContext
from fedaux.core.compute import Compute, to_float
from fedaux.core.dpsgd import refusal_of, schedule, train_privately
from fedaux.core.local_training import train_locally
from fedaux.core.messages import TrainRequest, Update
from fedaux.models import MODELS
from fedaux.privacy.accounting import ledger_lines, tight_composition
from fedaux.privacy.exact_gaussian import SimulatedDraws
from fedaux.privacy.ledger import UPDATE, LedgerEntry
from fedaux.running.run_directory import RunDirectory

pytestmark = pytest.mark.usefixtures("without_pages")

needs_opacus = pytest.mark.skipif(
    importlib.util.find_spec("opacus") is None or importlib.util.find_spec("dp_accounting") is None,
    reason="needs the extra dpsgd (opacus, dp-accounting)",
)


def examples(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = np.random.default_rng(seed)
    images = torch.from_numpy(generator.integers(0, 256, (size, 1, 8, 8), dtype=np.uint8))
    return images, torch.from_numpy(generator.integers(0, 10, size))


def small_model(name: str = "cnn") -> nn.Module:
    with seeding.initialisation(0, part="model"):
        return MODELS[name]((1, 8, 8), 10, **({"width": 4} if name == "cnn" else {}))


def section(**values: Any) -> Local:
    privacy = values.pop("privacy", {})
    return Local(**({"batch_size": 16, "optimizer": "sgd", "privacy": privacy} | values))


def train(
    model: nn.Module, size: int, *, seed: int = 0, proximal: float = 0.0, **values: Any
) -> LedgerEntry:
    images, labels = examples(size)
    generator = seeding.generator(seed, "local")
    return train_privately(
        model,
        images,
        labels,
        section=section(**values),
        proximal=proximal,
        draws=SimulatedDraws(generator, device=torch.device("cpu")),
        client=3,
    )[1]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@needs_opacus
def test_a_step_equals_plain_loops_where_noise_is_next_to_nothing() -> None:
    """theta - rate (sum_x min(1, C / |g_x|) g_x / n + mu (theta - theta_0)), twice, every example
    sampled."""
    model, oracle = small_model(), small_model()
    images, labels = examples(6)
    clip, rate, proximal = 0.5, 0.5, 0.3
    train(
        model,
        6,
        batch_size=6,
        epochs=2,
        learning_rate=rate,
        proximal=proximal,
        privacy={"noise_multiplier": 1e-3, "clip": clip},
    )
    start = flat(oracle)
    for _ in range(2):
        total = torch.zeros_like(start)
        norms = []
        for image, label in zip(images, labels, strict=True):
            oracle.zero_grad()
            functional.cross_entropy(oracle(image[None].float() / 255), label[None]).backward()
            gradient = torch.cat([parameter.grad.flatten() for parameter in oracle.parameters()])  # type: ignore[union-attr]
            norms.append(float(gradient.norm()))
            total += gradient * min(1.0, clip / norms[-1])
        assert max(norms) > clip
        moved = flat(oracle) - rate * (total / 6 + proximal * (flat(oracle) - start))
        nn.utils.vector_to_parameters(moved, oracle.parameters())
    assert torch.allclose(flat(model), flat(oracle), atol=5e-4)
    assert float((flat(model) - start).norm()) > 0.05


@needs_opacus
def test_noise_has_the_stated_spread() -> None:
    model = small_model()
    before = flat(model)
    entry = train(
        model,
        40,
        batch_size=20,
        learning_rate=1.0,
        privacy={"noise_multiplier": 100.0, "clip": 0.2},
    )
    assert entry.steps == 2
    # Two steps of noise sigma over the expected batch size; gradients are at most a fortieth of it.
    spread = np.sqrt(2) * entry.sigma / 20
    assert float((flat(model) - before).std()) == pytest.approx(spread, rel=0.1)


@needs_opacus
def test_hostile_weights_cannot_make_an_example_show_by_infinity() -> None:
    """A bright image overflows under these weights and gives NaN gradients; the update is finite
    all the same."""
    linear = nn.Linear(64, 10)
    model = nn.Sequential(nn.Flatten(), linear)
    nn.init.constant_(linear.weight, 1e37)
    images = torch.full((6, 1, 8, 8), 2, dtype=torch.uint8)
    images[4] = 255
    labels = torch.arange(6)
    assert not bool(functional.cross_entropy(model(images.float() / 255), labels).isfinite())
    before = flat(model)
    train_privately(
        model,
        images,
        labels,
        section=section(
            batch_size=6, learning_rate=1e35
        ),  # so that steps are seen beside such weights
        proximal=0.0,
        draws=SimulatedDraws(seeding.generator(0, "local"), device=torch.device("cpu")),
        client=0,
    )
    assert bool(flat(model).isfinite().all())
    assert not torch.equal(flat(model), before)


@needs_opacus
def test_entries_state_the_price_in_terms_of_replacing_one() -> None:
    entry = train(small_model(), 64, privacy={"noise_multiplier": 1.5, "clip": 0.2, "delta": 1e-4})
    assert (entry.client, entry.num_examples, entry.purpose, entry.mechanism) == (
        3,
        64,
        UPDATE,
        "dp-sgd",
    )
    assert (entry.sensitivity, entry.sigma) == pytest.approx((0.4, 0.3))
    assert (entry.steps, entry.sampling_probability, entry.noise) == (4, 0.25, "simulated")
    assert tight_composition(delta=1e-4)([entry])[0] == pytest.approx(entry.epsilon)
    assert LedgerEntry.from_json(json.loads(json.dumps(entry.to_json()))) == entry


@needs_opacus
def test_training_repeats_by_its_stream_and_leaves_the_global_one_alone() -> None:
    state = torch.get_rng_state()
    models = [small_model() for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        train(model, 32, seed=seed, optimizer="adam", learning_rate=1e-3)
    assert torch.equal(flat(models[0]), flat(models[1]))
    assert not torch.equal(flat(models[0]), flat(models[2]))
    assert torch.equal(state, torch.get_rng_state())


@needs_opacus
def test_the_model_is_an_ordinary_one_afterwards() -> None:
    model = small_model()
    names = list(model.state_dict())
    train(model, 32)
    train(model, 32)
    assert list(model.state_dict()) == names
    images, labels = examples(8)
    context = TrainContext(model, images, labels, Local(), 0.0, Compute(), key="test")
    job = ClientJob(0, torch.arange(8), seeding.generator(0, "local"), state={})
    assert train_locally(context, job).loss > 0


@needs_opacus
def test_steps_without_examples_are_steps_of_noise() -> None:
    entry = train(small_model(), 30, batch_size=1)
    assert entry.steps == 30
    assert entry.sampling_probability == pytest.approx(1 / 30)


def test_the_schedule_follows_from_public_numbers() -> None:
    assert schedule(section(batch_size=32, epochs=3), num_examples=100)[1] == 3 * 4
    assert schedule(section(batch_size=32), num_examples=96)[1] == 3
    query, steps = schedule(
        section(batch_size=32, privacy={"noise_multiplier": 2.0}), num_examples=5
    )
    assert (query.sampling_probability, query.noise_multiplier, steps) == (1.0, 2.0, 1)


def test_batch_normalisation_is_refused_with_the_way_out() -> None:
    assert refusal_of(small_model("resnet8-gn")) is None
    refusal = refusal_of(small_model("resnet8"))
    assert refusal is not None
    assert "features.bn1" in refusal
    assert "resnet8-gn" in refusal


@needs_opacus
def test_training_refuses_batch_normalisation_and_empty_clients() -> None:
    with pytest.raises(ValueError, match="resnet8-gn"):
        train(small_model("resnet8"), 4)
    with pytest.raises(ValueError, match="without examples"):
        train(small_model(), 0)


@pytest.mark.quickly("shufflenet-gn")
@needs_opacus
@pytest.mark.parametrize("name", ["resnet8-gn", "mobilenetv2-gn", "shufflenet-gn"])
def test_gradients_of_single_examples_are_those_of_a_loop(name: str) -> None:
    from opacus.grad_sample import GradSampleModule

    model = small_model(name)
    assert train(model, 4, batch_size=2).steps == 2
    model = model.double()  # groups of few numbers make much of rounding
    images, labels = examples(3)
    inputs = to_float(images).double()
    expected = []
    for image, label in zip(inputs, labels, strict=True):
        model.zero_grad()
        functional.cross_entropy(model(image[None]), label[None]).backward()
        expected.append(
            [
                parameter.grad.clone()
                for parameter in model.parameters()
                if parameter.grad is not None
            ]
        )
    wrapped = GradSampleModule(model)
    functional.cross_entropy(wrapped(inputs.requires_grad_()), labels).backward()
    for parameter, *gradients in zip(model.parameters(), *expected, strict=True):
        torch.testing.assert_close(
            parameter.grad_sample, torch.stack(gradients), rtol=1e-8, atol=1e-10
        )


def test_without_opacus_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus.grad_sample", None)
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[dpsgd\]'"):
        train(small_model(), 4)


@needs_opacus
@pytest.mark.slow
def test_a_protected_run_states_one_number_for_everything_a_client_sent(tmp_path: Path) -> None:
    changes = {"rounds": 2, "local": {"privacy": {"noise_multiplier": 2.0}, "batch_size": 64}}
    experiment = tiny(method=["fedaux", "fedavg"], **changes)
    result = fedaux.run(experiment, out=tmp_path / "run")
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert "without differential privacy" not in ledger["unprotected"]
    purposes = [(entry["method"], entry["purpose"]) for entry in ledger["entries"]]
    assert purposes.count(("fedaux", UPDATE)) == purposes.count(("fedavg", UPDATE)) == 8
    assert purposes.count(("fedaux", "certainty scores")) == 4
    scored, plain = result.summary["rows"]
    assert scored["updates_protected"]
    assert plain["updates_protected"]
    assert (scored["delta"], plain["delta"]) == (1e-5, 1e-5)
    assert scored["epsilon"] > plain["epsilon"]
    worst = max(entry["epsilon"] for entry in ledger["entries"] if entry["purpose"] == UPDATE)
    assert worst < plain["epsilon"] < 2 * worst
    lines = ledger_lines(ledger)
    assert len(lines) == 4
    assert "fedaux released one vector for certainty scores at (ε, δ) = (1, 1e-5)" in lines[0]
    assert "sent 2 model updates, trained with DP-SGD, at ε = " in lines[1]
    assert f"at most (ε, δ) = ({scored['epsilon']:.4g}, 1e-5)" in lines[1]
    assert lines[3] == f"Not protected: {ledger['unprotected']}"
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(
        json.loads(row)["local_loss"] is None for row in rows
    )  # the loss has no noise, so it is not sent
    with RunDirectory.open(tmp_path / "run", experiment, resume=True) as directory:
        progress = directory.load("fedaux", 0)
        assert progress is not None
        assert len(progress.state.ledger) == 8
        assert sorted(progress.state.releases) == [0, 1, 2, 3]


@needs_opacus
def test_a_run_that_cannot_be_private_stops_before_pretraining(tmp_path: Path) -> None:
    prototypes = [{"name": "resnet", "model": "resnet8"}]
    with pytest.raises(ValueError, match="resnet8-gn"):
        fedaux.run(tiny(prototypes=prototypes, local={"privacy": {}}), out=tmp_path / "run")
    assert not (tmp_path / "run" / "pretrained").exists()


class NullCallback(Wrapped):
    """Clients that keep the cost of their updates to themselves."""

    def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        for update in super().train(clients, request):
            yield replace(update, entry=None)


class Broken(Wrapped):
    """Clients whose updates cannot be used."""

    def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        for update in super().train(clients, request):
            yield replace(update, num_examples=0)


@needs_opacus
def test_updates_need_a_price_and_cost_it_even_where_they_are_useless(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"method": ["fedavg"], "local": {"privacy": {}, "batch_size": 64}}
    server, state, _, _ = federation(tmp_path / "silent", kind=NullCallback, **changes)
    state, row = server.play_round(state)
    assert row["clients_answered"] == []
    assert all("privacy cost" in reason for reason in row["clients_dropped"].values())
    server, state, _, _ = federation(tmp_path / "broken", kind=Broken, **changes)
    state, row = server.play_round(state)
    assert row["clients_answered"] == []
    assert [entry.client for entry in state.ledger] == [0, 1, 2, 3]
