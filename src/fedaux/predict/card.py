"""The card of a model's file: what it has to hold."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Size = Annotated[int, Field(ge=1, le=2**24)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Encoder(_Part):
    source: str
    digest: str
    inputs: dict[str, Any]


class _Input(_Part):
    kind: Literal["image", "text", "features"]
    encoder: _Encoder | None = None
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
        if about.encoder is not None or about.kind == "features":
            if len(shape) != 1:
                raise ValueError("features have a shape of one number")
        elif about.kind == "text":
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
