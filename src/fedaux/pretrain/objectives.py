"""Objectives of pretraining, by `pretraining.kind`."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedaux.config import Pretraining
from fedaux.core.compute import Compute
from fedaux.data.augment import Views
from fedaux.data.vocabulary import Vocabulary
from fedaux.pretrain.contrastive import ProjectionHead, nt_xent
from fedaux.pretrain.language import MaskedTokens

Named = dict[str, Tensor]


class Objective(Protocol):
    """A loss of a batch of inputs, a pure function; its random numbers are drawn separately."""

    model: nn.Module
    """A module with the features as `features`, and a head that is discarded."""
    least: int
    """Minimum number of examples."""
    key: Hashable
    """Distinguishes losses that are compiled for the same settings."""

    def draw(self, size: int, *, generator: torch.Generator) -> Tensor:
        """Draw the random numbers for `size` examples, uniform in [0, 1)."""
        ...

    def loss(self, parameters: Named, buffers: Named, inputs: Tensor, numbers: Tensor) -> Tensor:
        """Return the loss of the model with these weights on a batch."""
        ...


class Projected(nn.Module):
    """Features followed by the projection head."""

    def __init__(self, features: nn.Module, head: nn.Module, *, feature_width: int) -> None:
        super().__init__()
        self.features = features
        self.head = head
        self._width = feature_width

    def forward(self, inputs: Tensor) -> Tensor:
        """Return projections [N, D]. Raises ValueError if features are not [N, feature_width]."""
        embedded = self.features(inputs)
        if embedded.shape != (len(inputs), self._width):
            raise ValueError(
                f"features should return [{len(inputs)}, {self._width}], got {list(embedded.shape)}"
            )
        projections: Tensor = self.head(embedded)
        return projections


class TwoViews:
    """SimCLR's loss of two random views of each image.

    Raises ValueError for images that are not uint8 [N, C, H, W] with one or three channels.
    """

    least = 2
    key: Hashable = ()

    def __init__(
        self,
        features: nn.Module,
        images: Tensor,
        *,
        feature_width: int,
        section: Pretraining,
        generator: torch.Generator,
        compute: Compute,
    ) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
            raise ValueError(
                f"images must be uint8 [N, C, H, W] with C = 1 or 3, got {images.dtype} "
                f"{list(images.shape)}"
            )
        head = ProjectionHead(
            feature_width,
            widths=section.projection_widths,
            batch_norm=section.projection_batch_norm,
            generator=generator,
        )
        self.model: nn.Module = Projected(features, head, feature_width=feature_width)
        self._views = Views(section.augmentation, channels=images.shape[1], device=images.device)
        self._section = section
        self._compute = compute

    def draw(self, size: int, *, generator: torch.Generator) -> Tensor:
        """Draw the random numbers for two views of `size` images: [draws, 2 size]."""
        return self._views.draw(2 * size, generator=generator)

    def loss(self, parameters: Named, buffers: Named, inputs: Tensor, numbers: Tensor) -> Tensor:
        """Return the loss of images uint8 [B, C, H, W] with random numbers [draws, 2B]."""
        layout = torch.channels_last if inputs.is_cuda else torch.contiguous_format
        floats = inputs.float() / 255
        seen = self._views(torch.cat([floats, floats]), numbers)
        seen = self._compute.normalised(seen).contiguous(memory_format=layout)
        with self._compute.autocast():
            projections = functional_call(self.model, (parameters, buffers), (seen,))
        return nt_xent(projections.float(), temperature=self._section.temperature)


def objective_of(
    features: nn.Module,
    inputs: Tensor,
    *,
    feature_width: int,
    section: Pretraining,
    generator: torch.Generator,
    compute: Compute,
    vocabulary: Vocabulary | None,
) -> Objective:
    """Return the objective of a resolved `section.kind`; its head is drawn from `generator`."""
    if section.kind == "contrastive":
        return TwoViews(
            features,
            inputs,
            feature_width=feature_width,
            section=section,
            generator=generator,
            compute=compute,
        )
    if vocabulary is None:
        raise ValueError(
            f"pretraining.kind = {section.kind!r}: is for texts, and there is no table [text]"
        )
    return MaskedTokens(
        features,
        inputs,
        section=section,
        generator=generator,
        compute=compute,
        vocabulary=vocabulary,
    )


def resolved(section: Pretraining, features: nn.Module, *, texts: bool, given: bool) -> Pretraining:
    """Return the section with `auto` resolved. Raises ValueError for an incompatible kind."""
    kind: str = section.kind
    if kind == "auto":
        kind = "none" if given else "masked" if texts else "contrastive"
    if kind == "contrastive" and texts:
        raise ValueError(f"pretraining.kind = {kind!r}: is for images; for texts use masked")
    if kind == "masked":
        if not texts:
            raise ValueError(
                f"pretraining.kind = {kind!r}: is for texts, and there is no table [text]"
            )
        if not hasattr(features, "tokens"):
            raise ValueError(f"pretraining.kind = {kind!r}: needs a model of the BERT family")
        if getattr(features, "causal", False):
            raise ValueError(
                f"pretraining.kind = {kind!r}: prototypes.options.causal should be false; "
                "'next-token', for causal models, was removed in fedaux 0.3.0"
            )
    return section.model_copy(update={"kind": kind})
