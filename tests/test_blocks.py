"""Blocks as one operation, against torch's layers one by one."""

from __future__ import annotations

import copy
import gc
import json
import os
import stat
import subprocess
import sys
import tempfile
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap

import fedaux
from fedaux import native
from fedaux.compute import Compute, compute_for
from fedaux.config import Engine, Local
from fedaux.dpsgd import train_privately
from fedaux.inference import Predictor
from fedaux.local import train_locally
from fedaux.models import MODELS, SplitModel, blocks
from fedaux.models.blocks import MOST_POSITIONS, Layers, consists_of_blocks, join, of_models
from fedaux.seeding import generator
from fedaux.server import snapshot

COMPILER = os.environ.get("CC", "cc").split()[0]


def _has_compiler() -> bool:
    try:
        native.library()
    except native.Uncompiled:
        return False
    return True


HAS_COMPILER = _has_compiler()
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler here")

SHAPES = [
    # channels, size, features, kernel, stride, padding, groups
    (1, (8, 8), 16, (3, 3), (1, 1), (1, 1), 8),
    (16, (8, 8), 32, (3, 3), (2, 2), (1, 1), 8),
    (32, (4, 4), 32, (3, 3), (2, 2), (1, 1), 32),
    (3, (7, 5), 8, (3, 2), (2, 3), (0, 1), 1),
    (5, (6, 6), 24, (1, 1), (3, 3), (0, 0), 4),
    (8, (3, 4), 40, (5, 5), (1, 2), (2, 3), 5),
    (12, (1, 1), 8, (1, 1), (1, 1), (0, 0), 2),
    (3, (32, 32), 16, (3, 3), (1, 1), (1, 1), 8),
]


def layers_of(shape: Any, *, seed: int = 0) -> Layers:
    channels, _, features, kernel, stride, padding, groups = shape
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = Layers(
            nn.Conv2d(channels, features, kernel, stride=stride, padding=padding, bias=False),
            nn.GroupNorm(groups, features, eps=0.1),
            nn.ReLU(),
        )
        for parameter in made[1].parameters():
            nn.init.normal_(parameter, mean=0.5)
    return made


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def joined(module: nn.Module) -> Any:
    made = copy.deepcopy(module)
    join(made, joined=True)
    return made


def network(width: int = 16, *, size: int = 8, seed: int = 0) -> SplitModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = MODELS["cnn"]((1, size, size), 5, width=width)
        for part in made.modules():
            if isinstance(part, nn.GroupNorm):
                nn.init.normal_(part.weight, mean=1.0, std=0.3)
                nn.init.normal_(part.bias, std=0.3)
                part.eps = 0.03
        return made


