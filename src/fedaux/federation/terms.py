"""The settings that a request carries besides its tensors, as JSON, validated on arrival."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedaux.config import Certainty, Count, Local, NonNegative, Positive, Prototype, Section

PREPARE, TRAIN, HELLO = "query.prepare", "train", "query.hello"
"""The types of messages that the server sends."""


class Terms(Section):
    """The terms of every request: the client, the model and the images."""

    client: Annotated[int, Field(ge=0)]
    """The client that the server expects."""
    run: Annotated[str, Field(min_length=1, max_length=200)]
    """Identifies the run, method and seed; unchanged when the server resumes."""
    seed: Annotated[int, Field(ge=0)]
    prototype: Prototype
    mode: Literal["full", "linear"]
    image_shape: tuple[Count, Count, Count]
    classes: Annotated[tuple[str, ...], Field(min_length=1, max_length=100_000)]
    channel_mean: tuple[float, ...] = ()
    channel_deviation: tuple[Positive, ...] = ()
    batch_size: Count | None = None
    """Of inference."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"


class PrepareTerms(Terms):
    """The preparation phase: what is to be released."""

    certainty: Certainty


class TrainTerms(Terms):
    """One round: how to train."""

    round: Count
    local: Local
    proximal: NonNegative
    wire: Literal["fp32", "fp16"]
    extractor: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Digest of h0, if only heads are trained: the node has it, or it comes with the message."""
