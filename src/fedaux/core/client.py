"""One client: its own examples, what it releases about them, and how it trains on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedaux import seeding
from fedaux.config import Certainty, Local
from fedaux.core.backend import Backend, ClientJob, TrainContext, TrainResult
from fedaux.core.dpsgd import train_privately
from fedaux.core.local_training import joined_inputs
from fedaux.core.messages import ClientRelease, Update, Weights
from fedaux.core.objectives import class_adjustment, local_loss
from fedaux.core.weights import load, snapshot
from fedaux.models import SplitModel
from fedaux.privacy.exact_gaussian import Draws
from fedaux.privacy.ledger import entry_of
from fedaux.privacy.mechanism import Noise, Public
from fedaux.privacy.mechanisms import MECHANISMS

BLANK = -1
"""The label of an example that counts towards n but contributes nothing: it is unreadable, or of an
unknown class."""


def release_stream(section: Certainty, *, seed: int, client: int) -> np.random.Generator:
    """Return the source of simulated noise; a client that releases scores and a head has two."""
    part = MECHANISMS[section.mechanism](section).stream
    return seeding.generator(seed, "certainty noise", client=client, part=part)


@dataclass(frozen=True)
class Rehearsal:
    """Public examples that a client rehearses."""

    inputs: Tensor
    """In the form of the client's own [M, ...]."""
    soft_labels: Tensor
    """The server's soft labels, times their strength [M, C]."""
    batch_size: int
    """Number of them in each batch."""


@dataclass(frozen=True)
class Client:
    """The examples of one client on its device, and the model that it trains.

    Every example counts towards n. An example whose label is BLANK contributes a zero vector to a
    private release and a zero gradient to private training, so n does not depend on what examples
    hold.
    """

    number: int
    inputs: Tensor
    """uint8 [n, C, H, W], or features [n, F] where heads are trained."""
    labels: Tensor
    """[n], BLANK or 0 .. classes - 1."""
    model: SplitModel
    backend: Backend

    def release(
        self, section: Certainty, features: Tensor, public: Public, *, noise: Noise
    ) -> ClientRelease:
        """Release certainty about features [n, F] of this client under h0 (Algorithm 1).

        Mechanisms that take labels get them for the same examples; BLANK is out of their range.
        """
        # Mechanisms read NaN as zero.
        features = features.masked_fill((self.labels == BLANK)[:, None], torch.nan)
        mechanism = MECHANISMS[section.mechanism](section)
        release = mechanism.release(features, public, noise=noise, labels=self.labels)
        entry = entry_of(
            release,
            client=self.number,
            num_examples=len(features),
            purpose=mechanism.purpose,
        )
        return ClientRelease(self.number, release.vector, entry)

    def train(
        self,
        weights: Weights,
        section: Local,
        *,
        proximal: float,
        generator: np.random.Generator,
        state: Mapping[str, Tensor] | None = None,
        objectives: Sequence[str] = (),
        num_classes: int = 0,
        rehearsal: Rehearsal | None = None,
        mirrored: Tensor | None = None,
        correction: Mapping[str, Tensor] | None = None,
    ) -> tuple[Update, TrainResult]:
        """Train from the server's weights (Algorithm 2); return the update and what stays here.

        `mirrored` are the mirrored examples, in the form and order of `inputs`, of which half are
        then trained on at random; public ones to rehearse should then come twice as well.
        `correction` is added to the gradients.
        """
        rows = (self.labels != BLANK).nonzero().flatten()
        if len(rows) == 0:
            return Update(self.number, len(self.labels), dict(weights), 0.0), TrainResult(0.0, {})
        parts, rehearsed, soft_labels = [self.inputs], 0, None
        if mirrored is not None:
            parts.append(mirrored)
        if rehearsal is not None:
            parts.append(rehearsal.inputs)
            rehearsed, soft_labels = rehearsal.batch_size, rehearsal.soft_labels
        loss = local_loss(objectives, section, rehearsed=rehearsed)
        context = TrainContext(
            self.model,
            joined_inputs(parts),
            self.labels if mirrored is None else self.labels.repeat(2),
            section,
            proximal,
            self.backend.compute,
            key="client",
            loss=loss,
            corrected=bool(correction),
            mirrored=mirrored is not None,
        )
        training = self.backend.training(context, most_examples=len(rows))
        adjustment = None
        if not loss.plain:
            labels = self.labels[rows]
            adjustment = class_adjustment(objectives, section, labels, num_classes=num_classes)
        job = ClientJob(
            self.number, rows, generator, state or {}, adjustment, soft_labels, correction or {}
        )
        ((_, own, trained),) = training([job], weights)
        return Update(self.number, len(self.labels), own, trained.loss), trained

    def train_privately(
        self, weights: Weights, section: Local, *, proximal: float, draws: Draws
    ) -> Update:
        """Train from the server's weights with DP-SGD; the loss has no noise and stays here."""
        load(self.model, weights)
        _, entry = train_privately(
            self.model,
            self.inputs,
            self.labels,
            section=section,
            proximal=proximal,
            draws=draws,
            client=self.number,
            compute=self.backend.compute,
        )
        return Update(self.number, len(self.labels), snapshot(self.model), None, entry)
