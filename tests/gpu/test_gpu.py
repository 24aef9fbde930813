"""The fast ways on a GPU equal the plain loop. `make test-gpu` runs these; elsewhere they are
skipped."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.experiments import IMAGE_MODELS
from helpers.gpu_jobs import CLASSES, difference, jobs
from helpers.recorded_draws import Recorded
from torch import nn

from fedaux import seeding
from fedaux.config import Local, LocalPrivacy, Pretraining
from fedaux.core import dpsgd
from fedaux.core.backend import ClientJob, TrainContext
from fedaux.core.compute import Compute, to_float
from fedaux.core.plain_backend import PlainPredictor, one_by_one
from fedaux.core.weights import snapshot
from fedaux.data.vocabulary import Vocabulary
from fedaux.encoders import Encoder, Extractor, Images
from fedaux.fast import FastBackend, depthwise
from fedaux.fast.fusion import FusedInference
from fedaux.fast.inference import FastPredictor
from fedaux.fast.streams import StreamTraining
from fedaux.models import MODELS, SplitModel
from fedaux.pretrain.training import Training, pretrain
from fedaux.privacy.accounting import Query
from fedaux.privacy.mechanism import products, within_unit_ball

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("exact_convolutions"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:TensorFloat32"
    ),  # of the compiler
]


def model(name: str) -> SplitModel:
    with seeding.initialisation(0, part=name):
        return MODELS[name]((3, 32, 32), CLASSES)


def place(
    name: str, *, clients_at_once: int = 3, compile: bool = False, **settings: Any
) -> TrainContext:
    compute = Compute(
        torch.device("cuda"), torch.float32, compile=compile, clients_at_once=clients_at_once
    )
    generator = np.random.default_rng(0)
    images = torch.from_numpy(generator.integers(0, 256, (500, 3, 32, 32), dtype=np.uint8))
    proximal, corrected = settings.pop("proximal", 0.0), settings.pop("corrected", False)
    return TrainContext(
        model=FastBackend(compute).place(model(name)),
        inputs=compute.place_inputs(images),
        labels=torch.from_numpy(generator.integers(0, CLASSES, 500)).cuda(),
        section=Local(**({"batch_size": 16, "learning_rate": 1e-3} | settings)),
        proximal=proximal,
        compute=compute,
        key=name,
        corrected=corrected,
    )


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("resnet8", {}),
        (
            "resnet8",
            {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 1e-3, "learning_rate": 0.01},
        ),
        ("resnet8", {"proximal": 0.3, "epochs": 2}),
        ("resnet8", {"optimizer": "sgd", "learning_rate": 0.01, "corrected": True}),
        ("cnn", {}),
        ("mobilenetv2", {}),
        ("shufflenet", {}),
    ],
)
def test_clients_side_by_side_equal_one_by_one(name: str, settings: dict[str, Any]) -> None:
    here = place(name, **settings)
    weights = snapshot(here.model)

    def work() -> list[ClientJob]:
        if not here.corrected:
            return jobs()
        names = [name for name, _ in here.model.named_parameters()]
        return [
            replace(
                job,
                correction={k: (0.01 * job.client + 0.01) * weights[k].sign() for k in names},
            )
            for job in jobs()
        ]

    plain = {job.client: (own, trained) for job, own, trained in one_by_one(here)(work(), weights)}
    fast = {
        job.client: (own, trained)
        for job, own, trained in StreamTraining(here, capacity=100)(work(), weights)
    }
    assert plain.keys() == fast.keys()
    for client, (own, trained) in plain.items():
        moved = difference(own, weights)
        assert moved > 1e-4
        # Adam divides by the root of tiny squares, so rounding shows in single weights.
        assert difference(own, fast[client][0]) < 0.05 * moved
        assert fast[client][1].loss == pytest.approx(trained.loss, rel=1e-3)


def test_a_second_round_starts_anew_or_goes_on() -> None:
    for kept in ("reset", "kept"):
        here = place("cnn", optimizer_state=kept)
        weights = snapshot(here.model)
        results = []
        for training in (one_by_one(here), StreamTraining(here, capacity=100)):
            states = {
                job.client: trained.optimizer_state for job, _, trained in training(jobs(), weights)
            }
            assert all(bool(state) == (kept == "kept") for state in states.values())
            results.append(
                {job.client: own for job, own, _ in training(jobs(states, round=2), weights)}
            )
        for client, own in results[0].items():
            assert difference(own, results[1][client]) < 0.05 * difference(own, weights)


def test_compiled_steps_equal_plain_ones() -> None:
    here = place("resnet8", compile=True)
    weights = snapshot(here.model)
    plain = {job.client: own for job, own, _ in one_by_one(here)(jobs(), weights)}
    for job, own, _ in StreamTraining(here, capacity=100)(jobs(), weights):
        assert difference(own, plain[job.client]) < 0.05 * difference(own, weights)


def test_what_cannot_be_captured_is_trained_plainly() -> None:
    class Stubborn(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs if float(inputs.detach().sum()) > 0 else -inputs  # waits for the device

    here = place("cnn")
    here.model.get_submodule("features").add_module("stubborn", Stubborn())
    weights = snapshot(here.model)
    plain = {job.client: own for job, own, _ in one_by_one(here)(jobs(), weights)}
    with pytest.warns(UserWarning, match="cannot be captured"):
        fast = {
            job.client: own for job, own, _ in StreamTraining(here, capacity=100)(jobs(), weights)
        }
    assert all(
        difference(own, fast[client]) < 0.05 * difference(own, weights)
        for client, own in plain.items()
    )
    assert torch.rand(3, device="cuda").shape == (
        3,
    )  # the failed capture has not locked the generator


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_fused_predictions_are_those_of_the_module_to_half_precision(name: str) -> None:
    module = FastBackend(Compute(torch.device("cuda"))).place(model(name))
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            nn.init.normal_(layer.running_mean, 0, 0.1)
            nn.init.uniform_(layer.running_var, 0.5, 1.5)
    images = torch.randint(0, 256, (70, 3, 32, 32), dtype=torch.uint8, device="cuda")
    exact = FastPredictor(module, Compute(torch.device("cuda")))(
        snapshot(module), images, batch_size=32
    )
    predictor = FastPredictor(module, Compute(torch.device("cuda"), torch.bfloat16))
    half = predictor(snapshot(module), images, batch_size=32)
    assert half.dtype == torch.float32
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        rounded = module.eval()(to_float(images)).float()  # half precision, operation by operation
    assert float((exact - half).norm()) <= 1.5 * float((exact - rounded).norm())
    other = {
        key: 0.9 * tensor if tensor.is_floating_point() else tensor
        for key, tensor in snapshot(module).items()
    }
    both = predictor.many([snapshot(module), other], images, batch_size=32)
    assert torch.equal(both[0], half)
    assert torch.equal(both[1], predictor(other, images, batch_size=32))
    fused = FusedInference(module)
    with torch.no_grad():
        prepared = fused.prepared(to_float(images), dtype=torch.float32)
        own = fused(fused.fold(snapshot(module), dtype=torch.float32), prepared)
    assert float((exact - own).norm() / exact.norm()) < 1e-4


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("channels", "size"), [(50, 16), (96, 7), (3, 1)])
def test_depthwise_kernels_are_the_convolution_and_its_gradients(
    channels: int, size: int, stride: int
) -> None:
    depthwise.prepare(torch.device("cuda"))
    assert depthwise.takes(torch.zeros(1, 1, 1, 1, device="cuda")), "Triton comes with torch here"
    images = torch.randn(9, channels, size, size, device="cuda", requires_grad=True)
    weight = torch.randn(channels, 1, 3, 3, device="cuda", requires_grad=True)
    exact = nn.functional.conv2d(
        images.double(), weight.double(), stride=stride, padding=1, groups=channels
    )
    quick = depthwise.depthwise(images, weight, stride)
    gradient = torch.randn_like(quick)
    torch.testing.assert_close(quick, exact.float(), rtol=1e-5, atol=1e-4)
    expected = torch.autograd.grad(exact, (images, weight), gradient.double())
    for got, right in zip(
        torch.autograd.grad(quick, (images, weight), gradient), expected, strict=True
    ):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-4)
    torch.library.opcheck(depthwise.depthwise, (images, weight, stride))
    bias = torch.randn(channels, device="cuda")
    cut = depthwise.joined(images.detach(), weight.detach(), bias, stride=stride, most=6.0)
    torch.testing.assert_close(
        cut, (exact.detach().float() + bias[:, None, None]).clamp(0, 6), rtol=1e-5, atol=1e-4
    )
    half = depthwise.depthwise(images.bfloat16(), weight.bfloat16(), stride)
    assert half.dtype is torch.bfloat16
    torch.testing.assert_close(half.float(), exact.detach().float(), rtol=0.02, atol=0.1)
    spoilt = images.detach().clone().index_fill_(1, torch.tensor([0], device="cuda"), float("nan"))
    cut = depthwise.joined(spoilt, weight.detach(), bias, stride=stride, most=6.0)
    assert bool(cut[:, 0].isnan().all())
    assert bool(cut[:, 1:].isfinite().all())


def test_prediction_does_not_disturb_training() -> None:
    module = FastBackend(Compute(torch.device("cuda"))).place(model("resnet8")).train()
    before = copy.deepcopy(snapshot(module))
    FastPredictor(module, Compute(torch.device("cuda"), torch.bfloat16))(
        before, torch.zeros(4, 3, 32, 32, dtype=torch.uint8, device="cuda"), batch_size=2
    )
    assert module.training
    assert difference(before, snapshot(module)) == 0


def text_place(*, compile: bool) -> TrainContext:
    """Texts of different lengths; more tokens a batch than the lookup's backward has its short cut
    for."""
    compute = Compute(torch.device("cuda"), torch.float32, compile=compile, clients_at_once=3)
    generator = np.random.default_rng(0)
    ids = generator.integers(5, 300, (500, 256)).astype(np.int32)
    ids[np.arange(256)[None, :] >= generator.integers(2, 257, (500, 1))] = 0
    with seeding.initialisation(0, part="bert"):
        made = MODELS["bert"]((256, 300), CLASSES, layers=2, width=32, heads=4, intermediate=64)
    return TrainContext(
        model=FastBackend(compute).place(made),
        inputs=compute.place_inputs(torch.from_numpy(ids)),
        labels=torch.from_numpy(generator.integers(0, CLASSES, 500)).cuda(),
        section=Local(batch_size=16, learning_rate=1e-3),
        proximal=0.0,
        compute=compute,
        key="bert",
    )


@pytest.mark.parametrize("compile", [False, True])
def test_text_models_side_by_side_equal_one_by_one(compile: bool) -> None:
    here = text_place(
        compile=compile
    )  # what could not be captured would warn, and warnings are errors
    weights = snapshot(here.model)
    plain = {job.client: own for job, own, _ in one_by_one(here)(jobs(), weights)}
    for job, own, _ in StreamTraining(here, capacity=100)(jobs(), weights):
        assert difference(own, plain[job.client]) < 0.05 * difference(own, weights)


def test_text_predictions_in_half_precision_are_near() -> None:
    here = text_place(compile=False)
    weights = snapshot(here.model)
    exact = FastPredictor(here.model, here.compute)(weights, here.inputs, batch_size=64)
    half = FastPredictor(here.model, Compute(torch.device("cuda"), torch.bfloat16))(
        weights, here.inputs, batch_size=64
    )
    assert float((exact - half).norm() / exact.norm()) < 0.03


def test_language_modelling_can_be_captured() -> None:
    words = _Words(300)
    losses = []
    for at_once in (1, 8):
        with seeding.initialisation(0, part="bert"):
            made = MODELS["bert"]((64, 300), 2, layers=2, width=32, heads=4, intermediate=64)
        compute = Compute(torch.device("cuda"), torch.float32, clients_at_once=at_once)
        training = Training(
            FastBackend(compute).place(made).features,
            text_place(compile=False).inputs[:, :64].contiguous(),
            feature_width=32,
            section=Pretraining(kind="masked", epochs=3, batch_size=50),
            generator=torch.Generator("cuda").manual_seed(0),
            compute=compute,
            vocabulary=words,
        )
        pretrain(training)
        losses.append(training.losses)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


class _Words(Vocabulary):
    """As many words as asked for, and the marks."""

    def __init__(self, size: int) -> None:
        marks = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
        tokens = marks | {f"w{number}": number for number in range(len(marks), size)}
        super().__init__(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}), "a test")


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_features_of_one_image_at_a_time_do_not_depend_on_the_others(
    name: str, precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a node needs of a GPU, with the settings that a node chooses."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    compute = Compute(torch.device("cuda"), precision)
    module = compute.place(MODELS[name]((3, 32, 32), 10)).features
    predict, extractor = PlainPredictor(module, compute), snapshot(module)
    images = compute.place_inputs(torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8))
    whole = predict.alone(extractor, images)
    order = torch.randperm(40, device="cuda")
    assert torch.equal(predict.alone(extractor, images[order]), whole[order])
    replaced = torch.cat([255 - images[:1], images[1:]])
    assert torch.equal(predict.alone(extractor, replaced)[1:], whole[1:])
    assert torch.equal(predict.alone(extractor, images[7:8]), whole[7:8])
    rows, matrix = whole.double(), torch.randn(whole.shape[1], 9, device="cuda").double()
    projected = within_unit_ball(products(rows, matrix))
    assert torch.equal(within_unit_ball(products(rows[order], matrix)), projected[order])
    assert torch.equal(within_unit_ball(products(rows[7:8], matrix)), projected[7:8])


@pytest.mark.parametrize("name", ["cnn", "resnet8", "mobilenetv2"])
def test_features_of_a_nodes_encoder_are_a_function_of_their_image(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    inputs = Images(32, 32, (0.5,) * 3, (0.25,) * 3)
    encoder = Encoder(MODELS[name]((3, 32, 32), 10).features, inputs)
    compute = Compute(torch.device("cuda"), torch.bfloat16)

    def features(contents: Any) -> torch.Tensor:
        return Extractor(encoder, compute, batch_size=1).features(list(contents))

    images = np.random.default_rng(0).integers(0, 256, (9, 3, 40, 33), dtype=np.uint8)
    whole, order = features(images), [4, 2, 8, 5, 0, 3, 1, 7, 6]
    assert torch.equal(features(images[order]), whole[order])
    assert torch.equal(features([255 - images[0], *images[1:]])[1:], whole[1:])
    assert torch.equal(features(images[3:4]), whole[3:4])


@pytest.mark.parametrize("name", ["cnn", "resnet8-gn", "mobilenetv2-gn", "shufflenet-gn"])
def test_private_gradients_of_a_node_do_not_depend_on_who_else_is_sampled(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opacus")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    device = torch.device("cuda")
    steps = [[0], [1], [2], [0, 1, 2], [2, 1], []]
    query = Query(100.0, 0.2)
    monkeypatch.setattr(dpsgd, "schedule", lambda *_, **__: (query, len(steps)))
    drawn = Recorded(steps)
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, device=device)
    section = Local(learning_rate=1e-30, privacy=LocalPrivacy(noise_multiplier=100.0, clip=0.5))
    dpsgd.train_privately(
        MODELS[name]((3, 32, 32), 10).to(device),
        images,
        torch.arange(3, device=device),
        section=section,
        proximal=0.0,
        draws=drawn,  # type: ignore[arg-type]
        client=0,
        compute=Compute(device),
    )
    one, two, three, all_, last, none = (drawn.step(number) for number in range(len(steps)))
    assert torch.equal(all_, one + two + three)
    assert torch.equal(last, two + three)
    assert not bool(none.any())