def operations_behind(output: Tensor) -> str:
    names, nodes = [], [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            names.append(node.name())
            nodes += [before for before, _ in node.next_functions]
    return " ".join(names)


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


@pytest.fixture
def untried() -> Iterator[None]:
    """As if nobody had asked for the library yet."""
    native._tried.cache_clear()
    blocks._tell.cache_clear()
    yield
    native._tried.cache_clear()


@needs_compiler
@pytest.mark.parametrize("batch", [1, 5, 33])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_block_and_its_gradients_are_those_of_the_layers(shape: Any, batch: int) -> None:
    """Compared in double precision; single precision of torch itself is as far from it."""
    plain = layers_of(shape)
    own, exact = joined(plain), copy.deepcopy(plain).double()
    inputs = drawn(batch, shape[0], *shape[1])
    ours, theirs = inputs.clone().requires_grad_(), inputs.double().requires_grad_()
    found, expected = own(ours), exact(theirs)
    assert "_Chain" in operations_behind(found)
    assert found.shape == expected.shape
    assert relative(found, expected) < 1e-6
    weight = drawn(*expected.shape, seed=1)
    found.backward(weight)
    expected.backward(weight.double())
    assert relative(ours.grad, theirs.grad) < 1e-5  # type: ignore[arg-type]
    for one, other in zip(own.parameters(), exact.parameters(), strict=True):
        assert other.grad is not None
        assert one.grad.shape == other.grad.shape
        assert relative(one.grad, other.grad) < 1e-5
    with torch.no_grad():
        assert torch.equal(own(inputs), found.detach())


@needs_compiler
@pytest.mark.parametrize("size", [8, 12])
def test_a_network_predicts_and_learns_alike(size: int) -> None:
    plain = network(size=size)
    own, inputs = joined(plain), drawn(9, 1, size, size)
    expected, found = plain(inputs), own(inputs)
    assert "_Chain" in operations_behind(found)
    assert "_Chain" not in operations_behind(expected)
    assert relative(found, expected) < 1e-5
    for output in (expected, found):
        output.pow(2).sum().backward()
    for one, other in zip(own.parameters(), plain.parameters(), strict=True):
        assert other.grad is not None
        assert relative(one.grad, other.grad) < 1e-4
    with torch.no_grad():
        assert relative(own.eval()(inputs), expected) < 1e-5


@needs_compiler
def test_a_chain_whose_maps_grow() -> None:
    """More examples than go through it at a time, so that maps are written over those before."""
    chain = Layers(
        *(layer for shape in ((1, 0, 8), (8, 0, 24), (24, 0, 40)) for layer in layers_of(grown(shape))), nn.Flatten()
    )
    inputs = drawn(90, 1, 9, 9)
    with torch.no_grad():
        assert relative(joined(chain)(inputs), chain(inputs)) < 1e-5


def grown(shape: tuple[int, int, int]) -> Any:
    return shape[0], None, shape[2], (3, 3), (1, 1), (2, 2), 4


@needs_compiler
def test_images_need_a_gradient_only_where_they_are_asked_for_one() -> None:
    own, inputs = joined(layers_of(SHAPES[0])), drawn(4, 1, 8, 8)
    own(inputs).sum().backward()
    assert inputs.grad is None
    assert own[0].weight.grad is not None


@needs_compiler
def test_an_example_does_not_depend_on_its_batch_to_the_last_bit() -> None:
    own, inputs = joined(network()).eval(), drawn(130, 1, 8, 8)
    features = own.features
    with torch.no_grad():
        together = features(inputs)
        for number in (0, 1, 63, 129):
            assert torch.equal(features(inputs[number : number + 1])[0], together[number])
        assert torch.equal(features(inputs.flip(0)).flip(0), together)


@needs_compiler
def test_nan_and_infinity_come_through() -> None:
    own, inputs = joined(layers_of(SHAPES[0])), drawn(3, 1, 8, 8)
    inputs[1, 0, 2, 2] = torch.nan
    inputs[2, 0, 2, 2] = torch.inf
    with torch.no_grad():
        found = own(inputs)
    assert torch.isfinite(found[0]).all()
    assert torch.isnan(found[1]).any()
    assert torch.isnan(found[2]).any()


@needs_compiler
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_several_models_at_once_are_each_as_alone(shared: bool, gradients: bool) -> None:
    models = [joined(network(seed=seed)) for seed in range(3)]
    inputs = drawn(3, 7, 1, 8, 8)
    inputs = inputs[:1].expand(3, -1, -1, -1, -1) if shared else inputs
    weights = {
        name: torch.stack([dict(model.named_parameters())[name].detach() for model in models]).requires_grad_()
        for name, _ in models[0].named_parameters()
    }
    assert consists_of_blocks(models[0], inputs[0])
    with torch.set_grad_enabled(gradients):
        found = of_models(models[0])(weights, inputs)
    for index, model in enumerate(models):
        expected = model(inputs[index])
        assert relative(found[index], expected) < 1e-6
        expected.pow(2).sum().backward()
    if gradients:
        found.pow(2).sum().backward()
        for name, stacked in weights.items():
            for index, model in enumerate(models):
                assert relative(stacked.grad[index], dict(model.named_parameters())[name].grad) < 1e-5  # type: ignore[index]


@needs_compiler
def test_layers_can_have_names() -> None:
    model = joined(network())
    kinds = {"convolution": 0, "normalisation": 1, "relu": 2}
    named = {f"{kind}{block}": model.features[3 * block + place] for block in range(3) for kind, place in kinds.items()}
    other = SplitModel(Layers(OrderedDict(named | {"flat": nn.Flatten()})), model.head, feature_width=128)
    join(other, joined=True)
    weights = {name: torch.stack([tensor.detach()] * 2) for name, tensor in other.named_parameters()}
    inputs = drawn(2, 3, 1, 8, 8)
    assert consists_of_blocks(other, inputs[0])
    assert relative(of_models(other)(weights, inputs)[1], model(inputs[1])) < 1e-6


def test_models_without_blocks_are_vmapped() -> None:
    plain = network()
    weights = {name: torch.stack([own.detach(), 2 * own.detach()]) for name, own in plain.named_parameters()}
    inputs = drawn(2, 4, 1, 8, 8)
    assert not consists_of_blocks(plain, inputs[0])
    found = of_models(plain)(weights, inputs)
    for index in range(2):
        own = {name: tensor[index] for name, tensor in weights.items()}
        assert relative(found[index], functional_call(plain, own, (inputs[index],))) < 1e-5


def hooked(made: Layers) -> None:
    made[1].register_forward_hook(lambda _, __, output: output + 1)


def biased(made: Layers) -> None:
    made[0] = nn.Conv2d(1, 16, 3, stride=1, padding=1)


def in_groups(made: Layers) -> None:
    made[0] = nn.Conv2d(16, 16, 3, padding=1, groups=2, bias=False)


def with_holes(made: Layers) -> None:
    made[0] = nn.Conv2d(1, 16, 3, padding=1, dilation=2, bias=False)


def around(made: Layers) -> None:
    made[0] = nn.Conv2d(1, 16, 3, padding=1, padding_mode="circular", bias=False)


def named(made: Layers) -> None:
    made[0] = nn.Conv2d(1, 16, 3, padding="same", bias=False)


def narrow(made: Layers) -> None:
    made[0], made[1] = nn.Conv2d(1, 6, 3, bias=False), nn.GroupNorm(2, 6)


def without_scale(made: Layers) -> None:
    made[1] = nn.GroupNorm(8, 16, affine=False)


def otherwise_active(made: Layers) -> None:
    made[2] = nn.GELU()


def with_own_way(made: Layers) -> None:
    made[2].forward = torch.sigmoid


def doubled(made: Layers) -> None:
    made.double()


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        hooked,
        biased,
        in_groups,
        with_holes,
        around,
        named,
        narrow,
        without_scale,
        otherwise_active,
        with_own_way,
        doubled,
    ],
)
def test_what_there_is_no_operation_for_goes_layer_by_layer(change: Any) -> None:
    made = layers_of(SHAPES[0])
    change(made)
    assert isinstance(made[0], nn.Conv2d)
    inputs = drawn(2, made[0].in_channels, 8, 8).to(next(made.parameters()).dtype)
    own = joined(made)
    found, expected = own(inputs), made(inputs)
    assert torch.equal(found, expected)
    assert "_Chain" not in operations_behind(found)


