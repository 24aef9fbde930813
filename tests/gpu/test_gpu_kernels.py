"""Training steps by custom kernels, on a GPU that has what they need. `make test-gpu` runs
these."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gpu_jobs import CLASSES, can, difference, jobs

from fedaux import seeding
from fedaux.config import Distillation, Local
from fedaux.core.backend import ClientJob, TrainContext, TrainResult
from fedaux.core.compute import Compute
from fedaux.core.distillation import distill
from fedaux.core.messages import Weights
from fedaux.core.objectives import class_adjustment, local_loss
from fedaux.core.plain_backend import one_by_one
from fedaux.core.weights import snapshot
from fedaux.fast import FastBackend
from fedaux.fast.batched import BatchedTraining
from fedaux.fast.capture import CapturedSteps
from fedaux.fast.distillation import prepared_steps
from fedaux.models import MODELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not can(), reason="needs a GPU with bulk tensor copies"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:TensorFloat32"
    ),
]


def place(precision: torch.dtype, *, compile: bool = True, **settings: Any) -> TrainContext:
    at_once = settings.pop("clients_at_once", 3)
    compute = Compute(torch.device("cuda"), precision, compile=compile, clients_at_once=at_once)
    generator = np.random.default_rng(0)
    channels, classes = settings.pop("channels", 3), settings.pop("classes", CLASSES)
    images = torch.from_numpy(generator.integers(0, 256, (500, channels, 32, 32), dtype=np.uint8))
    proximal = settings.pop("proximal", 0.0)
    with seeding.initialisation(0, part="resnet8"):
        model = MODELS["resnet8"]((channels, 32, 32), classes)
    return TrainContext(
        model=FastBackend(compute).place(model),
        inputs=compute.place_inputs(images),
        labels=torch.from_numpy(generator.integers(0, classes, 500)).cuda(),
        section=Local(**({"batch_size": 16, "learning_rate": 1e-3} | settings)),
        proximal=proximal,
        compute=compute,
        key="resnet8",
    )


def exactly(settings: dict[str, Any], **more: Any) -> dict[int, tuple[Weights, TrainResult]]:
    """The plain loop in single precision."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    here = place(torch.float32, compile=False, **settings)
    done = {
        job.client: (own, trained)
        for job, own, trained in one_by_one(here)(jobs(**more), snapshot(here.model))
    }
    torch.backends.cudnn.allow_tf32 = before
    return done


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"proximal": 0.3, "epochs": 2, "weight_decay": 1e-3},
        {"clients_at_once": 8, "batch_size": 32},  # the defaults, whose products are cut otherwise
        {"channels": 1, "classes": 100},
    ],
)
def test_clients_by_kernels_are_as_near_the_exact_ones_as_the_plain_loop_in_half_precision(
    settings: dict[str, Any],
) -> None:
    here = place(torch.bfloat16, **settings)
    weights = snapshot(here.model)
    assert BatchedTraining.possible(here)
    exact = exactly(settings)
    plain = {job.client: (own, trained) for job, own, trained in one_by_one(here)(jobs(), weights)}
    training = BatchedTraining(here, capacity=100)
    for _ in range(2):  # the second time from what the first has left in memory
        fast = {job.client: (own, trained) for job, own, trained in training(jobs(), weights)}
        assert fast.keys() == exact.keys()
        for client, (own, trained) in exact.items():
            moved = difference(own, weights)
            assert moved > 1e-4
            rounding = difference(plain[client][0], own)
            assert difference(fast[client][0], own) < 1.25 * rounding + 0.02 * moved
            assert fast[client][1].loss == pytest.approx(trained.loss, rel=0.02)
            assert all(
                torch.equal(value, own[name])
                for name, value in fast[client][0].items()
                if "tracked" in name
            )


@pytest.mark.parametrize(
    ("names", "mirrored"),
    [
        (("logit-adjusted", "rehearsal"), False),
        (("logit-adjusted", "rehearsal"), True),
        (("rehearsal",), False),
    ],
)
def test_adjusted_logits_and_rehearsed_rows_by_kernels_are_as_near_the_exact_ones(
    names: tuple[str, ...], mirrored: bool
) -> None:
    """The local step of `fedaux2`, 32 private and 96 public images, and rehearsal alone."""
    section = Local(batch_size=32, learning_rate=1e-3)
    generator = torch.Generator().manual_seed(0)
    beliefs = 0.7 * torch.softmax(2 * torch.randn(200, CLASSES, generator=generator), dim=1).cuda()
    if mirrored:
        beliefs = beliefs.repeat(2, 1)

    def context(precision: torch.dtype) -> TrainContext:
        own = place(precision, compile=precision == torch.bfloat16, clients_at_once=8)
        public = own.inputs[:200].flip(0)
        parts = [own.inputs, public]
        if mirrored:
            parts = [each for part in parts for each in (part, part.flip(-1))]
        return replace(
            own,
            inputs=torch.cat(parts),
            labels=own.labels.repeat(2) if mirrored else own.labels,
            section=section,
            loss=local_loss(names, section, rehearsed=96),
            mirrored=mirrored,
        )

    def work(here: TrainContext) -> list[ClientJob]:
        return [
            replace(
                job,
                adjustment=class_adjustment(
                    names, section, here.labels[job.rows], num_classes=CLASSES
                ),
                soft_labels=beliefs,
            )
            for job in jobs()
        ]

    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    single = context(torch.float32)
    weights = snapshot(single.model)
    exact = {job.client: (own, out) for job, own, out in one_by_one(single)(work(single), weights)}
    torch.backends.cudnn.allow_tf32 = before
    half = context(torch.bfloat16)
    assert BatchedTraining.possible(half)
    plain = {job.client: own for job, own, _ in one_by_one(half)(work(half), weights)}
    training = BatchedTraining(half, capacity=100)
    for _ in range(2):
        fast = {job.client: (own, out) for job, own, out in training(work(half), weights)}
        for client, (own, trained) in exact.items():
            moved, rounding = difference(own, weights), difference(plain[client], own)
            assert moved > 1e-4
            assert difference(fast[client][0], own) < 1.25 * rounding + 0.02 * moved
            assert fast[client][1].loss == pytest.approx(trained.loss, rel=0.02)


