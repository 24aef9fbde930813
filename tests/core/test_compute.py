from __future__ import annotations

import platform
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Barrier, current_thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedaux import seeding
from fedaux.config import Engine
from fedaux.core import compute as module
from fedaux.core.compute import CLIENTS_AT_ONCE, Compute, compute_for, has_bf16
from fedaux.core.weights import snapshot
from fedaux.fast.fallback import compiled
from fedaux.fast.inference import FastPredictor
from fedaux.models import MODELS

CPU = torch.device("cpu")


def double(values: torch.Tensor) -> torch.Tensor:
    return values * 2


def test_auto_on_a_cpu_is_single_precision_and_not_compiled() -> None:
    compute = compute_for(Engine(), CPU)
    assert compute.precision is torch.float32
    assert not compute.compile
    assert not compute.captures
    assert compute.clients_at_once == CLIENTS_AT_ONCE == 8


def test_what_is_asked_for_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_bf16", lambda _: True)
    compute = compute_for(Engine(precision="bf16", compile=True, clients_at_once=3), CPU)
    assert compute.precision is torch.bfloat16
    assert compute.compile
    assert compute.clients_at_once == 3
    assert compute_for(Engine(precision="fp32", compile=False), CPU) == compute_for(Engine(), CPU)


def test_without_bf16_it_is_single_precision_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_bf16", lambda _: False)
    with pytest.warns(
        UserWarning, match=r"^engine\.precision: this processor has no bf16, going on in fp32$"
    ):
        compute = compute_for(Engine(precision="bf16"), CPU)
    assert compute.precision is torch.float32


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists(), reason="needs Linux, which lists what a processor can"
)
def test_a_processor_has_bf16_where_linux_says_so() -> None:
    lists = re.findall(
        r"^(?:flags|Features)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
    )
    if not lists:
        pytest.skip("Linux does not list it here")
    features = set(lists[0].split())
    if platform.machine() == "aarch64":
        assert has_bf16(CPU) == ("bf16" in features)
    else:  # torch is content with wide registers, too
        assert has_bf16(CPU) == bool(features & {"avx512bw", "avx_ne_convert"})


def test_graphs_are_captured_on_a_gpu_where_clients_are_side_by_side() -> None:
    gpu = torch.device("cuda")  # a name; nothing is put there
    assert Compute(gpu, clients_at_once=2).captures
    assert not Compute(gpu, clients_at_once=1).captures
    assert not Compute(CPU, clients_at_once=2).captures


def test_a_function_is_compiled_once_for_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def compile(function: Any, *, dynamic: bool) -> Any:
        made.append((function, dynamic))
        return lambda values: function(values) + 1  # as much as to say that it is another function

    monkeypatch.setattr(torch, "compile", compile)
    compute = Compute(compile=True)
    ones = torch.ones(2)
    for _ in range(2):
        assert compiled(compute, "double", lambda: double)(ones).tolist() == [3, 3]
    assert compiled(compute, ("double", 2), lambda: double)(ones).tolist() == [3, 3]
    assert [(function.__name__, dynamic) for function, dynamic in made] == [("double", False)] * 2