@needs_compiler
@pytest.mark.usefixtures("bf16")
def test_half_precision_large_maps_and_transformations_go_layer_by_layer() -> None:
    made = joined(layers_of(SHAPES[0]))
    with torch.autocast("cpu", torch.bfloat16):
        assert "_Chain" not in operations_behind(made(drawn(2, 1, 8, 8)))
    side = int(MOST_POSITIONS**0.5)
    assert "_Chain" in operations_behind(made(drawn(1, 1, side, side)))
    assert "_Chain" not in operations_behind(made(drawn(1, 1, side + 1, side)))
    assert made(drawn(0, 1, 8, 8)).shape == (0, 16, 8, 8)

    model, inputs = joined(network()), drawn(3, 1, 8, 8)
    with warnings.catch_warnings(action="ignore"):  # it is deprecated
        traced = torch.jit.trace(model.eval(), inputs)
    assert relative(traced(inputs + 1), model(inputs + 1)) < 1e-5
    with warnings.catch_warnings(action="ignore"), torch.no_grad(), forward_ad.dual_level():
        slope = forward_ad.unpack_dual(model(forward_ad.make_dual(inputs, torch.ones_like(inputs)))).tangent
        assert slope is not None
    assert slope.norm() > 0
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights: dict[str, Tensor], example: Tensor) -> Tensor:
        output: Tensor = functional_call(model, weights, (example[None],))
        return output.pow(2).sum()

    each = vmap(grad(loss), in_dims=(None, 0))(weights, inputs)
    model(inputs).pow(2).sum().backward()
    for name, parameter in model.named_parameters():
        assert relative(each[name].sum(dim=0), parameter.grad) < 1e-4


