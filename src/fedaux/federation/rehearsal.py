"""Public images that a node rehearses: sent once and kept under their digest, with new soft labels
in every round.

The server chooses all of it, so everything is checked before it is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedaux.core.client import Rehearsal
from fedaux.core.objectives import strength_of
from fedaux.federation.node import NodeConfig
from fedaux.federation.policy import Guard, Refusal, digest_of
from fedaux.federation.terms import TrainTerms

if TYPE_CHECKING:
    from fedaux.federation.records import Expected

ROUNDING = 2.0**-10
"""Relative error of a sum of non-negative numbers that were rounded to half precision."""
ROUNDING_NEAR_ZERO = 2.0**-24
"""Absolute error of each."""


@dataclass(frozen=True)
class Received:
    """The rehearsal part of a message, in the right types and shapes."""

    soft_labels: Tensor
    """The server's soft labels, times their strength; half precision [M, C]."""
    images: Tensor | None
    """The public images, uint8 [M, C, H, W], or features, half precision [M, F]; None if they were
    sent before."""


def expected_tensors(terms: TrainTerms, *, most_bytes: int) -> tuple[Expected, Expected]:
    """Return types and shapes of the soft labels and of the public images. Raises Refusal if they
    are too large."""
    assert terms.rehearsal is not None, "the caller asks"
    examples, classes, shape = terms.rehearsal.examples, len(terms.classes), terms.image_shape
    kind = torch.uint8 if len(shape) == 3 else torch.float16
    size = examples * max(2 * classes, kind.itemsize * math.prod(shape))
    if size > most_bytes:
        raise Refusal(
            f"the public data to rehearse has {size} bytes, more than this node accepts",
            detail=f"limits.message_megabytes allows {most_bytes} bytes",
        )
    return (
        {"beliefs": (torch.float16, (examples, classes))},
        {"images": (kind, (examples, *shape))},
    )


def public_images(guard: Guard, terms: TrainTerms, received: Received | None) -> Tensor | None:
    """Return the public images of the terms, and keep them for later rounds. Raises Refusal if
    they or their soft labels are not what the terms state."""
    wanted = terms.rehearsal
    if (wanted is not None) != ("rehearsal" in terms.objectives):
        raise Refusal("rehearsal: should be given with the objective of this name, and only then")
    if wanted is None or received is None:
        return None
    check_soft_labels(received.soft_labels, strength=strength_of("rehearsal", terms.local))
    sent = None if received.images is None else {"images": received.images}
    if sent is not None:
        if digest_of("rehearsed", sent) != wanted.digest:
            raise Refusal("the public images do not have the digest of the terms")
        guard.keep_received("rehearsed", sent)
    held = sent or guard.received("rehearsed", wanted.digest)
    if held is None:
        raise Refusal("the public images are missing here; they must be sent with the message")
    images = held["images"]
    if tuple(images.shape) != (wanted.examples, *terms.image_shape):
        raise Refusal("the public images with this digest have another number or shape")
    if not images.is_floating_point():
        return images
    if not bool(images.isfinite().all()):
        raise Refusal("the public features hold NaN or infinity")
    return images.float()


def check_soft_labels(soft_labels: Tensor, *, strength: float) -> None:
    """Raise Refusal unless soft labels [M, C] are finite and non-negative, and each row sums to at
    most the strength, up to rounding."""
    rows = soft_labels.double()
    if not bool((rows >= 0).all()):  # NaN is not, either
        raise Refusal("the soft labels hold negative numbers or NaN")
    most = strength * (1 + ROUNDING) + rows.shape[1] * ROUNDING_NEAR_ZERO
    if not bool((rows.sum(dim=1) <= most).all()):
        raise Refusal(
            f"the soft labels of an image sum to more than {strength:g}, the strength of rehearsal"
        )


def check_batches(config: NodeConfig, terms: TrainTerms, *, num_examples: int) -> None:
    """Raise Refusal if the rehearsed images of a batch, or the numbers that an epoch draws for
    them, would need more memory than the largest message."""
    if terms.rehearsal is None:
        return
    batches = math.ceil(num_examples / terms.local.batch_size)
    size = terms.rehearsal.batch_size * max(8 * batches, 4 * math.prod(terms.image_shape))
    most = config.limits.message_megabytes * 1_000_000
    if size > most:
        raise Refusal(
            f"rehearsal.batch_size = {terms.rehearsal.batch_size}: more than this node accepts",
            detail=f"it needs {size} bytes; limits.message_megabytes allows {most}",
        )


def rehearsal_of(
    terms: TrainTerms, received: Received | None, inputs: Tensor | None
) -> Rehearsal | None:
    """Return what a client rehearses, from inputs [M, ...] on its device; with mirrored ones
    [2M, ...]."""
    if terms.rehearsal is None or received is None or inputs is None:
        return None
    soft_labels = received.soft_labels.to(inputs.device)
    if terms.mirror:
        soft_labels = soft_labels.repeat(2, 1)
    return Rehearsal(inputs, soft_labels, terms.rehearsal.batch_size)