def test_moments_are_kept_from_round_to_round() -> None:
    settings: dict[str, Any] = {"optimizer_state": "kept"}
    here = place(torch.bfloat16, **settings)
    weights = snapshot(here.model)
    training = BatchedTraining(here, capacity=100)
    states: dict[str, dict[int, Any]] = {"fast": {}, "exact": {}}
    for round in (1, 2):
        exact = exactly(settings, states=states["exact"], round=round)
        fast = {
            job.client: (own, t)
            for job, own, t in training(jobs(states["fast"], round=round), weights)
        }
        states = {
            name: {client: dict(trained.optimizer_state) for client, (_, trained) in done.items()}
            for name, done in (("fast", fast), ("exact", exact))
        }
        for client, state in states["exact"].items():
            assert state.keys() == states["fast"][client].keys()
            for name, value in state.items():
                if name.endswith("/step"):
                    assert float(states["fast"][client][name]) == float(value)
            head = states["fast"][client]["head.weight/exp_avg"], state["head.weight/exp_avg"]
            assert float((head[0] - head[1]).norm()) < 0.2 * float(head[1].norm())


def test_a_client_on_its_own_is_the_same_to_rounding_whoever_is_beside_it() -> None:
    here = place(torch.bfloat16)
    weights = snapshot(here.model)
    training = BatchedTraining(here, capacity=100)
    together = {job.client: own for job, own, _ in training(jobs(), weights)}
    for client in range(5):
        ((_, alone, _),) = training([jobs()[client]], weights)
        assert difference(alone, together[client]) < 0.25 * difference(alone, weights)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_decay": 1e-3, "epochs": 2},
        {"batch_size": 128},  # the default
    ],
)
def test_distillation_by_kernels_is_as_near_the_exact_one_as_captured_steps(
    settings: dict[str, Any],
) -> None:
    section = Distillation(**{"batch_size": 64, "learning_rate": 1e-3} | settings)
    results = []
    for precision, by_kernels in (
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
    ):
        here = place(precision, compile=by_kernels)
        targets = torch.softmax(
            3 * torch.randn(500, CLASSES, generator=torch.Generator().manual_seed(0)), 1
        ).cuda()
        weights = snapshot(here.model)
        steps = prepared_steps(
            here.model,
            here.inputs,
            torch.zeros_like(targets),
            section=section,
            compute=here.compute,
            key="resnet8",
        )
        assert steps is not None
        assert isinstance(steps, CapturedSteps) != by_kernels
        for _ in range(2):
            after = distill(
                here.model, weights, here.inputs, targets, section=section,
                generator=seeding.generator(0, "x"), compute=here.compute, steps=steps,
            )  # fmt: skip
        results.append(after)
    exact, captured, fast = results
    assert difference(fast, exact) < 1.25 * difference(captured, exact) + 0.02 * difference(
        exact, weights
    )


def test_what_cannot_be_compiled_is_trained_on_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedaux.fast.triton import network

    def refuse(*_: object) -> None:
        raise ValueError("no such instruction")

    monkeypatch.setattr(network.Network, "step", refuse)
    here = place(torch.bfloat16)
    weights = snapshot(here.model)
    with pytest.warns(UserWarning, match="resnet8: no custom kernels here, training is slower"):
        fast = {
            job.client: own for job, own, _ in BatchedTraining(here, capacity=100)(jobs(), weights)
        }
    assert all(difference(own, weights) > 1e-4 for own in fast.values())
    section = Distillation(batch_size=64)
    targets = torch.full((500, CLASSES), 1 / CLASSES, device="cuda")
    with pytest.warns(UserWarning, match="resnet8: no custom kernels here, distillation is slower"):
        steps = prepared_steps(
            here.model, here.inputs, targets, section=section, compute=here.compute, key="resnet8"
        )
    assert isinstance(steps, CapturedSteps)


@pytest.mark.parametrize("change", ["precision", "compile", "optimizer"])
def test_other_settings_take_other_ways(change: str) -> None:
    here = place(
        torch.float32 if change == "precision" else torch.bfloat16,
        compile=change != "compile",
        optimizer="sgd" if change == "optimizer" else "adam",
    )
    assert not BatchedTraining.possible(here)
