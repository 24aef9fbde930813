"""The card of a model's file: what it has to hold, and whether the weights are its network's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from fedaux.models import SplitModel

Size = Annotated[int, Field(ge=1, le=2**24)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Input(_Part):
    kind: Literal["image", "text"]
    mean: list[Number] = []
    deviation: list[Annotated[Number, Field(gt=0)]] = []
    length: Size | None = None
    columns: list[str] = []
    tokenizer: dict[str, Any] | None = None


class _Accuracy(_Part):
    last: float | None


class _Privacy(_Part):
    epsilon: float | Literal["inf"] | None
    delta: float | None
    not_protected: str


class _Versions(_Part):
    fedaux: str


class _Plugin(_Part):
    path: str
    sha256: str


class Unfit(ValueError):
    """Weights that are not those of a network."""


class ModelCard(_Part):
    """The keys of a card that programs read; others are kept as they are."""

    method: str
    seed: int
    prototype: str
    model: str
    options: dict[str, bool | int | Number | str]
    input_shape: Annotated[list[Size], Field(min_length=1, max_length=3)]
    mode: Literal["full", "linear"]
    input: _Input
    classes: Annotated[list[str], Field(min_length=1, max_length=100_000)]
    batch_normalisation: Literal["stored", "batch"]
    batch_size: Size
    accuracy: _Accuracy
    privacy: _Privacy
    device: str
    precision: str
    versions: _Versions
    plugin: _Plugin | None = None

    @model_validator(mode="after")
    def _fits(self) -> ModelCard:
        about, shape = self.input, self.input_shape
        if about.kind == "text":
            if len(shape) != 2 or about.length is None or about.tokenizer is None:
                raise ValueError("texts need a shape of two numbers, a length and a tokenizer")
        elif len(shape) == 2:
            raise ValueError("images have a shape of three numbers, features one of one")
        elif any(len(one) not in (0, 1, shape[0]) for one in (about.mean, about.deviation)):
            raise ValueError(f"input.mean and input.deviation: not one for each of {shape[0]}")
        return self


def parse_card(text: str) -> dict[str, Any]:
    """Return a card in JSON. Raises ValueError if it is none."""
    try:
        card = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(card, dict):
        raise ValueError("is no JSON object")
    if missing := [
        key
        for key, field in ModelCard.model_fields.items()
        if field.is_required() and key not in card
    ]:
        raise ValueError(f"it has no {', '.join(missing)}")
    try:
        ModelCard.model_validate(card)
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False, include_input=False)
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from error
    return card


def check_weights(build: Callable[[], SplitModel], weights: Mapping[str, Tensor]) -> None:
    """Raise Unfit unless `build` makes a network of these weights, which takes no memory here.

    The shape of a network is in a card of a few bytes, and could ask for any amount.
    """
    counted = 0

    def count(*_: object) -> None:
        nonlocal counted
        counted += 1
        if counted > len(weights):
            raise Unfit(f"the network has more than the {len(weights)} tensors of the file")

    handle = register_module_parameter_registration_hook(count)
    try:
        with torch.device("meta"):
            expected = build().state_dict()
    finally:
        handle.remove()
    if names := sorted(expected.keys() ^ weights.keys()):
        place = "file" if names[0] in weights else "network"
        raise Unfit(f"{names[0]} is in the {place} alone")
    for name, tensor in expected.items():
        if (tensor.shape, tensor.dtype) != (weights[name].shape, weights[name].dtype):
            raise Unfit(
                f"size mismatch for {name}: {list(weights[name].shape)} of {weights[name].dtype}, "
                f"should be {list(tensor.shape)} of {tensor.dtype}"
            )