@needs_compiler
def test_wrong_inputs_get_torchs_own_message() -> None:
    made = layers_of(SHAPES[1])
    for inputs in (drawn(2, 3, 8, 8), drawn(2, 16, 0, 8)):
        with pytest.raises(RuntimeError) as expected:
            made(inputs)
        with pytest.raises(RuntimeError) as found:
            joined(made)(inputs)
        assert str(found.value) == str(expected.value)


@needs_compiler
def test_parameters_that_do_not_fit_get_torchs_own_message() -> None:
    """C would read whatever lies there."""
    model, inputs = joined(network()), drawn(2, 1, 8, 8)
    cases = [
        {"features.0.weight": drawn(3, 1, 3, 3)},
        {"features.1.weight": drawn(16).double()},
        {"features.4.bias": drawn(5)},
        {"features.1.bias": drawn(16).half()},
    ]
    for wrong in cases:
        own = {name: parameter.detach() for name, parameter in model.named_parameters()} | wrong
        with pytest.raises(RuntimeError) as expected:
            functional_call(network(), own, (inputs,))
        with pytest.raises(RuntimeError) as found:
            functional_call(model, own, (inputs,))
        assert str(found.value) == str(expected.value)
    with torch.device("meta"):
        nowhere = joined(network())
    assert nowhere(drawn(2, 1, 8, 8).to("meta")).shape == (2, 5)
    assert not nowhere.features.blocks(list(nowhere.features), inputs)
    stacked = {name: torch.stack([parameter.detach().double()] * 2) for name, parameter in model.named_parameters()}
    with pytest.raises(RuntimeError, match=r"Float|double"):
        of_models(model)(stacked, inputs.expand(2, *inputs.shape))
    with pytest.raises(ValueError, match="more than 1 value"):
        joined(Layers(nn.Conv2d(1, 8, 1, bias=False), nn.GroupNorm(8, 8), nn.ReLU()))(drawn(1, 1, 1, 1))


def normalised(features: Layers) -> None:
    features[9] = nn.BatchNorm2d(16, affine=False, track_running_stats=False)


def dropping(features: Layers) -> None:
    features[9] = nn.Dropout(0.5)


def looked_at(features: Layers) -> None:
    features[10].register_forward_hook(lambda _, __, output: output)


@needs_compiler
@pytest.mark.parametrize("change", [normalised, dropping, looked_at])
def test_layers_that_could_see_other_models_are_not_put_together(change: Any) -> None:
    model = joined(network(width=8))
    assert consists_of_blocks(model, drawn(6, 1, 8, 8))
    change(model.features)
    assert not consists_of_blocks(model, drawn(6, 1, 8, 8))


@needs_compiler
def test_many_models_whose_blocks_share_a_weight() -> None:
    alike = (32, (4, 4), 32, (3, 3), (2, 2), (1, 1), 8)
    features = Layers(*layers_of(SHAPES[1]), *layers_of(alike), *layers_of(alike, seed=1), nn.Flatten())
    features[6].weight = features[3].weight
    model, inputs = SplitModel(features, nn.Linear(32, 5), feature_width=32), drawn(6, 16, 8, 8)
    predictor = Predictor(joined(model), Compute(joins=True))
    weights = [{name: tensor * factor for name, tensor in model.state_dict().items()} for factor in (1.0, 0.5)]
    assert predictor.stacks(inputs)
    for found, own in zip(predictor.many(weights, inputs), weights, strict=True):
        assert relative(found, Predictor(model, Compute())(own, inputs)) < 1e-5


