"""Fixtures that tests share."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.corpus import learned_words, write_checkpoint, write_corpus
from helpers.experiments import tiny

import fedaux.report
from fedaux.config import Experiment
from fedaux.core.compute import has_bf16
from fedaux.data.vocabulary import Vocabulary

os.environ["FEDAUX_CACHE"] = ""  # no test reads or writes what other runs of the user share
torch.set_num_threads(1)  # two test processes on two cores
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark the cases of a test as slow that its mark `quickly` does not name. Federations, whose
    processes wait, come first in each worker's part of the tests, then long tests."""
    for item in items:
        mark = item.get_closest_marker("quickly")
        if mark and isinstance(item, pytest.Function) and item.callspec.id not in mark.args:
            item.add_marker("slow")
    yield  # tests are selected
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    kinds: list[list[pytest.Item]] = [[], [], []]
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        kinds[0 if "federation" in marks else 1 if "long" in marks else 2].append(item)
    items[:] = [
        item
        for part in range(workers)
        for kind in kinds
        for item in kind[part * len(kind) // workers : (part + 1) * len(kind) // workers]
    ]


@pytest.fixture
def experiment() -> Experiment:
    return tiny()


@pytest.fixture
def pages() -> None:
    """Runs of the test write report.html."""


@pytest.fixture(autouse=True)
def without_pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write no report.html, which takes longer than their rounds, unless a test asks for
    `pages`."""
    if "pages" not in request.fixturenames:
        monkeypatch.setattr(fedaux.report, "write_report", lambda path: path / "report.html")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages have empty figures: drawing takes nearly all the time of a page."""
    monkeypatch.setattr("fedaux.report.html.as_svg", lambda figure, **options: "<svg></svg>")


@pytest.fixture
def exact_convolutions() -> Iterator[None]:
    """Convolutions on a GPU in single precision, not in the shorter one of cuDNN's default."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def double_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Train in double precision: many steps enlarge the last bits of single precision beyond any
    tolerance."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def bf16() -> Iterator[None]:
    """Let a test compute in bf16 on a processor that has none, too.

    At the first product torch would switch oneDNN off there, and all that follows would be rounded
    otherwise.
    """
    if has_bf16(torch.device("cpu")):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration")  # of torch's own switch
        with torch.backends.mkldnn.flags(enabled=False):
            yield


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What torch has compiled so far; its graphs run as they are, without the compiler's last
    part."""
    made: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        made.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    yield made
    torch._dynamo.reset()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with private and public texts."""
    return write_corpus(tmp_path / "corpus")


@pytest.fixture(scope="session")
def words() -> Vocabulary:
    """A vocabulary that was learned on such texts."""
    return learned_words()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT as transformers writes it, with that vocabulary; to be read, or copied and
    changed."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
