"""A tiny experiment that runs in about a second, and what tests share."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fedaux.config import Experiment
from fedaux.core.compute import has_bf16
from fedaux.data.vocabulary import Vocabulary
from fedaux.models import MODELS, model_input

os.environ["FEDAUX_CACHE"] = ""  # no test reads or writes what other runs of the user share
torch.set_num_threads(1)  # two test processes on two cores

IMAGE_MODELS = [name for name in MODELS if model_input(name) == "image"]

TINY: dict[str, Any] = {
    "name": "tiny",
    "method": ["fedaux"],
    "rounds": 3,
    "participation_rate": 1.0,
    "auxiliary": {"source": "letters", "size": 200},
    "split": {"num_clients": 4, "alpha": 0.1},
    "prototypes": [{"name": "cnn", "model": "cnn", "options": {"width": 4}}],
    "pretraining": {"epochs": 1, "batch_size": 64, "augmentation": {"flip": 0.0}},
    "certainty": {"epsilon": 1.0, "components": 4},
    "distillation": {"learning_rate": 0.001},
    "data": {"source": "digits"},
    "engine": {"device": "cpu", "threads": 1},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return base with nested changes."""
    result = dict(base)
    for key, value in changes.items():
        result[key] = merged(result[key], value) if isinstance(value, dict) and key in result else value
    return result


def tiny(**changes: Any) -> Experiment:
    """Return the tiny experiment with changes."""
    return Experiment(**merged(TINY, changes))


@pytest.fixture
def experiment() -> Experiment:
    return tiny()


@pytest.fixture
def bf16() -> Iterator[None]:
    """Let a test compute in bf16 on a processor that has none, too.

    At the first product torch would switch oneDNN off there, and all that follows would be rounded otherwise.
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
    """What torch has compiled so far; its graphs run as they are, without the compiler's last part."""
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
    from corpus import write_corpus  # which takes what is above from here

    return write_corpus(tmp_path / "corpus")


@pytest.fixture(scope="session")
def words() -> Vocabulary:
    """A vocabulary that was learned on such texts."""
    from corpus import learned_words

    return learned_words()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT as transformers writes it, with that vocabulary; to be read, or copied and changed."""
    from corpus import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