@needs_compiler
def test_backward_and_global_hooks_are_called() -> None:
    made, called = joined(layers_of(SHAPES[0])), []
    made[0].register_full_backward_pre_hook(lambda *_: called.append("backward"))
    made(drawn(2, 1, 8, 8).requires_grad_()).sum().backward()
    assert called == ["backward"]
    hook = nn.modules.module.register_module_forward_hook(lambda part, *_: called.append(type(part).__name__))
    try:
        joined(layers_of(SHAPES[0]))(drawn(2, 1, 8, 8))
    finally:
        hook.remove()
    assert called[1:] == ["Conv2d", "GroupNorm", "ReLU", "Layers"]


@needs_compiler
def test_second_derivatives_are_refused() -> None:
    made = joined(layers_of(SHAPES[0]))
    inputs = drawn(2, 1, 8, 8).requires_grad_()
    (first,) = torch.autograd.grad(made(inputs).pow(2).sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@needs_compiler
def test_threads_do_not_disturb_each_other() -> None:
    models = [joined(network(seed=seed)) for seed in range(4)]
    inputs = drawn(200, 1, 8, 8)

    def work(number: int) -> list[Tensor]:
        output = models[number](inputs)
        gradients = torch.autograd.grad(output.pow(2).sum(), list(models[number].parameters()))
        return [output.detach(), *gradients]

    expected = [work(number) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for one, other in zip(pool.map(work, range(4)), expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@needs_compiler
@pytest.mark.parametrize("batch", [1, 2, 50])
def test_work_is_shared_among_threads(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes out is the same to the bit; sums over examples are made in another order, the same every time."""
    own, inputs = joined(network()), drawn(batch, 1, 8, 8)

    def work() -> list[Tensor]:
        output = own(inputs)
        with torch.no_grad():
            assert torch.equal(own(inputs), output)
        return [output.detach(), *torch.autograd.grad(output.pow(2).sum(), list(own.parameters()))]

    alone = work()
    monkeypatch.setattr(blocks, "SHARE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert blocks._threads(10) == 3
    first, second = work(), work()
    assert torch.equal(first[0], alone[0])
    for one, other, expected in zip(first, second, alone, strict=True):
        assert torch.equal(one, other)
        assert relative(one, expected) < 1e-5


@needs_compiler
def test_a_predictor_asks_many_models_at_once() -> None:
    images = torch.randint(256, (50, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    own = network()
    predictor = Predictor(Compute(joins=True).place(copy.deepcopy(own)), Compute(joins=True))
    plain = Predictor(own, Compute())
    weights = [snapshot(network(seed=seed)) for seed in range(3)]
    rows = torch.tensor([4, 9, 1, 30])
    assert predictor.stacks(images)
    assert not plain.stacks(images)
    for how in ({}, {"batch_size": 16}, {"rows": rows}):
        for found, one in zip(predictor.many(weights, images, **how), weights, strict=True):
            assert relative(found, plain(one, images, **how)) < 1e-5
    assert [output.shape for output in predictor.many(weights, images[:0])] == [(0, 5)] * 3
    assert not Predictor(joined(own), Compute(precision=torch.bfloat16, joins=True)).stacks(images)


@needs_compiler
def test_private_training_sees_every_layer() -> None:
    """Opacus looks at layers through hooks, which a joined block would leave out."""
    pytest.importorskip("opacus")
    images = torch.randint(256, (40, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    section = Local(privacy={"noise_multiplier": 1.0})  # type: ignore[arg-type]
    models = [network(), joined(network())]
    for model in models:
        train_privately(
            model, images, torch.arange(40) % 5, section=section, proximal=0.0, generator=generator(0, "a"), client=0
        )
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


@needs_compiler
def test_local_training_comes_to_the_same() -> None:
    images = torch.randint(256, (60, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    start = network()
    trained = []
    for model in (copy.deepcopy(start), joined(start)):
        section = Local(epochs=2, learning_rate=1e-2, optimizer="sgd")
        train_locally(model, images, torch.arange(60) % 5, section=section, proximal=0.1, generator=generator(0, "a"))
        trained.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    before = torch.cat([parameter.detach().flatten() for parameter in start.parameters()])
    moved = (trained[0] - before).norm()
    assert moved > 0.03
    assert (trained[1] - trained[0]).norm() < 1e-4 * moved


@needs_compiler
def test_a_run_joins_blocks_unless_it_is_told_not_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, calls = blocks._chain, []

    def counted(*arguments: Any) -> Tensor:
        calls.append(arguments)
        return chain(*arguments)

    monkeypatch.setattr(blocks, "_chain", counted)
    options = {"prototypes": [{"name": "cnn", "model": "cnn", "options": {"width": 8}}], "rounds": 2}
    losses, uses = [], []
    for name, section in (("joined", {}), ("plain", {"compile": False})):
        calls.clear()
        fedaux.run(tiny(**options, engine=section), out=tmp_path / name)
        uses.append(len(calls))
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows])
    assert uses[0] > 20
    assert uses[1] == 0
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for engine, expected in (
        (Engine(), True),
        (Engine(compile=True), True),
        (Engine(compile=False), False),
        (Engine(clients_at_once=1), False),
    ):
        model = compute_for(engine, torch.device("cpu")).place(network())
        assert isinstance(model.features, Layers)
        assert model.features.joined == expected


def test_a_network_can_be_taken_apart_again() -> None:
    model = joined(network())
    Compute().place(model)
    assert isinstance(model.features, Layers)
    assert not model.features.joined


# The compiler.


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    "command",
    [
        "no-such-compiler-here",
        "false",
        f"{sys.executable} -c 'exit(3)'",
        "cc 'not closed",
        "true",  # which compiles nothing
        f"{COMPILER} -nostdlib -Dforward=another",
        "printf '\\377'",
    ],
)
def test_without_a_compiler_one_line_says_so_and_layers_go_one_by_one(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", command)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = network()
    with pytest.warns(
        UserWarning, match=r"^engine\.compile: C cannot be compiled here, small networks are slower \("
    ) as told:
        Compute(joins=True).place(model)
    assert len(told) == 1
    assert isinstance(model.features, Layers)
    assert not model.features.joined
    assert model(drawn(2, 1, 8, 8)).shape == (2, 5)
    model.features.joined = True  # as it comes from a machine with a compiler
    assert model(drawn(2, 1, 8, 8)).shape == (2, 5)
    reference = weakref.ref(model)
    with warnings.catch_warnings(action="error"):  # said once
        Compute(joins=True).place(model)
    del model
    gc.collect()
    assert reference() is None  # the reason that is kept holds nobody


@needs_compiler
@pytest.mark.usefixtures("untried")
def test_the_library_is_compiled_once_and_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told"
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {told}\nexec {COMPILER} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert native.library().lanes() in (4, 8)
    folder = tmp_path / f"fedaux-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (kept,) = folder.iterdir()

    def compilations() -> int:
        return sum("-shared" in line for line in told.read_text().splitlines())

    assert compilations() == 1
    native._tried.cache_clear()
    native.library()
    assert compilations() == 1
    folder.chmod(0o755)  # not as we made it
    native._tried.cache_clear()
    native.library()
    assert compilations() == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == ["compiler", folder.name, "told"]  # nothing is left
    damaged = tmp_path / "elsewhere" / folder.name / kept.name
    damaged.parent.mkdir(parents=True, mode=0o700)
    damaged.write_bytes(b"no library")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    native._tried.cache_clear()
    assert native.library().lanes() in (4, 8)
    assert compilations() == 3


@needs_compiler
def test_a_processor_without_a_name_for_it_gets_a_plain_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untried: None
) -> None:
    monkeypatch.setattr(native, "NATIVE", "-march=no-such-processor")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plain = layers_of(SHAPES[1])
    inputs = drawn(3, 16, 8, 8)
    assert relative(joined(plain)(inputs), plain(inputs)) < 1e-6


@needs_compiler
def test_compilers_find_nothing_to_complain_about(tmp_path: Path) -> None:
    source = Path(native.__file__).with_name("blocks.c")
    command = [COMPILER, *native.FLAGS, "-Wall", "-Wextra", "-o", str(tmp_path / "made.so"), str(source), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""
