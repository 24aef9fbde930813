"""The settings that a request carries besides its tensors, as JSON, validated on arrival."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedaux import __version__
from fedaux.config import Certainty, Count, Local, NonNegative, Positive, Prototype, Section

PREPARE, TRAIN, HELLO = "query.prepare", "train", "query.hello"
"""The types of messages that the server sends."""


Objective = Annotated[str, Field(pattern=r"^[ -~]{1,100}$")]
Objectives = Annotated[tuple[Objective, ...], Field(max_length=100)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Plan(Section):
    """Everything that a run will ask of a node, which checks all of it before it spends any."""

    run: Annotated[str, Field(min_length=1, max_length=100)]
    """Identifies the run, with all its methods and seeds."""
    certainty: Annotated[tuple[Certainty, ...], Field(max_length=100)] = ()
    """How scores are released, by each mechanism that methods use."""
    releases: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Number of releases by each mechanism: one per seed."""
    local: Local | None = None
    """How the node will train, with DP-SGD or without; None if it will not."""
    objectives: Objectives = ()
    """What the node will minimise besides cross-entropy, in any method. With `rehearsal`, the
    server will give it public images."""
    updates: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Number of updates: the expected one, if clients take part in random rounds."""
    public: Annotated[str, Field(max_length=200)] = ""
    """The source of the public data, for the node's log."""


class Terms(Section):
    """The terms of every request: the client, the model and the images."""

    version: Annotated[str, Field(max_length=40)] = __version__
    """The server's version of fedaux."""
    client: Annotated[int, Field(ge=0)]
    """The client that the server expects."""
    run: Annotated[str, Field(min_length=1, max_length=200)]
    """Identifies the run, method and seed; unchanged when the server resumes."""
    plan: Plan
    seed: Annotated[int, Field(ge=0)]
    prototype: Prototype
    mode: Literal["full", "linear"]
    image_shape: tuple[Count, Count, Count] | tuple[Count]
    """(channels, height, width), or (width,) of feature vectors."""
    encoder: Digest | None = None
    """Digest of the encoder for the node's images; the node has its file."""
    classes: Annotated[tuple[str, ...], Field(min_length=1, max_length=100_000)]
    channel_mean: tuple[float, ...] = ()
    channel_deviation: tuple[Positive, ...] = ()
    batch_size: Count | None = None
    """Batch size of inference."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"


class PrepareTerms(Terms):
    """The preparation phase: the releases that are asked for."""

    certainty: Certainty


class RehearsalTerms(Section):
    """Public images that the node rehearses; their soft labels come with every message."""

    examples: Count
    """Number of images."""
    batch_size: Count
    """Number of them in each batch."""
    digest: Digest
    """Digest of the images, which the node has, or which come with the message."""


class TrainTerms(Terms):
    """One round: how to train."""

    round: Count
    local: Local
    proximal: NonNegative
    wire: Literal["fp32", "fp16"]
    extractor: Digest | None = None
    """Digest of h0, if only heads are trained: the node has it, or it comes with the message."""
    objectives: Objectives = ()
    """What this method minimises besides cross-entropy."""
    rehearsal: RehearsalTerms | None = None
    """Given if one of the objectives is `rehearsal`."""
    mirror: bool = False
    """Whether half of the images are trained on mirrored, at random."""
    corrected: bool = False
    """Whether the message brings a correction, which is added to the gradients."""
