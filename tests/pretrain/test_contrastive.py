from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.blobs import blobs, extractor, seeded
from helpers.operations import Listening
from helpers.oracles import nt_xent_loop
from torch import Tensor, nn

from fedaux.config import Augmentation, Pretraining
from fedaux.core.compute import Compute
from fedaux.core.weights import snapshot
from fedaux.fast import FastBackend
from fedaux.pretrain import training as module
from fedaux.pretrain.contrastive import ProjectionHead, nt_xent
from fedaux.pretrain.training import DeviceRates, EpochProgress, Training, learning_rate

GENTLE = Augmentation(crop_scale=(0.6, 1.0), flip=0.0)


OWN = {"feature_width", "generator", "compute"}
WATCHING = {"progress", "save_seconds", "on_epoch"}
"""Arguments that are no settings."""


def section(**changes: Any) -> Pretraining:
    settings: dict[str, Any] = {
        "epochs": 2,
        "batch_size": 32,
        "projection_widths": (32, 16),
        "augmentation": GENTLE,
    }
    return Pretraining(**(settings | changes))


def pretrain(features: nn.Module, images: Tensor, **changes: Any) -> list[float]:
    own: dict[str, Any] = {"feature_width": 16, "generator": seeded()} | {
        key: changes[key] for key in OWN & changes.keys()
    }
    settings = section(
        **{key: value for key, value in changes.items() if key not in OWN | WATCHING}
    )
    training = Training(features, images, section=settings, **own)
    module.pretrain(training, **{key: changes[key] for key in WATCHING & changes.keys()})
    return training.losses


@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("pairs", [1, 2, 5])
def test_nt_xent_equals_the_loop(pairs: int, temperature: float) -> None:
    projections = torch.randn(2 * pairs, 4, generator=seeded(), dtype=torch.float64)
    expected = nt_xent_loop(projections.tolist(), temperature=temperature)
    assert float(nt_xent(projections, temperature=temperature)) == pytest.approx(
        expected, abs=1e-12
    )


def test_nt_xent_gradient_equals_finite_differences() -> None:
    projections = torch.randn(6, 4, generator=seeded(), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda rows: nt_xent(rows, temperature=0.5), (projections,))


def test_nt_xent_ignores_length_and_prefers_true_pairs() -> None:
    views = torch.randn(5, 8, generator=seeded())
    lengths = torch.rand(10, 1, generator=seeded(1)) + 0.5
    paired = torch.cat([views, views])
    torch.testing.assert_close(
        nt_xent(paired * lengths, temperature=0.5),
        nt_xent(paired, temperature=0.5),
        atol=1e-5,
        rtol=0,
    )
    wrong = torch.cat([views, views.roll(1, 0)])
    assert nt_xent(paired, temperature=0.5) < nt_xent(wrong, temperature=0.5)


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (4,)])
def test_losses_refuse_what_is_not_two_views(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="two views"):
        nt_xent(torch.ones(shape), temperature=0.5)


def test_the_temperature_has_to_be_positive() -> None:
    with pytest.raises(ValueError, match="temperature"):
        nt_xent(torch.ones(2, 4), temperature=0.0)


