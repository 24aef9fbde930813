"""SimCLR: contrastive pretraining of the feature extractor h0 on unlabeled images (Chen et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedaux.config import Augmentation
from fedaux.data.augment import augment


def nt_xent(projections: Tensor, *, temperature: float) -> Tensor:
    """Normalised temperature-scaled cross-entropy; rows i and i + N of `projections` [2N, D] are a pair p(i).

    loss = mean_i -log( exp(z_i . z_p(i) / t) / sum_{j != i} exp(z_i . z_j / t) ), z the rows at unit length.

    Raises:
        ValueError: `projections` is not [2N, D] with N >= 1, or `temperature` is not positive.
    """
    if projections.ndim != 2 or len(projections) < 2 or len(projections) % 2:
        raise ValueError(f"projections must be [2N, D], two views of N >= 1 images, got {list(projections.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    rows = len(projections)
    unit = functional.normalize(projections, dim=1)
    similarity = (unit @ unit.T / temperature).fill_diagonal_(-math.inf)
    partner = torch.arange(rows, device=projections.device).roll(rows // 2)
    return functional.cross_entropy(similarity, partner)


class ProjectionHead(nn.Sequential):
    """Multilayer perceptron from features [N, F] to projections [N, D], thrown away after pretraining.

    Weights and biases are uniform in +-1/sqrt(fan in), as PyTorch's own, but drawn from `generator`.
    """

    def __init__(self, feature_width: int, *, widths: Sequence[int] = (512, 128), generator: torch.Generator) -> None:
        if feature_width < 1 or not widths or min(widths) < 1:
            raise ValueError(f"widths must be positive, got {feature_width} -> {list(widths)}")
        layers: list[nn.Module] = []
        fan_in = feature_width
        for width in widths:
            # Built on "meta": PyTorch would otherwise draw first weights from the global generator.
            linear = nn.Linear(fan_in, width, device="meta").to_empty(device=generator.device)
            bound = 1 / math.sqrt(fan_in)
            nn.init.uniform_(linear.weight, -bound, bound, generator=generator)
            nn.init.uniform_(linear.bias, -bound, bound, generator=generator)
            layers += [linear, nn.ReLU()]
            fan_in = width
        super().__init__(*layers[:-1])


def pretrain_contrastive(
    features: nn.Module,
    images: Tensor,
    *,
    feature_width: int,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    temperature: float,
    projection_widths: Sequence[int],
    augmentation: Augmentation,
    generator: torch.Generator,
    normalise: Callable[[Tensor], Tensor] | None = None,
    on_epoch: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train `features` in place by SimCLR and Adam on `images` uint8 [N, C, H, W]; return epoch losses.

    `features` maps floats in [0, 1] of [B, C, H, W], or what `normalise` makes of them, to [B, feature_width];
    `generator` is on their device.
    An epoch goes once through the images in random order; a last incomplete batch is left out, unless it is
    the only one, because the loss depends on how many others an image is compared with.

    Raises:
        ValueError: fewer than 2 images, not uint8 [N, C, H, W], a batch below 2, a negative number of epochs,
            a learning rate or temperature that is not positive, or `features` of another width.
    """
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(f"images must be uint8 [N, C, H, W], got {images.dtype} {list(images.shape)}")
    if len(images) < 2:
        raise ValueError(f"contrastive pretraining compares images, so it needs at least 2, got {len(images)}")
    if batch_size < 2:
        raise ValueError(f"batch_size must be at least 2, so that a batch holds a negative, got {batch_size}")
    if epochs < 0:
        raise ValueError(f"epochs must be 0 or more, got {epochs}")
    if not learning_rate > 0 or not temperature > 0:
        raise ValueError(f"learning_rate and temperature must be positive, got {learning_rate} and {temperature}")

    head = ProjectionHead(feature_width, widths=projection_widths, generator=generator)
    optimizer = torch.optim.Adam([*features.parameters(), *head.parameters()], lr=learning_rate)
    batch_size = min(batch_size, len(images))
    batches = len(images) // batch_size
    was_training = features.training
    features.train()
    losses: list[float] = []
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=generator, device=images.device)
        # Summed on the device: reading the loss every step would make it wait.
        total = torch.zeros((), device=images.device)
        for chosen in order[: batches * batch_size].view(batches, batch_size):
            batch = images[chosen].float() / 255
            views = augment(torch.cat([batch, batch]), policy=augmentation, generator=generator)
            embedded = features(views if normalise is None else normalise(views))
            if embedded.shape != (2 * batch_size, feature_width):
                raise ValueError(
                    f"features should return [{2 * batch_size}, {feature_width}], got {list(embedded.shape)}"
                )
            loss = nt_xent(head(embedded), temperature=temperature)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        losses.append(float(total) / batches)
        if on_epoch is not None:
            on_epoch(epoch, losses[-1])
    features.train(was_training)
    return losses