def test_there_is_no_limit_to_the_functions_that_are_compiled(compilations: list[Any]) -> None:
    class Times:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def and_one(self, values: torch.Tensor, *, more: float = 1.0) -> torch.Tensor:
            return values * self.factor + more

    def times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda values: values * factor

    def times_and_one(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return Times(factor).and_one

    compute = Compute(compile=True)
    limit = torch._dynamo.config.recompile_limit
    for factor in range(2, limit + 4):
        function = compiled(compute, factor, partial(times, factor))
        assert function(torch.ones(2)).tolist() == [factor, factor]
        method = compiled(compute, ("method", factor), partial(times_and_one, factor))
        assert method(torch.ones(2)).tolist() == [factor + 1, factor + 1]
    assert len(compilations) == 2 * (limit + 2)


@pytest.mark.parametrize("when", ["at once", "at the first call"])
def test_where_nothing_can_be_compiled_the_plain_function_goes_on_with_one_warning(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fail(*_: Any) -> Any:
        tried.append(1)
        raise RuntimeError("no C++ compiler\nand much more about it")

    def compile(function: Any, *, dynamic: bool) -> Any:
        return fail() if when == "at once" else fail

    monkeypatch.setattr(torch, "compile", compile)
    compute = Compute(compile=True)
    with pytest.warns(UserWarning, match=r"running without \(RuntimeError: no C\+\+ compiler\)$"):
        assert compiled(compute, "double", lambda: double)(torch.ones(2)).tolist() == [2, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(compute, "double", lambda: double)(torch.ones(3)).tolist() == [2, 2, 2]
    assert len(tried) == 1


def test_an_error_without_words_is_named_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: fail)
    with pytest.warns(UserWarning, match="NotImplementedError"):
        compiled(Compute(compile=True), "double", lambda: double)(torch.ones(2))


def test_running_out_of_memory_is_no_reason_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: fail)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        compiled(Compute(compile=True), "double", lambda: double)(torch.ones(2))


def test_a_wrong_argument_is_reported_by_the_function_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    with (
        pytest.warns(UserWarning, match="not possible here"),
        pytest.raises(RuntimeError, match="size"),
    ):
        compiled(Compute(compile=True), "add", lambda: torch.add)(torch.ones(2), torch.ones(3))


@pytest.mark.usefixtures("bf16")
def test_single_precision_changes_nothing_and_half_precision_little() -> None:
    """Three digits: bf16 has eight bits of mantissa. Weights and results stay in single
    precision."""
    with seeding.initialisation(0, part="cnn"):
        model = MODELS["cnn"]((1, 8, 8), 5)
    images = torch.from_numpy(
        np.random.default_rng(0).integers(0, 256, (20, 1, 8, 8), dtype=np.uint8)
    )
    exact = FastPredictor(model, Compute())(snapshot(model), images)
    with torch.no_grad():
        assert torch.equal(exact, model(images.float() / 255))
    half = FastPredictor(model, Compute(precision=torch.bfloat16))(snapshot(model), images)
    assert half.dtype == torch.float32
    assert not torch.equal(half, exact)
    assert float((half - exact).norm() / exact.norm()) < 0.02
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.usefixtures("bf16")
def test_autocast_is_in_the_chosen_precision() -> None:
    layer, values = nn.Linear(3, 2), torch.ones(1, 3)
    with Compute(precision=torch.bfloat16).autocast():
        assert layer(values).dtype == torch.bfloat16
    with Compute().autocast():
        assert layer(values).dtype == torch.float32


def test_a_cpu_keeps_the_layout_of_images_and_models() -> None:
    compute, images = Compute(), torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    assert compute.place_inputs(images) is images
    model = nn.Conv2d(3, 2, 3)
    assert compute.place(model) is model
    assert model.weight.is_contiguous()


def test_images_are_normalised_by_channel_and_features_are_not() -> None:
    mean, deviation = (
        torch.tensor([0.5, 0.25])[:, None, None],
        torch.tensor([2.0, 0.5])[:, None, None],
    )
    compute = Compute(mean=mean, deviation=deviation)
    images = torch.full((1, 2, 1, 1), 255, dtype=torch.uint8)
    assert compute.floats(images).flatten().tolist() == [0.25, 1.5]
    assert Compute(mean=mean).floats(images).flatten().tolist() == [0.5, 0.75]
    assert Compute(deviation=deviation).floats(images).flatten().tolist() == [0.5, 2.0]
    assert Compute().floats(images).flatten().tolist() == [1.0, 1.0]
    features = torch.tensor([[3.0, -1.0]])
    assert compute.floats(features) is features


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_each_worker_has_one_core_to_itself_and_everybody_else_what_they_had() -> None:
    """Sharing operations inside threads that share the cores already makes both wait for each
    other."""
    compute, together = Compute(workers=2), Barrier(2)

    def work(number: int) -> tuple[int, str, int]:
        together.wait()
        torch.ones(200, 200) @ torch.ones(200, 200)
        return number, current_thread().name, torch.get_num_threads()

    for _ in range(3):
        done = compute.spread(work, [7, 9])
        assert [number for number, _, _ in done] == [7, 9]
        assert len({name for _, name, _ in done}) == 2
        assert [threads for _, _, threads in done] == [1, 1]
        assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError):
        compute.spread(lambda number: 1 // number, [0, 1])
    assert torch.get_num_threads() == 2