def test_projection_head_has_its_widths_and_its_generator() -> None:
    before = torch.get_rng_state()
    head = ProjectionHead(16, generator=seeded(1))
    assert torch.equal(before, torch.get_rng_state())
    assert [tuple(parameter.shape) for parameter in head.parameters()] == [
        (512, 16),
        (512,),
        (128, 512),
        (128,),
    ]
    weight = next(head.parameters()).detach()
    assert weight.abs().max() <= 0.25
    assert float(weight.std()) == pytest.approx(0.25 / 3**0.5, rel=0.05)
    assert torch.equal(weight, next(ProjectionHead(16, generator=seeded(1)).parameters()))
    assert not torch.equal(weight, next(ProjectionHead(16, generator=seeded(2)).parameters()))
    assert ProjectionHead(16, widths=(5,), generator=seeded())(torch.ones(3, 16)).shape == (3, 5)
    with pytest.raises(ValueError, match="widths"):
        ProjectionHead(16, widths=(), generator=seeded())
    normalised = ProjectionHead(16, widths=(5, 4), batch_norm=True, generator=seeded())
    assert [type(layer).__name__ for layer in normalised] == [
        "Linear",
        "BatchNorm1d",
        "ReLU",
        "Linear",
    ]
    plain = ProjectionHead(16, widths=(5, 4), generator=seeded())
    assert torch.equal(normalised[0].weight, plain[0].weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"projection_batch_norm": True},
        {
            "optimizer": "adamw",
            "weight_decay": 1e-2,
            "schedule": "cosine",
            "warmup_epochs": 1,
            "learning_rate": 3e-3,
        },
    ],
)
def test_loss_goes_down_and_features_are_trained_in_place(changes: dict[str, Any]) -> None:
    features = extractor().eval()
    before = [parameter.detach().clone() for parameter in features.parameters()]
    seen: list[EpochProgress] = []
    losses = pretrain(features, blobs(), epochs=12, on_epoch=seen.append, **changes)
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.2
    assert [(passed.epoch, passed.loss) for passed in seen] == list(enumerate(losses, start=1))
    assert [passed.epochs for passed in seen] == 12 * [12]
    assert seen[0].seconds_left > seen[-1].seconds_left == 0
    assert str(seen[-1]) == f"12/12, loss {losses[-1]:.3f}, ETA 0 s"
    assert not features.training
    assert all((old != new).any() for old, new in zip(before, features.parameters(), strict=True))


def test_pretraining_is_a_function_of_the_generator_and_leaves_the_global_one_alone() -> None:
    state = torch.get_rng_state()
    runs = []
    for seed in (0, 0, 1):
        features = extractor()
        losses = pretrain(features, blobs(), generator=seeded(seed))
        runs.append((losses, next(features.parameters()).detach().clone()))
    assert torch.equal(state, torch.get_rng_state())
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])
    assert runs[0][0] != runs[2][0]


@pytest.mark.parametrize(
    ("size", "batch_size", "expected"), [(40, 16, [32, 32]), (10, 16, [20]), (32, 16, [32, 32])]
)
def test_incomplete_batch_is_left_out_unless_alone(
    size: int, batch_size: int, expected: list[int]
) -> None:
    features = extractor()
    sizes: list[int] = []
    features.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    pretrain(features, blobs(size), batch_size=batch_size, epochs=1)
    assert sizes == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 1}, "batch_size"),
        ({"epochs": 0}, "epochs"),
        ({"warmup_epochs": 2}, "warmup_epochs should be below epochs, 2"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"temperature": -1.0}, "temperature"),
        ({"feature_width": 15}, r"got \[64, 16\]"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pretrain(extractor(), blobs(), **changes)


def test_too_few_or_wrong_images_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 examples, got 1"):
        pretrain(extractor(), blobs(1))
    with pytest.raises(ValueError, match="uint8"):
        pretrain(extractor(), blobs().float())


def test_a_loss_that_is_no_number_ends_pretraining() -> None:
    with pytest.raises(ValueError, match=r"learning_rate = 1e\+30: the loss is nan"):
        pretrain(extractor(), blobs(), learning_rate=1e30, epochs=4)


def test_learning_rate_rises_and_falls() -> None:
    settings = section(epochs=6, warmup_epochs=2, schedule="cosine", learning_rate=0.5)
    rates = [learning_rate(step, section=settings, steps_per_epoch=5) for step in range(30)]
    assert rates[:10] == pytest.approx([0.05 * step for step in range(1, 11)])
    assert rates[10] == 0.5
    assert rates[20] == pytest.approx(0.25)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.005
    assert [learning_rate(step, section=section(), steps_per_epoch=2) for step in range(4)] == 4 * [
        1e-3
    ]


def test_the_schedule_reaches_the_optimizer() -> None:
    settings = section(epochs=4, warmup_epochs=3, learning_rate=3e-3)
    made = Training(extractor(), blobs(32), feature_width=16, section=settings, generator=seeded())
    rates = []
    for _ in range(4):  # of one step each
        made.epoch()
        rates.append(made._optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1e-3, 2e-3, 3e-3, 3e-3])


