"""Run on objects of a Python program: a plain nn.Module, and torch datasets or arrays."""

from __future__ import annotations

import copy
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedaux import seeding
from fedaux.config import LINEAR, Experiment
from fedaux.data import SOURCES
from fedaux.data.in_memory import NAME, InMemory, read_labelled, read_public
from fedaux.data.tensor_files import weights_digest
from fedaux.encoders import ENCODERS, Encoder
from fedaux.models import MODELS, SplitModel, split_model
from fedaux.models.split import find_head
from fedaux.privacy.mean import suitable_components
from fedaux.recipes import merged

Factory = Callable[..., nn.Module]
"""A class or function that returns a module; called without arguments, or with the input shape and
the number of classes."""
SMALL = {
    "method": ["fedaux", "fedavg+p"],
    "rounds": 10,
    "participation_rate": 1.0,
    "pretraining": {"epochs": 20, "batch_size": 200},
    "certainty": {"epsilon": 0.5, "sharpness": 1.0},
    "local": {"learning_rate": 3e-3},
    "distillation": {"learning_rate": 3e-4},
}
"""The settings of a run without an experiment; the learning rates suit ten rounds, not the paper's
hundred."""

ANY_CLASSES = 2
"""Number of classes of a digest before the data is read."""
OF_EXAMPLES = (
    *("image_size", "channels", "test_fraction", "channel_mean", "channel_deviation"),
    *("server_validation", "negatives_fraction"),
)
"""Settings of `data` and `auxiliary` that apply to data in memory too."""


