"""The seam between the algorithm and the code that computes: what a round asks of its backend.

`fedaux.core.plain_backend` implements it in eager PyTorch: it is the reference in tests, and what a
federation's node runs. `fedaux.fast` implements it with kernels, CUDA graphs and stacked models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from torch import Tensor, nn

from fedaux.config import Distillation, Local
from fedaux.core.compute import Compute
from fedaux.core.messages import Weights
from fedaux.core.objectives import CROSS_ENTROPY, LocalLoss

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class TrainContext:
    """Settings and data of the clients of one prototype, each of which holds some of the rows."""

    model: nn.Module
    inputs: Tensor
    """Private examples, then the public ones that clients rehearse [n + M, ...]."""
    labels: Tensor
    """Labels of the private examples [n]."""
    section: Local
    proximal: float
    compute: Compute
    key: str
    """Names the architecture: code compiled for one model serves all models of the same key."""
    loss: LocalLoss = CROSS_ENTROPY
    corrected: bool = False
    """Whether jobs correct the gradients."""
    mirrored: bool = False
    """Whether the private examples and their labels come twice: unchanged [n / 2], then mirrored
    in the same order. The public examples then come twice as well."""


@dataclass(frozen=True)
class ClientJob:
    """One client's part of a round."""

    client: int
    rows: Tensor
    """Its examples, as rows of the shared data [n]."""
    generator: np.random.Generator
    """Draws the order of its examples."""
    state: Mapping[str, Tensor]
    """The optimizer's tensors of its last round; empty for an optimizer that starts fresh."""
    adjustment: Tensor | None = None
    """Scale, offset and class shares [3, C] from its class counts; None for plain cross-entropy."""
    soft_labels: Tensor | None = None
    """The server's soft labels of the rehearsed examples [M, C], times their strength."""
    correction: Mapping[str, Tensor] = field(default_factory=dict)
    """Added to each gradient, by parameter; empty for none."""


@dataclass(frozen=True)
class TrainResult:
    """Results of local training besides the weights."""

    loss: float
    """Mean over the examples seen, without the proximal term."""
    optimizer_state: Mapping[str, Tensor]
    """The optimizer's tensors, by "parameter/moment"."""


Training = Callable[
    [Sequence[ClientJob], Weights], Iterator[tuple[ClientJob, Weights, TrainResult]]
]
"""Trains each job from the given weights; yields results in any order."""


Distill = Callable[[Weights, Tensor, np.random.Generator], Weights]
"""Returns the weights after learning the soft labels [N, C] of public inputs (Eq. 1)."""


Extract = Callable[[Weights, Tensor, Tensor | None], Tensor]
"""Returns the features [n, F] of examples, or of some rows of them, under h0."""


class Predictor(Protocol):
    """One architecture that predicts with any weights of its shape."""

    def __call__(
        self,
        weights: Weights,
        inputs: Tensor,
        *,
        batch_size: int | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return outputs [N, ...] in single precision, on all inputs or on some rows of them."""
        ...

    def many(
        self, models: Sequence[Weights], inputs: Tensor, *, batch_size: int | None = None
    ) -> list[Tensor]:
        """Return the outputs [N, ...] of several models on the same inputs."""
        ...


class Backend(Protocol):
    """Computes what the algorithm asks for, on one device."""

    @property
    def compute(self) -> Compute:
        """Device and precision."""
        ...

    def place(self, model: Model) -> Model:
        """Return a model as this backend computes it, on its device."""
        ...

    def training(self, context: TrainContext, *, most_examples: int) -> Training:
        """Return a function that trains clients of one prototype, each with at most
        `most_examples`."""
        ...

    def predictor(self, module: nn.Module) -> Predictor:
        """Return a function that predicts with models of one architecture."""
        ...

    def extractor(self, module: nn.Module, *, batch_size: int | None) -> Extract:
        """Return a function that computes features under any h0 of one architecture."""
        ...

    def distiller(
        self, model: nn.Module, inputs: Tensor, *, section: Distillation, key: str
    ) -> Distill:
        """Return a function that distills one architecture on public inputs [N, ...]."""
        ...