def test_rates_on_the_device_are_taken_in_turn() -> None:
    rates = DeviceRates([0.1, 0.2, 0.3], torch.device("cpu"))
    place = rates.rate.data_ptr()
    seen = []
    for _ in range(4):
        rates.advance()
        seen.append(float(rates.rate))
    assert seen == pytest.approx([0.1, 0.2, 0.3, 0.3])
    rates.go_to(1)
    rates.advance()
    assert float(rates.rate) == pytest.approx(0.2)
    assert rates.rate.data_ptr() == place  # which an optimizer and a graph have been given


def test_weight_decay_is_for_matrices_alone() -> None:
    made = Training(
        extractor(),
        blobs(),
        feature_width=16,
        section=section(optimizer="adamw", weight_decay=0.1, projection_batch_norm=True),
        generator=seeded(),
    )
    groups = made._optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(parameter.ndim > 1 for parameter in groups[0]["params"])
    assert all(parameter.ndim == 1 for parameter in groups[1]["params"])
    assert len(groups[0]["params"]) == 4
    assert len(groups[1]["params"]) == 4 + 2  # biases, and the scale and shift of the normalisation


class Powercut(Exception):
    pass


@pytest.mark.parametrize("changes", [{}, {"projection_batch_norm": True, "schedule": "cosine"}])
def test_an_interrupted_training_ends_with_the_same_weights(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole = extractor()
    losses = pretrain(whole, blobs(), epochs=5, **changes)

    def cut(passed: EpochProgress) -> None:
        if passed.epoch == 3:
            raise Powercut

    progress, again = tmp_path / "progress.safetensors", extractor()
    with pytest.raises(Powercut):
        pretrain(
            extractor(),
            blobs(),
            epochs=5,
            progress=progress,
            save_seconds=0,
            on_epoch=cut,
            **changes,
        )
    seen: list[EpochProgress] = []
    continued = pretrain(
        again, blobs(), epochs=5, progress=progress, on_epoch=seen.append, **changes
    )
    assert [passed.epoch for passed in seen] == [4, 5]
    assert continued == losses
    assert all(
        torch.equal(tensor, snapshot(again)[name]) for name, tensor in snapshot(whole).items()
    )
    progress.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"progress.safetensors: damaged"):
        pretrain(extractor(), blobs(), epochs=5, progress=progress, **changes)


def test_progress_is_saved_no_oftener_than_asked(tmp_path: Path) -> None:
    pretrain(
        extractor(),
        blobs(),
        epochs=3,
        progress=tmp_path / "progress.safetensors",
        save_seconds=1000,
    )
    assert not list(tmp_path.iterdir())


class Capturing(Compute):
    """A machine without a GPU that believes it can capture."""

    @property
    def captures(self) -> bool:
        return True


class Graph:
    def __init__(self, step: Callable[[], None]) -> None:
        self.replay = step


def test_a_rehearsal_before_the_capture_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsed = 0

    def captured(step: Callable[[], None], *, rewind: Callable[[], object], **where: Any) -> Graph:
        nonlocal rehearsed
        for _ in range(4):
            rewind()
            step()
            rehearsed += 1
        return Graph(step)

    monkeypatch.setattr(module, "capture", captured)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    changes: dict[str, Any] = {
        "epochs": 3,
        "batch_size": 64,
        "schedule": "cosine",
        "projection_batch_norm": True,
    }
    plain, fast = extractor(), extractor()
    losses = pretrain(plain, blobs(), **changes)
    assert pretrain(fast, blobs(), compute=Capturing(), **changes) == losses
    assert rehearsed == 4
    assert all(
        torch.equal(tensor, snapshot(fast)[name]) for name, tensor in snapshot(plain).items()
    )