def default_experiment(memory: InMemory) -> Experiment:
    """Return :data:`SMALL`, with as many components as suit the clients' sizes.

    A batch of pretraining is at most half of the public data.
    """
    table = copy.deepcopy(SMALL)
    if memory.clients is not None:
        typical = int(median(len(part.labels) for part in memory.clients.values()))
        fitting = suitable_components(typical, epsilon=0.5, delta=1e-5)
        table = merged(table, {"certainty": {"components": min(96, max(4, fitting))}})
    if memory.public is not None:
        half = max(2, len(memory.public) // 2)
        table = merged(table, {"pretraining": {"batch_size": min(200, half)}})
    return Experiment(**table)


@contextmanager
def in_memory(
    experiment: Experiment | None,
    *,
    model: nn.Module | Encoder | Factory | None,
    clients: Sequence[Any] | Mapping[str, Any] | None,
    public: Any,
    test: Any,
) -> Iterator[Experiment]:
    """Yield an experiment that names the given objects, and register them while inside.

    The model stays known, for predictions after the run. Raises ValueError for unusable input.
    """
    if test is not None and clients is None:
        raise ValueError("test: needs clients; test data of files is the setting data.test")
    memory = InMemory(
        None if clients is None else _read_clients(clients),
        None if public is None else read_public(public),
        None if test is None else read_labelled(test, name="test"),
    )
    small = experiment is None
    if experiment is None:
        if clients is not None and public is None:
            raise ValueError(
                "public: missing; should be public unlabeled images of the size of the clients'"
            )
        experiment = default_experiment(memory)
    changes: dict[str, Any] = {}
    if memory.clients is not None:
        own = {"source": NAME, "clients": list(memory.clients)}
        changes["data"] = own | ({"test": "test"} if test is not None else {})
        changes["split"] = {"num_clients": len(memory.clients)}
    if memory.public is not None:
        changes["auxiliary"] = {"source": NAME, "path": "public"}
    table = _settings(experiment, memory)
    if isinstance(model, Encoder):
        name = f"{NAME}:{model.source}"
        ENCODERS[name] = replace(model, source=name)
        changes |= {
            "encoder": {"source": name, "digest": ENCODERS[name].digest},
            "mode": "linear",
            "prototypes": [LINEAR],
            "pretraining": {"kind": "none"},
        }
        for key in ("local", "distillation"):  # heads have other default rates
            if "learning_rate" not in getattr(experiment, key).model_fields_set or small:
                table[key].pop("learning_rate", None)
        model = None
    if model is not None:
        row = ModelRow(model)
        shape, num_classes = None, ANY_CLASSES
        if memory.clients is not None:
            shape = tuple(next(iter(memory.clients.values())).images.shape[1:])
            num_classes = memory.num_classes
        digest = row.digest(shape, num_classes)
        MODELS[row.name] = row
        changes["prototypes"] = [
            {"name": row.short, "model": row.name, "options": {"digest": digest}}
        ]
    if changes:
        experiment = Experiment(**merged(table, changes))
    if memory.clients is None and memory.public is None:
        yield experiment
        return
    if NAME in SOURCES:
        raise ValueError("another run of this process uses data in memory; wait until it ends")
    num_classes = 0 if memory.clients is None else memory.num_classes
    if memory.clients is not None and model is not None and shape is not None:
        if (outputs := row.outputs(shape, num_classes)) < num_classes:
            raise ValueError(
                f"model: {row.short} returns {outputs} logits, but there are {num_classes} classes"
            )
        num_classes = outputs
    SOURCES[NAME] = memory.source(num_classes=num_classes)
    try:
        yield experiment
    finally:
        del SOURCES[NAME]


def _settings(experiment: Experiment, memory: InMemory) -> dict[str, Any]:
    """Return an experiment's settings without the places and sizes of data that is in memory."""
    table = experiment.to_dict()
    for section, given in (("data", memory.clients), ("auxiliary", memory.public)):
        if given is not None:
            own = table[section]
            table[section] = {key: own[key] for key in OF_EXAMPLES if key in own}
    return table


def _read_clients(clients: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(clients, Mapping):
        named = {str(name): part for name, part in clients.items()}
    elif isinstance(clients, Dataset | Tensor) or not isinstance(clients, Sequence):
        raise ValueError(
            f"clients: is a {type(clients).__name__}; should be a list of datasets, one per "
            "client, or a dict of them by name"
        )
    else:
        named = {f"client-{number}": part for number, part in enumerate(clients)}
    if not named:
        raise ValueError("clients: is empty; should be a list of datasets, one per client")
    return {
        name: read_labelled(part, name=f"clients[{name}]" if isinstance(clients, Mapping) else name)
        for name, part in named.items()
    }


class ModelRow:
    """A row of MODELS for a module or a factory of modules.

    A module starts from its own weights, the same for every seed; a factory is called with a seeded
    generator for each seed.
    """

    def __init__(self, model: nn.Module | Factory) -> None:
        if not callable(model):
            raise ValueError(
                f"model: is a {type(model).__name__}; should be an nn.Module, or a class or "
                "function that returns one"
            )
        self._module = copy.deepcopy(model).cpu() if isinstance(model, nn.Module) else None
        self._factory: Factory = model
        named = type(model) if isinstance(model, nn.Module) else model
        self.short = re.sub(r"[^A-Za-z0-9._-]", "", getattr(named, "__name__", "")) or "model"
        self.name = f"{NAME}:{self.short}"
        self._heads: dict[tuple[int, ...], str] = {}

    def __call__(
        self, image_shape: tuple[int, ...], num_classes: int, *, digest: str = ""
    ) -> SplitModel:
        """Return a model, split at its last nn.Linear unless it is a SplitModel."""
        module = self._build(image_shape, num_classes)
        if isinstance(module, SplitModel):
            return module
        example = torch.rand(
            (2, *image_shape), generator=seeding.torch_generator(0, "example images")
        )
        try:
            if image_shape not in self._heads:
                self._heads[image_shape] = find_head(module, example=example)
            return split_model(module, head=self._heads[image_shape], example=example)
        except (RuntimeError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(
                f"model: {self.short} fails on images {list(image_shape)} ({error})"
            ) from error
        except ValueError as error:
            raise ValueError(f"model: {self.short}: {error}") from error

    def outputs(self, image_shape: tuple[int, ...], num_classes: int) -> int:
        """Return the number of logits."""
        with seeding.initialisation(0, part=self.short):
            model = self(image_shape, num_classes).eval()
        with torch.no_grad():
            return int(model(torch.zeros(2, *image_shape)).shape[1])

    def digest(self, image_shape: tuple[int, ...] | None, num_classes: int) -> str:
        """Return a digest of architecture and code, and of the weights of a module.

        A stored h0 is reused, and a run is resumed, only for the same model. Functions that the
        module's methods call are not part of it.
        """
        content = hashlib.sha256()
        if inspect.isfunction(self._factory):
            content.update(_code(self._factory.__code__).encode())
        if self._module is not None:
            content.update(weights_digest(self._module.state_dict()).encode())
        if self._module is not None or image_shape is not None or not self._wants_shape():
            with seeding.initialisation(0, part=self.short):
                module = self._build(image_shape or (), num_classes)
            content.update(repr(module).encode())
            for kind in sorted({type(part) for part in module.modules()}, key=repr):
                if not kind.__module__.startswith("torch."):
                    functions = [one for one in vars(kind).values() if inspect.isfunction(one)]
                    content.update("".join(_code(one.__code__) for one in functions).encode())
        return content.hexdigest()[:16]

    def _build(self, image_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        if self._module is not None:
            return copy.deepcopy(self._module)
        arguments = (image_shape, num_classes) if self._wants_shape() else ()
        module = self._factory(*arguments)
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"model: {self.short} returns a {type(module).__name__}; should be an nn.Module"
            )
        return module

    def _wants_shape(self) -> bool:
        parameters = inspect.signature(self._factory).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        required = [
            one for one in parameters if one.default is one.empty and one.kind in positional
        ]
        if len(required) not in (0, 2):
            names = ", ".join(one.name for one in required)
            raise ValueError(
                f"model: {self.short} takes {names}; should take no arguments, or the input shape "
                "and the number of classes"
            )
        return bool(required)


def _code(code: CodeType) -> str:
    """Return the content of a function: instructions, names and constants, without addresses."""
    constants = [_code(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