def test_what_cannot_be_captured_is_trained_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    def captured(step: Callable[[], None], *, rewind: Callable[[], object], **_: Any) -> Graph:
        rewind()
        step()
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(module, "capture", captured)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    plain, fast = extractor(), extractor()
    losses = pretrain(plain, blobs())
    with pytest.warns(
        UserWarning,
        match=r"cannot be captured, training is slower \(RuntimeError: operation not permitted\)",
    ):
        assert pretrain(fast, blobs(), compute=Capturing()) == losses


@pytest.mark.parametrize("channels", [1, 3])
def test_a_step_brings_no_numbers_from_the_host_and_asks_for_none(channels: int) -> None:
    """A CUDA graph cannot: where with a Python number copies it to the device, item waits for
    one."""
    images = blobs(32).expand(-1, channels, -1, -1)
    features = nn.Sequential(nn.Flatten(), nn.Linear(64 * channels, 16))
    made = Training(features, images, feature_width=16, section=section(), generator=seeded())
    numbers = made._objective.draw(32, generator=seeded())
    with Listening() as heard:
        made._loss(images, numbers)  # backward makes its zeros on the device
    assert "grid_sampler_2d" in heard.called
    assert not heard.called & {
        "where",
        "scalar_tensor",
        "lift_fresh",
        "_local_scalar_dense",
        "nonzero",
    }


@pytest.mark.usefixtures("bf16")
def test_half_precision_is_near_and_keeps_weights_whole() -> None:
    whole, half = extractor(), extractor()
    losses = pretrain(whole, blobs(), epochs=3)
    shortened = pretrain(half, blobs(), epochs=3, compute=Compute(precision=torch.bfloat16))
    assert shortened != losses
    assert shortened == pytest.approx(losses, rel=0.01)
    assert all(parameter.dtype == torch.float32 for parameter in half.parameters())


def test_the_loss_is_compiled_once_for_all_seeds_and_is_the_same(compilations: list[Any]) -> None:
    compute = Compute(compile=True)
    for number in range(2):
        settings: dict[str, Any] = {"epochs": 1, "projection_batch_norm": True}
        fast = pretrain(
            extractor(), blobs(64), compute=compute, generator=seeded(number), **settings
        )
        assert fast == pytest.approx(
            pretrain(extractor(), blobs(64), generator=seeded(number), **settings), rel=1e-4
        )
    assert len(compilations) == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:TensorFloat32"
)  # of the compiler
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("compile", [False, True])
def test_captured_steps_equal_plain_ones_on_a_gpu(compile: bool) -> None:
    device = torch.device("cuda")
    tf32, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    results = []
    for at_once in (1, 2):
        compute = Compute(device, compile=compile, clients_at_once=at_once)
        features = FastBackend(compute).place(extractor())
        losses = pretrain(
            features,
            blobs().to(device),
            epochs=4,
            schedule="cosine",
            projection_batch_norm=True,
            compute=compute,
            generator=torch.Generator(device).manual_seed(0),
        )
        results.append((losses, snapshot(features)))
    torch.backends.cudnn.allow_tf32 = tf32
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-3)
    start = {name: tensor.to(device) for name, tensor in extractor().state_dict().items()}
    assert distance(results[0][1], results[1][1]) < 0.05 * distance(results[0][1], start)


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Of weights: Adam turns rounding of a tiny gradient into a whole step of one weight, so not
    the largest."""
    return math.sqrt(
        sum(float((first[name].double() - second[name].double()).square().sum()) for name in first)
    )
